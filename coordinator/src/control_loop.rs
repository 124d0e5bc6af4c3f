//! One task that takes an event, asks the brain (`Cluster`), and carries out its actions (`actions`). Nothing here decides.

mod actions;
mod publishing;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use identity::Identity;
use service_runtime::clock::Clock;
use service_runtime::event_log;
use service_runtime::failpoints::{self, FaultPoint};
use service_runtime::shutdown::Shutdown;
use service_runtime::telemetry::{self, opentelemetry};
use serving_core::cluster::{ClusterEvent, FinishedBy, LastDecodeNode, Leg, Transition, WhenUnsplit};
use serving_core::ids::RequestId;
use serving_core::request::{AttemptKey, RequestError};
use serving_core::time::Time;
use tokio::sync::{mpsc, oneshot, watch};

use crate::control_handle::{ClientSignals, ControlHandle, Input, NodeOrder, Reply};
use crate::dispatch::Channels;
use crate::flight_recorder::RecordedCluster;
use crate::membership::{NodeStreams, Terms};
use crate::metrics::Metrics;
use crate::node_clocks::NodeClocks;
use crate::request_handle::{ClientEvent, Readiness, Submission};
use crate::running_leg::RunningLeg;
use crate::standstill::{Standstill, WAKE_INTERVAL};
use crate::token_stream::RequestStream;

use publishing::Publishing;

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
    /// The gauges of an idle cluster must be refreshed, or reports of nodes wait to be published.
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
    publishing: Publishing,
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
            publishing: Publishing::default(),
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
        let instant = |at: Time| tokio::time::Instant::from_std(Clock::instant_of(at));
        let wake = self.cluster.next_wake().map(instant);
        let publish = self.publishing.due.map(instant);
        tokio::select! {
            biased;
            () = stop.requested() => Woken::Stop,
            () = drain.requested(), if !self.is_draining => Woken::Drain,
            () = self.signals.notify.notified() => Woken::ClientSignals,
            Some(input) = self.membership.recv() => Woken::Input(input),
            input = self.inbox.recv() => input.map_or(Woken::Stop, Woken::Input),
            () = sleep_until(wake) => Woken::Timer,
            () = sleep_until(publish) => Woken::Refresh,
            _ = refresh.tick() => Woken::Refresh,
        }
    }

    fn take_signals(&mut self) {
        let signals = self.signals.take();
        for (request, choice) in signals.finished {
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
        for request in signals.cancelled {
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
            let is_report = matches!(event, ClusterEvent::NodeReported { .. });
            let is_of_nodes = matches!(
                event,
                ClusterEvent::NodeJoined { .. }
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
            if is_of_nodes || (is_report && self.publishing.may_publish(now)) {
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
        self.publishing.done(now, Clock::now());
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

async fn sleep_until(wake: Option<tokio::time::Instant>) {
    match wake {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
