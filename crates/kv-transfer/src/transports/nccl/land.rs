//! Frames that have arrived in the decode node's ring: checked there, and copied to their blocks from there.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};

use proto::messages::KvBlockFrame;

use super::rings::RingMemory;
use crate::device::{DeviceFault, Event, Lane};
use crate::receiver::{FrameData, HandoffSink, TransferRefusal, check};
use crate::span::{DeviceAddress, Lending, Lent, Span};

/// The receiver's end of one communicator's memory.
pub(super) struct ReceiveRing {
    memory: Arc<RingMemory>,
    has_checksums: bool,
    lane: Lane,
    /// One frame lands at a time.
    event: Mutex<Event>,
}

impl Debug for ReceiveRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveRing").finish_non_exhaustive()
    }
}

impl ReceiveRing {
    /// For a blocking thread.
    ///
    /// # Errors
    /// The device gives no stream or event.
    pub fn new(memory: Arc<RingMemory>, has_checksums: bool) -> Result<Arc<Self>, DeviceFault> {
        let kv = memory.kv().clone();
        Ok(Arc::new(Self {
            has_checksums,
            lane: kv.lane()?,
            event: Mutex::new(kv.event()?),
            memory,
        }))
    }

    /// Its first byte.
    pub fn at(&self) -> DeviceAddress {
        self.memory.at()
    }

    fn copy(&self, from: DeviceAddress, to: DeviceAddress, bytes: usize) -> Result<(), DeviceFault> {
        let event = self.event.lock().unwrap_or_else(PoisonError::into_inner);
        let copied = self.memory.kv().copy((&self.lane, &*event), (from, to), bytes);
        if DeviceFault::lent(&copied) == Lent::Kept {
            self.memory.note_stuck();
        }
        copied
    }
}

/// The bytes of one frame in the ring.
#[derive(Debug)]
pub(super) struct InRing {
    pub ring: Arc<ReceiveRing>,
    pub at: DeviceAddress,
    pub bytes: usize,
}

impl FrameData for InRing {
    /// It waits for the device, so it is never done on an async thread.
    const INLINE_BYTES_MAX: usize = 0;

    fn len(&self) -> usize {
        self.bytes
    }

    fn land(self, frame: &KvBlockFrame, sink: &dyn HandoffSink) -> Result<(), TransferRefusal> {
        let import = |error: &dyn std::fmt::Display| TransferRefusal::Import(error.to_string());
        let kv = self.ring.memory.kv();
        if self.ring.has_checksums {
            let sum = kv.checksum(self.at, self.bytes).map_err(|fault| import(&fault))?;
            check(sum == frame.checksum, frame)?;
        }
        let layers = frame.layer_begin..frame.layer_end;
        let mut copied = None;
        let lending = sink.lend(frame.block, layers.clone(), &mut |to| {
            let ended = self.ring.copy(self.at, to, self.bytes);
            let lent = DeviceFault::lent(&ended);
            copied = Some(ended);
            lent
        });
        match lending.map_err(|error| import(&error))? {
            Lending::Lent => match copied {
                Some(copied) => copied.map_err(|fault| import(&fault)),
                None => Err(import(&"the memory was lent, and nothing was copied")),
            },
            Lending::NotOnDevice => {
                let mut bytes = vec![0; self.bytes];
                let (copied, _) = kv.download(self.at, &mut bytes);
                copied.map_err(|fault| import(&fault))?;
                let imported = sink.import(frame.block, layers, Span::Host(&bytes));
                imported.map_err(|error| import(&error))
            }
        }
    }
}
