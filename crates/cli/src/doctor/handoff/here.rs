//! The GPU of this process, and how much moves and how long is waited on it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cuda::{Device, Libraries};
use cuda_engine::kernels::ImageForm;

#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    pub bytes: usize,
    /// Until another process has opened its GPU and its libraries.
    pub start: Duration,
    /// Until a communicator is there.
    pub meet: Duration,
    /// Until bytes are where they belong.
    pub exchange: Duration,
    /// How long a dead peer is waited for before the communicator is aborted.
    pub patience: Duration,
    /// Until an abort has returned. Then its thread is given up.
    pub abort: Duration,
}

impl Scale {
    /// The first communicator of a process loads code and looks for networks, which takes seconds.
    const HARDWARE: Self = Self {
        bytes: 8 << 20,
        start: Duration::from_secs(60),
        meet: Duration::from_secs(60),
        exchange: Duration::from_secs(30),
        patience: Duration::from_secs(3),
        abort: Duration::from_secs(30),
    };
    /// The false driver of the tests keeps 32 bytes for each byte. Its double of NCCL meets in milliseconds.
    const FALSE: Self = Self {
        bytes: 1 << 20,
        start: Duration::from_secs(30),
        meet: Duration::from_secs(5),
        exchange: Duration::from_secs(20),
        patience: Duration::from_millis(500),
        abort: Duration::from_secs(5),
    };
}

#[derive(Debug)]
pub(super) struct Here {
    pub libraries: Arc<Libraries>,
    pub device: Device,
    pub scale: Scale,
}

impl Here {
    /// # Errors
    /// The GPU cannot be opened.
    pub fn open(ordinal: u32) -> anyhow::Result<Self> {
        let libraries = cuda_engine::libraries();
        let device = Device::open(&libraries, ordinal).context("the GPU cannot be opened")?;
        let scale = match ImageForm::of(device.facts()) {
            ImageForm::Cubin => Scale::HARDWARE,
            ImageForm::Ptx => Scale::FALSE,
        };
        Ok(Self {
            libraries,
            device,
            scale,
        })
    }
}
