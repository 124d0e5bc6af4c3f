//! What every figure is measured with: a stream, two events that tell the time, and sizes that end within seconds.

use anyhow::Context as _;
use cuda::{Device, DeviceMemory, Event, EventUse, Stream};
use cuda_engine::kernels::{ImageForm, Kernels};
use workload::statistics::Samples;

use crate::doctor::pattern::Pattern;

/// A piece of random numbers, which fills memory of any size.
const PIECE_BYTES: usize = 1 << 20;

/// One product: rows of activations times a matrix of `inputs x outputs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub rows: u32,
    pub outputs: u32,
    pub inputs: u32,
}

const fn shape(rows: u32, outputs: u32, inputs: u32) -> Shape {
    Shape { rows, outputs, inputs }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Between host and device.
    pub transfer_bytes: usize,
    /// On the device. More than any cache of a GPU holds.
    pub copy_bytes: usize,
    /// Of the small kernel, in one sample.
    pub launches: u32,
    pub products: &'static [Shape],
    /// Runs of a product in one sample.
    pub product_runs: u32,
    /// For cuBLASLt: what NVIDIA recommends for Hopper.
    pub workspace_bytes: usize,
    /// Samples of each figure, after one that is not counted. An odd number.
    pub samples: u32,
}

impl Size {
    /// A chunk of a prompt; one row and eight rows of a decode step, with a matrix that stays in a cache and one that does not.
    const HARDWARE: Self = Self {
        transfer_bytes: 64 << 20,
        copy_bytes: 256 << 20,
        launches: 1_000,
        products: &[
            shape(512, 2_048, 2_048),
            shape(1, 2_048, 2_048),
            shape(1, 16_384, 8_192),
            shape(8, 16_384, 8_192),
        ],
        product_runs: 20,
        workspace_bytes: 32 << 20,
        samples: 11,
    };
    /// The false driver interprets each instruction.
    const FALSE: Self = Self {
        transfer_bytes: 64 << 10,
        copy_bytes: 64 << 10,
        launches: 8,
        products: &[shape(17, 64, 64), shape(1, 64, 64)],
        product_runs: 1,
        workspace_bytes: 64 << 10,
        samples: 1,
    };

    pub fn of(form: ImageForm) -> Self {
        match form {
            ImageForm::Cubin => Self::HARDWARE,
            ImageForm::Ptx => Self::FALSE,
        }
    }
}

#[derive(Debug)]
pub(super) struct Bench<'a> {
    pub device: &'a Device,
    pub kernels: &'a Kernels,
    pub size: Size,
    pub stream: Stream,
    begun: Event,
    ended: Event,
}

impl<'a> Bench<'a> {
    pub fn new(device: &'a Device, kernels: &'a Kernels, size: Size) -> anyhow::Result<Self> {
        Ok(Self {
            device,
            kernels,
            size,
            stream: device.stream()?,
            begun: device.event(EventUse::Timing)?,
            ended: device.event(EventUse::Timing)?,
        })
    }

    /// The median time of one run in microseconds. A sample is the mean of so many runs. The first sample is not counted: code
    /// is loaded at a first launch.
    pub fn median_us(&self, runs: u32, run: impl Fn(&Stream) -> anyhow::Result<()>) -> anyhow::Result<f64> {
        let mut samples = Vec::new();
        for _ in 0..=self.size.samples {
            self.stream.record(&self.begun)?;
            for _ in 0..runs {
                run(&self.stream)?;
            }
            self.stream.record(&self.ended)?;
            self.ended.synchronize()?;
            let ms = f64::from(self.ended.ms_since(&self.begun)?);
            samples.push(ms * 1e3 / f64::from(runs));
        }
        let counted = Samples::new(samples.into_iter().skip(1));
        counted.percentile(50.0).context("nothing was timed")
    }

    /// Memory of the device with random numbers in bf16. Waits until they are there.
    pub fn numbers(&self, bytes: usize) -> anyhow::Result<DeviceMemory> {
        let memory = self.device.allocate(bytes)?;
        let mut staged = self.device.allocate_pinned(PIECE_BYTES.min(bytes))?;
        let piece_bytes = staged.size_bytes();
        staged.write(0, &Pattern(1).bf16_bytes(piece_bytes))?;
        for at in (0..bytes).step_by(piece_bytes) {
            let length = piece_bytes.min(bytes - at);
            self.stream
                .copy_to_device(memory.ptr().offset(at), &staged, 0..length)?;
        }
        self.stream.synchronize()?;
        Ok(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_sample_in_the_middle() {
        for size in [Size::HARDWARE, Size::FALSE] {
            assert!(size.samples % 2 == 1);
        }
    }
}
