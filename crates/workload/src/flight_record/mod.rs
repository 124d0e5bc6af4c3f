//! A flight record: every event that a coordinator's `Cluster` was given in one life, and every action that it answered with.
//!
//! It has no content of requests: a prompt is its length and the keys of its blocks. A file is `MAGIC`, the schema's number, and
//! frames. A frame is the length of its body, a checksum and the body. The first frame is the header. Then come batches of
//! entries, and at the end a mark that says why the record ends. A record without the mark was cut: its coordinator was killed, or
//! still runs.

use serde::{Deserialize, Serialize};
use serving_core::cluster::ClusterConfig;
use serving_core::ids::RequestId;
use thiserror::Error;
use twox_hash::XxHash3_64;

mod describe;
mod read;
mod replay;
mod traffic;
mod write;

pub use read::{Ending, Entry, Reader, RecordedEvent};
pub use replay::{Difference, Replay, ReplayError, ReplayOptions, Shown, replay};
pub use traffic::{Traffic, TrafficError, traffic};
pub use write::{Batch, EntryEncoder, NotEncodable, end_mark, file_start, frame_of};

/// First bytes of a file.
pub const MAGIC: &[u8; 8] = b"BATONFLT";

/// Raised when an event, an action, the configuration or a frame is written in another way. A test compares the bytes. Versions
/// before 26 November 2026 cannot read a request with a priority, those before 28 November none with an owner, those before 29 November no
/// tokens that were counted when a client ended its request, and none of the reasons `PromptTooLong`, `TooManyChoices` and `NoRoom`; all others they can.
pub const SCHEMA: u32 = 1;

/// Length of the body, and its checksum.
const FRAME_HEAD_BYTES: usize = 8;

/// The longest body of a frame. The largest event is a node's whole list of cached prefixes: 65,536 keys of at most 10 bytes.
const FRAME_BYTES_MAX: usize = 16 << 20;

const HEADER_BYTES_MAX: usize = 64 << 10;

/// First byte of a frame's body.
const BATCH: u8 = b'B';
const END: u8 = b'E';

/// First byte of an entry.
const EVENT: u8 = 0;
const NOTE: u8 = 1;

/// How a record begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Of the baton that wrote it. Another version may decide differently.
    pub version: String,
    pub coordinator: String,
    /// When this life of the coordinator began, by its wall clock.
    pub started_unix_ms: u64,
    pub config: ClusterConfig,
}

/// What the core is not told, and a simulation of the same traffic needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Note {
    /// A request has ended, and so many tokens of its choices had been delivered.
    Delivered { request: RequestId, output_tokens: u64 },
}

/// Why a record ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// The coordinator stopped in order.
    Stopped,
    /// The file reached its bound.
    SizeBound,
    /// The writer was slower than the coordinator for so long that the queue between them was full.
    QueueFull,
}

impl EndReason {
    const ALL: [Self; 3] = [Self::Stopped, Self::SizeBound, Self::QueueFull];

    fn number(self) -> u8 {
        match self {
            Self::Stopped => 0,
            Self::SizeBound => 1,
            Self::QueueFull => 2,
        }
    }
}

/// The last frame of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EndMark {
    pub reason: EndReason,
    /// Events of this life that came after the last one in the record. Counted anew once a second while the coordinator runs.
    pub lost_events: u64,
}

/// A file that is no flight record, or a damaged one. `at_byte` counts from the start of the file.
#[derive(Debug, Error)]
pub enum RecordError {
    #[error("the flight record cannot be read: {0}")]
    Read(#[from] std::io::Error),
    #[error("this is no flight record: it does not begin with BATONFLT. A coordinator with --flight-record writes one")]
    NotARecord,
    #[error(
        "this flight record has schema {found}, and this baton reads schema {SCHEMA}. Replay it with the baton that wrote it"
    )]
    UnknownSchema { found: u32 },
    #[error(
        "the frame at byte {at_byte} claims {bytes} bytes, at most {bytes_max} are possible. The file is damaged from there on"
    )]
    FrameTooLong {
        at_byte: u64,
        bytes: usize,
        bytes_max: usize,
    },
    #[error("the frame at byte {at_byte} is damaged: {what}. `--until` replays what comes before it")]
    Damaged { at_byte: u64, what: &'static str },
    #[error(
        "the record ends before its header: the coordinator was stopped while it started, so there is nothing to replay"
    )]
    NoHeader,
}

fn checksum(body: &[u8]) -> u32 {
    XxHash3_64::oneshot(body) as u32
}

#[cfg(test)]
mod tests;
