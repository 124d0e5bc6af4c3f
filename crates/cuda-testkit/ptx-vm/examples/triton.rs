//! Calibrates the interpreter: PTX that Triton made, which hardware has proven, has to give right values and no finding.
//!
//! Usage: `cargo run --release -p ptx-vm --example triton FOLDER`. The folder has `tmm.ptx` (kernel `mm`: a pipelined product of
//! f16 matrices, sums in f32, tiles of 64 x 64 x 32) and `tattn.ptx` (kernel `attn`: causal attention, tiles of 64 x 64, head
//! size 64), compiled by Triton 3.6 for sm_80 with 4 warps. The files are Triton's output and not in this repository.

#![forbid(unsafe_code)]

use std::error::Error;
use std::path::Path;

use ptx_vm::{Findings, Kernel, Launch, Memory, Module};

const THREADS: u32 = 128;
const TILE: usize = 64;
const DYNAMIC_SHARED_BYTES: usize = 16_384;
const STEPS_MAX: u64 = 10_000_000_000;
/// Sums in f32 of some hundred products of numbers below 1.
const ERROR_MAX: f64 = 1e-3;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args()
        .nth(1)
        .ok_or("name the folder of tmm.ptx and tattn.ptx")?;
    let folder = Path::new(&folder);
    for shape in [[64, 64, 64], [100, 128, 96]] {
        product(&folder.join("tmm.ptx"), shape)?;
    }
    attention(&folder.join("tattn.ptx"))
}

/// Numbers in -1 to 1 that f16 holds exactly, with their bits.
struct Numbers {
    values: Vec<f64>,
    bits: Vec<u16>,
}

impl Numbers {
    fn new(count: usize, seed: u64) -> Self {
        let mut state = seed;
        let draw = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 53) as i32 - 1024) as f32 / 1024.0
        };
        let values: Vec<f32> = (0..count).map(draw).collect();
        Self {
            bits: values.iter().map(|value| exact_f16(*value)).collect(),
            values: values.into_iter().map(f64::from).collect(),
        }
    }

    fn address(&self) -> u64 {
        self.bits.as_ptr().expose_provenance() as u64
    }
}

/// The bits of a number that is zero or normal in f16.
fn exact_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = if value == 0.0 {
        0
    } else {
        ((bits >> 13) & 0x3_ffff) - (112 << 10)
    };
    ((bits >> 16) & 0x8000) as u16 | magnitude as u16
}

/// Runs a kernel, and prints the largest error.
struct Run<'a> {
    name: &'a str,
    kernel: &'a Kernel,
    grid: [u32; 3],
    inputs: &'a [&'a Numbers],
    /// After the addresses of the inputs and of the result.
    other_args: &'a [u64],
}

impl Run<'_> {
    fn check(&self, expected: &[f64]) -> Result<(), Box<dyn Error>> {
        let mut result = vec![f32::NAN; expected.len()];
        let (mut memory, mut findings) = (Memory::default(), Findings::default());
        for input in self.inputs {
            memory.add(input.address(), 2 * input.bits.len());
            memory.set_initialised(input.address(), 2 * input.bits.len());
        }
        let at = result.as_mut_ptr().expose_provenance() as u64;
        memory.add(at, 4 * result.len());
        let args = self
            .inputs
            .iter()
            .map(|input| input.address())
            .chain([at])
            .chain(self.other_args.iter().copied());
        let mut params = vec![0; self.kernel.param_bytes];
        for (param, value) in self.kernel.params.iter().zip(args) {
            let bytes = param.bytes.min(8);
            params[param.offset..param.offset + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        }
        let launch = Launch {
            kernel: self.kernel,
            grid: self.grid,
            block: [THREADS, 1, 1],
            dynamic_shared_bytes: DYNAMIC_SHARED_BYTES,
            params: &params,
            seed: 99,
            steps_max: STEPS_MAX,
        };
        let steps = ptx_vm::run(&launch, &mut memory, &mut findings)?;
        let errors = result
            .iter()
            .zip(expected)
            .map(|(found, expected)| (f64::from(*found) - expected).abs());
        let error_max = errors.fold(
            0.0,
            |max: f64, error| if error.is_nan() { f64::INFINITY } else { max.max(error) },
        );
        println!(
            "{}: largest error {error_max:.2e}, {steps} thread instructions",
            self.name
        );
        for finding in findings.list() {
            println!("  {finding}");
        }
        match error_max < ERROR_MAX && findings.is_empty() {
            true => Ok(()),
            false => Err(format!("{} is wrong", self.name).into()),
        }
    }
}

fn product(file: &Path, shape: [usize; 3]) -> Result<(), Box<dyn Error>> {
    let [rows, columns, depth] = shape;
    let module = Module::parse(&std::fs::read_to_string(file)?)?;
    let kernel = module.kernel("mm").ok_or("no kernel mm")?;
    let (a, b) = (Numbers::new(rows * depth, 7), Numbers::new(depth * columns, 8));
    let element = |row: usize, column: usize| {
        (0..depth)
            .map(|k| a.values[row * depth + k] * b.values[k * columns + column])
            .sum::<f64>()
    };
    let expected: Vec<f64> = (0..rows * columns)
        .map(|at| element(at / columns, at % columns))
        .collect();
    let run = Run {
        name: &format!("product of {shape:?}"),
        kernel: &kernel,
        grid: [rows.div_ceil(TILE) as u32, columns.div_ceil(TILE) as u32, 1],
        inputs: &[&a, &b],
        other_args: &shape.map(|size| size as u64),
    };
    run.check(&expected)
}

fn attention(file: &Path) -> Result<(), Box<dyn Error>> {
    const HEADS: usize = 2;
    const TOKENS: usize = 112;
    const HEAD_SIZE: usize = 64;
    let module = Module::parse(&std::fs::read_to_string(file)?)?;
    let kernel = module.kernel("attn").ok_or("no kernel attn")?;
    let inputs = [1, 2, 3].map(|seed| Numbers::new(HEADS * TOKENS * HEAD_SIZE, seed));
    let [q, k, v] = &inputs;
    let scale = 0.125_f32;
    let mut expected = Vec::new();
    for (head, token) in (0..HEADS).flat_map(|head| (0..TOKENS).map(move |token| (head, token))) {
        let at =
            |numbers: &Numbers, token: usize, place: usize| numbers.values[(head * TOKENS + token) * HEAD_SIZE + place];
        let score = |other: usize| {
            (0..HEAD_SIZE)
                .map(|place| at(q, token, place) * at(k, other, place))
                .sum::<f64>()
        };
        let weights: Vec<f64> = (0..=token)
            .map(|other| (score(other) * f64::from(scale)).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        for place in 0..HEAD_SIZE {
            let sum: f64 = weights
                .iter()
                .enumerate()
                .map(|(other, weight)| weight * at(v, other, place))
                .sum();
            expected.push(sum / total);
        }
    }
    // The kernel works with powers of two.
    let scale_bits = (scale * std::f32::consts::LOG2_E).to_bits();
    let run = Run {
        name: "attention",
        kernel: &kernel,
        grid: [TOKENS.div_ceil(TILE) as u32, HEADS as u32, 1],
        inputs: &[q, k, v],
        other_args: &[u64::from(scale_bits), TOKENS as u64],
    };
    run.check(&expected)
}
