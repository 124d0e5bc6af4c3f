//! Memory of a decode node that a prefill node of the same host writes in place, as the writer of its frames ends it.

use std::fmt::Debug;

/// Whether this process can still write the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transports) enum Writing {
    /// Every copy has ended and none can begin.
    Over,
    /// A copy did not end in time, and nobody knows when it will. The peer must not be told that its blocks are free: it waits
    /// for the exit of this process.
    MayGoOn,
}

/// The peer's memory.
pub(in crate::transports) trait WrittenInPlace: Send + Sync + Debug {
    /// What the peer may be told now about a transfer whose copies have returned.
    fn writing(&self) -> Writing {
        Writing::Over
    }

    /// Ends every way to the memory, after the running copies. For a blocking thread.
    fn end(&self) -> Writing;
}
