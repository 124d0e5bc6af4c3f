//! Counters of the brain's own decisions; the shell exports them, nothing decides by them.

use std::collections::BTreeMap;

use crate::request::{Lane, LocalPrefillReason};
use crate::routing::RouteReason;

/// How a handoff (a placement with a prefill and a decode node) ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HandoffOutcome {
    Committed,
    /// The request ended at its first token: nothing was handed over.
    EndedAtFirstToken,
    Failed,
    Cancelled,
}

impl HandoffOutcome {
    pub const ALL: [Self; 4] = [Self::Committed, Self::EndedAtFirstToken, Self::Failed, Self::Cancelled];

    pub fn name(self) -> &'static str {
        match self {
            HandoffOutcome::Committed => "committed",
            HandoffOutcome::EndedAtFirstToken => "ended_at_first_token",
            HandoffOutcome::Failed => "failed",
            HandoffOutcome::Cancelled => "cancelled",
        }
    }
}

/// How a migration (a retry after delivered tokens) ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MigrationOutcome {
    Started,
    /// More than one choice was running: such a request is not migrated.
    NotMigratable,
    /// Attempts or the retry budget were used up.
    BudgetSpent,
}

impl MigrationOutcome {
    pub const ALL: [Self; 3] = [Self::Started, Self::NotMigratable, Self::BudgetSpent];

    pub fn name(self) -> &'static str {
        match self {
            MigrationOutcome::Started => "started",
            MigrationOutcome::NotMigratable => "not_migratable",
            MigrationOutcome::BudgetSpent => "budget_spent",
        }
    }
}

/// All totals since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterStats {
    pub routing_decisions: BTreeMap<RouteReason, u64>,
    pub local_prefills: BTreeMap<LocalPrefillReason, u64>,
    /// By transport: the one the prefill node reports for the pair; before it does, the best that both nodes have.
    pub handoffs: BTreeMap<(String, HandoffOutcome), u64>,
    /// By `LegError::name`.
    pub retries: BTreeMap<&'static str, u64>,
    pub migrations: BTreeMap<MigrationOutcome, u64>,
    /// Refused for want of room in the queue, or pushed out of it.
    pub shed: BTreeMap<Lane, u64>,
    /// By `RefuseReason::name`.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Nodes whose lease ran out.
    pub nodes_lost: u64,
    /// Pairs taken out of use for a while because their transfers kept failing.
    pub pair_rests: u64,
    /// Times that a node was set aside because its engine failed requests.
    pub node_rests: u64,
    /// Events of attempts that are over.
    pub stale_events: u64,
    pub protocol_violations: u64,
    /// Never above 0 unless this crate has a bug.
    pub illegal_transitions: u64,
}

pub(super) fn count<K: Ord>(map: &mut BTreeMap<K, u64>, key: K) {
    *map.entry(key).or_insert(0) += 1;
}
