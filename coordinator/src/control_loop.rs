//! One task that takes an event, asks the brain (`Cluster`), and carries out its actions. Nothing here decides.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use identity::Identity;
use proto::messages::{OpenRequest, PrefillRequest};
use service_runtime::clock::Clock;
use service_runtime::event_log;
use service_runtime::failpoints::{self, FaultPoint};
use service_runtime::shutdown::Shutdown;
use service_runtime::telemetry::opentelemetry::KeyValue;
use service_runtime::telemetry::{self, MeasuredSpan, opentelemetry};
use serving_core::cluster::{
    ClusterAction, ClusterEvent, FinishedBy, LastDecodeNode, Leg, PlacementFacts, Transition, WhenUnsplit,
};
use serving_core::ids::{NodeId, RequestId};
use serving_core::request::{AttemptKey, Request, RequestError};
use serving_core::time::Time;
use tokio::sync::{mpsc, oneshot, watch};

use crate::control_handle::{ClientSignals, ControlHandle, Input, NodeOrder, Reply};
use crate::dispatch::{self, Channels};
use crate::flight_recorder::RecordedCluster;
use crate::membership::{NodeStreams, Terms, tell_dropped};
use crate::metrics::Metrics;
use crate::node_clocks::NodeClocks;
use crate::request_handle::{ClientEvent, Readiness, Rejected, RequestControl, RequestHandle, Submission};
use crate::running_leg::{LegContext, RunningLeg};
use crate::standstill::{Standstill, WAKE_INTERVAL};
use crate::token_stream::RequestStream;

/// Events that wait for the loop. A leg waits when the queue is full; a new request is refused.
const INBOX_MAX: usize = 4096;
/// Reports of nodes that wait for the loop. They may be taken before the event of a leg. When the queue is full their readers wait.
const MEMBERSHIP_INBOX_MAX: usize = 256;

/// One request in the shell: its stream to the client and its running legs.
#[derive(Debug)]
struct ActiveRequest {
    stream: Arc<RequestStream>,
    /// `Some` until the submitter has its handle.
    waiting: Option<(Reply, mpsc::Receiver<ClientEvent>)>,
    legs: BTreeMap<(AttemptKey, Leg), RunningLeg>,
    parent: opentelemetry::Context,
    submitted: Time,
    lane: &'static str,
}

/// Why the loop woke.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one value at a time, handled at once")]
enum Woken {
    Stop,
    Drain,
    /// A client left, or a stop string was found.
    ClientSignals,
    Input(Input),
    /// A timer of the brain is due.
    Timer,
    /// The gauges of an idle cluster must be refreshed.
    Refresh,
}

/// The parts from which the loop is built.
#[derive(Debug)]
pub(crate) struct LoopParts {
    pub cluster: RecordedCluster,
    pub when_unsplit: WhenUnsplit,
    pub terms: Terms,
    pub metrics: Arc<Metrics>,
    pub clocks: NodeClocks,
    pub identity: Identity,
}

#[derive(Debug)]
pub(crate) struct ControlLoop {
    cluster: RecordedCluster,
    membership: mpsc::Receiver<Input>,
    when_unsplit: WhenUnsplit,
    inbox: mpsc::Receiver<Input>,
    to_self: mpsc::Sender<Input>,
    signals: Arc<ClientSignals>,
    readiness: watch::Sender<Readiness>,
    metrics: Arc<Metrics>,
    clocks: NodeClocks,
    nodes: NodeStreams,
    channels: Channels,
    live: BTreeMap<RequestId, ActiveRequest>,
    is_draining: bool,
}

impl ControlLoop {
    pub(crate) fn new(parts: LoopParts) -> (Self, ControlHandle) {
        let (to_self, inbox) = mpsc::channel(INBOX_MAX);
        let (to_membership, membership) = mpsc::channel(MEMBERSHIP_INBOX_MAX);
        let signals = Arc::new(ClientSignals::default());
        let not_yet = Readiness::NotReady("no node has joined yet".to_owned());
        let (readiness, readiness_seen) = watch::channel(not_yet);
        let handle = ControlHandle::new((to_self.clone(), to_membership), signals.clone(), readiness_seen);
        let control = Self {
            cluster: parts.cluster,
            membership,
            when_unsplit: parts.when_unsplit,
            inbox,
            to_self,
            signals,
            readiness,
            metrics: parts.metrics,
            clocks: parts.clocks,
            nodes: NodeStreams::new(parts.terms),
            channels: Channels::of(parts.identity),
            live: BTreeMap::new(),
            is_draining: false,
        };
        (control, handle)
    }

    /// Runs until `stop`. `drain` stops admission; running requests go on.
    pub(crate) async fn run(mut self, drain: Shutdown, stop: Shutdown) {
        let mut refresh = tokio::time::interval(WAKE_INTERVAL);
        refresh.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut standstill = Standstill::since(Clock::now());
        loop {
            let woken = self.woken(&mut refresh, (&drain, &stop)).await;
            if let Some(stillness) = standstill.woke(Clock::now()) {
                self.handle(ClusterEvent::StoodStill { stillness });
            }
            match woken {
                Woken::Stop => return,
                Woken::Drain => {
                    self.is_draining = true;
                    self.handle(ClusterEvent::DrainStarted);
                }
                Woken::ClientSignals => self.take_signals(),
                Woken::Input(input) => self.take(input),
                Woken::Timer => self.handle(ClusterEvent::Tick),
                Woken::Refresh => self.publish_nodes(),
            }
        }
    }

    /// Reports of nodes are taken before legs and timers, so that no lease ends while the status that renews it waits here.
    async fn woken(&mut self, refresh: &mut tokio::time::Interval, (drain, stop): (&Shutdown, &Shutdown)) -> Woken {
        let wake = self
            .cluster
            .next_wake()
            .map(|t| tokio::time::Instant::from_std(Clock::instant_of(t)));
        tokio::select! {
            biased;
            () = stop.requested() => Woken::Stop,
            () = drain.requested(), if !self.is_draining => Woken::Drain,
            () = self.signals.notify.notified() => Woken::ClientSignals,
            Some(input) = self.membership.recv() => Woken::Input(input),
            input = self.inbox.recv() => input.map_or(Woken::Stop, Woken::Input),
            () = sleep_until(wake) => Woken::Timer,
            _ = refresh.tick() => Woken::Refresh,
        }
    }

    fn take_signals(&mut self) {
        let take_signals = self.signals.take();
        for (request, choice) in take_signals.finished {
            if let Some(live) = self.live.get(&request) {
                live.stream.finish_choice(choice);
            }
            self.count_untold(request);
            self.handle(ClusterEvent::ChoiceFinished {
                request,
                choice,
                by: FinishedBy::Edge,
            });
        }
        for request in take_signals.cancelled {
            self.count_untold(request);
            self.handle(ClusterEvent::ClientGone { request });
        }
    }

    /// The request and its legs may end with the next event. Then no leg would report these tokens any more.
    fn count_untold(&mut self, request: RequestId) {
        let untold = self.live.get(&request).map(|live| live.stream.take_untold());
        if let Some(count) = untold.filter(|count| *count > 0) {
            self.handle(ClusterEvent::TokensCounted { request, count });
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Submit { submission, reply } => self.submitted(submission, reply),
            Input::Event(event) => self.handle(event),
            Input::Drain { order, reply } => self.drain_node(order, reply),
            Input::Join {
                record,
                stream,
                node_stream,
            } => {
                self.nodes.insert(stream, node_stream);
                self.handle(ClusterEvent::NodeJoined {
                    record: *record,
                    stream,
                });
            }
        }
    }

    /// The check and the drain are one step. So when two drains come at the same moment, the second one sees the first.
    fn drain_node(&mut self, order: NodeOrder, reply: oneshot::Sender<Result<(), LastDecodeNode>>) {
        let checked = self.cluster.check_drain(Clock::now(), &order.name);
        let checked = if order.is_forced { Ok(()) } else { checked };
        if checked.is_ok() {
            self.handle(ClusterEvent::DrainNode {
                name: order.name,
                next_role: order.next_role,
            });
        }
        // The caller may have gone. The node drains all the same.
        let _ = reply.send(checked);
    }

    fn submitted(&mut self, submission: Submission, reply: Reply) {
        if reply.is_closed() {
            // The client left before its request was looked at.
            return;
        }
        let request = submission.request;
        let submitted_at = submission.tokenized_at;
        let (stream, events) = RequestStream::new(&request, submitted_at, self.metrics.clone());
        let parent = submission
            .traceparent
            .as_deref()
            .map(telemetry::context_of_traceparent)
            .unwrap_or_default();
        let live = ActiveRequest {
            stream: Arc::new(stream),
            waiting: Some((reply, events)),
            legs: BTreeMap::new(),
            parent,
            submitted: Clock::time_of(submitted_at),
            lane: request.lane.name(),
        };
        // Ids are random 128-bit numbers of this process. A repeated id would be a bug of the edge and must not take over
        // the first request's stream. Its reply is dropped, which the submitter sees as a refusal.
        if let std::collections::btree_map::Entry::Vacant(slot) = self.live.entry(request.id) {
            slot.insert(live);
            self.handle(ClusterEvent::RequestArrived { request });
            failpoints::hit(FaultPoint::Queued);
        }
    }

    /// Applies one event and all events that follow from it at once.
    fn handle(&mut self, event: ClusterEvent) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let is_of_nodes = matches!(
                event,
                ClusterEvent::NodeJoined { .. }
                    | ClusterEvent::NodeReported { .. }
                    | ClusterEvent::NodeDisconnected { .. }
                    | ClusterEvent::NodeLeft { .. }
                    | ClusterEvent::DrainNode { .. }
                    | ClusterEvent::DrainStarted
                    | ClusterEvent::StoodStill { .. }
                    | ClusterEvent::Tick
            );
            if let ClusterEvent::NodeDisconnected { stream } = &event {
                self.nodes.close_stream(*stream);
            }
            let now = Clock::now();
            let actions = self.cluster.apply(now, event);
            for Transition { key, change } in self.cluster.transitions() {
                event_log::record(*key, || (*change).into());
            }
            for action in actions {
                events.extend(self.carry_out(now, action));
            }
            self.metrics.publish(|snapshot| snapshot.take_counts(&self.cluster));
            if is_of_nodes {
                self.publish_nodes();
            }
        }
    }

    fn publish_nodes(&mut self) {
        let now = Clock::now();
        self.metrics.publish(|snapshot| {
            snapshot.take_counts(&self.cluster);
            snapshot.take_nodes(now, &self.cluster);
        });
        let reach = self.cluster.readiness(now);
        let readiness = match reach.and_then(|reach| reach.counted(self.when_unsplit)) {
            _ if self.is_draining => Readiness::Draining,
            Ok(reach) => Readiness::Ready(reach),
            Err(missing) => Readiness::NotReady(missing),
        };
        self.readiness.send_if_modified(|seen| {
            let changes = *seen != readiness;
            *seen = readiness;
            changes
        });
    }

    /// Carries out one action. An action that is answered at once returns the answer as an event.
    fn carry_out(&mut self, now: Time, action: ClusterAction) -> Option<ClusterEvent> {
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
        let (key, request, target, leg) = match &action {
            ClusterAction::StartOpen {
                key, request, decode, ..
            } => (*key, request, decode.clone(), Leg::Decode),
            ClusterAction::StartPrefill {
                key, request, prefill, ..
            } => (*key, request, prefill.clone(), Leg::Prefill),
            _ => return,
        };
        let choice_count = request.choice_count;
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
        let channel = self.channels.get(&target);
        let node_epoch = target.node.epoch;
        let running = match action {
            ClusterAction::StartOpen {
                request,
                local,
                prefill,
                permit_blocks,
                time_left,
                ..
            } => {
                let request = with_time_left(&request, time_left);
                let open = OpenRequest {
                    attempt: key.attempt,
                    request,
                    node_epoch,
                    permit_blocks,
                    coordinator_epoch: self.nodes.coordinator().epoch,
                    local_prefill: local,
                    prefill_node: prefill,
                };
                dispatch::start_open(context, channel, open)
            }
            ClusterAction::StartPrefill {
                request,
                ticket,
                permit_tokens,
                time_left,
                ..
            } => {
                let request = with_time_left(&request, time_left);
                let prefill = PrefillRequest {
                    attempt: key.attempt,
                    request,
                    node_epoch,
                    permit_tokens,
                    coordinator_epoch: self.nodes.coordinator().epoch,
                    ticket,
                };
                dispatch::start_prefill(context, channel, prefill)
            }
            _ => return,
        };
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

impl Drop for ControlLoop {
    /// The legs end with the loop, and so does their work on the nodes.
    fn drop(&mut self) {
        for live in self.live.values() {
            live.stream
                .fail(RequestError::Internal("the coordinator stopped".to_owned()));
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

async fn sleep_until(wake: Option<tokio::time::Instant>) {
    match wake {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
