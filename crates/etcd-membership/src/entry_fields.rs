//! The fields of a record: written as text, and checked when they are read. The limits are those of the wire (`proto`'s
//! convert).

use std::fmt::Write as _;

use serving_core::ids::NodeEpoch;
use serving_core::node::{CompatibilityHash, NodeRole, NodeState};

use crate::entry::BadRecord;

/// The limit of the wire. A DNS name with its port fits.
const TEXT_BYTES_MAX: usize = 255;
/// There are four kinds of transport. A record with more is not one of our nodes.
const TRANSPORTS_MAX: usize = 64;
/// The most characters of others' text in a log line.
const SHOWN_CHARS_MAX: usize = 200;

fn invalid<T>(field: &'static str, why: &'static str) -> Result<T, BadRecord> {
    Err(BadRecord::Invalid { field, why })
}

/// Visible ASCII, so that it can be part of logs, labels and addresses.
pub(crate) fn text(text: String, field: &'static str) -> Result<String, BadRecord> {
    match text.len() {
        1..=TEXT_BYTES_MAX if text.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(text),
        _ => invalid(field, "must be 1 to 255 visible ASCII characters"),
    }
}

/// A name is the last part of a key, so it has no slash.
pub(crate) fn name(name: &str) -> Result<&str, BadRecord> {
    match name.len() {
        1..=TEXT_BYTES_MAX if name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/') => Ok(name),
        _ => invalid("name", "must be 1 to 255 visible ASCII characters without a slash"),
    }
}

pub(crate) fn transports(list: Vec<String>) -> Result<Vec<String>, BadRecord> {
    if list.len() > TRANSPORTS_MAX {
        return invalid("transports", "more than 64 of them");
    }
    list.into_iter()
        .map(|transport| text(transport, "transports"))
        .collect()
}

pub(crate) fn role(text: &str) -> Result<NodeRole, BadRecord> {
    let roles = [NodeRole::Prefill, NodeRole::Decode];
    match roles.into_iter().find(|role| role.name() == text) {
        Some(role) => Ok(role),
        None => invalid("role", "must be prefill or decode"),
    }
}

pub(crate) fn state(text: &str) -> Result<NodeState, BadRecord> {
    let states = [NodeState::Joining, NodeState::Ready, NodeState::Draining];
    match states.into_iter().find(|state| state.name() == text) {
        Some(state) => Ok(state),
        None => invalid("state", "must be joining, ready or draining"),
    }
}

/// Text, not a JSON number, because other readers of JSON keep only 53 bits of a number.
pub(crate) fn epoch_text(epoch: NodeEpoch) -> String {
    epoch.to_string()
}

pub(crate) fn epoch(text: &str) -> Result<NodeEpoch, BadRecord> {
    let is_hex = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match u64::from_str_radix(text, 16) {
        Ok(number) if is_hex => Ok(NodeEpoch(number)),
        _ => invalid("epoch", "must be 16 hex digits"),
    }
}

pub(crate) fn compatibility_text(hash: CompatibilityHash) -> String {
    let mut out = String::with_capacity(64);
    for byte in hash.0 {
        // Writing to a string cannot fail.
        let _ = write!(out, "{byte:02x}");
    }
    out
}

pub(crate) fn compatibility(text: &str) -> Result<CompatibilityHash, BadRecord> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some(digit(*high)? * 16 + digit(*low)?),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
    match bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok()) {
        Some(hash) => Ok(CompatibilityHash(hash)),
        None => invalid("compatibility", "must be 64 hex digits"),
    }
}

/// A part of others' text, fit for one log line.
pub(crate) fn shown(text: &str) -> String {
    text.chars()
        .take(SHOWN_CHARS_MAX)
        .flat_map(char::escape_default)
        .collect()
}
