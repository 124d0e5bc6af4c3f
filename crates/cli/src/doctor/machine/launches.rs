//! From one launch of a kernel that does next to nothing to the next, launch by launch and as one graph.

use cuda::{Cause, CudaError, Stream};
use cuda_engine::kernels::KernelError;
use cuda_engine::kernels::calls::CapLogits;

use super::bench::Bench;
use crate::doctor::step::{Amount, Figure};

/// One number, which becomes `cap * tanh(number / cap)`.
const NUMBER_BYTES: usize = 4;
const CAP: f32 = 30.0;

/// # Errors
/// The device has failed.
pub(super) fn measure(bench: &Bench<'_>) -> anyhow::Result<Vec<Figure>> {
    let memory = bench.device.allocate(NUMBER_BYTES)?;
    bench.stream.fill(memory.ptr(), 0, NUMBER_BYTES)?;
    let call = CapLogits {
        logits: memory.ptr(),
        count: 1,
        cap: CAP,
    };
    let call = call.call()?;
    let launches = bench.size.launches;
    let launch = |stream: &Stream| bench.kernels.launch(stream, &call);
    let eager_us = bench.median_us(launches, |stream| Ok(launch(stream)?))?;
    let graph = bench
        .stream
        .capture(|stream| (0..launches).try_for_each(|_| launch(stream).map_err(of_driver)))?;
    let graph_us = bench.median_us(1, |stream| Ok(stream.launch_graph(&graph)?))?;
    let figure = |what: &str, median_us: f64| Figure {
        what: format!("launch after launch, {what}, of {launches}"),
        median_us,
        n: bench.size.samples,
        amount: Amount::Launch,
        floor: None,
    };
    Ok(vec![
        figure("one by one", eager_us),
        figure("as a graph", graph_us / f64::from(launches)),
    ])
}

/// A capture takes errors of the driver only.
fn of_driver(error: KernelError) -> CudaError {
    match error {
        KernelError::Cuda(cause) | KernelError::Device { cause, .. } => cause,
        other => CudaError {
            call: "cuStreamEndCapture",
            cause: Cause::Misuse("the work of the graph failed"),
            context: other.to_string(),
        },
    }
}
