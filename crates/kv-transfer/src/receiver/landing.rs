//! How the bytes of a frame land in this node's memory.

use bytes::Bytes;
use proto::messages::KvBlockFrame;

use super::sink::{HandoffSink, TransferRefusal};
use crate::span::Span;

/// The bytes of one frame, where their transport has them.
pub(crate) trait FrameData: Send + 'static {
    /// So many bytes are summed and copied on an async thread: it takes 20 us, as long as two changes of threads.
    const INLINE_BYTES_MAX: usize = 128 << 10;
    /// The sender has written them into their block. Only a claimed transfer may have: such a frame claims nothing.
    const IS_IN_PLACE: bool = false;

    fn len(&self) -> usize;

    /// Whether they land by a call of this node's memory, which may wait for a device.
    fn asks_memory(&self) -> bool {
        true
    }

    /// Checks the bytes, and only then writes one. Called on a blocking thread. The bytes that are summed are the bytes that are
    /// written: bytes that the sender can still change are copied before.
    ///
    /// # Errors
    /// They are not what the frame says, or this node cannot write them.
    fn land(self, frame: &KvBlockFrame, sink: &dyn HandoffSink) -> Result<(), TransferRefusal>;
}

/// Copies the bytes into their block if they are undamaged.
pub(crate) fn copy_in(bytes: Span<'_>, frame: &KvBlockFrame, sink: &dyn HandoffSink) -> Result<(), TransferRefusal> {
    check(bytes.checksum() == frame.checksum, frame)?;
    sink.import(frame.block, frame.layer_begin..frame.layer_end, bytes)
        .map_err(|error| TransferRefusal::Import(error.to_string()))
}

pub(crate) fn check(is_good: bool, frame: &KvBlockFrame) -> Result<(), TransferRefusal> {
    let sequence_no = frame.sequence_no;
    is_good.then_some(()).ok_or(TransferRefusal::Checksum { sequence_no })
}

impl FrameData for Bytes {
    fn len(&self) -> usize {
        Bytes::len(self)
    }

    fn land(self, frame: &KvBlockFrame, sink: &dyn HandoffSink) -> Result<(), TransferRefusal> {
        copy_in(Span::Host(&self), frame, sink)
    }
}
