//! What comes out: a run with the same records as a measured one, and what the nodes did meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use workload::record::Run;

/// A simulated run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// As a load client would have measured it.
    pub run: Run,
    pub totals: Totals,
    /// In the order of the topology.
    pub nodes: Vec<NodeOutcome>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// From the start of the trace to the end of its last request.
    pub virtual_time: Duration,
    /// Events of the agenda.
    pub events: u64,
    /// Handoffs that were committed.
    pub handoffs: u64,
    /// Prompts that decode nodes computed, by reason.
    pub local_prefills: BTreeMap<String, u64>,
    /// Attempts that were followed by another, by reason.
    pub retries: BTreeMap<String, u64>,
    /// Requests that went on elsewhere after their first token.
    pub migrations: u64,
    pub nodes_lost: u64,
    /// Sequences that lost their blocks to older ones.
    pub preemptions: u64,
    /// KV blocks that belong to a request or a transfer when none is left: each is a bug.
    pub blocks_left: u32,
    /// What the brains call impossible: each is a bug, here or there.
    pub violations: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeOutcome {
    pub name: String,
    /// Its last one.
    pub role: String,
    /// Time in which it computed. A standstill does not count.
    pub busy: Duration,
    pub steps: u64,
    /// Rows that went through the model, prompts and outputs alike, over all its lives.
    pub computed_tokens: u64,
    /// KV bytes that it sent.
    pub kv_bytes_sent: u64,
    /// The largest number of blocks that requests and transfers held at once.
    pub kv_blocks_used_max: u32,
}
