//! The receiver's half of a transfer, the same for every transport. It checks that this sender may write, that the bytes are those that
//! were promised, and that they are undamaged.
//!
//! A decode node implements [`HandoffSink`] and shares one [`Receiver`]. A transport makes an [`IncomingPair`] per stream
//! and passes frames to it. For each claimed transfer exactly one of two calls comes in the end: `commit` or `ended`. After
//! either, nothing of that transfer is written any more. So a node that cancels a request calls [`Receiver::abort`] and
//! keeps the blocks in quarantine until `ended` comes. (When `abort` returns false it can release them at once.)
//!
//! Where the sender writes blocks in place, a transfer that is over for this node may
//! still be written by a sender that does not know it yet, or that was paused in the middle of a store. Such a transfer
//! *lingers*: `ended` waits for the sender's abort, which says that it stores no more, or for the end of the pair, whose
//! transport must then have proof that the writer is gone ([`IncomingPair::writer_is_gone`]).

mod incoming;
mod landing;
mod shared;
mod sink;
mod stream_end;

pub(crate) use incoming::{IncomingPair, PairError, REPLY_TIME_LIMIT};
pub(crate) use landing::{FrameData, check, copy_in};
pub use shared::Receiver;
pub(crate) use shared::{Offered, TakenStreams};
pub use sink::{Arrived, HandoffSink, ImportError, MappedPool, PoolShape, ReceiveEnd, TransferRefusal, WrittenPool};
pub(crate) use stream_end::StreamEnd;

#[cfg(test)]
mod tests;
