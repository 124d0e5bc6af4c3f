//! Who holds which blocks: what `/admin/blocks` answers on a node whose pool does not come to rest.

use serde::Serialize;

use crate::batching::decode::DecodeBatcher;
use crate::batching::decode_entry::DecodeEntry;
use crate::batching::prefill::PrefillBatcher;
use crate::batching::prefill_entry::{PrefillEntry, PrefillPhase};
use crate::batching::sequence::Sequence;
use crate::ids::TransferId;
use crate::kv::{BlockHandle, BlockPool, BlockUse};
use crate::node::KvBlockCounts;
use crate::time::Time;

/// Every hold of a node. As long as the batcher has requests, which its limits bound.
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
fn quarantined(handles: &[BlockHandle]) -> BlockHolder {
    let mut holds = HoldCounts::default();
    holds.add(handles);
    BlockHolder {
        request_id: None,
        attempt: None,
        transfer: None,
        stage: "quarantine",
        holds,
        age_ms: None,
        deadline_in_ms: None,
    }
}

fn report(pool: &BlockPool, holders: Vec<BlockHolder>) -> BlockReport {
    BlockReport {
        blocks: pool.counts(),
        dropped_handles_total: pool.dropped_total(),
        holders,
    }
}

fn millis(duration: std::time::Duration) -> Option<u64> {
    Some(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

impl PrefillBatcher {
    pub fn block_report(&self, now: Time) -> BlockReport {
        let entry = |entry: &PrefillEntry| BlockHolder {
            request_id: Some(entry.key.request.to_string()),
            attempt: Some(entry.key.attempt.0),
            transfer: None,
            stage: entry.stage().name(),
            holds: HoldCounts::of([&entry.sequence]),
            age_ms: millis(now.since(entry.accepted_at)),
            deadline_in_ms: millis(match entry.phase {
                PrefillPhase::Held { until, .. } => until.min(entry.deadline).remaining(now),
                PrefillPhase::Waiting | PrefillPhase::Computing => entry.deadline.remaining(now),
            }),
        };
        let quarantined = self.quarantine.iter().map(|(key, table)| BlockHolder {
            request_id: Some(key.request.to_string()),
            attempt: Some(key.attempt.0),
            ..quarantined(table.handles())
        });
        let holders = self.entries.values().map(entry).chain(quarantined).collect();
        report(&self.pool, holders)
    }
}

impl DecodeBatcher {
    pub fn block_report(&self, now: Time) -> BlockReport {
        let entry = |entry: &DecodeEntry| BlockHolder {
            request_id: Some(entry.key.request.to_string()),
            attempt: Some(entry.key.attempt.0),
            transfer: entry.transfer().map(TransferId::label),
            stage: entry.stage().name(),
            holds: HoldCounts::of(entry.choices.iter().map(|choice| &choice.sequence)),
            age_ms: millis(now.since(entry.opened_at)),
            deadline_in_ms: millis(entry.deadline.remaining(now)),
        };
        let quarantined = self.quarantine.iter().map(|(transfer, handles)| BlockHolder {
            transfer: Some(transfer.label()),
            ..quarantined(handles)
        });
        let holders = self.entries.values().map(entry).chain(quarantined).collect();
        report(&self.pool, holders)
    }
}
