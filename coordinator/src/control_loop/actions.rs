//! Carries out the actions of the brain: hands out requests, starts and ends their legs, tells clients the end, and writes to the nodes.

use std::sync::Arc;
use std::time::Duration;

use proto::messages::{OpenRequest, PrefillRequest};
use service_runtime::clock::Clock;
use service_runtime::telemetry::MeasuredSpan;
use service_runtime::telemetry::opentelemetry::KeyValue;
use serving_core::cluster::{ClusterAction, ClusterEvent, Leg, LegError, PlacementFacts, Target};
use serving_core::ids::{NodeId, RequestId};
use serving_core::request::{AttemptKey, Request};
use serving_core::time::Time;
use tonic::transport::Channel;

use super::ControlLoop;
use crate::dispatch;
use crate::membership::tell_dropped;
use crate::request_handle::{Rejected, RequestControl, RequestHandle};
use crate::running_leg::{LegContext, RunningLeg};
use crate::token_stream::RequestStream;

impl ControlLoop {
    /// Carries out one action. An action that is answered at once returns the answer as an event.
    pub(super) fn carry_out(&mut self, now: Time, action: ClusterAction) -> Option<ClusterEvent> {
        match action {
            ClusterAction::Place { key, placement } => self.place(now, key, placement),
            ClusterAction::StartOpen { .. } | ClusterAction::StartPrefill { .. } => self.start_leg(action),
            ClusterAction::CancelLeg { key, leg } => {
                drop(self.take_leg(key, leg));
            }
            ClusterAction::FailLeg { key, leg, error } => {
                if let Some(running) = self.take_leg(key, leg) {
                    running.fail(error);
                }
            }
            ClusterAction::EndAttempt { key } => return self.end_attempt(key),
            ClusterAction::Reject {
                request,
                reason,
                retry_after,
            } => {
                if let Some((reply, _)) = self.live.remove(&request).and_then(|live| live.waiting) {
                    let missing = || self.cluster.readiness(now).err();
                    let _ = reply.send(Err(Rejected::of((reason, retry_after), missing)));
                }
            }
            ClusterAction::Fail { request, error } => self.end(request, |stream| stream.fail(error)),
            ClusterAction::Complete { request, .. } => self.end(request, RequestStream::complete),
            ClusterAction::Forget { request } => self.end(request, RequestStream::forget),
            ClusterAction::WelcomeNode { stream } => self.nodes.welcome(stream),
            ClusterAction::RefuseNode { stream, reason } => self.nodes.refuse(stream, &reason),
            ClusterAction::RenewLease { stream } => self.nodes.renew(stream),
            ClusterAction::SendPeers { stream, peers } => self.nodes.peers(stream, peers),
            ClusterAction::RequestDrain { stream, next_role } => self.nodes.drain(stream, next_role),
            ClusterAction::TellPermits { stream, note } => self.nodes.permits(stream, note),
            ClusterAction::DropNode { node, cause } => {
                tell_dropped(&node, cause);
                self.clocks.forget(&node);
                self.channels.close(&node);
                self.nodes.close_node(&node);
            }
        }
        None
    }

    fn place(&mut self, now: Time, key: AttemptKey, facts: PlacementFacts) {
        let Some(live) = self.live.get_mut(&key.request) else {
            return;
        };
        let wait = facts.queued_for;
        // A request that is placed again has waited since the end of its last attempt.
        let since = if key.attempt.0 == 0 { live.submitted } else { now - wait };
        let mut admission = MeasuredSpan::new("admission", since, now);
        admission.attributes = vec![
            KeyValue::new("lane", live.lane),
            KeyValue::new("wait_ms", i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)),
            KeyValue::new("attempt", i64::from(key.attempt.0)),
        ];
        admission.record_later(&live.parent);
        let name = |node: &Option<NodeId>| node.as_ref().map_or(String::new(), |n| n.name.to_string());
        let mut route = MeasuredSpan::new("route", now, Clock::now());
        route.attributes = vec![
            KeyValue::new("reason", facts.route_reason.clone()),
            KeyValue::new("prefill_node", name(&facts.prefill)),
            KeyValue::new("decode_node", name(&facts.decode)),
            KeyValue::new("local_prefill", facts.local.map_or("", |l| l.name())),
        ];
        route.record_later(&live.parent);
        live.stream.place(key, facts, Clock::instant_of(now));
        self.hand_out(key.request);
    }

    /// Gives the submitter its handle, once.
    fn hand_out(&mut self, id: RequestId) {
        let control: Arc<dyn RequestControl> = self.signals.clone();
        let waiting = self.live.get_mut(&id).and_then(|live| live.waiting.take());
        if let Some((reply, events)) = waiting {
            // A submitter that went away drops the handle, and that cancels the request.
            let _ = reply.send(Ok(RequestHandle::new(id, events, control)));
        }
    }

    fn start_leg(&mut self, action: ClusterAction) {
        let coordinator_epoch = self.nodes.coordinator().epoch;
        match action {
            ClusterAction::StartOpen {
                key,
                request,
                decode,
                prefill,
                local,
                permit_blocks,
                time_left,
            } => {
                let open = OpenRequest {
                    attempt: key.attempt,
                    request: with_time_left(&request, time_left),
                    node_epoch: decode.node.epoch,
                    permit_blocks,
                    coordinator_epoch,
                    local_prefill: local,
                    prefill_node: prefill,
                };
                let start = |context, channel| dispatch::start_open(context, channel, open);
                self.leg((key, Leg::Decode), &decode, request.choice_count, start);
            }
            ClusterAction::StartPrefill {
                key,
                request,
                prefill,
                ticket,
                permit_tokens,
                time_left,
            } => {
                let prompt = PrefillRequest {
                    attempt: key.attempt,
                    request: with_time_left(&request, time_left),
                    node_epoch: prefill.node.epoch,
                    permit_tokens,
                    coordinator_epoch,
                    ticket,
                };
                let start = |context, channel| dispatch::start_prefill(context, channel, prompt);
                self.leg((key, Leg::Prefill), &prefill, request.choice_count, start);
            }
            _ => {}
        }
    }

    /// Keeps the leg that `start` begins, if its request still lives.
    fn leg(
        &mut self,
        (key, leg): (AttemptKey, Leg),
        target: &Target,
        choice_count: u32,
        start: impl FnOnce(LegContext, Result<Channel, LegError>) -> RunningLeg,
    ) {
        let Some(live) = self.live.get_mut(&key.request) else {
            return;
        };
        let context = LegContext {
            key,
            leg,
            node: target.node.clone(),
            choice_count,
            stream: live.stream.clone(),
            inbox: self.to_self.clone(),
            clocks: self.clocks.clone(),
            parent: live.parent.clone(),
        };
        let running = start(context, self.channels.get(target));
        live.legs.insert((key, leg), running);
    }

    fn take_leg(&mut self, key: AttemptKey, leg: Leg) -> Option<RunningLeg> {
        self.live.get_mut(&key.request)?.legs.remove(&(key, leg))
    }

    fn end_attempt(&mut self, key: AttemptKey) -> Option<ClusterEvent> {
        let live = self.live.get_mut(&key.request)?;
        let delivered = live.stream.end_attempt(key.attempt);
        live.legs.retain(|(of, _), _| *of != key);
        Some(ClusterEvent::AttemptEnded { key, delivered })
    }

    fn end(&mut self, id: RequestId, tell: impl FnOnce(&RequestStream)) {
        // A request may break before it was placed. Its submitter still gets a handle that says so.
        self.hand_out(id);
        if let Some(live) = self.live.remove(&id) {
            self.cluster.note_delivered(id, &live.stream);
            drop(live.legs);
            tell(&live.stream);
        }
    }
}

/// The request with the time that is left until its deadline. The wire carries this time, not the deadline.
fn with_time_left(request: &Request, time_left: Duration) -> Request {
    Request {
        time_limit: time_left,
        ..request.clone()
    }
}
