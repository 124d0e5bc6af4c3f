//! What is done when an attempt fails: whose fault it was, whether to try again, where not to.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::ids::{NodeId, RequestId};
use crate::request::{AttemptKey, Request, RequestError};
use crate::time::Time;

use super::Cluster;
use super::action::{ClusterAction, DropCause};
use super::event::{Delivered, Leg, LegError, NodeFault, RefuseReason};
use super::handoff::{AdmittedRequest, Phase, Retry};
use super::member::Life;
use super::stats::{HandoffOutcome, MigrationOutcome, count};

/// PROTOCOL rule 10: attempts / requests at most 1.2 over a minute.
const BUDGET_WINDOW: Duration = Duration::from_secs(60);
const BUDGET_RETRIES_PER_REQUESTS: (u64, u64) = (1, 5);
/// Slots of the sliding window.
const BUDGET_SLOTS: u64 = 12;

/// Counts first placements and retries of the last minute, in slots of five seconds.
#[derive(Debug, Default)]
pub(super) struct RetryBudget {
    /// (slot number, requests, retries)
    slots: VecDeque<(u64, u64, u64)>,
}

impl RetryBudget {
    fn slot(&mut self, now: Time) -> &mut (u64, u64, u64) {
        let width = u64::try_from(BUDGET_WINDOW.as_nanos()).unwrap_or(u64::MAX) / BUDGET_SLOTS;
        let number = now.0 / width;
        self.slots.retain(|(n, _, _)| n + BUDGET_SLOTS > number);
        if self.slots.back().is_none_or(|(n, _, _)| *n != number) {
            self.slots.push_back((number, 0, 0));
        }
        let last = self.slots.len() - 1;
        &mut self.slots[last]
    }

    pub(super) fn count_request(&mut self, now: Time) {
        self.slot(now).1 += 1;
    }

    /// Takes one retry if the budget allows it; so many a minute it always does.
    pub(super) fn take_retry(&mut self, now: Time, free_per_minute: u64) -> bool {
        self.slot(now);
        let requests: u64 = self.slots.iter().map(|s| s.1).sum();
        let retries: u64 = self.slots.iter().map(|s| s.2).sum();
        let (part, whole) = BUDGET_RETRIES_PER_REQUESTS;
        let allowed = (requests * part / whole).max(free_per_minute);
        if retries + 1 > allowed {
            return false;
        }
        self.slot(now).2 += 1;
        true
    }
}

fn name_of(node: Option<&NodeId>) -> String {
    node.map_or_else(|| "none".into(), |n| n.name.to_string())
}

/// The error the client would see, and whether another attempt may hide it.
fn verdict(tracked: &AdmittedRequest, leg: Leg, error: &LegError) -> (RequestError, Retry) {
    let (prefill, decode) = (&tracked.pair.0, &tracked.pair.1);
    let retry = Retry::Budgeted(error.name());
    let node = match leg {
        Leg::Prefill => name_of(prefill.as_ref()),
        Leg::Decode => name_of(decode.as_ref()),
    };
    let of_node = |detail: String| match leg {
        Leg::Prefill => RequestError::PrefillNodeFailed {
            node: node.clone(),
            detail,
        },
        Leg::Decode => RequestError::DecodeNodeFailed {
            node: node.clone(),
            detail,
        },
    };
    match error {
        LegError::Node {
            fault: NodeFault::Engine,
            detail,
            ..
        } => (
            RequestError::EngineFailed {
                node,
                detail: detail.clone(),
            },
            // Two engines that fail it are not at fault: it would go on to harm every node.
            match tracked.engine_failures {
                0 => retry,
                _ => Retry::Never,
            },
        ),
        LegError::Node {
            fault: NodeFault::RuledOut,
            ..
        } => (RequestError::RuledOut, Retry::Never),
        LegError::Node {
            fault: NodeFault::Deadline,
            ..
        } => {
            let stage = tracked.phase.stage().name().to_string();
            let waited_ms = u64::try_from(tracked.request.time_limit.as_millis()).unwrap_or(u64::MAX);
            (RequestError::DeadlineExceeded { stage, waited_ms }, Retry::Never)
        }
        LegError::Node {
            fault: NodeFault::Transfer | NodeFault::Peer,
            reason,
            ..
        } => {
            let (from, to) = (name_of(prefill.as_ref()), name_of(decode.as_ref()));
            let reason = reason.clone();
            (RequestError::TransferFailed { from, to, reason }, retry)
        }
        LegError::Node {
            fault: NodeFault::Draining,
            ..
        } => (of_node(error.to_string()), Retry::Free),
        LegError::Node {
            fault: NodeFault::Internal,
            ..
        }
        | LegError::TimedOut { .. }
        | LegError::Protocol { .. } => (of_node(error.to_string()), retry),
        LegError::Unreachable { .. } | LegError::ConnectionLost { .. } | LegError::NodeLost => {
            (of_node(error.to_string()), Retry::NodeGone(error.name()))
        }
    }
}

fn is_transfer_fault(error: &LegError) -> bool {
    matches!(
        error,
        LegError::Node {
            fault: NodeFault::Transfer | NodeFault::Peer,
            ..
        }
    )
}

impl Cluster {
    /// Nothing came from a leg that the brain can go by, or nonsense: it has failed, and whoever runs it has to hear of it.
    pub(super) fn fail_leg(&mut self, now: Time, key: AttemptKey, (leg, error): (Leg, LegError)) {
        let verdict = error.clone();
        self.act(ClusterAction::FailLeg { key, leg, error });
        self.leg_failed(now, key, (leg, verdict));
    }

    /// A leg of a running attempt broke.
    pub(super) fn leg_failed(&mut self, now: Time, key: AttemptKey, (leg, error): (Leg, LegError)) {
        let Some(tracked) = self.requests.get(&key.request) else {
            return;
        };
        // After the commit the decode node has everything but what the prefill node alone says: when that has come, it does not matter to
        // the client how the prefill leg ends.
        let is_past_handoff = matches!(tracked.phase, Phase::Committed | Phase::Decoding);
        let is_needed = tracked.lacks_prefill_word() || tracked.legs.decode.is_none();
        if leg == Leg::Prefill && is_past_handoff && !is_needed {
            return self.release_leg(key, leg);
        }
        if tracked.phase == Phase::Finishing {
            return self.complete(now, key.request);
        }
        let node = match leg {
            Leg::Prefill => tracked.pair.0.clone(),
            Leg::Decode => tracked.pair.1.clone(),
        };
        let started_at = tracked.legs.get(leg).and_then(|l| l.started_at).unwrap_or(now);
        let failure = verdict(tracked, leg, &error);
        let reached = !matches!(error, LegError::Unreachable { .. });
        if let Some(node) = &node
            && error.casts_suspicion()
            && let Some(member) = self.members.get_mut(node)
        {
            member.suspicion.failed(now, started_at);
        }
        if let Some(member) = node
            .as_ref()
            .filter(|_| error.blames_engine())
            .and_then(|n| self.members.get_mut(n))
        {
            self.stats.node_rests += u64::from(member.breaker.failed(now));
        }
        // Such an end costs the request no attempt, so a node that says this again and again must not be tried as fast as it answers.
        if failure.1 == Retry::Free
            && let Some(member) = node.as_ref().and_then(|n| self.members.get_mut(n))
        {
            member.permits.pause_until_report();
        }
        self.count_handoff(key.request, HandoffOutcome::Failed);
        self.settle_charge(&key, leg, reached);
        if let Some(tracked) = self.requests.get_mut(&key.request) {
            if is_transfer_fault(&error) {
                tracked.avoid.transfer_failures += 1;
                if let (Some(p), Some(d)) = tracked.pair.clone() {
                    tracked.avoid.pairs.insert((p.clone(), d.clone()));
                    self.stats.pair_rests += u64::from(self.breaker.failed(now, (p, d)));
                }
            } else if let Some(node) = node {
                tracked.avoid.nodes.insert(node);
            }
            tracked.engine_failures += u32::from(error.blames_engine());
            tracked.was_broken_off = true;
            tracked.broken_attempts += u32::from(failure.1 != Retry::Free);
            tracked.failure = Some(failure);
        }
        self.end_attempt(now, key);
    }

    /// A node refused: nothing broke, the request goes back to the front of its lane.
    pub(super) fn leg_refused(&mut self, now: Time, key: AttemptKey, (leg, reason): (Leg, RefuseReason)) {
        let phase = self.requests.get(&key.request).map(|t| t.phase);
        let is_first_answer = match leg {
            Leg::Decode => phase == Some(Phase::Opening),
            Leg::Prefill => phase == Some(Phase::Opened),
        };
        if !is_first_answer {
            return self.violation(now, key, (leg, "refused after it was accepted"));
        }
        count(&mut self.stats.refusals, reason.name());
        let started_at = self
            .requests
            .get(&key.request)
            .and_then(|t| t.legs.get(leg)?.started_at);
        self.settle_charge(&key, leg, true);
        let Some(tracked) = self.requests.get_mut(&key.request) else {
            return;
        };
        let node = match leg {
            Leg::Prefill => tracked.pair.0.clone(),
            Leg::Decode => tracked.pair.1.clone(),
        };
        let mut retry = Retry::Refused;
        match reason {
            RefuseReason::NoCapacity | RefuseReason::Draining => {}
            RefuseReason::StaleEpoch | RefuseReason::Duplicate => tracked.avoid.nodes.extend(node.clone()),
            RefuseReason::Incompatible => {
                if let (Some(p), Some(d)) = tracked.pair.clone() {
                    tracked.avoid.pairs.insert((p, d));
                }
            }
            RefuseReason::Invalid => retry = Retry::Never,
        }
        let detail = format!(
            "node {} refused {}: {}",
            name_of(node.as_ref()),
            leg.name(),
            reason.name()
        );
        tracked.failure = Some((RequestError::Internal(detail), retry));
        if let Some(member) = node.and_then(|n| self.members.get_mut(&n)) {
            member.permits.pause_until_report();
            if reason == RefuseReason::StaleEpoch {
                member.suspicion.failed(now, started_at.unwrap_or(now));
            }
        }
        self.end_attempt(now, key);
    }

    /// Stops what runs of this attempt and asks what the client has had.
    pub(super) fn end_attempt(&mut self, now: Time, key: AttemptKey) {
        self.release_legs(key.request);
        self.advance(now, key.request, Phase::Recovering);
        if self.requests.contains_key(&key.request) {
            self.act(ClusterAction::EndAttempt { key });
            self.set_wait(key.request, None);
        }
    }

    /// Nothing of the failed attempt can reach the client any more: go on elsewhere, or give up.
    pub(super) fn attempt_ended(&mut self, now: Time, key: AttemptKey, delivered: Delivered) {
        let Some(tracked) = self.requests.get_mut(&key.request) else {
            return;
        };
        if tracked.phase != Phase::Recovering || tracked.key() != key {
            self.stats.stale_events += 1;
            return;
        }
        if delivered.is_complete {
            return self.complete(now, key.request);
        }
        let unknown = || {
            (
                RequestError::Internal("an attempt ended without a reason".into()),
                Retry::Never,
            )
        };
        let (error, retry) = tracked.failure.take().unwrap_or_else(unknown);
        let had_tokens = delivered.token_count > 0 || tracked.request.delivered_tokens() > 0;
        let can_migrate = tracked.request.choice_count == 1;
        if retry == Retry::Never {
            return self.fail(now, key.request, error);
        }
        if had_tokens && !can_migrate {
            count(&mut self.stats.migrations, MigrationOutcome::NotMigratable);
            return self.fail(now, key.request, error);
        }
        let broken = tracked.broken_attempts;
        if let Retry::Budgeted(label) | Retry::NodeGone(label) = retry {
            let is_free = matches!(retry, Retry::NodeGone(_));
            let free = self.config.retries_free_per_minute;
            if broken >= self.config.attempts_max || !(is_free || self.budget.take_retry(now, free)) {
                if had_tokens {
                    count(&mut self.stats.migrations, MigrationOutcome::BudgetSpent);
                }
                return self.fail(now, key.request, error);
            }
            count(&mut self.stats.retries, label);
        }
        if had_tokens {
            count(&mut self.stats.migrations, MigrationOutcome::Started);
        }
        self.requeue(now, key, (retry, delivered));
    }

    fn requeue(&mut self, now: Time, key: AttemptKey, (retry, delivered): (Retry, Delivered)) {
        let queue_wait = self.config.queue_wait_max;
        if delivered.token_count > 0 {
            self.migrate(key.request, &delivered);
        }
        if let Some(tracked) = self.requests.get_mut(&key.request) {
            // A refusal does not restart the queue's clock: a node that refuses for ever must not hold a request for ever.
            if retry != Retry::Refused {
                tracked.queued_since = now;
                tracked.queue_deadline = now + queue_wait;
            }
        }
        self.advance(now, key.request, Phase::Queued);
        if let Some(tracked) = self.requests.get(&key.request) {
            self.queue.push_returned(&tracked.request, tracked.arrived_at);
            self.set_wait(key.request, None);
        }
    }

    fn migrate(&mut self, request: RequestId, delivered: &Delivered) {
        let before = self.requests.get(&request);
        let Some(next) = before.map(|tracked| Arc::new(migrated(&tracked.request, delivered))) else {
            return;
        };
        let keys = self.look_up(&next);
        if let Some(tracked) = self.requests.get_mut(&request) {
            tracked.request = next;
            tracked.prompt_keys = keys;
        }
    }

    pub(super) fn pair_succeeded(&mut self, request: RequestId) {
        let Some(tracked) = self.requests.get(&request) else {
            return;
        };
        // The pair was chosen when `Open` was sent.
        let started_at = tracked.legs.decode.as_ref().and_then(|leg| leg.started_at);
        if let ((Some(prefill), Some(decode)), Some(started_at)) = (tracked.pair.clone(), started_at) {
            self.breaker.succeeded(&(prefill, decode), request, started_at);
        }
    }

    /// The node's life ended: everything that runs there goes on elsewhere.
    pub(super) fn node_lost(&mut self, now: Time, id: &NodeId, cause: DropCause) {
        let over = match cause {
            DropCause::Left => Life::Left { since: now },
            DropCause::LeaseExpired | DropCause::Restarted => Life::Lost { since: now },
        };
        self.stats.nodes_lost += u64::from(cause == DropCause::LeaseExpired);
        self.members.lose(id, over);
        self.breaker.forget(id);
        self.act(ClusterAction::DropNode {
            node: id.clone(),
            cause,
        });
        self.fail_over(now, id);
        self.peers_changed = true;
    }

    pub(super) fn fail_over(&mut self, now: Time, id: &NodeId) {
        for leg in [Leg::Decode, Leg::Prefill] {
            let on_node = |t: &&AdmittedRequest| t.legs.get(leg).is_some_and(|l| l.node == *id);
            let keys: Vec<_> = self
                .requests
                .values()
                .filter(on_node)
                .map(AdmittedRequest::key)
                .collect();
            for key in keys {
                self.fail_leg(now, key, (leg, LegError::NodeLost));
            }
        }
    }
}

/// The next attempt's form of a request: what was delivered becomes prompt, and is never sampled again (rule 2).
fn migrated(request: &Request, delivered: &Delivered) -> Request {
    let mut next = request.clone();
    let prompt: Vec<_> = request.prompt.iter().chain(&delivered.tokens).copied().collect();
    next.prompt = prompt.into();
    // A client has no token before the prompt's logprobs.
    next.prompt_logprobs = None;
    next
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{node_record, ready_status, request};
    use super::super::{ClusterConfig, ClusterEvent, LegEvent, StreamId};
    use super::*;
    use crate::ids::TokenId;
    use crate::node::NodeRole;

    const FREE: u64 = 10;

    #[test]
    fn the_budget_is_a_fifth_of_the_requests_of_the_last_minute_but_never_below_its_floor() {
        let mut budget = RetryBudget::default();
        for _ in 0..FREE {
            assert!(budget.take_retry(Time::from_millis(1), FREE));
        }
        assert!(!budget.take_retry(Time::from_millis(2), FREE));
        for i in 0..100 {
            budget.count_request(Time::from_millis(10 + i));
        }
        let allowed = (0..100)
            .filter(|_| budget.take_retry(Time::from_millis(500), FREE))
            .count();
        assert_eq!(allowed as u64, 100 / 5 - FREE);
        let allowed_later = (0..100)
            .filter(|_| budget.take_retry(Time::from_millis(61_000), FREE))
            .count();
        assert_eq!(allowed_later as u64, FREE, "the old minute is forgotten");
    }

    fn placed(actions: &[ClusterAction]) -> Option<AttemptKey> {
        actions.iter().find_map(|action| match action {
            ClusterAction::Place { key, .. } => Some(*key),
            _ => None,
        })
    }

    #[test]
    fn a_node_whose_drain_ends_each_attempt_gets_one_for_each_report_and_uses_none_up() {
        let mut cluster = Cluster::new(ClusterConfig::default());
        let stream = StreamId(1);
        let record = node_record("d0", 1, NodeRole::Decode);
        cluster.apply(Time::ZERO, ClusterEvent::NodeJoined { record, stream });
        let report = |cluster: &mut Cluster, read_at: Time| {
            let status = ready_status(1_000);
            placed(&cluster.apply(
                read_at,
                ClusterEvent::NodeReported {
                    stream,
                    read_at,
                    status,
                },
            ))
        };
        assert_eq!(report(&mut cluster, Time::from_millis(1)), None);
        let request = Arc::new(request(1, 40, 8));
        let arrived = cluster.apply(Time::from_millis(2), ClusterEvent::RequestArrived { request });
        let mut key = placed(&arrived).expect("a place");
        for second in 1..=10 {
            let now = Time::from_millis(1_000 * second);
            let event = LegEvent::Failed {
                leg: Leg::Decode,
                error: LegError::Node {
                    fault: NodeFault::Draining,
                    reason: "draining".to_owned(),
                    detail: "d".to_owned(),
                },
            };
            cluster.apply(now, ClusterEvent::Leg { key, event });
            let delivered = Delivered::default();
            let ended = cluster.apply(now, ClusterEvent::AttemptEnded { key, delivered });
            assert_eq!(placed(&ended), None, "the node has not reported since");
            key = report(&mut cluster, now).expect("a place after the report");
        }
    }

    #[test]
    fn a_migration_keeps_the_clients_prompt_and_shrinks_the_budget() {
        let before = request(1, 10, 8);
        let delivered = Delivered {
            tokens: vec![TokenId(7), TokenId(8)],
            token_count: 2,
            is_complete: false,
        };
        let after = migrated(&before, &delivered);
        assert_eq!(after.prompt_tokens(), 12);
        assert_eq!(after.client_prompt_tokens, 10);
        assert_eq!(after.delivered_tokens(), 2);
        assert_eq!(after.remaining_tokens(), 6);
        let twice = migrated(&after, &delivered);
        assert_eq!((twice.delivered_tokens(), twice.remaining_tokens()), (4, 4));
    }
}
