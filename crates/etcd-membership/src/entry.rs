//! The entries in etcd: one JSON record per node and per coordinator, at `/baton/<cluster>/<folder>/<name>`.
//!
//! **Schema.** A record says `"schema": 1`. Fields that this version does not know are ignored. So a newer version may add
//! fields without a new number, and old and new processes see each other during a rolling upgrade. A record is only used to
//! find a process; the status stream checks all of it again. A new schema number means that old readers must not use the
//! record: they skip it. Two fields stay in every schema: `name`, and `epoch` as 16 hex digits.
//!
//! **Trust.** Anybody with write access to the prefix can put anything there. A record that cannot be read is a
//! [`BadRecord`]: skipped, counted and reported, never fatal.

use serde::{Deserialize, Serialize};
use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use serving_core::node::{NodeCapacity, NodeRecord, NodeRole, NodeState};
use thiserror::Error;

use crate::entry_fields::{
    FactsJson, compatibility, epoch, epoch_text, hex_text, name, role, shown, state, text, transports,
};

/// An honest record has less than 1 KiB. 64 times that is still quick to parse.
pub const RECORD_BYTES_MAX: usize = 64 << 10;
const SCHEMA: u32 = 1;

/// Why a record is skipped.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BadRecord {
    /// How much larger is not said, because no more of a value is kept than shows that it is too large.
    #[error("more than {RECORD_BYTES_MAX} bytes, which no record has")]
    TooLarge,
    /// Not JSON, or a field is missing or of another type.
    #[error("not a record: {detail}")]
    Shape { detail: String },
    #[error("schema {got}; this version reads schema {SCHEMA}: upgrade it")]
    UnknownSchema { got: u32 },
    #[error("the record at `{key}` says that it is `{name}`")]
    NameDiffers { key: String, name: String },
    #[error("field {field}: {why}")]
    Invalid { field: &'static str, why: &'static str },
    #[error("more than {max} records in this folder")]
    TooMany { max: usize },
}

/// One kind of record: [`NodeEntry`] or [`CoordinatorEntry`].
pub trait Entry: Clone + std::fmt::Debug + PartialEq + Send + Sync + 'static {
    /// The folder under the cluster's prefix.
    const FOLDER: &'static str;

    fn id(&self) -> &NodeId;
    fn state(&self) -> NodeState;
    fn set_state(&mut self, state: NodeState);
    /// The JSON, or the reason for which other processes would skip it.
    fn encode(&self) -> Result<Vec<u8>, BadRecord>;
    /// Reads a record without looking at its key.
    fn decode(json: &[u8]) -> Result<Self, BadRecord>;
}

/// Reads the record found under `name`.
pub fn decode_at<T: Entry>(name: &[u8], json: &[u8]) -> Result<T, BadRecord> {
    let entry = T::decode(json)?;
    let own = entry.id().name.as_str();
    if own.as_bytes() != name {
        return Err(BadRecord::NameDiffers {
            key: shown(&String::from_utf8_lossy(name)),
            name: shown(own),
        });
    }
    Ok(entry)
}

/// The epoch of a record of any schema, also of one that cannot be read otherwise.
pub fn epoch_of(json: &[u8]) -> Option<NodeEpoch> {
    #[derive(Deserialize)]
    struct OnlyEpoch {
        epoch: String,
    }
    if json.len() > RECORD_BYTES_MAX {
        return None;
    }
    let record: OnlyEpoch = serde_json::from_slice(json).ok()?;
    epoch(&record.epoch).ok()
}

/// A registered node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeEntry {
    record: NodeRecord,
}

impl From<NodeRecord> for NodeEntry {
    fn from(record: NodeRecord) -> Self {
        Self { record }
    }
}

impl From<NodeEntry> for NodeRecord {
    fn from(entry: NodeEntry) -> Self {
        entry.record
    }
}

impl NodeEntry {
    pub fn record(&self) -> &NodeRecord {
        &self.record
    }
}

#[derive(Serialize, Deserialize)]
struct NodeJson {
    schema: u32,
    name: String,
    epoch: String,
    role: String,
    is_co_located: bool,
    address: String,
    kv_address: String,
    compatibility: String,
    /// Earlier versions do not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    compatibility_facts: Option<FactsJson>,
    transports: Vec<String>,
    version: String,
    capacity: NodeCapacity,
    model_name: String,
    state: String,
}

impl Entry for NodeEntry {
    const FOLDER: &'static str = "nodes";

    fn id(&self) -> &NodeId {
        &self.record.id
    }
    fn state(&self) -> NodeState {
        self.record.state
    }
    fn set_state(&mut self, state: NodeState) {
        self.record.state = state;
    }

    fn encode(&self) -> Result<Vec<u8>, BadRecord> {
        let record = self.record.clone();
        write_json::<Self>(&NodeJson {
            schema: SCHEMA,
            name: record.id.name.as_str().to_owned(),
            epoch: epoch_text(record.id.epoch),
            role: record.role.name().to_owned(),
            is_co_located: record.is_co_located,
            address: record.address,
            kv_address: record.kv_address,
            compatibility: hex_text(&record.compatibility.hash.0),
            compatibility_facts: record.compatibility.facts.map(|facts| (*facts).into()),
            transports: record.transports,
            version: record.version,
            capacity: record.capacity,
            model_name: record.model_name,
            state: record.state.name().to_owned(),
        })
    }

    fn decode(json: &[u8]) -> Result<Self, BadRecord> {
        let json: NodeJson = read_json(json)?;
        let role = role(&json.role)?;
        let invalid = |field, why| Err(BadRecord::Invalid { field, why });
        if json.is_co_located && role == NodeRole::Prefill {
            return invalid("is_co_located", "only a decode node can be co-located");
        }
        if json.capacity.block_tokens == 0 {
            return invalid("capacity.block_tokens", "must be 1 or more");
        }
        Ok(Self {
            record: NodeRecord {
                id: id(&json.name, &json.epoch)?,
                role,
                is_co_located: json.is_co_located,
                address: text(json.address, "address")?,
                kv_address: text(json.kv_address, "kv_address")?,
                compatibility: compatibility(&json.compatibility, json.compatibility_facts)?,
                transports: transports(json.transports)?,
                version: text(json.version, "version")?,
                capacity: json.capacity,
                model_name: text(json.model_name, "model_name")?,
                state: state(&json.state)?,
                // The membership stream has it and asks for it.
                roles: Vec::new(),
            },
        })
    }
}

/// A registered coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorEntry {
    pub id: NodeId,
    /// host:port of its membership service, which nodes join.
    pub control_address: String,
    /// host:port of its HTTP API.
    pub http_address: String,
    pub version: String,
    pub state: NodeState,
}

#[derive(Serialize, Deserialize)]
struct CoordinatorJson {
    schema: u32,
    name: String,
    epoch: String,
    control_address: String,
    http_address: String,
    version: String,
    state: String,
}

impl Entry for CoordinatorEntry {
    const FOLDER: &'static str = "coordinators";

    fn id(&self) -> &NodeId {
        &self.id
    }
    fn state(&self) -> NodeState {
        self.state
    }
    fn set_state(&mut self, state: NodeState) {
        self.state = state;
    }

    fn encode(&self) -> Result<Vec<u8>, BadRecord> {
        write_json::<Self>(&CoordinatorJson {
            schema: SCHEMA,
            name: self.id.name.as_str().to_owned(),
            epoch: epoch_text(self.id.epoch),
            control_address: self.control_address.clone(),
            http_address: self.http_address.clone(),
            version: self.version.clone(),
            state: self.state.name().to_owned(),
        })
    }

    fn decode(json: &[u8]) -> Result<Self, BadRecord> {
        let json: CoordinatorJson = read_json(json)?;
        Ok(Self {
            id: id(&json.name, &json.epoch)?,
            control_address: text(json.control_address, "control_address")?,
            http_address: text(json.http_address, "http_address")?,
            version: text(json.version, "version")?,
            state: state(&json.state)?,
        })
    }
}

fn id(name_text: &str, epoch_text: &str) -> Result<NodeId, BadRecord> {
    Ok(NodeId {
        name: NodeName::new(name(name_text)?),
        epoch: epoch(epoch_text)?,
    })
}

/// A record is read back before it is written. So a process whose record others would skip learns of it when it starts.
fn write_json<T: Entry>(json: &impl Serialize) -> Result<Vec<u8>, BadRecord> {
    let bytes = serde_json::to_vec(json).map_err(|error| shape(&error))?;
    T::decode(&bytes)?;
    Ok(bytes)
}

fn read_json<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, BadRecord> {
    #[derive(Deserialize)]
    struct OnlySchema {
        schema: u32,
    }
    if json.len() > RECORD_BYTES_MAX {
        return Err(BadRecord::TooLarge);
    }
    let got = serde_json::from_slice::<OnlySchema>(json)
        .map_err(|error| shape(&error))?
        .schema;
    if got != SCHEMA {
        return Err(BadRecord::UnknownSchema { got });
    }
    serde_json::from_slice(json).map_err(|error| shape(&error))
}

fn shape(error: &serde_json::Error) -> BadRecord {
    BadRecord::Shape {
        detail: shown(&error.to_string()),
    }
}

#[cfg(test)]
#[path = "entry_tests.rs"]
pub(crate) mod tests;
