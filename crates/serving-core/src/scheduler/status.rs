//! What a node tells of itself: its status, the permits it grants, and who holds which blocks (`/admin/blocks`).

use std::time::Duration;

use serde::Serialize;

use crate::ids::TransferId;
use crate::kv::BlockHandle;
use crate::kv::BlockUse;
use crate::node::{KvBlockCounts, NodeCapacity, NodeState, NodeStatus};
use crate::scheduler::entry::{ChoiceState, Entry};
use crate::scheduler::permits::{permits_kept_for_short, prefill_capacity_tokens};
use crate::scheduler::sequence::Sequence;
use crate::scheduler::{PermitUnit, Quarantined, Scheduler};
use crate::stage::Stage;
use crate::time::Time;

impl Scheduler {
    pub fn status(&self, state: NodeState) -> NodeStatus {
        let sum = |count: fn(&Entry) -> u32| self.entries.values().map(count).sum();
        NodeStatus {
            state,
            permits_granted_total: self.permits.granted_total,
            permits_received_total: self.permits.received_total,
            permits_recalled_total: 0,
            permits_received_by: self.permits.received_by.clone(),
            coordinators: 0,
            kv_blocks: self.pool.counts(),
            running_sequences: sum(Entry::running_sequences),
            waiting_sequences: sum(Entry::waiting_sequences),
            waiting_tokens: sum(Entry::waiting_tokens),
            prefix_query_tokens_total: self.prefix_query_tokens,
            prefix_hit_tokens_total: self.prefix_hit_tokens,
            preemptions_total: self.preemptions,
            computed_tokens_total: self.computed_tokens,
            pairs: Vec::new(),
        }
    }

    /// The stage of every request that is here.
    pub fn stages(&self) -> impl Iterator<Item = Stage> {
        self.entries.values().map(Entry::stage)
    }

    /// While paused (the push queue is full, or the node drains) no further permits are granted (PROTOCOL rule 7).
    pub fn pause_grants(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        self.grant();
    }

    pub(super) fn open_sequences(&self) -> u32 {
        self.entries.values().map(Entry::live_choices).sum()
    }
    pub(super) fn most_sequences(&self) -> u32 {
        let limits = &self.config.limits;
        limits.max_sequences.saturating_mul(self.config.sequences_per_place)
    }

    pub(super) fn grant(&mut self) {
        if self.is_paused || self.open_sequences() >= self.most_sequences() || self.has_preempted() {
            return;
        }
        let available = match self.config.permits {
            PermitUnit::PromptTokens => self.grantable_tokens(),
            PermitUnit::KvBlocks => self.grantable_blocks(),
        };
        self.permits.grant(available);
    }

    /// Two step budgets less what waits, at most what the blocks hold. All long prompts together leave the share of short prompts
    /// to them, as the steps do; short ones count whole.
    fn grantable_tokens(&self) -> u64 {
        let limits = &self.config.limits;
        let capacity = prefill_capacity_tokens(&NodeCapacity {
            kv_blocks: limits.kv_blocks,
            block_tokens: limits.block_tokens,
            max_sequences: limits.max_sequences,
            max_batch_tokens: limits.max_batch_tokens,
            max_model_tokens: limits.max_model_tokens,
            block_bytes: 0,
        });
        let kept_for_short = capacity.min(permits_kept_for_short(limits.max_batch_tokens));
        let (mut short, mut long) = (0, 0);
        for tokens in self.entries.values().map(|entry| u64::from(entry.waiting_tokens())) {
            let sum = if tokens <= kept_for_short {
                &mut short
            } else {
                &mut long
            };
            *sum += tokens;
        }
        let left = capacity - long.min(capacity - kept_for_short);
        let room = u64::from(self.pool.available()) * u64::from(limits.block_tokens);
        left.saturating_sub(short).min(room)
    }

    /// Free and cached blocks less one for each sequence that has no growth left: those come before new requests.
    pub(super) fn grantable_blocks(&self) -> u64 {
        let growing = self.entries.values().filter(|entry| entry.is_committed());
        let promised = growing
            .flat_map(|entry| &entry.choices)
            .filter(|choice| choice.state != ChoiceState::Done && choice.sequence.spare.is_empty());
        let promised = u32::try_from(promised.count()).unwrap_or(u32::MAX);
        u64::from(self.pool.available().saturating_sub(promised))
    }

    pub fn block_report(&self, now: Time) -> BlockReport {
        let reservation = self.config.reservation;
        let entry = |entry: &Entry| BlockHolder {
            request_id: Some(entry.key.request.to_string()),
            attempt: Some(entry.key.attempt.0),
            transfer: entry.transfer().map(TransferId::label),
            stage: entry.stage().name(),
            holds: HoldCounts::of(entry.choices.iter().map(|choice| &choice.sequence)),
            age_ms: millis(now.since(entry.admitted_at)),
            deadline_in_ms: millis(
                entry
                    .peer_limit(reservation)
                    .map_or(entry.deadline, |limit| limit.min(entry.deadline))
                    .remaining(now),
            ),
        };
        let quarantined = self.quarantine.iter().map(|(why, handles)| quarantined(*why, handles));
        BlockReport {
            blocks: self.pool.counts(),
            dropped_handles_total: self.pool.dropped_total(),
            holders: self.entries.values().map(entry).chain(quarantined).collect(),
        }
    }
}

/// Every hold of a node. As many as there are requests, which the limits bound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockReport {
    /// By state; the sum is the pool.
    pub blocks: KvBlockCounts,
    /// Handles that were dropped instead of released since the start: each is a bug, none is a leak.
    pub dropped_handles_total: u64,
    pub holders: Vec<BlockHolder>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockHolder {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    /// Its label.
    pub transfer: Option<String>,
    /// The stage the request is in (PROTOCOL, stages), or `quarantine`: the request is gone, its transfer is not.
    pub stage: &'static str,
    pub holds: HoldCounts,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_in_ms: Option<u64>,
}

/// Holds by use. A block that is shared is held, and counted, once by each holder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HoldCounts {
    pub active: u32,
    pub reserved: u32,
    pub in_transfer: u32,
    pub quarantined: u32,
}

impl HoldCounts {
    fn add<'a>(&mut self, handles: impl IntoIterator<Item = &'a BlockHandle>) {
        for handle in handles {
            *match handle.held_as() {
                BlockUse::Active => &mut self.active,
                BlockUse::Reserved => &mut self.reserved,
                BlockUse::InTransfer => &mut self.in_transfer,
                BlockUse::Quarantined => &mut self.quarantined,
            } += 1;
        }
    }

    fn of<'a>(sequences: impl IntoIterator<Item = &'a Sequence>) -> Self {
        let mut counts = Self::default();
        for sequence in sequences {
            counts.add(sequence.table.handles());
            counts.add(&sequence.spare);
        }
        counts
    }
}

/// Blocks whose request is gone: nothing of it is timed any more.
fn quarantined(why: Quarantined, handles: &[BlockHandle]) -> BlockHolder {
    let mut holds = HoldCounts::default();
    holds.add(handles);
    let (key, transfer) = match why {
        Quarantined::Push(key) => (Some(key), None),
        Quarantined::Transfer(transfer) => (None, Some(transfer.label())),
    };
    BlockHolder {
        request_id: key.map(|key| key.request.to_string()),
        attempt: key.map(|key| key.attempt.0),
        transfer,
        stage: "quarantine",
        holds,
        age_ms: None,
        deadline_in_ms: None,
    }
}

fn millis(duration: Duration) -> Option<u64> {
    Some(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}
