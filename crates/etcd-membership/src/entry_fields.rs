//! The fields of a record: written as text, and checked when they are read. The limits are those of the wire (`proto`'s
//! convert).

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serving_core::compatibility::{Compatibility, CompatibilityFacts, CompatibilityHash};
use serving_core::ids::NodeEpoch;
use serving_core::node::{NodeRole, NodeState};

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

pub(crate) fn hex_text(bytes: &[u8; 32]) -> String {
    let mut out = String::with_capacity(64);
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(out, "{byte:02x}");
    }
    out
}

fn bytes32(text: &str, field: &'static str) -> Result<[u8; 32], BadRecord> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some(digit(*high)? * 16 + digit(*low)?),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
    match bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok()) {
        Some(bytes) => Ok(bytes),
        None => invalid(field, "must be 64 hex digits"),
    }
}

pub(crate) fn compatibility(hash: &str, facts: Option<FactsJson>) -> Result<Compatibility, BadRecord> {
    Ok(Compatibility {
        hash: CompatibilityHash(bytes32(hash, "compatibility")?),
        facts: facts.map(CompatibilityFacts::try_from).transpose()?.map(Box::new),
    })
}

/// The facts under the hash, for people who look at etcd.
#[derive(Serialize, Deserialize)]
pub(crate) struct FactsJson {
    weights_sha256: String,
    tokenizer_sha256: String,
    numerics_id: String,
    kv_dtype: String,
    block_tokens: u32,
    layer_count: u32,
    kv_head_count: u32,
    head_dim: u32,
    vocab_size: u32,
    context_length: u32,
    rope_base: f32,
    rank_count: u32,
    protocol_version: u32,
}

impl From<CompatibilityFacts> for FactsJson {
    fn from(facts: CompatibilityFacts) -> Self {
        Self {
            weights_sha256: hex_text(&facts.weights_sha256),
            tokenizer_sha256: hex_text(&facts.tokenizer_sha256),
            numerics_id: facts.numerics_id,
            kv_dtype: facts.kv_dtype,
            block_tokens: facts.block_tokens,
            layer_count: facts.layer_count,
            kv_head_count: facts.kv_head_count,
            head_dim: facts.head_dim,
            vocab_size: facts.vocab_size,
            context_length: facts.context_length,
            rope_base: facts.rope_base,
            rank_count: facts.rank_count,
            protocol_version: facts.protocol_version,
        }
    }
}

impl TryFrom<FactsJson> for CompatibilityFacts {
    type Error = BadRecord;

    fn try_from(json: FactsJson) -> Result<Self, BadRecord> {
        Ok(Self {
            weights_sha256: bytes32(&json.weights_sha256, "compatibility_facts.weights_sha256")?,
            tokenizer_sha256: bytes32(&json.tokenizer_sha256, "compatibility_facts.tokenizer_sha256")?,
            numerics_id: text(json.numerics_id, "compatibility_facts.numerics_id")?,
            kv_dtype: text(json.kv_dtype, "compatibility_facts.kv_dtype")?,
            block_tokens: json.block_tokens,
            layer_count: json.layer_count,
            kv_head_count: json.kv_head_count,
            head_dim: json.head_dim,
            vocab_size: json.vocab_size,
            context_length: json.context_length,
            rope_base: json.rope_base,
            rank_count: json.rank_count,
            protocol_version: json.protocol_version,
        })
    }
}

/// A part of others' text, fit for one log line.
pub(crate) fn shown(text: &str) -> String {
    text.chars()
        .flat_map(char::escape_default)
        .take(SHOWN_CHARS_MAX)
        .collect()
}
