//! Carries out what a node's scheduler says.

use serving_core::cluster::{Leg, LegError, LegEvent, NodeFault, PrefillOutcome};
use serving_core::request::AttemptKey;
use serving_core::scheduler::{NodeFailure, Outcome, PushEnd, Report, SchedulerEvent};

use super::World;

impl World<'_> {
    /// Until the scheduler has nothing more to say.
    pub(super) fn deliver(&mut self, node: usize) {
        while let Some(event) = self.nodes[node].scheduler.take_event() {
            self.carry_out_at(node, event);
        }
    }

    fn carry_out_at(&mut self, node: usize, event: SchedulerEvent) {
        match event {
            SchedulerEvent::BlocksReady { key, blocks } => self.push_blocks(node, key, blocks.len()),
            SchedulerEvent::Held { key, timings } => {
                if let Some(live) = self.live_attempt(key) {
                    live.node_reported(&timings);
                }
                self.first_tokens(node, key, Outcome::HandedOver);
            }
            SchedulerEvent::AbortPush { key } => self.abort_push(node, key),
            SchedulerEvent::Committed { key, transfer, timings } => {
                if let Some(live) = self.live_attempt(key) {
                    live.node_reported(&timings);
                }
                self.tell((key, Leg::Decode), LegEvent::Committed);
                self.acknowledge(transfer);
            }
            SchedulerEvent::CloseTransfer { transfer } => self.close_transfer(node, transfer),
            SchedulerEvent::Token { key, event } => {
                let Some(stream) = self.nodes[node].streams.get_mut(&key) else {
                    return;
                };
                // Those of a prefill leg wait for the word that they are all of them.
                match stream.leg {
                    Leg::Prefill => stream.tokens.push(event),
                    Leg::Decode => self.send_tokens((node, key), &[event]),
                }
            }
            SchedulerEvent::Finished { key, outcome, report } => self.finished(node, key, outcome, &report),
            SchedulerEvent::Failed { key, failure, .. } => self.failed(node, key, &failure),
            // No bytes are here.
            SchedulerEvent::CopyBlock { .. } | SchedulerEvent::HashPrompt { .. } => {}
        }
    }

    fn first_tokens(&mut self, node: usize, key: AttemptKey, outcome: Outcome) {
        let Some(stream) = self.nodes[node].streams.get_mut(&key) else {
            return;
        };
        let tokens = std::mem::take(&mut stream.tokens);
        if outcome == Outcome::HandedOver {
            let going_on = tokens.iter().filter(|token| token.finish.is_none()).cloned().collect();
            self.last_frame(node, key, going_on);
        }
        if !tokens.is_empty() {
            self.send_tokens((node, key), &tokens);
        }
    }

    fn finished(&mut self, node: usize, key: AttemptKey, outcome: Outcome, report: &Report) {
        let Some(leg) = self.nodes[node].streams.get(&key).map(|stream| stream.leg) else {
            return;
        };
        if let Some(live) = self.live_attempt(key) {
            live.node_reported(&report.timings);
        }
        let event = match (leg, outcome) {
            (Leg::Prefill, Outcome::Complete) => {
                self.first_tokens(node, key, Outcome::Complete);
                LegEvent::PrefillFinished {
                    outcome: PrefillOutcome::EndedAtFirstToken,
                }
            }
            (Leg::Prefill, Outcome::HandedOver) => LegEvent::PrefillFinished {
                outcome: PrefillOutcome::HandedOver,
            },
            (Leg::Decode, _) => LegEvent::DecodeFinished,
        };
        self.tell_count((node, key));
        self.tell((key, leg), event);
        self.close(node, key);
    }

    fn failed(&mut self, node: usize, key: AttemptKey, failure: &NodeFailure) {
        if let Some(leg) = self.nodes[node].streams.get(&key).map(|stream| stream.leg) {
            let error = LegError::Node {
                fault: fault_of(failure),
                reason: failure.name().to_owned(),
                detail: failure.to_string(),
            };
            self.tell((key, leg), LegEvent::Failed { leg, error });
            self.close(node, key);
        }
    }

    /// The end of a push, however it ended.
    pub(super) fn push_ended(&mut self, node: usize, key: AttemptKey, end: PushEnd) {
        let own = &mut self.nodes[node];
        own.pushes.remove(&key);
        own.scheduler.push_ended(key, end);
        self.deliver(node);
        self.turn_soon(node);
    }
}

/// As `proto` puts it on the wire.
fn fault_of(failure: &NodeFailure) -> NodeFault {
    match failure {
        NodeFailure::Deadline { .. } => NodeFault::Deadline,
        NodeFailure::ReservationExpired { .. } => NodeFault::Peer,
        NodeFailure::HoldExpired { .. } | NodeFailure::Transfer { .. } => NodeFault::Transfer,
        NodeFailure::Engine { .. } | NodeFailure::NotFinite => NodeFault::Engine,
        NodeFailure::RuledOut => NodeFault::RuledOut,
        NodeFailure::SlowReader { .. } => NodeFault::Internal,
        NodeFailure::Draining => NodeFault::Draining,
    }
}
