//! The life of one request: its phases, which phase may follow which, and what the request holds meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::compatibility::CompatibilityHash;
use crate::ids::{Attempt, ChoiceIndex, NodeId};
use crate::request::{AttemptKey, LocalPrefillReason, Request, RequestError};
use crate::stage::Stage;
use crate::time::Time;

use super::event::Leg;
use super::permits::Charge;
use super::prefix_directory::PromptKeys;

/// PROTOCOL's states, with the three waits between them: `Opening`, `Recovering` and `Finishing`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Waits for permits and a place.
    Queued,
    /// `Open` was sent and not answered.
    Opening,
    /// The decode node reserved its blocks; `Prefill` was sent and not answered. A request that ends on the prefill
    /// node alone starts here.
    Opened,
    /// A node computes the prompt: the prefill node, or the decode node with local prefill.
    Prefilling,
    /// The first token came; the tail of the KV is on its way.
    Transferring,
    /// The decode node verified and committed the KV.
    Committed,
    /// Tokens come from the decode node.
    Decoding,
    /// All tokens came, and the client has them; the prefill node's last report is awaited for a moment.
    Finishing,
    /// The attempt failed; what the client has had is being counted.
    Recovering,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Queued => "queued",
            Phase::Opening => "opening",
            Phase::Opened => "opened",
            Phase::Prefilling => "prefilling",
            Phase::Transferring => "transferring",
            Phase::Committed => "committed",
            Phase::Decoding => "decoding",
            Phase::Finishing => "finishing",
            Phase::Recovering => "recovering",
        }
    }

    /// The stage a request in this phase is in, as far as the coordinator can tell: whether a prompt that a node has
    /// accepted waits there or is computed already is known to the node alone.
    pub fn stage(self) -> Stage {
        match self {
            Phase::Queued | Phase::Recovering => Stage::Queue,
            Phase::Opening => Stage::Reserve,
            Phase::Opened => Stage::Dispatch,
            Phase::Prefilling => Stage::PrefillForward,
            Phase::Transferring => Stage::TransferTail,
            Phase::Committed => Stage::DecodeQueue,
            Phase::Decoding | Phase::Finishing => Stage::Decode,
        }
    }

    pub const ALL: [Phase; 9] = [
        Phase::Queued,
        Phase::Opening,
        Phase::Opened,
        Phase::Prefilling,
        Phase::Transferring,
        Phase::Committed,
        Phase::Decoding,
        Phase::Finishing,
        Phase::Recovering,
    ];

    /// The whole table. Ending (done, failed, cancelled) is allowed from everywhere and removes the request.
    pub fn may_become(self, next: Phase) -> bool {
        use Phase::{Committed, Decoding, Finishing, Opened, Opening, Prefilling, Queued, Recovering, Transferring};
        match (self, next) {
            (Queued, Opening | Opened) => true,
            // `Prefilling` with local prefill: there is no second node to ask.
            (Opening, Opened | Prefilling) => true,
            // The legs are separate streams: an early commit or first token may overtake `Accepted`.
            (Opened, Prefilling | Transferring | Committed | Decoding) => true,
            (Prefilling, Transferring | Committed | Decoding) => true,
            (Transferring, Committed | Decoding) => true,
            (Committed, Decoding) => true,
            (Opened | Prefilling | Transferring | Committed | Decoding, Finishing) => true,
            (Opening | Opened | Prefilling | Transferring | Committed | Decoding, Recovering) => true,
            (Recovering, Queued) => true,
            _ => false,
        }
    }
}

/// How many unfinished requests are in each phase: counted when a request enters or leaves one, as the figures are taken after each
/// event. A phase without requests has no entry.
#[derive(Debug, Default)]
pub(super) struct PhaseCounts(BTreeMap<Phase, u64>);

impl PhaseCounts {
    pub(super) fn enter(&mut self, phase: Phase) {
        *self.0.entry(phase).or_default() += 1;
    }

    pub(super) fn leave(&mut self, phase: Phase) {
        let left = self.0.get(&phase).map_or(0, |count| count.saturating_sub(1));
        match left {
            0 => self.0.remove(&phase),
            _ => self.0.insert(phase, left),
        };
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Phase, u64)> {
        self.0.iter().map(|(phase, count)| (*phase, *count))
    }
}

/// One open stream to a node, as far as the coordinator knows.
#[derive(Debug)]
pub(super) struct OpenLeg {
    pub node: NodeId,
    /// Permits taken for it: blocks (decode) or prompt tokens (prefill).
    pub cost: u32,
    /// Permits whose work the node has not answered yet.
    pub charge: Option<Charge>,
    /// When the stream to the node was started; `None` before.
    pub started_at: Option<Time>,
    /// Choices counted against the node's limit.
    pub sequences: u32,
}

/// What one attempt holds.
#[derive(Debug, Default)]
pub(super) struct Legs {
    pub prefill: Option<OpenLeg>,
    pub decode: Option<OpenLeg>,
}

impl Legs {
    pub(super) fn get(&self, leg: Leg) -> Option<&OpenLeg> {
        match leg {
            Leg::Prefill => self.prefill.as_ref(),
            Leg::Decode => self.decode.as_ref(),
        }
    }
    pub(super) fn slot(&mut self, leg: Leg) -> &mut Option<OpenLeg> {
        match leg {
            Leg::Prefill => &mut self.prefill,
            Leg::Decode => &mut self.decode,
        }
    }
}

/// Nodes and pairs that failed this request: avoided while there are others.
#[derive(Debug, Default)]
pub(super) struct Avoid {
    pub nodes: BTreeSet<NodeId>,
    /// (prefill, decode)
    pub pairs: BTreeSet<(NodeId, NodeId)>,
    pub transfer_failures: u32,
}

impl Avoid {
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.pairs.is_empty() && self.transfer_failures == 0
    }
}

/// One admitted request, until it ends.
#[derive(Debug)]
pub(super) struct AdmittedRequest {
    /// As the next attempt would send it: after a migration with a longer prompt.
    pub request: Arc<Request>,
    pub prompt_keys: PromptKeys,
    pub arrived_at: Time,
    pub deadline: Time,
    pub queued_since: Time,
    pub queue_deadline: Time,
    pub phase: Phase,
    /// Placements so far; the current attempt's number is one less.
    pub placements: u32,
    pub local: Option<LocalPrefillReason>,
    pub is_prefill_only: bool,
    pub legs: Legs,
    /// Both nodes of the current placement, kept after a leg has ended.
    pub pair: (Option<NodeId>, Option<NodeId>),
    /// Compatibility group of the first placement: a migration stays in it while it can.
    pub group: Option<CompatibilityHash>,
    /// When the current wait is too long, and the wake-up this request has asked for.
    pub wait_until: Option<Time>,
    pub wake: Option<Time>,
    pub avoid: Avoid,
    pub finished_choices: BTreeSet<ChoiceIndex>,
    pub was_finished_by_edge: bool,
    /// The prefill node of the current attempt has told its first tokens, and before them the prompt's logprobs.
    pub has_prefill_word: bool,
    /// What became of the current attempt's handoff is in the figures.
    pub is_handoff_counted: bool,
    /// An attempt was not only refused: it ended before its time, by a failure or by the drain of its node.
    pub was_broken_off: bool,
    /// Attempts that broke, not those that a node refused or that a drain ended.
    pub broken_attempts: u32,
    /// Those of them in which an engine failed.
    pub engine_failures: u32,
    /// Why the attempt that is being ended failed, and the `LegError` label.
    pub failure: Option<(RequestError, Retry)>,
}

/// Whether an attempt that failed may be followed by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    Never,
    /// Counted against the retry budget, under this label.
    Budgeted(&'static str),
    /// The node cannot be reached any more. Bounded by the attempts of each request only: one death costs each request
    /// on that node one retry, however many there were, and a suspected node is given nothing that could fail again.
    NodeGone(&'static str),
    /// The node is leaving: nothing broke.
    Free,
    /// The node refused: nothing broke, and nothing had begun.
    Refused,
}

impl AdmittedRequest {
    pub(super) fn new((request, prompt_keys): (Arc<Request>, PromptKeys), now: Time, queue_wait: Duration) -> Self {
        let deadline = now + request.time_limit;
        Self {
            request,
            prompt_keys,
            arrived_at: now,
            deadline,
            queued_since: now,
            queue_deadline: now + queue_wait,
            phase: Phase::Queued,
            placements: 0,
            local: None,
            is_prefill_only: false,
            legs: Legs::default(),
            pair: (None, None),
            group: None,
            wait_until: None,
            wake: None,
            avoid: Avoid::default(),
            finished_choices: BTreeSet::new(),
            was_finished_by_edge: false,
            has_prefill_word: false,
            is_handoff_counted: false,
            was_broken_off: false,
            broken_attempts: 0,
            engine_failures: 0,
            failure: None,
        }
    }

    /// Key of the current attempt. A request that was never placed has attempt 0 ahead of it.
    pub(super) fn key(&self) -> AttemptKey {
        AttemptKey {
            request: self.request.id,
            attempt: Attempt(self.placements.saturating_sub(1)),
        }
    }

    pub(super) fn is_running(&self, key: AttemptKey) -> bool {
        self.placements > 0 && self.key() == key && !matches!(self.phase, Phase::Queued | Phase::Recovering)
    }

    pub(super) fn all_choices_finished(&self) -> bool {
        self.finished_choices.len() as u64 >= u64::from(self.request.choice_count)
    }

    /// Something is missing that the prefill node alone says: logprobs of the prompt, or choices that ended at their first token.
    pub(super) fn lacks_prefill_word(&self) -> bool {
        let is_needed = self.request.prompt_logprobs.is_some() || self.request.choice_count > 1;
        is_needed && self.is_handoff() && !self.has_prefill_word
    }

    /// True for a placement that hands KV from one node to another.
    pub(super) fn is_handoff(&self) -> bool {
        self.local.is_none() && !self.is_prefill_only
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_phase_follows_itself_and_only_recovery_goes_back() {
        for from in Phase::ALL {
            assert!(!from.may_become(from), "{}", from.name());
            for to in Phase::ALL {
                let goes_back = to < from;
                let is_recovery = (from, to) == (Phase::Recovering, Phase::Queued);
                assert!(
                    !goes_back || !from.may_become(to) || is_recovery,
                    "{} -> {}",
                    from.name(),
                    to.name()
                );
            }
        }
    }

    #[test]
    fn every_phase_can_be_left_for_the_end_of_the_attempt() {
        for from in Phase::ALL {
            let waits_on_nodes = !matches!(from, Phase::Queued | Phase::Recovering | Phase::Finishing);
            assert_eq!(from.may_become(Phase::Recovering), waits_on_nodes, "{}", from.name());
        }
    }
}
