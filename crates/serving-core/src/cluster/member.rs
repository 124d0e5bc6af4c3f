//! One node as this coordinator knows it: its life, its permits, what it gets and whether it is trusted.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::ids::{NodeId, RequestId};
use crate::node::{AssignedRole, NodeRecord, NodeRole, NodeState, NodeStatus, PairHealth, PermitNote};
use crate::time::Time;

use super::breaker::Breaker;
use super::event::StreamId;
use super::permits::Permits;
use super::prefix_directory::CachedPrefixes;
use super::suspicion::Suspicion;

/// Until a new life of a node gets as much work as the others: long enough to see its first answers, short against the
/// minutes that a scale-up takes.
const SLOW_START: Duration = Duration::from_secs(10);

/// Whether a node's membership stream is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Connected {
        stream: StreamId,
    },
    /// The stream broke, the lease still runs: no new work, running work goes on.
    Disconnected,
    /// The lease ended.
    Lost {
        since: Time,
    },
    /// The node said goodbye.
    Left {
        since: Time,
    },
}

impl Life {
    /// Since when there is nobody behind the name any more.
    pub fn over_since(self) -> Option<Time> {
        match self {
            Life::Lost { since } | Life::Left { since } => Some(since),
            Life::Connected { .. } | Life::Disconnected => None,
        }
    }
    pub fn is_over(self) -> bool {
        self.over_since().is_some()
    }
}

/// What the outside may see of a node's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeHealth {
    Joining,
    Ready,
    Draining,
    Lost,
    Left,
}

impl NodeHealth {
    pub const ALL: [NodeHealth; 5] = [
        NodeHealth::Joining,
        NodeHealth::Ready,
        NodeHealth::Draining,
        NodeHealth::Lost,
        NodeHealth::Left,
    ];
    pub fn name(self) -> &'static str {
        match self {
            NodeHealth::Joining => "joining",
            NodeHealth::Ready => "ready",
            NodeHealth::Draining => "draining",
            NodeHealth::Lost => "lost",
            NodeHealth::Left => "left",
        }
    }
    /// There is nobody behind the name any more.
    pub fn is_over(self) -> bool {
        matches!(self, NodeHealth::Lost | NodeHealth::Left)
    }
}

/// The last note to a node, as far as a change of it is worth another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LastNote {
    waiting: Option<RequestId>,
    wanted: u64,
    returned_total: u64,
}

/// The decode nodes that a prefill node last named, by what it said of its link to each. Placement asks this for every pair of
/// nodes, so it is kept beside the report.
#[derive(Clone, Debug, Default)]
struct ReportedLinks {
    usable: BTreeSet<NodeId>,
    unusable: BTreeSet<NodeId>,
}

impl ReportedLinks {
    fn of(pairs: &[PairHealth]) -> Self {
        let named = |is_usable: bool| {
            let pairs = pairs.iter().filter(|pair| pair.unusable_reason.is_none() == is_usable);
            pairs.map(|pair| pair.decode_node.clone()).collect()
        };
        Self {
            usable: named(true),
            unusable: named(false),
        }
    }
}

/// A node is to leave: for good, or to join again as something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainOrder {
    pub next_role: Option<AssignedRole>,
}

/// One name and the last life seen under it.
#[derive(Clone, Debug)]
pub struct Node {
    pub record: NodeRecord,
    pub life: Life,
    pub lease_until: Time,
    /// When this life was first seen.
    pub joined_at: Time,
    /// The last report. [`Node::take_status`] alone sets it.
    pub status: Option<NodeStatus>,
    links: ReportedLinks,
    pub status_at: Time,
    /// When a report last said that the model ran: a node at work is not a dead one, however quiet its streams are.
    pub progress_at: Time,
    pub permits: Permits,
    pub prefixes: CachedPrefixes,
    /// What this coordinator last told the node of the permits they share, and for which request.
    told: LastNote,
    /// Choices given to this node and not ended (decode).
    pub sequences: u32,
    /// Prompt tokens sent since the last status (prefill).
    pub sent_tokens: u64,
    /// What somebody asked of this life; its own reports may still say ready for a moment.
    pub drain: Option<DrainOrder>,
    pub(super) suspicion: Suspicion,
    /// Of its engine's failures.
    pub(super) breaker: Breaker,
}

impl Node {
    pub(super) fn new(record: NodeRecord, stream: StreamId, now: Time, lease: Duration) -> Self {
        Self {
            record,
            life: Life::Connected { stream },
            lease_until: now + lease,
            joined_at: now,
            status: None,
            links: ReportedLinks::default(),
            status_at: now,
            progress_at: now,
            permits: Permits::of_stream(stream),
            prefixes: CachedPrefixes::default(),
            told: LastNote::default(),
            sequences: 0,
            sent_tokens: 0,
            drain: None,
            suspicion: Suspicion::default(),
            breaker: Breaker::default(),
        }
    }

    pub fn id(&self) -> &NodeId {
        &self.record.id
    }

    /// Most reports repeat the links of the one before, so these are put in order only when they have changed.
    pub(super) fn take_status(&mut self, status: NodeStatus) {
        let links_before = self.status.as_ref().map(|before| &before.pairs);
        if links_before != Some(&status.pairs) {
            self.links = ReportedLinks::of(&status.pairs);
        }
        self.record.state = status.state;
        self.status = Some(status);
    }

    /// Prompt tokens that wait here, as far as this coordinator knows (prefill).
    pub fn waiting_tokens(&self) -> u64 {
        let reported = self.status.as_ref().map_or(0, |status| status.waiting_tokens);
        u64::from(reported) + self.sent_tokens
    }

    pub fn health(&self) -> NodeHealth {
        match self.life {
            Life::Lost { .. } => return NodeHealth::Lost,
            Life::Left { .. } => return NodeHealth::Left,
            Life::Connected { .. } | Life::Disconnected => {}
        }
        match self.record.state {
            NodeState::Ready if self.drain.is_some() => NodeHealth::Draining,
            NodeState::Joining => NodeHealth::Joining,
            NodeState::Ready => NodeHealth::Ready,
            NodeState::Draining => NodeHealth::Draining,
        }
    }

    /// No new work now: a connection to it broke, or the one request that tries it again has no answer yet.
    pub fn is_suspected(&self, now: Time) -> bool {
        !self.suspicion.trust.admits(now)
    }

    /// Its engine failed requests, one after the other: it gets no new work while another node can take it.
    pub fn is_resting(&self, now: Time) -> bool {
        self.breaker.is_resting(now)
    }

    /// Ready, connected: may be counted on. Suspicion is not considered.
    pub fn is_live(&self) -> bool {
        self.health() == NodeHealth::Ready && matches!(self.life, Life::Connected { .. })
    }

    /// May be given new work now, permits apart.
    pub fn is_usable(&self, now: Time) -> bool {
        self.is_live() && !self.is_suspected(now)
    }

    /// The life of a decode node that has just begun is the emptiest of its pool, so every request would go there at once,
    /// to a node that has proved nothing yet. It gets its share over `SLOW_START`, while others can take the rest. A prefill
    /// node never has more than two steps of work.
    pub(super) fn has_its_share(&self, now: Time) -> bool {
        let age = now.since(self.joined_at);
        if age >= SLOW_START || self.record.role == NodeRole::Prefill {
            return false;
        }
        let share = age.as_secs_f64() / SLOW_START.as_secs_f64();
        f64::from(self.sequences) >= (f64::from(self.record.capacity.max_sequences) * share).max(1.0)
    }

    /// Whether this prefill node reports its link to `decode` as broken.
    pub fn pair_is_usable(&self, decode: &NodeId) -> bool {
        !self.links.unusable.contains(decode)
    }

    /// Whether this prefill node has said that its link to `decode` works.
    pub fn pair_is_reported_usable(&self, decode: &NodeId) -> bool {
        self.links.usable.contains(decode)
    }

    /// Returns what is recalled and says what is waited for, if there is anything new to say and others to share with.
    pub(super) fn share_permits(&mut self, waiting: Option<(RequestId, u64)>) -> Option<PermitNote> {
        if self.status.as_ref().is_none_or(|status| status.coordinators < 2) {
            return None;
        }
        let told = LastNote {
            waiting: waiting.map(|(request, _)| request),
            wanted: waiting.map_or(0, |(_, wanted)| wanted),
            returned_total: self.permits.return_recalled(),
        };
        let is_news = std::mem::replace(&mut self.told, told) != told;
        is_news.then_some(PermitNote {
            wanted: told.wanted,
            waited: Duration::ZERO,
            returned_total: told.returned_total,
        })
    }
}
