//! Newtype identities: one type per thing that is counted or named, so that two kinds of number cannot be mixed up.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub $inner);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

number_id!(
    /// One client request. Minted by the coordinator; client labels such as `x-request-id` are kept beside it.
    RequestId(u128)
);
number_id!(
    /// One of those between whom the coordinator's queue is fair: the holder of a key.
    QueueOwner(u64)
);
number_id!(
    /// One placement of a request on nodes, counted from 0.
    Attempt(u32)
);
number_id!(
    /// One life of a node process: random at start, compared for equality only.
    NodeEpoch(u64)
);
number_id!(
    /// One handoff. Random, minted by the decode node, never taken from a client.
    TransferId(u128)
);
number_id!(
    /// Index of a KV block in its node's pool.
    BlockId(u32)
);
number_id!(
    /// One ownership of a block: bumped whenever the block is handed to a new owner.
    Generation(u32)
);
number_id!(
    /// Index into the model's vocabulary.
    TokenId(u32)
);
number_id!(
    /// Which of a request's `n` sequences.
    ChoiceIndex(u32)
);
number_id!(
    /// Position of an output token within its sequence: 0 is the first generated token.
    OutputIndex(u32)
);

macro_rules! display_plain {
    ($($name:ident),*) => { $(impl fmt::Display for $name {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { write!(f, "{}", self.0) }
    })* };
}
display_plain!(
    Attempt,
    QueueOwner,
    BlockId,
    Generation,
    TokenId,
    ChoiceIndex,
    OutputIndex
);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
impl fmt::Display for NodeEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl TransferId {
    /// What people and pages see of an id: 2^96 ids have the same label. Whoever knows an id may claim its transfer, so that
    /// the whole of it is for the two nodes and the event log only.
    pub fn label(self) -> String {
        let folded = (0..4).fold(0, |label, word| label ^ (self.0 >> (32 * word)) as u32);
        format!("{folded:08x}")
    }
}

/// Keeps cached prefixes apart: a request finds only blocks that were made under its own salt. The coordinator derives it from who
/// asks; no client chooses one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixSalt(pub u64);

/// Whose share of a node's cache a request's blocks are counted in. Two salts of one tenant have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CacheTenant(pub u64);

/// A node's configured name, for example `decode-0`. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeName(pub Arc<str>);

impl NodeName {
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl fmt::Debug for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeName({})", self.0)
    }
}

/// One process: a name and the life it is in. A restart keeps the name and changes the epoch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId {
    pub name: NodeName,
    pub epoch: NodeEpoch,
}
impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.name, self.epoch)
    }
}
