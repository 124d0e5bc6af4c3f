//! Products of activations with a matrix, by the own kernel and by cuBLASLt.

use cuda::cublaslt::{CublasLt, GemmPlan, GemmShape, Operands, Output as Rounding, WeightLayout, Workspace};
use cuda::{DeviceMemory, Stream};
use cuda_engine::kernels::calls::{Output, Product};

use super::bench::{Bench, Shape};
use super::copies::CopyRate;
use crate::doctor::step::{Amount, Figure, Floor};

const BF16_BYTES: u64 = 2;
/// Up to so many rows a product does less than the reading of its matrix takes, on every GPU that the kernels run on.
const READING_ROWS_MAX: u32 = 16;
/// The largest cache of a GPU so far, that of a B200. A matrix that stays in it is read faster than memory is.
const CACHE_BYTES_MAX: u64 = 126 << 20;

/// # Errors
/// The device has failed, or cuBLASLt does not compute a shape.
pub(super) fn measure(bench: &Bench<'_>, library: Option<&CublasLt>, rate: CopyRate) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for shape in bench.size.products {
        let matrices = Matrices::new(bench, shape)?;
        let own_us = matrices.own_us(bench, shape)?;
        figures.push(figure(bench, (shape, "own kernel"), own_us, rate));
        if let Some(library) = library {
            let library_us = matrices.library_us(bench, shape, library)?;
            figures.push(figure(bench, (shape, "cuBLASLt"), library_us, rate));
        }
    }
    Ok(figures)
}

fn figure(bench: &Bench<'_>, (shape, by): (&Shape, &str), median_us: f64, rate: CopyRate) -> Figure {
    let Shape { rows, outputs, inputs } = *shape;
    let is_reading = rows <= READING_ROWS_MAX;
    Figure {
        what: format!("product {rows} x {inputs} x {outputs}, {by}"),
        median_us,
        n: bench.size.samples,
        amount: match is_reading {
            true => Amount::Bytes(shape.weight_bytes()),
            false => Amount::Operations(2 * u64::from(rows) * u64::from(inputs) * u64::from(outputs)),
        },
        floor: (is_reading && shape.weight_bytes() > CACHE_BYTES_MAX).then(|| Floor {
            us: rate.read_us(shape.weight_bytes()),
            from: "its matrix read once, at the rate of the copy on the GPU".to_owned(),
        }),
    }
}

impl Shape {
    fn weight_bytes(&self) -> u64 {
        u64::from(self.inputs) * u64::from(self.outputs) * BF16_BYTES
    }

    fn bytes_of_rows(&self, columns: u32) -> usize {
        (u64::from(self.rows) * u64::from(columns) * BF16_BYTES) as usize
    }
}

struct Matrices {
    weights: DeviceMemory,
    inputs: DeviceMemory,
    outputs: DeviceMemory,
}

impl Matrices {
    fn new(bench: &Bench<'_>, shape: &Shape) -> anyhow::Result<Self> {
        Ok(Self {
            weights: bench.numbers(shape.weight_bytes() as usize)?,
            inputs: bench.numbers(shape.bytes_of_rows(shape.inputs))?,
            outputs: bench.device.allocate(shape.bytes_of_rows(shape.outputs))?,
        })
    }

    fn own_us(&self, bench: &Bench<'_>, shape: &Shape) -> anyhow::Result<f64> {
        let product = Product {
            x: self.inputs.ptr(),
            w: self.weights.ptr(),
            bias: None,
            out: self.outputs.ptr(),
            rows: shape.rows,
            columns: shape.outputs,
            depth: shape.inputs,
            output: Output::Bf16,
        };
        let call = product.call()?;
        bench.median_us(bench.size.product_runs, |stream: &Stream| {
            Ok(bench.kernels.launch(stream, &call)?)
        })
    }

    fn library_us(&self, bench: &Bench<'_>, shape: &Shape, library: &CublasLt) -> anyhow::Result<f64> {
        let bytes = bench.size.workspace_bytes;
        let memory = bench.device.allocate(bytes)?;
        let workspace = Workspace {
            at: memory.ptr(),
            bytes,
        };
        let shape = GemmShape {
            rows: shape.rows,
            outputs: shape.outputs,
            inputs: shape.inputs,
            weights: WeightLayout::OutputsFirst,
            output: Rounding::Bf16,
        };
        let plan = GemmPlan::new(library, shape, bytes)?;
        let operands = Operands {
            weights: self.weights.ptr(),
            inputs: self.inputs.ptr(),
            outputs: self.outputs.ptr(),
            alpha: 1.0,
            beta: 0.0,
        };
        bench.median_us(bench.size.product_runs, |stream: &Stream| {
            Ok(plan.run(stream, &operands, workspace)?)
        })
    }
}
