//! Writing: the loop encodes entries into a buffer, and whoever writes the file turns each buffer into a frame.

use postcard::ser_flavors::Flavor;
use serde::Serialize;
use serving_core::cluster::{ClusterAction, ClusterEvent, PromptKeys};
use serving_core::time::Time;

use super::{BATCH, END, EVENT, EndMark, FRAME_HEAD_BYTES, Header, MAGIC, NOTE, Note, SCHEMA, checksum};

/// Entries that were encoded and are not yet in the file.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    pub events: u64,
}

/// A value that serde refuses to serialize. The types of a record have no such value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it cannot be encoded for a flight record; this is an error of baton")]
pub struct NotEncodable;

/// Appends to a buffer. Nothing but the end of memory can fail.
struct Append<'a>(&'a mut Vec<u8>);

impl Flavor for Append<'_> {
    type Output = ();
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

pub(super) fn append<T: Serialize + ?Sized>(value: &T, bytes: &mut Vec<u8>) -> postcard::Result<()> {
    postcard::serialize_with_flavor(value, Append(bytes))
}

/// The encoded form of actions. Equal actions have equal bytes, prompts apart, of which only the length is written.
pub(super) fn encode_actions(actions: &[ClusterAction], bytes: &mut Vec<u8>) -> postcard::Result<()> {
    actions.iter().try_for_each(|action| append(action, bytes))
}

/// Encodes entries one by one. An event is encoded before it is given to the core, which consumes it, and its actions after.
#[derive(Debug, Default)]
pub struct EntryEncoder {
    batch: Batch,
    /// Length of the batch before the entry in hand.
    entry_start: usize,
    has_failed: bool,
    actions: Vec<u8>,
}

impl EntryEncoder {
    pub fn begin(&mut self, now: Time, event: &ClusterEvent) {
        self.entry_start = self.batch.bytes.len();
        let bytes = &mut self.batch.bytes;
        bytes.push(EVENT);
        self.has_failed = append(&(now, event), bytes).is_err();
    }

    /// # Errors
    /// The entry could not be encoded, and is not in the batch.
    pub fn finish(&mut self, keys: Option<&PromptKeys>, actions: &[ClusterAction]) -> Result<(), NotEncodable> {
        self.actions.clear();
        let encoded = encode_actions(actions, &mut self.actions);
        let encoded = encoded.and_then(|()| append(&(keys, self.actions.as_slice()), &mut self.batch.bytes));
        match encoded {
            Ok(()) if !self.has_failed => {
                self.batch.events += 1;
                Ok(())
            }
            _ => {
                self.batch.bytes.truncate(self.entry_start);
                Err(NotEncodable)
            }
        }
    }

    pub fn note(&mut self, now: Time, note: &Note) {
        let start = self.batch.bytes.len();
        self.batch.bytes.push(NOTE);
        if append(&(now, note), &mut self.batch.bytes).is_err() {
            self.batch.bytes.truncate(start);
        }
    }

    pub fn waiting_bytes(&self) -> usize {
        self.batch.bytes.len()
    }

    /// What was encoded since the last call. The next buffer is as large, so that it does not grow step by step.
    pub fn take(&mut self) -> Batch {
        let next = Batch {
            bytes: Vec::with_capacity(self.batch.bytes.len()),
            events: 0,
        };
        std::mem::replace(&mut self.batch, next)
    }
}

fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME_HEAD_BYTES + body.len());
    frame.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    frame.extend_from_slice(&checksum(body).to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

/// The first bytes of a file.
///
/// # Errors
/// The header could not be encoded.
pub fn file_start(header: &Header) -> Result<Vec<u8>, NotEncodable> {
    let mut body = Vec::new();
    append(header, &mut body).map_err(|_| NotEncodable)?;
    let mut start = MAGIC.to_vec();
    start.extend_from_slice(&SCHEMA.to_le_bytes());
    start.extend(frame(&body));
    Ok(start)
}

pub fn frame_of(batch: &Batch) -> Vec<u8> {
    let mut body = Vec::with_capacity(1 + batch.bytes.len());
    body.push(BATCH);
    body.extend_from_slice(&batch.bytes);
    frame(&body)
}

/// Always of the same length, so that it can be written over an earlier mark.
pub fn end_mark(mark: EndMark) -> Vec<u8> {
    let mut body = vec![END, mark.reason.number()];
    body.extend_from_slice(&mark.lost_events.to_le_bytes());
    frame(&body)
}
