//! The coordinator's brain: `Cluster::apply(now, event) -> actions`. Pure; see README.md in this folder.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::ids::{ChoiceIndex, RequestId};
use crate::request::{Lane, RejectReason, RequestError};
use crate::routing::Router;
use crate::time::Time;

mod action;
mod admission;
mod breaker;
mod capacity;
mod config;
mod content_free;
mod event;
mod fair_share;
mod handoff;
mod legs;
mod member;
mod membership;
mod nodes;
mod pair_breaker;
mod permits;
mod placement;
mod prefix_directory;
mod readiness;
mod recovery;
mod saving;
mod start;
mod stats;
mod suspicion;
mod timers;
mod transition;
mod trust;

pub use action::{ClusterAction, DropCause, JoinRefusal, PlacementFacts, Target};
pub use capacity::answer_tokens_max;
pub use config::{ClusterConfig, OnIllegalTransition};
pub use event::{
    ClusterEvent, Delivered, FinishedBy, Leg, LegError, LegEvent, NodeFault, PrefillOutcome, RefuseReason, StreamId,
    TimedWait,
};
pub use handoff::Phase;
pub use member::{DrainOrder, Life, Node, NodeHealth};
pub use membership::Membership;
pub use prefix_directory::PromptKeys;
pub use readiness::{LastDecodeNode, Reach, Unsplit, WhenUnsplit};
pub use stats::{ClusterStats, HandoffOutcome, MigrationOutcome};
pub use transition::{Change, Transition};

use admission::{Enqueued, WaitingQueue};
use handoff::{AdmittedRequest, PhaseCounts};
use pair_breaker::PairBreaker;
use recovery::RetryBudget;
use saving::Saving;
use stats::count;

/// A client that is turned away is told to come back after at least this time, because the header has whole seconds.
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// When all tokens of a request have come, it is kept for this long for the prefill node's last report, which has the figures of the
/// transfer and is sent between two steps. The client has its answer by then. Afterwards the leg is cancelled.
const LAST_REPORT_WAIT_MAX: Duration = Duration::from_secs(1);

/// Everything that the coordinator knows and on which it decides.
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    members: Membership,
    queue: WaitingQueue,
    saving: Option<Saving>,
    requests: BTreeMap<RequestId, AdmittedRequest>,
    phases: PhaseCounts,
    wakes: BTreeSet<(Time, RequestId)>,
    router: Box<dyn Router>,
    budget: RetryBudget,
    breaker: PairBreaker,
    stats: ClusterStats,
    is_draining: bool,
    peers_changed: bool,
    /// The keys of the prompt that the present event looks at, if the prompt itself is not known, as in a replay.
    foretold: Option<PromptKeys>,
    looked_up: Option<PromptKeys>,
    actions: Vec<ClusterAction>,
    transitions: Vec<Transition>,
}

impl Cluster {
    pub fn new(config: ClusterConfig) -> Self {
        Self {
            members: Membership::new(config.lease, config.model_name.clone()),
            queue: WaitingQueue::new(config.queue_requests_max),
            saving: None,
            requests: BTreeMap::new(),
            phases: PhaseCounts::default(),
            wakes: BTreeSet::new(),
            router: config.routing.build(),
            budget: RetryBudget::default(),
            breaker: PairBreaker::default(),
            stats: ClusterStats::default(),
            is_draining: false,
            peers_changed: false,
            foretold: None,
            looked_up: None,
            actions: Vec::new(),
            transitions: Vec::new(),
            config,
        }
    }

    /// This is the only way in which anything changes. The same events at the same times give the same actions.
    pub fn apply(&mut self, now: Time, event: ClusterEvent) -> Vec<ClusterAction> {
        self.transitions.clear();
        self.looked_up = None;
        let is_of_membership = event.is_of_membership();
        match event {
            ClusterEvent::RequestArrived { request } => self.request_arrived(now, request),
            ClusterEvent::ClientGone { request } => self.client_gone(now, request),
            ClusterEvent::ChoiceFinished { request, choice, by } => self.choice_finished(now, request, (choice, by)),
            ClusterEvent::StreamBroken { request, error } => self.stream_broken(now, request, error),
            ClusterEvent::AttemptEnded { key, delivered } => self.attempt_ended(now, key, delivered),
            ClusterEvent::Leg { key, event } => self.leg_event(now, key, event),
            ClusterEvent::NodeJoined { record, stream } => self.node_joined(now, record, stream),
            ClusterEvent::NodeReported {
                stream,
                read_at,
                status,
            } => self.node_reported(now, (stream, read_at), status),
            ClusterEvent::PrefixesReported { stream, report } => self.prefixes_reported(stream, report),
            ClusterEvent::NodeDisconnected { stream } => self.node_disconnected(stream),
            ClusterEvent::NodeLeft { stream } => self.node_left(now, stream),
            ClusterEvent::DrainNode { name, next_role } => self.drain_node(&name, next_role),
            ClusterEvent::DrainStarted => self.is_draining = true,
            ClusterEvent::StoodStill { stillness } => self.stood_still(stillness),
            ClusterEvent::Tick => {}
            ClusterEvent::TokensCounted { request, count } => self.tokens_counted(request, count),
        }
        // The next event may be the status that renews a lease, so leases do not end at an event of the membership.
        if !is_of_membership {
            self.end_leases(now);
        }
        self.due(now);
        self.place_waiting(now);
        self.share_permits(now);
        self.publish_peers();
        std::mem::take(&mut self.actions)
    }

    /// `apply` for an event that was recorded and read again. Its prompt has no tokens any more, and `keys` is what
    /// [`Cluster::looked_up`] returned for it when it was recorded.
    pub fn apply_again(&mut self, now: Time, event: ClusterEvent, keys: Option<PromptKeys>) -> Vec<ClusterAction> {
        self.foretold = keys;
        let actions = self.apply(now, event);
        self.foretold = None;
        actions
    }

    /// The keys of the prompt that the last event looked at. Decisions depend on nothing of a prompt but these keys and its length.
    pub fn looked_up(&self) -> Option<&PromptKeys> {
        self.looked_up.as_ref()
    }

    /// An event looks at one prompt at most.
    fn look_up(&mut self, request: &crate::request::Request) -> PromptKeys {
        let foretold = self.foretold.take();
        let block_sizes = self.members.iter().map(|node| node.record.capacity.block_tokens);
        let keys = foretold.unwrap_or_else(|| PromptKeys::of(request, block_sizes));
        self.looked_up = Some(keys.clone());
        keys
    }

    /// When `Tick` is due at the latest.
    pub fn next_wake(&self) -> Option<Time> {
        let request = self.wakes.first().map(|(t, _)| *t);
        request.into_iter().chain(self.members.next_wake()).min()
    }

    pub fn members(&self) -> &Membership {
        &self.members
    }
    pub fn stats(&self) -> &ClusterStats {
        &self.stats
    }
    pub fn policy_name(&self) -> &'static str {
        self.config.routing.name()
    }
    pub fn waiting(&self, lane: Lane) -> usize {
        self.queue.len_of(lane)
    }
    /// Requests that were admitted and have not ended, waiting ones included.
    pub fn unfinished(&self) -> usize {
        self.requests.len()
    }
    /// The phases in which there are unfinished requests, and how many.
    pub fn phase_counts(&self) -> impl Iterator<Item = (Phase, u64)> {
        self.phases.iter()
    }

    fn act(&mut self, action: ClusterAction) {
        self.actions.push(action);
    }

    fn request_arrived(&mut self, now: Time, request: std::sync::Arc<crate::request::Request>) {
        let id = request.id;
        if self.requests.contains_key(&id) {
            // Ids are minted by the coordinator; a second one would be its bug, and must not disturb the first.
            self.stats.protocol_violations += 1;
            return;
        }
        if self.is_draining {
            return self.reject(id, RejectReason::Draining, Some(RETRY_AFTER_MIN));
        }
        if self.readiness(now).is_err() {
            return self.reject(id, RejectReason::NotReady, Some(RETRY_AFTER_MIN));
        }
        if let Err(reason) = self.fits_some_pool(&request) {
            let retry_after = (reason == RejectReason::NodeAway).then_some(RETRY_AFTER_MIN);
            return self.reject(id, reason, retry_after);
        }
        let keys = self.look_up(&request);
        let tracked = AdmittedRequest::new((request.clone(), keys), now, self.config.queue_wait_max);
        match self.queue.push_new(&request, now) {
            Enqueued::Waiting => {}
            Enqueued::Displaced(victim) => {
                let of_victim = self.requests.get(&victim).map(|tracked| tracked.request.lane);
                count(&mut self.stats.shed, of_victim.unwrap_or(request.lane));
                self.forget(victim);
                self.reject(victim, RejectReason::QueueFull, Some(RETRY_AFTER_MIN));
            }
            Enqueued::Full => {
                count(&mut self.stats.shed, request.lane);
                return self.reject(id, RejectReason::QueueFull, Some(RETRY_AFTER_MIN));
            }
        }
        self.budget.count_request(now);
        self.note(tracked.key(), Change::Arrived);
        self.phases.enter(tracked.phase);
        self.requests.insert(id, tracked);
        self.set_wait(id, None);
    }

    fn reject(&mut self, request: RequestId, reason: RejectReason, retry_after: Option<Duration>) {
        self.act(ClusterAction::Reject {
            request,
            reason,
            retry_after,
        });
    }

    fn client_gone(&mut self, now: Time, request: RequestId) {
        self.count_handoff(request, HandoffOutcome::Cancelled);
        self.release_legs(request);
        self.end(now, request, ClusterAction::Forget { request });
    }

    fn choice_finished(&mut self, now: Time, request: RequestId, (choice, by): (ChoiceIndex, event::FinishedBy)) {
        let Some(tracked) = self.requests.get_mut(&request) else {
            return;
        };
        if choice.0 >= tracked.request.choice_count {
            self.stats.protocol_violations += 1;
            return;
        }
        tracked.finished_choices.insert(choice);
        tracked.was_finished_by_edge |= by == event::FinishedBy::Edge;
        // When the nodes ended every choice themselves, their last report is on its way and ends the request.
        if tracked.was_finished_by_edge && tracked.all_choices_finished() {
            self.complete(now, request);
        }
    }

    /// Each attempt that hands KV over counts once, by its first outcome. What breaks after the commit is not a fault of the handoff.
    fn count_handoff(&mut self, request: RequestId, outcome: HandoffOutcome) {
        let Some(tracked) = self.requests.get_mut(&request) else {
            return;
        };
        let is_over = matches!(tracked.phase, Phase::Queued | Phase::Recovering);
        if is_over || !tracked.is_handoff() || std::mem::replace(&mut tracked.is_handoff_counted, true) {
            return;
        }
        if let (Some(prefill), Some(decode)) = tracked.pair.clone() {
            let transport = self.members.transport_of(&prefill, &decode);
            count(&mut self.stats.handoffs, (transport, outcome));
        }
    }

    fn stream_broken(&mut self, now: Time, request: RequestId, error: RequestError) {
        if self.requests.contains_key(&request) {
            // The client stopped the handoff.
            self.count_handoff(request, HandoffOutcome::Cancelled);
            self.fail(now, request, error);
        }
    }

    fn fail(&mut self, now: Time, request: RequestId, error: RequestError) {
        self.count_handoff(request, HandoffOutcome::Failed);
        self.release_legs(request);
        self.end(now, request, ClusterAction::Fail { request, error });
    }

    fn complete(&mut self, now: Time, request: RequestId) {
        // The edge ended the answer while its KV was under way.
        self.count_handoff(request, HandoffOutcome::Cancelled);
        let attempts = self.requests.get(&request).map_or(0, |t| t.placements);
        self.release_legs(request);
        self.end(now, request, ClusterAction::Complete { request, attempts });
    }

    /// The one place where a request ends: exactly one terminal action for each admitted request.
    fn end(&mut self, _now: Time, request: RequestId, terminal: ClusterAction) {
        if self.forget(request) {
            self.act(terminal);
        }
    }

    fn forget(&mut self, request: RequestId) -> bool {
        self.queue.remove(request);
        let Some(tracked) = self.requests.remove(&request) else {
            return false;
        };
        if let Some(wake) = tracked.wake {
            self.wakes.remove(&(wake, request));
        }
        self.phases.leave(tracked.phase);
        self.note(tracked.key(), Change::Ended);
        true
    }

    /// Moves a request to its next phase. A move that the table forbids is a bug of this crate. No node and no client can cause it.
    fn advance(&mut self, now: Time, request: RequestId, next: Phase) {
        let Some(tracked) = self.requests.get_mut(&request) else {
            return;
        };
        if tracked.phase.may_become(next) {
            let from = std::mem::replace(&mut tracked.phase, next);
            let key = tracked.key();
            self.phases.leave(from);
            self.phases.enter(next);
            return self.note(key, Change::Phase { from, to: next });
        }
        self.stats.illegal_transitions += 1;
        let what = format!(
            "request {request} cannot go from {} to {}",
            tracked.phase.name(),
            next.name()
        );
        match self.config.on_illegal_transition {
            OnIllegalTransition::Panic => panic!("{what}"),
            OnIllegalTransition::FailRequest => self.fail(now, request, RequestError::Internal(what)),
        }
    }

    /// Checks that the counts which are kept up to date equal what a walk over all requests finds.
    #[cfg(test)]
    fn check_counts(&self) {
        let (mut in_phase, mut waiting) = (BTreeMap::new(), BTreeMap::new());
        for tracked in self.requests.values() {
            *in_phase.entry(tracked.phase).or_insert(0_u64) += 1;
            if tracked.phase == Phase::Queued {
                *waiting.entry(tracked.request.lane).or_insert(0_usize) += 1;
            }
        }
        assert_eq!(self.phase_counts().collect::<BTreeMap<_, _>>(), in_phase);
        for lane in Lane::ALL {
            assert_eq!(self.waiting(lane), waiting.get(&lane).copied().unwrap_or(0));
        }
    }

    #[cfg(test)]
    fn check_invariants(&self) {
        self.members.check_invariants();
        self.check_counts();
        for (id, tracked) in &self.requests {
            let waits = self.queue.in_order().contains(id);
            assert_eq!(waits, tracked.phase == Phase::Queued, "{id} {}", tracked.phase.name());
            assert!(
                tracked.wake.is_some_and(|w| self.wakes.contains(&(w, *id))),
                "{id} has no timer"
            );
            for leg in [Leg::Prefill, Leg::Decode] {
                let node = tracked.legs.get(leg).map(|l| &l.node);
                let is_lost = |n| self.members.get(n).is_none_or(|n| n.life.is_over());
                assert!(!node.is_some_and(is_lost), "{id} holds on to a lost node");
            }
        }
        assert_eq!(self.wakes.len(), self.requests.len());
        for node in self.members.iter() {
            if let trust::Trust::OnTrial { by: Some(request) } = node.suspicion.trust {
                let legs = self.requests.get(&request).map(|tracked| &tracked.legs);
                let is_there = |leg| legs.and_then(|l| l.get(leg)).is_some_and(|l| l.node == *node.id());
                assert!(
                    is_there(Leg::Prefill) || is_there(Leg::Decode),
                    "{request} tries {} no more",
                    node.id()
                );
            }
        }
        for node in self.members.iter() {
            let held = self
                .requests
                .values()
                .filter_map(|t| t.legs.decode.as_ref())
                .filter(|l| l.node == *node.id());
            assert_eq!(held.map(|l| l.sequences).sum::<u32>(), node.sequences, "{}", node.id());
        }
    }
}

#[cfg(test)]
mod fixtures;
/// For the tests of the node's half of permits: both halves have to fit.
#[cfg(test)]
pub(crate) mod permits_for_tests {
    pub(crate) use super::fixtures::ready_status;
    pub(crate) use super::permits::{Charge, Permits};
}
#[cfg(test)]
mod tests;
