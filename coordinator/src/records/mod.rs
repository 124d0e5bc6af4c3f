//! The last generation requests, kept in memory: what `/admin/requests`, `baton trace` and the console read.
//!
//! The number of records and their bytes are limited; the oldest go first. Running requests are read where they are, and
//! nothing is copied per token. A follower of the events that does not keep up is told how many it has missed.

pub(crate) mod closing;
pub mod pages;
pub mod prefixes;
pub(crate) mod prompts;
pub(crate) mod rates;
pub mod shape;
mod sketch;
pub(crate) mod stalls;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use closing::ClosingRecords;
use prefixes::{PrefixBook, PrefixShape};
use rates::RateBook;
use shape::{Detail, RecordState, Summary};

/// Events that a follower may be behind: ten seconds of a hundred requests a second, with three events each.
const EVENTS_BEHIND_MAX: usize = 4096;

/// Limits of the store. The record of a request with a few stalls takes some 3 KiB.
#[derive(Clone, Copy, Debug)]
pub struct RecordLimits {
    pub records_max: usize,
    pub bytes_max: usize,
}

impl Default for RecordLimits {
    fn default() -> Self {
        Self {
            records_max: 10_000,
            bytes_max: 64 << 20,
        }
    }
}

/// A request that has not ended, as the store sees it.
pub trait Running: Send + Sync {
    fn detail(&self) -> Option<Detail>;
}

/// KV bytes and handoffs of one pair, counted over the requests that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairTotals {
    pub kv_bytes: u64,
    pub handoffs: u64,
}

#[derive(Default)]
struct Ring {
    next_seq: u64,
    ended: VecDeque<Arc<Detail>>,
    bytes: usize,
    forgotten: u64,
    running: BTreeMap<u64, Weak<dyn Running>>,
    pairs: BTreeMap<(String, String), PairEntry>,
}

struct PairEntry {
    totals: PairTotals,
    /// Of the request that used the pair last.
    last_seq: u64,
}

/// Pairs whose totals are kept: a bound against nodes that come under ever new names. The one that was used least recently goes first.
pub(super) const PAIRS_MAX: usize = 4096;

/// Shared by all requests and all readers.
pub struct RecordStore {
    limits: RecordLimits,
    ring: Mutex<Ring>,
    pub closing: ClosingRecords,
    pub prefixes: PrefixBook,
    pub rates: RateBook,
    events: broadcast::Sender<Arc<Summary>>,
}

impl Ring {
    fn handed_over(&mut self, pair: (String, String), (kv_bytes, seq): (u64, u64)) {
        if self.pairs.len() >= PAIRS_MAX && !self.pairs.contains_key(&pair) {
            let oldest = self.pairs.iter().min_by_key(|(_, entry)| entry.last_seq);
            if let Some(oldest) = oldest.map(|(pair, _)| pair.clone()) {
                self.pairs.remove(&oldest);
            }
        }
        let entry = self.pairs.entry(pair).or_insert(PairEntry {
            totals: PairTotals::default(),
            last_seq: seq,
        });
        entry.last_seq = entry.last_seq.max(seq);
        entry.totals.kv_bytes = entry.totals.kv_bytes.saturating_add(kv_bytes);
        entry.totals.handoffs += 1;
    }
}

impl fmt::Debug for RecordStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordStore")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Default for RecordStore {
    fn default() -> Self {
        Self::new(RecordLimits::default())
    }
}

/// The records that a reader wants, as a query string has them. All conditions that are set must hold; an empty text sets
/// none.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Listing {
    /// At most as many; `None` lists a hundred.
    pub limit: Option<usize>,
    pub before: Option<u64>,
    /// Sort by end-to-end time, instead of newest first.
    pub slowest: bool,
    /// The kinds of events that a follower wants.
    pub kinds: String,
    pub outcome: String,
    pub lane: String,
    pub model: String,
    /// Name of the prefill node or of the decode node.
    pub node: String,
    pub breached: Option<bool>,
    pub stalled: Option<bool>,
    pub running: Option<bool>,
    pub slower_than_ms: Option<f64>,
    /// Only ended records, in the order of their ends, from this number on. The first record of the process that ended has
    /// number 0.
    pub ended_from: Option<u64>,
    /// With `ended_from`: the fingerprints of the prompts as well.
    pub prefixes: bool,
}

const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1_000;
/// Fingerprints on one page, and those of one more record: 3 MB of JSON.
const PAGE_BLOCKS_MAX: usize = 131_072;

impl Listing {
    pub fn admits(&self, s: &Summary) -> bool {
        let is = |wanted: &str, got: &[Option<&str>]| wanted.is_empty() || got.contains(&Some(wanted));
        is(&self.outcome, &[s.outcome.as_deref()])
            && is(&self.lane, &[Some(&s.lane)])
            && is(&self.model, &[s.model.as_deref()])
            && is(
                &self.node,
                &[s.serving.prefill_node.as_deref(), s.serving.decode_node.as_deref()],
            )
            && self.breached.is_none_or(|wanted| wanted != s.breached.is_empty())
            && self.stalled.is_none_or(|wanted| wanted == (s.stall_count > 0))
            && self
                .running
                .is_none_or(|wanted| wanted == (s.state != RecordState::Ended))
            && self.slower_than_ms.is_none_or(|limit| s.e2e_ms > limit)
    }
}

/// One page of the list.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Page {
    pub records: Vec<Summary>,
    /// Where the next page begins, if there is one.
    pub next_before: Option<u64>,
    pub now_unix_ms: f64,
    pub kept: usize,
    pub forgotten: u64,
    /// With `ended_from`: where the next page begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_ended_from: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefixes: Option<PrefixPage>,
}

/// The fingerprints of the prompts on a page.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefixPage {
    pub block_tokens: u32,
    /// Fingerprints of two recordings cannot be compared.
    pub recording: String,
    /// By the number of the record: one for each prompt. A record that began before the recording has none.
    pub requests: BTreeMap<u64, Vec<PrefixShape>>,
}

impl RecordStore {
    pub fn new(limits: RecordLimits) -> Self {
        Self {
            limits,
            ring: Mutex::default(),
            closing: ClosingRecords::default(),
            prefixes: PrefixBook::default(),
            rates: RateBook::default(),
            events: broadcast::channel(EVENTS_BEHIND_MAX).0,
        }
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request begins. Returns its number; pass it to `began` when the request can be looked at.
    pub(crate) fn next_seq(&self) -> u64 {
        let mut ring = self.ring();
        ring.next_seq += 1;
        ring.next_seq
    }

    pub fn began(&self, seq: u64, running: Weak<dyn Running>) {
        self.ring().running.insert(seq, running);
    }

    /// Requests whose answers have not ended. A record that only waits for the nodes' last reports is not counted.
    pub(crate) fn unanswered(&self) -> usize {
        let closing = self.closing.count();
        self.ring().running.len().saturating_sub(closing)
    }

    pub(crate) fn has_followers(&self) -> bool {
        self.events.receiver_count() > 0
    }

    /// Tells followers the state of a running request.
    pub fn tell(&self, summary: Summary) {
        // Without followers there is no event to build.
        let _ = self.events.send(Arc::new(summary));
    }

    pub fn ended(&self, detail: Detail) {
        let bytes = detail.bytes();
        let detail = Arc::new(detail);
        let summary = &detail.summary;
        self.rates.ended(Instant::now(), summary);
        {
            let mut ring = self.ring();
            ring.running.remove(&summary.seq);
            for serving in detail.servings() {
                if let (Some(prefill), Some(decode)) = (&serving.prefill_node, &serving.decode_node)
                    && serving.transport.is_some()
                {
                    ring.handed_over((prefill.clone(), decode.clone()), (serving.kv_bytes, summary.seq));
                }
            }
            ring.bytes += bytes;
            ring.ended.push_back(detail.clone());
            while ring.ended.len() > self.limits.records_max || ring.bytes > self.limits.bytes_max {
                let Some(oldest) = ring.ended.pop_front() else { break };
                ring.bytes -= oldest.bytes();
                ring.forgotten += 1;
            }
        }
        if self.has_followers() {
            self.tell(summary.clone());
        }
    }

    pub fn follow(&self) -> broadcast::Receiver<Arc<Summary>> {
        self.events.subscribe()
    }

    pub fn pairs(&self) -> BTreeMap<(String, String), PairTotals> {
        let ring = self.ring();
        let totals = ring.pairs.iter().map(|(pair, entry)| (pair.clone(), entry.totals));
        totals.collect()
    }

    fn running(&self) -> Vec<Detail> {
        let running: Vec<_> = self.ring().running.values().filter_map(Weak::upgrade).collect();
        // The lock is not held here, because a request that ends meanwhile takes it.
        running.iter().filter_map(|running| running.detail()).collect()
    }

    pub fn list(&self, listing: &Listing) -> Page {
        let running = self.running();
        let ring = self.ring();
        let admits = |s: &Summary| listing.before.is_none_or(|before| s.seq < before) && listing.admits(s);
        // A request that has ended in the meantime is in the list of ended ones now.
        let running = running.iter().map(|detail| &detail.summary);
        let running = running.filter(|summary| ring.running.contains_key(&summary.seq));
        let ended = ring.ended.iter().map(|detail| &detail.summary);
        let mut found: Vec<&Summary> = running.chain(ended).filter(|summary| admits(summary)).collect();
        match listing.slowest {
            true => found.sort_by(|a, b| b.e2e_ms.total_cmp(&a.e2e_ms)),
            false => found.sort_by_key(|summary| std::cmp::Reverse(summary.seq)),
        }
        let limit = listing.limit.unwrap_or(LIMIT_DEFAULT).clamp(1, LIMIT_MAX);
        let is_more = found.len() > limit;
        found.truncate(limit);
        Page {
            next_before: found
                .last()
                .filter(|_| is_more && !listing.slowest)
                .map(|summary| summary.seq),
            records: found.into_iter().cloned().collect(),
            now_unix_ms: shape::now_unix_ms(),
            kept: ring.ended.len(),
            forgotten: ring.forgotten,
            ..Page::default()
        }
    }

    /// The records that ended from number `from` on, oldest end first. Numbers below `forgotten` are no longer kept, so a reader
    /// that follows the ends knows exactly how many it has missed.
    pub fn ended_from(&self, listing: &Listing, from: u64) -> Page {
        let ring = self.ring();
        let first = ring.forgotten;
        let from = from.clamp(first, first + ring.ended.len() as u64);
        let limit = listing.limit.unwrap_or(LIMIT_DEFAULT).clamp(1, LIMIT_MAX);
        let mut page = Page {
            now_unix_ms: shape::now_unix_ms(),
            kept: ring.ended.len(),
            forgotten: first,
            ..Page::default()
        };
        let (mut next, mut blocks) = (from, 0);
        let mut prefixes = PrefixPage {
            block_tokens: prefixes::BLOCK_TOKENS as u32,
            ..PrefixPage::default()
        };
        for detail in ring.ended.iter().skip((from - first) as usize) {
            if page.records.len() >= limit || blocks >= PAGE_BLOCKS_MAX {
                break;
            }
            next += 1;
            if listing.admits(&detail.summary) {
                blocks += detail.prefixes.iter().map(|prompt| prompt.blocks.len()).sum::<usize>();
                page.records.push(detail.summary.clone());
                if listing.prefixes {
                    prefixes.requests.insert(detail.summary.seq, detail.prefixes.to_vec());
                }
            }
        }
        page.next_ended_from = Some(next);
        page.prefixes = listing.prefixes.then_some(prefixes);
        page
    }

    /// Finds a request by number, response id, request id or trace id; the newest when several have the id. A client may choose the last
    /// two, so they count only where nothing else has the id.
    pub fn find(&self, id: &str) -> Option<Arc<Detail>> {
        let seq = id.parse::<u64>().ok();
        let is_own = |s: &Summary| s.response_id.as_deref() == Some(id) || seq == Some(s.seq);
        let is_chosen = |s: &Summary| s.id == id || s.trace_id == id;
        self.newest(is_own).or_else(|| self.newest(is_chosen))
    }

    fn newest(&self, is_it: impl Fn(&Summary) -> bool) -> Option<Arc<Detail>> {
        let running = self.running().into_iter().rev().find(|detail| is_it(&detail.summary));
        running.map(Arc::new).or_else(|| {
            let ring = self.ring();
            ring.ended.iter().rev().find(|detail| is_it(&detail.summary)).cloned()
        })
    }

    /// The stages of the last ended requests, newest first.
    pub(crate) fn last_ended(&self, most: usize) -> Vec<Arc<Detail>> {
        self.ring().ended.iter().rev().take(most).cloned().collect()
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
