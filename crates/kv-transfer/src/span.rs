//! A span of memory, as links read and write KV: a slice of this process's memory, or a part of a device's memory whose bytes
//! count once an event has come.

use std::any::Any;
use std::fmt::Debug;
use std::sync::{Arc, OnceLock};

use thiserror::Error;
use twox_hash::XxHash3_64;

/// XXH3-64, by a crate that chooses the instruction set at run time: copying and summing a block runs at 13.5 GB/s here,
/// and at 11.5 GB/s with a crate that chooses at compile time. It detects damage on an honest network. It is no signature:
/// a peer can always send other KV.
pub(crate) fn checksum(data: &[u8]) -> u64 {
    XxHash3_64::oneshot(data)
}

/// Bytes to be read.
#[derive(Debug)]
pub enum Span<'a> {
    /// Valid during the call.
    Host(&'a [u8]),
    Device(DeviceSpan),
}

/// Bytes to be written.
#[derive(Debug)]
pub enum SpanMut<'a> {
    /// Written when the call returns.
    Host(&'a mut [u8]),
    /// Written when the writer signals `ready`, which may be after the call has returned.
    Device(DeviceSpan),
}

/// Bytes in the memory of a device. The memory stays in use as long as a clone of the span lives, so a copy that was launched
/// may outlast the call that launched it.
#[derive(Clone, Debug)]
pub struct DeviceSpan {
    pub memory: Arc<dyn SpanMemory>,
    pub bytes: usize,
    pub ready: Ready,
}

/// A piece of a device's memory. The code of that device finds its own type behind it, by way of `Any`.
pub trait SpanMemory: Any + Send + Sync + Debug {
    /// XXH3-64 of the first `bytes`, which are ready. Called on a blocking thread.
    fn checksum(&self, bytes: usize) -> u64;
}

/// An address in the memory of a device, as its driver knows it. The host never follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Whether a device has done with bytes that were lent to a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lent {
    Back,
    /// The device may still use them, and nobody knows until when: they must never be used for anything else.
    Kept,
}

/// The answer of KV memory that is asked to lend bytes to a copy on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lending {
    /// The copy was called, once.
    Lent,
    /// The bytes are not in memory that a transport can address on a device. The copy was not called.
    NotOnDevice,
}

/// An event that comes once: the bytes of a span are in their place.
#[derive(Clone, Debug, Default)]
pub struct Ready(Arc<OnceLock<()>>);

impl Ready {
    pub fn signal(&self) {
        let _ = self.0.set(());
    }

    /// For a blocking thread. A device that fails must signal too; the bytes then do not match their checksum.
    pub fn wait(&self) {
        self.0.wait();
    }
}

/// The bytes are not in memory of the kind that this node's KV has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the span is in the memory of a device that this node's KV memory does not know")]
pub struct WrongMemory;

impl<'a> Span<'a> {
    /// For KV in the memory of this process.
    ///
    /// # Errors
    /// It is a device's.
    pub fn host(self) -> Result<&'a [u8], WrongMemory> {
        match self {
            Span::Host(bytes) => Ok(bytes),
            Span::Device(_) => Err(WrongMemory),
        }
    }

    /// Waits until the bytes are there.
    pub(crate) fn checksum(&self) -> u64 {
        match self {
            Span::Host(bytes) => checksum(bytes),
            Span::Device(span) => {
                span.ready.wait();
                span.memory.checksum(span.bytes)
            }
        }
    }
}

impl<'a> SpanMut<'a> {
    /// For KV in the memory of this process.
    ///
    /// # Errors
    /// It is a device's.
    pub fn host(self) -> Result<&'a mut [u8], WrongMemory> {
        match self {
            SpanMut::Host(bytes) => Ok(bytes),
            SpanMut::Device(_) => Err(WrongMemory),
        }
    }
}
