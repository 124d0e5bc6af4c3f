//! The coordinator's shell: events go to the real brain, its actions become messages and ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serving_core::cluster::{ClusterAction, ClusterEvent, DropCause, Leg, LegEvent};
use serving_core::ids::{NodeId, RequestId};
use serving_core::request::{AttemptKey, RejectReason, Request};
use workload::record::Outcome as RequestOutcome;

use super::World;
use super::agenda::{Event, LegWork, StartLeg, ToNode};
use super::prompts;
use super::request::{Edges, Live, Sent};

impl World<'_> {
    pub(super) fn arrive(&mut self, index: usize) {
        let request = prompts::request(self.scenario, index);
        self.live.insert(request.id, Live::new(index, self.now()));
        let request = Arc::new(request);
        self.apply(ClusterEvent::RequestArrived { request });
    }

    /// A timer that was put off meanwhile is not due.
    pub(super) fn wake(&mut self) {
        if self.wake_at.take_if(|at| *at <= self.agenda.now()).is_some() {
            self.apply(ClusterEvent::Tick);
        }
    }

    /// One event and all that follow from it at once, as in the coordinator's loop.
    pub(super) fn apply(&mut self, event: ClusterEvent) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now = self.now();
            for action in self.cluster.apply(now, event) {
                events.extend(self.carry_out(action));
            }
        }
        // Not in this very instant: the brain has just seen it.
        let next = self
            .cluster
            .next_wake()
            .map(|at| at.max(self.now() + Duration::from_nanos(1)));
        if let Some(next) = next
            && self.wake_at.is_none_or(|at| next < at)
        {
            self.wake_at = Some(next);
            self.agenda.at(next, Event::Wake);
        }
    }

    /// What comes in on a leg. A leg that was closed meanwhile says nothing any more.
    pub(super) fn leg_event(&mut self, (key, leg): (AttemptKey, Leg), event: LegEvent) {
        let now = self.now();
        let Some(live) = self.live.get_mut(&key.request) else {
            return;
        };
        if live.attempt != Some(key.attempt) || !live.legs.contains_key(&leg) {
            return;
        }
        match &event {
            LegEvent::Opened { .. } => live.opened(now),
            LegEvent::PrefillFinished { .. }
            | LegEvent::DecodeFinished
            | LegEvent::Refused { .. }
            | LegEvent::Failed { .. } => {
                live.legs.remove(&leg);
            }
            _ => {}
        }
        self.apply(ClusterEvent::Leg { key, event });
    }

    fn carry_out(&mut self, action: ClusterAction) -> Option<ClusterEvent> {
        match action {
            ClusterAction::Place { key, placement } => {
                let now = self.now();
                if let Some(live) = self.live.get_mut(&key.request) {
                    live.placed(key.attempt, (placement, now));
                }
            }
            ClusterAction::StartOpen { .. } | ClusterAction::StartPrefill { .. } => self.start_leg(action),
            ClusterAction::FailLeg { key, leg, .. } | ClusterAction::CancelLeg { key, leg } => {
                self.close_leg(key, leg);
            }
            ClusterAction::EndAttempt { key } => return self.end_attempt(key),
            ClusterAction::Reject { request, reason, .. } => self.end(request, rejected(&reason)),
            ClusterAction::Fail { request, error } => {
                let error = error.name().to_owned();
                self.end(request, RequestOutcome::Failed { error });
            }
            ClusterAction::Complete { request, .. } => self.end(request, RequestOutcome::Completed),
            ClusterAction::Forget { request } => self.end(request, RequestOutcome::Cancelled),
            ClusterAction::WelcomeNode { stream } => {
                self.tell_stream(stream, ToNode::Welcome);
            }
            ClusterAction::RefuseNode { stream, .. } => {
                self.refused(stream);
            }
            ClusterAction::RequestDrain { stream, next_role } => self.tell_stream(stream, ToNode::Drain { next_role }),
            ClusterAction::DropNode { node, cause } => self.drop_node(&node, cause),
            // Leases run at the coordinator; every pair is known here; one coordinator shares its permits with nobody.
            ClusterAction::RenewLease { .. } | ClusterAction::SendPeers { .. } | ClusterAction::TellPermits { .. } => {}
        }
        None
    }

    fn start_leg(&mut self, action: ClusterAction) {
        let (key, request, node, permits, work, time_left) = match action {
            ClusterAction::StartOpen {
                key,
                request,
                decode,
                local,
                permit_blocks,
                time_left,
                ..
            } => {
                let work = local.map_or(LegWork::Decode, |_| LegWork::Whole);
                (key, request, decode.node, permit_blocks, work, time_left)
            }
            ClusterAction::StartPrefill {
                key,
                request,
                prefill,
                ticket,
                permit_tokens,
                time_left,
            } => (
                key,
                request,
                prefill.node,
                permit_tokens,
                LegWork::Prefill(ticket),
                time_left,
            ),
            _ => return,
        };
        let Some(place) = self.place_of(&node) else {
            return;
        };
        let leg = work.leg();
        if let Some(live) = self.live.get_mut(&key.request) {
            live.legs.insert(leg, place);
        }
        let delay = self.scenario.costs.overheads.hop_with_prompt(request.prompt_tokens());
        // The time that is left is what travels.
        let request = Arc::new(Request {
            time_limit: time_left,
            ..(*request).clone()
        });
        let what = ToNode::Leg(Box::new(StartLeg {
            key,
            request,
            permits: u64::from(permits),
            work,
        }));
        self.agenda.after(delay, Event::Node { place, what });
    }

    /// Closes the leg's stream, which the node sees a message later.
    fn close_leg(&mut self, key: AttemptKey, leg: Leg) {
        let place = self.live.get_mut(&key.request).and_then(|live| live.legs.remove(&leg));
        if let Some(place) = place {
            let what = ToNode::Cancel(key);
            self.agenda.after(self.hop, Event::Node { place, what });
        }
    }

    fn end_attempt(&mut self, key: AttemptKey) -> Option<ClusterEvent> {
        self.close_leg(key, Leg::Decode);
        self.close_leg(key, Leg::Prefill);
        let now = self.now();
        let vocab_size = self.scenario.nodes.limits.vocab_size;
        let live = self.live.get_mut(&key.request)?;
        let output_tokens = self.scenario.trace.requests[live.index].output_tokens.max(1);
        let delivered = live.end_attempt(now, (key.request, output_tokens, vocab_size));
        Some(ClusterEvent::AttemptEnded { key, delivered })
    }

    /// The one place where a request ends for its client.
    fn end(&mut self, request: RequestId, outcome: RequestOutcome) {
        let Some(mut live) = self.live.remove(&request) else {
            return;
        };
        let now = self.now();
        if let Some(attempt) = live.attempt {
            let key = AttemptKey { request, attempt };
            for place in std::mem::take(&mut live.legs).into_values() {
                let what = ToNode::Cancel(key);
                self.agenda.after(self.hop, Event::Node { place, what });
            }
        }
        let is_complete = outcome == RequestOutcome::Completed;
        if !is_complete {
            // What was on its way does not arrive.
            let had = live.arrivals.iter().take_while(|at| **at <= now).count();
            live.arrivals.truncate(had);
        }
        let (scenario, index) = (self.scenario, live.index);
        let (planned, overheads) = (&scenario.trace.requests[index], &scenario.costs.overheads);
        let edges = Edges {
            before: overheads.edge(planned.prompt_tokens),
            hop: self.hop,
            hop_with_prompt: overheads.hop_with_prompt(planned.prompt_tokens),
            after: overheads.egress(),
        };
        // An answer is over with its last token, whatever the nodes still have to report.
        let last = live.arrivals.last().copied().filter(|_| is_complete);
        let scheduled = self.clients.scheduled[index];
        let sent = Sent {
            planned,
            scheduled,
            ended: last.unwrap_or(now) + edges.after,
            edges,
        };
        let record = live.record(&sent, outcome);
        self.answered(index, (sent.ended, record));
    }

    /// A life of a node is over for the coordinator: its connections are closed.
    fn drop_node(&mut self, id: &NodeId, cause: DropCause) {
        let Some(place) = self.place_of(id) else {
            return;
        };
        self.streams.retain(|_, at| *at != place);
        if cause == DropCause::LeaseExpired && self.nodes[place.node].is_at(place) {
            // It does not know that it is lost. When it sees its stream closed, it registers again.
            self.nodes[place.node].stream = None;
            let what = ToNode::Join;
            self.agenda.after(self.hop, Event::Node { place, what });
        }
    }
}

fn rejected(reason: &RejectReason) -> RequestOutcome {
    match reason {
        RejectReason::QueueFull | RejectReason::QueueTimeout { .. } => RequestOutcome::Refused { status: 429 },
        RejectReason::NotReady | RejectReason::NodeAway | RejectReason::Draining => {
            RequestOutcome::Refused { status: 503 }
        }
        RejectReason::TooLargeForPool { .. }
        | RejectReason::PromptTooLong { .. }
        | RejectReason::TooManyChoices { .. } => RequestOutcome::Failed {
            error: reason.name().to_owned(),
        },
    }
}
