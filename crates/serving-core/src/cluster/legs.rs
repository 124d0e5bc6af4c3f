//! The events that come in on the legs of a running attempt. Two streams may deliver them in any order.

use crate::ids::{NodeId, RequestId};
use crate::node::Ticket;
use crate::request::AttemptKey;
use crate::time::Time;

use super::action::ClusterAction;
use super::event::{Leg, LegError, LegEvent, PrefillOutcome, RefuseReason};
use super::handoff::{AdmittedRequest, Phase};
use super::stats::HandoffOutcome;
use super::{Cluster, LAST_REPORT_WAIT_MAX};

impl Cluster {
    pub(super) fn leg_event(&mut self, now: Time, key: AttemptKey, event: LegEvent) {
        let Some(tracked) = self.requests.get(&key.request).filter(|t| t.is_running(key)) else {
            // The attempt is over, or the id is unknown: nothing is kept for it.
            self.stats.stale_events += 1;
            return;
        };
        let leg = leg_of(&event);
        if tracked.legs.get(leg).is_none_or(|l| l.started_at.is_none()) {
            // That leg has ended for this attempt, or was never opened.
            self.stats.stale_events += 1;
            return;
        }
        match &event {
            LegEvent::Failed { .. } => {}
            LegEvent::Refused { reason, .. } => {
                if *reason != RefuseReason::StaleEpoch {
                    self.heard_from(&key, leg);
                }
            }
            _ => {
                self.settle_charge(&key, leg, true);
                self.heard_from(&key, leg);
            }
        }
        match event {
            LegEvent::Opened { ticket } => self.opened(now, key, ticket),
            LegEvent::PrefillAccepted => self.prefill_accepted(now, key),
            LegEvent::FirstToken { leg } => self.first_token(now, key, leg),
            LegEvent::Committed => self.committed(now, key),
            LegEvent::TokensDelivered { leg, count } => self.tokens_delivered(now, key, (leg, count)),
            LegEvent::PrefillFinished { outcome } => self.prefill_finished(now, key, outcome),
            LegEvent::DecodeFinished => self.decode_finished(now, key),
            LegEvent::Refused { leg, reason } => self.leg_refused(now, key, (leg, reason)),
            LegEvent::Failed { leg, error } => self.leg_failed(now, key, (leg, error)),
        }
    }

    fn phase(&self, key: &AttemptKey) -> Option<Phase> {
        self.requests.get(&key.request).map(|t| t.phase)
    }

    /// A node sent something that makes no sense at this point. The leg counts as broken.
    pub(super) fn violation(&mut self, now: Time, key: AttemptKey, (leg, what): (Leg, &str)) {
        self.stats.protocol_violations += 1;
        let phase = self.phase(&key).map_or("", Phase::name);
        let detail = format!("{what} while {phase}");
        self.fail_leg(now, key, (leg, LegError::Protocol { detail }));
    }

    fn opened(&mut self, now: Time, key: AttemptKey, ticket: Option<Ticket>) {
        let Some(tracked) = self.requests.get(&key.request) else {
            return;
        };
        match (tracked.phase, tracked.local, ticket) {
            (Phase::Opening, Some(_), None) => {
                self.advance(now, key.request, Phase::Prefilling);
                self.restart_silence(now, key.request);
            }
            (Phase::Opening, None, Some(ticket)) => {
                self.advance(now, key.request, Phase::Opened);
                self.start_prefill(now, key, Some(ticket));
            }
            _ => self.violation(now, key, (Leg::Decode, "unexpected Opened or ticket")),
        }
    }

    /// Sends the work. Its permit was taken when the request was placed.
    pub(super) fn start_prefill(&mut self, now: Time, key: AttemptKey, ticket: Option<Ticket>) {
        let Some(tracked) = self.requests.get(&key.request) else {
            return;
        };
        let Some(leg) = tracked.legs.prefill.as_ref() else {
            return self.violation(now, key, (Leg::Decode, "a ticket for a lost prefill node"));
        };
        let Some(prefill) = self.target(&leg.node) else {
            return;
        };
        let action = ClusterAction::StartPrefill {
            key,
            request: tracked.request.clone(),
            prefill,
            ticket,
            permit_tokens: leg.cost,
            time_left: tracked.deadline.remaining(now),
        };
        self.mark_started(now, key.request, Leg::Prefill);
        self.act(action);
        self.set_wait(key.request, Some(now + self.config.prefill_start_timeout));
    }

    fn prefill_accepted(&mut self, now: Time, key: AttemptKey) {
        match self.phase(&key) {
            Some(Phase::Opened) => self.advance(now, key.request, Phase::Prefilling),
            // The other leg was faster.
            Some(Phase::Transferring | Phase::Committed | Phase::Decoding | Phase::Finishing) => {}
            _ => return self.violation(now, key, (Leg::Prefill, "unexpected Accepted")),
        }
        self.restart_silence(now, key.request);
    }

    fn first_token(&mut self, now: Time, key: AttemptKey, leg: Leg) {
        let Some(tracked) = self.requests.get_mut(&key.request) else {
            return;
        };
        tracked.has_prefill_word |= leg == Leg::Prefill;
        let is_local = tracked.local.is_some();
        let was_awaited = tracked.legs.decode.is_none();
        // A first token that comes from the decode node may have been drawn by the prefill node.
        if leg == Leg::Prefill {
            self.engine_answered(key, leg);
        }
        match (self.phase(&key), leg) {
            (Some(Phase::Committed | Phase::Decoding), Leg::Prefill) if was_awaited => {
                return self.finish(now, key.request);
            }
            (Some(Phase::Opened | Phase::Prefilling), Leg::Prefill) => {
                self.advance(now, key.request, Phase::Transferring);
            }
            (Some(Phase::Prefilling), Leg::Decode) if is_local => self.advance(now, key.request, Phase::Decoding),
            (Some(Phase::Committed), Leg::Decode) => self.advance(now, key.request, Phase::Decoding),
            (Some(Phase::Transferring | Phase::Committed | Phase::Decoding | Phase::Finishing), _) => {}
            _ => return self.violation(now, key, (leg, "unexpected first token")),
        }
        self.restart_silence(now, key.request);
    }

    fn committed(&mut self, now: Time, key: AttemptKey) {
        let is_handoff = self.requests.get(&key.request).is_some_and(|t| t.is_handoff());
        match self.phase(&key) {
            Some(Phase::Opened | Phase::Prefilling | Phase::Transferring) if is_handoff => {
                self.advance(now, key.request, Phase::Committed);
                self.count_handoff(key.request, HandoffOutcome::Committed);
                self.pair_succeeded(key.request);
            }
            _ => return self.violation(now, key, (Leg::Decode, "unexpected Committed")),
        }
        self.restart_silence(now, key.request);
    }

    /// Counts these tokens as work of the request's owner.
    pub(super) fn tokens_counted(&mut self, request: RequestId, count: u32) {
        if let Some(tracked) = self.requests.get(&request) {
            self.queue.answered(&tracked.request, count);
        }
    }

    fn tokens_delivered(&mut self, now: Time, key: AttemptKey, (leg, count): (Leg, u32)) {
        self.tokens_counted(key.request, count);
        self.engine_answered(key, leg);
        match (self.phase(&key), leg) {
            (Some(Phase::Committed), Leg::Decode) => self.advance(now, key.request, Phase::Decoding),
            (Some(Phase::Opening), _) => return self.violation(now, key, (leg, "tokens before Opened")),
            _ => {}
        }
        self.restart_silence(now, key.request);
    }

    fn prefill_finished(&mut self, now: Time, key: AttemptKey, outcome: PrefillOutcome) {
        let Some(tracked) = self.requests.get(&key.request) else {
            return;
        };
        let (phase, is_prefill_only) = (tracked.phase, tracked.is_prefill_only);
        match outcome {
            PrefillOutcome::EndedAtFirstToken if phase < Phase::Committed => {
                self.count_handoff(key.request, HandoffOutcome::EndedAtFirstToken);
                self.close_leg(key, Leg::Prefill);
                self.complete(now, key.request);
            }
            PrefillOutcome::HandedOver if !is_prefill_only => {
                self.close_leg(key, Leg::Prefill);
                self.finish_if_all_legs_ended(now, key);
                self.restart_silence(now, key.request);
            }
            PrefillOutcome::EndedAtFirstToken | PrefillOutcome::HandedOver => {
                self.violation(now, key, (Leg::Prefill, "unexpected end of prefill"));
            }
        }
    }

    fn decode_finished(&mut self, now: Time, key: AttemptKey) {
        let Some(tracked) = self.requests.get(&key.request) else {
            return;
        };
        let can_finish = match tracked.phase {
            Phase::Committed | Phase::Decoding => true,
            Phase::Prefilling => tracked.local.is_some(),
            _ => false,
        };
        if !can_finish {
            return self.violation(now, key, (Leg::Decode, "unexpected Finished"));
        }
        let (has_prefill_leg, lacks_prefill_word) = (tracked.legs.prefill.is_some(), tracked.lacks_prefill_word());
        self.close_leg(key, Leg::Decode);
        match (has_prefill_leg, lacks_prefill_word) {
            (false, _) => self.complete(now, key.request),
            // The client does not have everything yet.
            (true, true) => self.restart_silence(now, key.request),
            (true, false) => self.finish(now, key.request),
        }
    }

    /// All tokens came.
    fn finish(&mut self, now: Time, request: RequestId) {
        self.advance(now, request, Phase::Finishing);
        self.set_wait(request, Some(now + LAST_REPORT_WAIT_MAX));
    }

    /// Finishes the request if the decode leg has ended and only the end of the prefill leg was waited for.
    pub(super) fn finish_if_all_legs_ended(&mut self, now: Time, key: AttemptKey) {
        let is_over = |t: &AdmittedRequest| t.phase == Phase::Finishing || t.legs.decode.is_none();
        if self.requests.get(&key.request).is_some_and(is_over) {
            self.complete(now, key.request);
        }
    }

    /// The wait for the last report has a limit of its own. What the prefill node says late before it does not lengthen that wait.
    fn restart_silence(&mut self, now: Time, request: RequestId) {
        let phase = self.requests.get(&request).map(|tracked| tracked.phase);
        if phase == Some(Phase::Finishing) {
            return;
        }
        self.set_wait(request, Some(now + self.config.stream_silence_max));
    }

    /// Settles the permits of a leg: the node has received them, or they are given back.
    pub(super) fn settle_charge(&mut self, key: &AttemptKey, leg: Leg, was_received: bool) {
        let Some(open) = self
            .requests
            .get_mut(&key.request)
            .and_then(|t| t.legs.slot(leg).as_mut())
        else {
            return;
        };
        let (node, charge) = (open.node.clone(), open.charge.take());
        if let (Some(charge), Some(member)) = (charge, self.members.get_mut(&node)) {
            if was_received {
                member.permits.answered(charge);
            } else {
                member.permits.give_back(charge);
            }
        }
    }

    fn heard_from(&mut self, key: &AttemptKey, leg: Leg) {
        let open = self.requests.get(&key.request).and_then(|t| t.legs.get(leg));
        if let Some((node, Some(started_at))) = open.map(|l| (l.node.clone(), l.started_at))
            && let Some(member) = self.members.get_mut(&node)
        {
            member.suspicion.answered(started_at);
        }
    }

    fn engine_answered(&mut self, key: AttemptKey, leg: Leg) {
        let open = self.requests.get(&key.request).and_then(|t| t.legs.get(leg));
        let node = open.map(|open| open.node.clone());
        if let Some(member) = node.and_then(|id| self.members.get_mut(&id)) {
            member.breaker.answered(key.request);
        }
    }

    /// The request no longer uses this leg. If it was the trial of a node or a pair, the next request may make the trial.
    fn end_trials(&mut self, key: AttemptKey, leg: Leg, node: &NodeId) {
        if let Some(member) = self.members.get_mut(node) {
            member.suspicion.trust.released(key.request);
            member.breaker.released(key.request);
        }
        let pair = self.requests.get(&key.request).map(|tracked| tracked.pair.clone());
        if let (Leg::Decode, Some((Some(prefill), Some(decode)))) = (leg, pair) {
            self.breaker.released(&(prefill, decode), key.request);
        }
    }

    /// The leg's stream has ended by itself, with all that was asked of the node.
    pub(super) fn close_leg(&mut self, key: AttemptKey, leg: Leg) {
        self.settle_charge(&key, leg, true);
        let open = self
            .requests
            .get_mut(&key.request)
            .and_then(|t| t.legs.slot(leg).take());
        let Some(open) = open else {
            return;
        };
        if let Some(member) = self.members.get_mut(&open.node) {
            member.sequences = member.sequences.saturating_sub(open.sequences);
            if let Some(started_at) = open.started_at {
                member.breaker.succeeded(key.request, started_at);
            }
        }
        self.end_trials(key, leg, &open.node);
    }

    /// Gives up both legs: streams that were started are cancelled, permits that were never sent are given back.
    pub(super) fn release_legs(&mut self, request: RequestId) {
        if let Some(key) = self.requests.get(&request).map(|t| t.key()) {
            self.release_leg(key, Leg::Decode);
            self.release_leg(key, Leg::Prefill);
        }
    }

    pub(super) fn release_leg(&mut self, key: AttemptKey, leg: Leg) {
        let open = self
            .requests
            .get_mut(&key.request)
            .and_then(|t| t.legs.slot(leg).take());
        let Some(open) = open else {
            return;
        };
        if let Some(member) = self.members.get_mut(&open.node) {
            member.sequences = member.sequences.saturating_sub(open.sequences);
            match open.charge {
                Some(charge) if open.started_at.is_some() => member.permits.answered(charge),
                Some(charge) => member.permits.give_back(charge),
                None => {}
            }
        }
        self.end_trials(key, leg, &open.node);
        if open.started_at.is_some() {
            self.act(ClusterAction::CancelLeg { key, leg });
        }
    }
}

fn leg_of(event: &LegEvent) -> Leg {
    match event {
        LegEvent::Opened { .. } | LegEvent::Committed | LegEvent::DecodeFinished => Leg::Decode,
        LegEvent::PrefillAccepted | LegEvent::PrefillFinished { .. } => Leg::Prefill,
        LegEvent::FirstToken { leg }
        | LegEvent::TokensDelivered { leg, .. }
        | LegEvent::Refused { leg, .. }
        | LegEvent::Failed { leg, .. } => *leg,
    }
}
