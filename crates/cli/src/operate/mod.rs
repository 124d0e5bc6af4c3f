//! The verbs that change a live cluster. They ask a coordinator, which asks the node.

pub mod drain;
pub mod role;
