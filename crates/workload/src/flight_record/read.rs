//! Reading: one frame at a time, no length believed before it is checked, and every damage with its place.

use std::io::{self, Read};

use serde::Serialize;
use serving_core::cluster::{ClusterAction, ClusterEvent, OnIllegalTransition, PromptKeys};
use serving_core::time::Time;

use super::{
    BATCH, END, EVENT, EndMark, EndReason, FRAME_BYTES_MAX, FRAME_HEAD_BYTES, HEADER_BYTES_MAX, Header, MAGIC, NOTE,
    Note, RecordError, SCHEMA, checksum, describe,
};

/// How a record ended, once it has been read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    Marked(EndMark),
    /// No mark: the coordinator was killed, or still runs. What it did last may be missing.
    Cut,
}

#[derive(Debug)]
pub enum Entry {
    Event(Box<RecordedEvent>),
    Note { at: Time, note: Note },
}

/// One event, and what the core answered.
#[derive(Clone, Debug)]
pub struct RecordedEvent {
    pub at: Time,
    pub event: ClusterEvent,
    /// Of the prompt that the event looked at.
    pub keys: Option<PromptKeys>,
    pub(super) actions: Vec<u8>,
}

impl RecordedEvent {
    /// Something broke, or somebody went away.
    pub(super) fn is_fault(&self) -> bool {
        let loses_a_node = |action: Result<ClusterAction, usize>| action.as_ref().is_ok_and(describe::is_loss);
        describe::is_fault(&self.event) || decoded_actions(&self.actions).any(loses_a_node)
    }

    /// The recorded actions, each as text. Text of what cannot be decoded says so.
    pub(super) fn actions_as_text(&self) -> Vec<String> {
        actions_as_text(&self.actions)
    }
}

/// Each action is decoded by itself: a placeholder of its prompt is in memory only while it is looked at. Bytes that are no action
/// come last, as their number.
fn decoded_actions(mut bytes: &[u8]) -> impl Iterator<Item = Result<ClusterAction, usize>> {
    std::iter::from_fn(move || {
        let left = std::mem::take(&mut bytes);
        if left.is_empty() {
            return None;
        }
        match postcard::take_from_bytes::<ClusterAction>(left) {
            Ok((action, rest)) => {
                bytes = rest;
                Some(Ok(action))
            }
            Err(_) => Some(Err(left.len())),
        }
    })
}

pub(super) fn actions_as_text(bytes: &[u8]) -> Vec<String> {
    let text = |action: Result<ClusterAction, usize>| match action {
        Ok(action) => describe::action(&action),
        Err(left) => format!("{left} bytes that are no action"),
    };
    decoded_actions(bytes).map(text).collect()
}

/// Reads a record from its start to its end.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    header: Header,
    /// Body of the frame in hand, and how much of it has been read.
    body: Vec<u8>,
    taken: usize,
    /// Where the frame in hand began, and where the next one begins.
    frame_at: u64,
    at_byte: u64,
    ending: Option<Ending>,
}

impl<R: Read> Reader<R> {
    /// # Errors
    /// It is no flight record, or one of another schema, or its header is damaged.
    pub fn open(mut input: R) -> Result<Self, RecordError> {
        let mut start = [0; MAGIC.len() + 4];
        let read = read_up_to(&mut input, &mut start)?;
        let (magic, schema) = start.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(RecordError::NotARecord);
        }
        if read < start.len() {
            return Err(RecordError::NoHeader);
        }
        let found = u32::from_le_bytes(schema.try_into().unwrap_or_default());
        if found != SCHEMA {
            return Err(RecordError::UnknownSchema { found });
        }
        let at_byte = start.len() as u64;
        let body = next_frame(&mut input, (at_byte, HEADER_BYTES_MAX))?.ok_or(RecordError::NoHeader)?;
        let damaged = |_| RecordError::Damaged {
            at_byte,
            what: "it is no header",
        };
        let mut header: Header = postcard::from_bytes(&body).map_err(damaged)?;
        // Whoever made the file must not choose that a replay stops with a panic.
        header.config.on_illegal_transition = OnIllegalTransition::FailRequest;
        let frame_at = at_byte;
        Ok(Self {
            input,
            header,
            taken: body.len(),
            at_byte: frame_at + (FRAME_HEAD_BYTES + body.len()) as u64,
            body,
            frame_at,
            ending: None,
        })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    /// `None` before the end was reached.
    pub fn ending(&self) -> Option<Ending> {
        self.ending
    }

    /// The next entry; `None` at the end.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, RecordError> {
        while self.taken >= self.body.len() {
            if self.ending.is_some() || !self.next_batch()? {
                return Ok(None);
            }
        }
        let rest = &self.body[self.taken..];
        let (entry, left) = decode_entry(rest).map_err(|what| self.damaged(what))?;
        self.taken = self.body.len() - left;
        Ok(Some(entry))
    }

    /// False at the end of the record.
    fn next_batch(&mut self) -> Result<bool, RecordError> {
        self.frame_at = self.at_byte;
        let Some(body) = next_frame(&mut self.input, (self.at_byte, FRAME_BYTES_MAX))? else {
            self.ending = Some(Ending::Cut);
            return Ok(false);
        };
        self.at_byte += (FRAME_HEAD_BYTES + body.len()) as u64;
        match body.split_first() {
            Some((&BATCH, _)) => {
                (self.body, self.taken) = (body, 1);
                Ok(true)
            }
            Some((&END, mark)) => {
                let mark = decode_mark(mark).ok_or_else(|| self.damaged("it is no end mark"))?;
                if read_up_to(&mut self.input, &mut [0])? > 0 {
                    return Err(self.damaged("something follows the end mark"));
                }
                self.ending = Some(Ending::Marked(mark));
                Ok(false)
            }
            _ => Err(self.damaged("its kind is unknown")),
        }
    }

    fn damaged(&self, what: &'static str) -> RecordError {
        RecordError::Damaged {
            at_byte: self.frame_at,
            what,
        }
    }
}

/// An entry, and how many bytes come after it.
fn decode_entry(bytes: &[u8]) -> Result<(Entry, usize), &'static str> {
    let wrong = |_| "an entry cannot be decoded";
    match bytes.split_first() {
        Some((&EVENT, rest)) => {
            let ((at, event), rest) = postcard::take_from_bytes::<(Time, ClusterEvent)>(rest).map_err(wrong)?;
            let ((keys, actions), rest) =
                postcard::take_from_bytes::<(Option<PromptKeys>, &[u8])>(rest).map_err(wrong)?;
            let actions = actions.to_vec();
            let event = RecordedEvent {
                at,
                event,
                keys,
                actions,
            };
            Ok((Entry::Event(Box::new(event)), rest.len()))
        }
        Some((&NOTE, rest)) => {
            let ((at, note), rest) = postcard::take_from_bytes(rest).map_err(wrong)?;
            Ok((Entry::Note { at, note }, rest.len()))
        }
        _ => Err("an entry of an unknown kind"),
    }
}

fn decode_mark(bytes: &[u8]) -> Option<EndMark> {
    let (&number, lost) = bytes.split_first()?;
    let reason = EndReason::ALL.into_iter().find(|reason| reason.number() == number)?;
    let lost_events = u64::from_le_bytes(lost.try_into().ok()?);
    Some(EndMark { reason, lost_events })
}

/// The body of the next frame. `None`: the file ends before the frame does.
fn next_frame(input: &mut impl Read, (at_byte, bytes_max): (u64, usize)) -> Result<Option<Vec<u8>>, RecordError> {
    let mut head = [0; FRAME_HEAD_BYTES];
    if read_up_to(input, &mut head)? < head.len() {
        return Ok(None);
    }
    let (length, sum) = head.split_at(4);
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap_or_default());
    let bytes = number(length) as usize;
    if bytes > bytes_max {
        return Err(RecordError::FrameTooLong {
            at_byte,
            bytes,
            bytes_max,
        });
    }
    let mut body = Vec::new();
    // Grows with what is there, not with what is claimed.
    input.take(bytes as u64).read_to_end(&mut body)?;
    if body.len() < bytes {
        return Ok(None);
    }
    if checksum(&body) != number(sum) {
        return Err(RecordError::Damaged {
            at_byte,
            what: "its checksum is wrong",
        });
    }
    Ok(Some(body))
}

/// Fills the buffer as far as the input goes.
fn read_up_to(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
