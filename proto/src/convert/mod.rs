//! Wire <-> core in both directions. This is the only place that names the fields of generated types. Everything from the
//! wire is untrusted: each field is checked, a bad one is a [`ConvertError`] that names it, and nothing panics.

mod cache;
mod compatibility;
mod dispatch;
mod handoff;
mod inference;
mod membership;
mod node_outcome;
mod request;
mod tokens;

use std::time::Duration;

use serving_core::ids::{NodeEpoch, NodeId, NodeName, RequestId, TransferId};
use thiserror::Error;

use crate::v1;

/// A message from a peer breaks the contract. It is always the sender's fault, and the same message will not pass later.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConvertError {
    #[error("field {field} is missing")]
    Missing { field: &'static str },
    #[error("field {field} has {got} bytes instead of {expected}")]
    BadLength {
        field: &'static str,
        expected: usize,
        got: usize,
    },
    #[error("field {field} is not a usable number: {value} (allowed: {allowed})")]
    OutOfRange {
        field: &'static str,
        value: String,
        allowed: &'static str,
    },
    #[error("field {field} has {got} elements, at most {max} are allowed")]
    TooMany {
        field: &'static str,
        got: usize,
        max: usize,
    },
    #[error("field {field} holds the unknown value {value}; is the peer of another version?")]
    Unknown { field: &'static str, value: String },
    #[error("field {field} is not a name: 1 to {max} visible ASCII characters are allowed")]
    BadText { field: &'static str, max: usize },
    #[error("field {field} contradicts the rest of the message: {why}")]
    Inconsistent { field: &'static str, why: &'static str },
}

impl ConvertError {
    pub fn field(&self) -> &'static str {
        match self {
            ConvertError::Missing { field }
            | ConvertError::BadLength { field, .. }
            | ConvertError::OutOfRange { field, .. }
            | ConvertError::TooMany { field, .. }
            | ConvertError::Unknown { field, .. }
            | ConvertError::BadText { field, .. }
            | ConvertError::Inconsistent { field, .. } => field,
        }
    }
}

type Result<T> = std::result::Result<T, ConvertError>;

/// Names, labels and addresses; a DNS name has at most 253 characters.
const NAME_BYTES_MAX: usize = 255;
/// Text for people is cut, not refused, so that it never costs a request.
const DETAIL_BYTES_MAX: usize = 2048;
/// Transports, nodes of a pool and the like: far above any real cluster.
const SMALL_LIST_MAX: usize = 1024;

/// Blocks of one request, tokens of one batch, hashes: the message size limit binds first.
const LARGE_LIST_MAX: usize = 1 << 20;

fn required<T>(value: Option<T>, field: &'static str) -> Result<T> {
    value.ok_or(ConvertError::Missing { field })
}

/// A value of an enum that this version does not know.
fn unknown(field: &'static str, value: i32) -> ConvertError {
    ConvertError::Unknown {
        field,
        value: value.to_string(),
    }
}

fn id_from_wire(bytes: &[u8], field: &'static str) -> Result<u128> {
    let array: [u8; 16] = bytes.try_into().map_err(|_| ConvertError::BadLength {
        field,
        expected: 16,
        got: bytes.len(),
    })?;
    Ok(u128::from_be_bytes(array))
}

fn id_to_wire(id: u128) -> Vec<u8> {
    id.to_be_bytes().to_vec()
}

fn request_id(bytes: &[u8], field: &'static str) -> Result<RequestId> {
    id_from_wire(bytes, field).map(RequestId)
}

fn transfer_id(bytes: &[u8], field: &'static str) -> Result<TransferId> {
    id_from_wire(bytes, field).map(TransferId)
}

fn hash32(bytes: &[u8], field: &'static str) -> Result<[u8; 32]> {
    bytes.try_into().map_err(|_| ConvertError::BadLength {
        field,
        expected: 32,
        got: bytes.len(),
    })
}

fn at_most<T>(list: Vec<T>, max: usize, field: &'static str) -> Result<Vec<T>> {
    if list.len() > max {
        return Err(ConvertError::TooMany {
            field,
            got: list.len(),
            max,
        });
    }
    Ok(list)
}

fn finite(value: f32, field: &'static str) -> Result<f32> {
    if value.is_finite() {
        return Ok(value);
    }
    Err(ConvertError::OutOfRange {
        field,
        value: value.to_string(),
        allowed: "finite numbers",
    })
}

/// A name or label that may end up in a metric, a header or a log line.
fn name(text: String, field: &'static str) -> Result<String> {
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(ConvertError::BadText {
            field,
            max: NAME_BYTES_MAX,
        });
    }
    Ok(text)
}

fn names(list: Vec<String>, field: &'static str) -> Result<Vec<String>> {
    at_most(list, SMALL_LIST_MAX, field)?
        .into_iter()
        .map(|text| name(text, field))
        .collect()
}

/// Text for people: control characters out, cut at a limit.
fn detail(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if out.len() + c.len_utf8() > DETAIL_BYTES_MAX {
            break;
        }
        out.push(if c.is_control() { ' ' } else { c });
    }
    out
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn node_id(node: Option<v1::NodeRef>, field: &'static str) -> Result<NodeId> {
    let node = required(node, field)?;
    Ok(NodeId {
        name: NodeName::new(&name(node.name, field)?),
        epoch: NodeEpoch(node.epoch),
    })
}

fn node_ref(node: NodeId) -> v1::NodeRef {
    v1::NodeRef {
        name: node.name.as_str().to_owned(),
        epoch: node.epoch.0,
    }
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod round_trip_tests;
