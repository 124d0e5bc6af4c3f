//! Pinned memory through which weights go to the device: one half is filled while the other is copied. It is freed with the
//! value.

use cuda::{Device, DeviceMemory, DevicePtr, Event, EventUse, PinnedMemory, Stream};
use model_files::gguf::GgmlType;

use crate::error::WorkError;
use crate::kernels::calls::Dequantise;
use crate::kernels::{ImageForm, Kernels};

/// Of each half. A copy of it takes 0.3 ms of a 50 GB/s link (computed), far longer than its launch.
pub(super) const STAGE_BYTES: usize = 16 << 20;

/// The false driver of the tests interprets each instruction: a larger tensor of a real model would take it minutes.
const INTERPRETED_ELEMENTS_MAX: usize = 100_000;

/// What loading works with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loading<'a> {
    pub device: &'a Device,
    pub stream: &'a Stream,
    pub kernels: &'a Kernels,
}

struct Half {
    pinned: PinnedMemory,
    /// The last copy out of it.
    copied: Event,
}

pub(super) struct Stage<'a> {
    on: Loading<'a>,
    halves: [Half; 2],
    next: usize,
    /// A file's bytes on the device, before a kernel makes bf16 of them. The stream orders its uses.
    raw: DeviceMemory,
}

impl<'a> Stage<'a> {
    pub fn new(on: Loading<'a>) -> Result<Self, WorkError> {
        let half = || -> Result<Half, WorkError> {
            Ok(Half {
                pinned: on.device.allocate_pinned(STAGE_BYTES)?,
                copied: on.device.event(EventUse::Order)?,
            })
        };
        Ok(Self {
            on,
            halves: [half()?, half()?],
            next: 0,
            raw: on.device.allocate(STAGE_BYTES)?,
        })
    }

    /// Lets `fill` write at most [`STAGE_BYTES`] bytes, and copies them to the device.
    pub fn send(&mut self, to: DevicePtr, bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<(), WorkError> {
        let half = &mut self.halves[self.next];
        self.next = 1 - self.next;
        half.copied.synchronize()?;
        let staged = half.pinned.bytes_mut()?;
        let bytes = bytes.min(staged.len());
        fill(&mut staged[..bytes]);
        self.on.stream.copy_to_device(to, &half.pinned, 0..bytes)?;
        self.on.stream.record(&half.copied)?;
        Ok(())
    }

    /// Tensors of at most so many values become bf16 on the device.
    pub fn elements_max(&self) -> usize {
        match ImageForm::of(self.on.device.facts()) {
            ImageForm::Cubin => usize::MAX,
            ImageForm::Ptx => INTERPRETED_ELEMENTS_MAX,
        }
    }

    /// Copies at most [`STAGE_BYTES`] bytes of a type that has a kernel, and makes bf16 of them on the device.
    pub fn expand(&mut self, to: DevicePtr, raw: &[u8], (kind, elements): (GgmlType, usize)) -> Result<(), WorkError> {
        let from = self.raw.ptr();
        self.send(from, raw.len(), |staged| staged.copy_from_slice(raw))?;
        let call = Dequantise {
            from,
            out: to,
            elements: elements as u64,
        };
        if let Some(call) = call.call(kind)? {
            self.on.kernels.launch(self.on.stream, &call)?;
        }
        Ok(())
    }

    /// Waits until everything is on the device.
    pub fn finish(self) -> Result<(), WorkError> {
        Ok(self.on.stream.synchronize()?)
    }
}
