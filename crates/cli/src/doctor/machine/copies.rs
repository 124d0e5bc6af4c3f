//! Copies between pinned memory of the host and the device, and on the device. The engine makes no copies of pageable memory.

use super::bench::Bench;
use crate::doctor::step::{Amount, Figure};

/// How long a copy on the device takes. It reads and writes each byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyRate {
    bytes: usize,
    us: f64,
}

impl CopyRate {
    /// The time of reading so many bytes once, at the same rate.
    pub fn read_us(self, bytes: u64) -> f64 {
        self.us * bytes as f64 / (2.0 * self.bytes as f64)
    }
}

/// # Errors
/// The device has failed or has not enough memory.
pub(super) fn measure(bench: &Bench<'_>) -> anyhow::Result<(Vec<Figure>, CopyRate)> {
    let (to_device_us, to_host_us) = transfers(bench)?;
    let rate = CopyRate {
        bytes: bench.size.copy_bytes,
        us: on_device(bench)?,
    };
    let figure = |what: &str, bytes: usize, median_us: f64| Figure {
        what: format!("copy {what}, {} KiB", bytes >> 10),
        median_us,
        n: bench.size.samples,
        amount: Amount::Bytes(bytes as u64),
        // Neither the link to the host nor the memory's clock is among the facts that the driver is asked for.
        floor: None,
    };
    let figures = vec![
        figure("from pinned memory to the GPU", bench.size.transfer_bytes, to_device_us),
        figure("from the GPU to pinned memory", bench.size.transfer_bytes, to_host_us),
        figure("on the GPU", rate.bytes, rate.us),
    ];
    Ok((figures, rate))
}

/// To the device, and to the host.
fn transfers(bench: &Bench<'_>) -> anyhow::Result<(f64, f64)> {
    let bytes = bench.size.transfer_bytes;
    let memory = bench.numbers(bytes)?;
    let pinned = bench.device.allocate_pinned(bytes)?;
    let to_host = bench.median_us(1, |stream| Ok(stream.copy_to_host(&pinned, 0, memory.ptr(), bytes)?))?;
    let to_device = bench.median_us(1, |stream| {
        Ok(stream.copy_to_device(memory.ptr(), &pinned, 0..bytes)?)
    })?;
    Ok((to_device, to_host))
}

fn on_device(bench: &Bench<'_>) -> anyhow::Result<f64> {
    let bytes = bench.size.copy_bytes;
    let (from, to) = (bench.numbers(bytes)?, bench.device.allocate(bytes)?);
    bench.median_us(1, |stream| Ok(stream.copy_on_device(to.ptr(), from.ptr(), bytes)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_takes_half_of_a_copy() {
        let rate = CopyRate { bytes: 1_000, us: 8.0 };
        assert_eq!(rate.read_us(1_000), 4.0);
        assert_eq!(rate.read_us(250), 1.0);
    }
}
