//! The node's one loop, on a thread of its own: take what arrived, apply it to the scheduler, carry out, submit the next step.
//!
//! It owns the scheduler and every response stream, and waits for nobody: the engine computes on a thread of its own, results go
//! into bounded channels, and a reader that lets one run full loses its request. So a request is answered while a step runs. The
//! loop sleeps until something arrives, at most a second, so that deadlines are kept on an idle node as on a full one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use engine::{KvMemory, Step, StepOutput, StepRow};
use kv_transfer::receiver::Receiver;
use proto::messages::StepNote;
use service_runtime::clock::Clock;
use serving_core::ids::{NodeId, TransferId};
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{NodeState, NodeStatus, PairHealth};
use serving_core::request::AttemptKey;
use serving_core::scheduler::{NodeFailure, Scheduler};
use serving_core::time::Time;
use tokio::sync::watch;

use crate::engine_thread::EngineThread;
use crate::handoff_in::Reservations;
use crate::handoff_out::{Handoff, Handoffs};
use crate::inbox::{Arrivals, HandoffSerial, Inbox, StepDone};
use crate::metrics::Metrics;
use crate::streams::Streams;

/// The reaper's period (PROTOCOL, timers): independent of traffic. An idle loop sleeps no longer.
const TICK: Duration = Duration::from_secs(1);
/// After the drain's grace everything has been told to end; handoffs that still read or write get this long to stop.
const CLOSE_TIME_LIMIT: Duration = Duration::from_secs(1);

/// What the loop is made of.
#[derive(Debug)]
pub struct LoopParts {
    pub node: NodeId,
    pub engine: EngineThread,
    pub scheduler: Scheduler,
    pub inbox: Arc<Inbox>,
    pub metrics: Metrics,
    pub status: watch::Sender<NodeStatus>,
    pub prefixes: watch::Sender<PrefixLog>,
    /// Where KV goes, on a node that computes prompts for others.
    pub outgoing: Option<Outgoing>,
    /// Where KV comes from, on a node that decodes.
    pub incoming: Option<Incoming>,
}

#[derive(Debug)]
pub struct Outgoing {
    pub handoffs: Handoffs,
    pub pairs: watch::Receiver<Vec<PairHealth>>,
}

#[derive(Debug)]
pub struct Incoming {
    pub reservations: Arc<Reservations>,
    pub receiver: Arc<Receiver>,
    /// host:port of this node's handoff service, for tickets.
    pub kv_address: String,
    /// How long a reservation lives, for tickets.
    pub reservation: Duration,
}

/// Says that the loop has ended, also by a panic: what waits in its inbox ends, nothing more is taken, and the coordinators place
/// nothing here until the process has ended.
struct Leaves {
    inbox: Arc<Inbox>,
    status: watch::Sender<NodeStatus>,
}

impl Drop for Leaves {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the node's loop has panicked: its requests end here, and the node leaves");
        }
        self.inbox.close();
        self.status.send_if_modified(|status| {
            let before = std::mem::replace(&mut status.state, NodeState::Draining);
            before != NodeState::Draining
        });
    }
}

/// Owned by its thread. The fields are dropped in this order, also after a panic.
#[derive(Debug)]
pub struct NodeLoop {
    /// Before the engine, whose thread may need the rest of a step to end: nobody waits that long for a loop that is gone.
    pub(crate) streams: Streams,
    pub(crate) parts: LoopParts,
    pub(crate) kv: Arc<KvMemory>,
    /// Requests that wait for a transfer.
    pub(crate) transfers: BTreeMap<TransferId, AttemptKey>,
    /// Transfers without a commit whose client has gone, until they have ended.
    pub(crate) cancelled: BTreeSet<TransferId>,
    /// Pushes whose request is gone, until they say that they have ended. Each was told to.
    pub(crate) ending: BTreeMap<HandoffSerial, (AttemptKey, Handoff)>,
    /// Prompt tokens of the step that the engine runs.
    running: Option<u32>,
    /// Buffers for the next step.
    spare: Step,
    /// The step whose tokens are being told.
    pub(crate) step: Option<(Time, StepNote)>,
    pub(crate) drain_until: Option<Time>,
}

impl NodeLoop {
    pub fn new(parts: LoopParts) -> Self {
        // Before the first tick too: to whoever scrapes, a missing series is not zero blocks.
        let status = parts.scheduler.status(NodeState::Ready);
        parts.metrics.status(&status, parts.scheduler.stages());
        if let Some(memory) = parts.engine.device_memory() {
            parts.metrics.device_memory(memory);
        }
        Self {
            streams: Streams::default(),
            kv: parts.engine.kv().clone(),
            parts,
            transfers: BTreeMap::new(),
            cancelled: BTreeSet::new(),
            ending: BTreeMap::new(),
            running: None,
            spare: Step::default(),
            step: None,
            drain_until: None,
        }
    }

    /// Runs until a drain is over, or the engine is gone.
    pub fn run(mut self) {
        // It is dropped before the loop's fields, also after a panic, so before anybody waits for the engine.
        let _leaves = Leaves {
            inbox: self.parts.inbox.clone(),
            status: self.parts.status.clone(),
        };
        let mut next_tick = Clock::now() + TICK;
        while !self.is_over() {
            let arrivals = self.select(next_tick);
            if arrivals.is_engine_gone {
                tracing::error!("the engine's thread has ended; the node ends");
                break;
            }
            self.apply(arrivals);
            self.note_progress();
            let now = Clock::now();
            if now >= next_tick || self.parts.scheduler.next_timer().is_some_and(|timer| timer <= now) {
                self.tick(now);
                next_tick = now + TICK;
            }
            self.give_up_when_late(now);
            self.cancel_closed();
            self.deliver();
            self.begin_step();
            self.publish();
        }
        for new in self.parts.inbox.close() {
            self.refuse_leaving(&new);
        }
    }

    /// Waits until something has come or is due, and takes what has come.
    fn select(&mut self, next_tick: Time) -> Arrivals {
        let now = Clock::now();
        let drain = self.drain_until.into_iter();
        let drain = drain.flat_map(|until| [until, until + CLOSE_TIME_LIMIT]);
        let timers = self.parts.scheduler.next_timer().into_iter();
        let wake_at = timers.chain(drain.filter(|at| *at > now)).fold(next_tick, Time::min);
        self.parts.inbox.take(wake_at)
    }

    fn apply(&mut self, arrivals: Arrivals) {
        let now = Clock::now();
        if let Some(until) = arrivals.drain_until {
            self.drain_until = Some(until);
        }
        self.pause_grants();
        if let Some(done) = arrivals.step {
            self.end_step(done);
        }
        for new in arrivals.requests {
            self.admit(now, new);
        }
        for transfer in arrivals.began {
            if let Some(key) = self.transfers.get(&transfer) {
                self.parts.scheduler.prefill_began(now, *key);
            }
        }
        for transfer in arrivals.progressed {
            if let Some(key) = self.transfers.get(&transfer) {
                self.parts.scheduler.frame_arrived(now, *key);
            }
        }
        for job in arrivals.commits {
            self.commit(now, job);
        }
        for (transfer, transport, end) in arrivals.receive_ends {
            self.receive_ended(transfer, transport, &end);
        }
        for ended in arrivals.push_ends {
            self.push_ended(ended);
        }
        for answer in arrivals.questions {
            // Whoever asked may have left.
            let _ = answer.send(self.parts.scheduler.block_report(now));
        }
        for answer in arrivals.cache_resets {
            let _ = answer.send(self.parts.scheduler.reset_prefix_cache());
        }
    }

    fn pause_grants(&mut self) {
        let outgoing = self.parts.outgoing.as_ref();
        let is_queue_full = outgoing.is_some_and(|outgoing| outgoing.handoffs.queue.is_full());
        let is_paused = is_queue_full || self.drain_until.is_some();
        self.parts.scheduler.pause_grants(is_paused);
    }

    /// Before the timers are looked at: a push whose blocks leave is not silent.
    fn note_progress(&mut self) {
        for (key, stream) in self.streams.iter() {
            if let Some(at) = stream.prefill.handoff.as_ref().and_then(Handoff::progressed_at) {
                self.parts.scheduler.push_progressed(at, *key);
            }
        }
    }

    /// A push that ended without a word, as one whose task has panicked, is forgotten here. The scheduler then asks for the end
    /// of a push that nobody carries any more, and has its answer.
    fn tick(&mut self, now: Time) {
        self.ending.retain(|_, (_, handoff)| !handoff.is_over());
        self.parts.scheduler.tick(now);
    }

    fn give_up_when_late(&mut self, now: Time) {
        if self.drain_until.is_some_and(|until| until <= now) {
            let keys: Vec<AttemptKey> = self.parts.scheduler.keys().collect();
            for key in keys {
                self.parts.scheduler.fail(key, NodeFailure::Draining);
            }
        }
    }

    /// Submits the next step when none runs and something can be computed.
    fn begin_step(&mut self) {
        if self.running.is_some() {
            return;
        }
        let began = Clock::now();
        self.parts.scheduler.next_step(began);
        let Some(plan) = self.parts.scheduler.running_step() else {
            return;
        };
        let mut step = std::mem::take(&mut self.spare);
        step.fill(&plan);
        self.running = Some(plan.prompt_token_count());
        for row in step.rows() {
            if let (Some(outgoing), Some(stream)) = (&self.parts.outgoing, self.streams.get_mut(row.key)) {
                stream.begin_prefill(began, row.key, &outgoing.handoffs);
            }
        }
        self.parts.engine.submit(step);
    }

    /// Tells what a step has brought.
    fn end_step(&mut self, done: StepDone) {
        let StepDone { ended, took, completed } = done;
        let mut step = completed.step;
        let tokens = step.rows().iter().map(StepRow::token_count).sum();
        self.parts.metrics.step(tokens, step.rows().len(), took);
        match completed.result {
            Ok(output) => self.step_done(ended, &step, output),
            Err(error) => {
                tracing::error!(%error, "a model step failed");
                self.parts.scheduler.step_failed(&error.to_string());
            }
        }
        // Until the next step, which may be long after, it would hold requests that have ended.
        step.clear();
        self.spare = step;
        let note = StepNote {
            took,
            prompt_tokens: self.running.take().unwrap_or(0),
            preemptions: 0,
        };
        self.step = Some((ended, note));
        self.deliver();
        self.step = None;
    }

    fn step_done(&mut self, now: Time, step: &Step, mut output: StepOutput) {
        for row in step.rows() {
            if let Some(stream) = self.streams.get_mut(row.key).filter(|stream| stream.is_prefill()) {
                stream.prefill.chunks.push((now, row.token_count()));
            }
        }
        for key in output.unscored {
            if let Some(stream) = self.streams.get_mut(key) {
                stream.broken = Some(NodeFailure::NotFinite);
            }
        }
        for chunk in output.prompt_logprobs {
            if let Some(stream) = self.streams.get_mut(chunk.key)
                && let Err(failure) = stream.tell_prompt_logprobs(chunk.first_position, &chunk.tokens)
            {
                stream.broken.get_or_insert(failure);
            }
        }
        self.parts.scheduler.step_done(now, &mut output.sampled);
        for (key, failure) in self.streams.broken() {
            self.parts.scheduler.fail(key, failure);
        }
    }

    fn is_over(&self) -> bool {
        let Some(until) = self.drain_until else {
            return false;
        };
        let blocks = self.parts.scheduler.pool().counts();
        let is_empty = self.parts.scheduler.keys().next().is_none();
        is_empty && self.running.is_none() && (blocks.quarantined == 0 || Clock::now() >= until + CLOSE_TIME_LIMIT)
    }

    fn publish(&mut self) {
        let parts = &mut self.parts;
        if let Some(changes) = parts.scheduler.take_prefix_changes() {
            parts.prefixes.send_modify(|log| log.apply(changes));
        }
        let mut status = parts.scheduler.status(match self.drain_until {
            Some(_) => NodeState::Draining,
            None => NodeState::Ready,
        });
        if let Some(outgoing) = &parts.outgoing {
            status.pairs = outgoing.pairs.borrow().clone();
            parts.metrics.push_queue(outgoing.handoffs.queue.waiting_blocks());
        }
        parts.metrics.status(&status, parts.scheduler.stages());
        parts.metrics.drafts(parts.scheduler.draft_counts());
        parts.metrics.evictions(parts.scheduler.evictions());
        parts.status.send_if_modified(|published| {
            let is_changed = *published != status;
            if is_changed {
                *published = status;
            }
            is_changed
        });
    }
}

#[cfg(test)]
#[path = "node_loop_tests.rs"]
pub(crate) mod tests;
