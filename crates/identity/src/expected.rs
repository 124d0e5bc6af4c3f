//! Whom a caller means to call.

use std::fmt;

use crate::name::{PeerName, PeerRole};

/// The process that is called. Its certificate has to say so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    Coordinator,
    /// The node of this name, in whatever role.
    Node(String),
    Process {
        role: PeerRole,
        name: String,
    },
}

impl Expected {
    pub fn decode_node(name: impl ToString) -> Self {
        Self::Process {
            role: PeerRole::Decode,
            name: name.to_string(),
        }
    }

    pub(crate) fn is_met_by(&self, found: &PeerName) -> bool {
        match self {
            Self::Coordinator => found.role == PeerRole::Coordinator,
            Self::Node(name) => matches!(found.role, PeerRole::Prefill | PeerRole::Decode) && found.name == *name,
            Self::Process { role, name } => found.role == *role && found.name == *name,
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Coordinator => f.write_str("a coordinator"),
            Self::Node(name) => write!(f, "node {name}"),
            Self::Process { role, name } => write!(f, "{role} {name}"),
        }
    }
}
