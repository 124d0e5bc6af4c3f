//! The node's one loop, on a thread of its own: take commands, let the scheduler decide, carry out, run one step.
//!
//! It never waits for a push or a client: results go through bounded queues with `try_send`, and a full one fails that
//! request alone. It sleeps only when nothing can be computed, at most a second, so that deadlines are kept on an idle
//! node as on a full one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use engine::{KvMemory, StepRunner};
use kv_transfer::choice::TransportKind;
use kv_transfer::transport::AbortReason;
use proto::messages::PrefillEvent as Told;
use proto::messages::{Failed, PromptLogprobs, Refused, RefusedReason, TokenBatch};
use service_runtime::clock::Clock;
use service_runtime::event_log::{self, Step};
use service_runtime::failpoints::{self, FaultPoint};
use service_runtime::telemetry;
use serving_core::ids::NodeId;
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{NodeState, NodeStatus, PairHealth};
use serving_core::request::{AttemptKey, TokenLogprobs};
use serving_core::scheduler::{
    Admission, NodeFailure, Outcome, PushEnd, PushPlan, Report, Scheduler, SchedulerEvent, Work,
};
use serving_core::stage::{Stage, StageTimings};
use serving_core::time::Time;
use tokio::sync::{mpsc, watch};

use crate::delivery::{Live, NewLive};
use crate::handoff::{Handoff, Handoffs, PushReport};
use crate::inbox::{Command, INBOX_MAX, NewPrefill, receive};
use crate::metrics::Metrics;

/// The reaper's period (PROTOCOL, timers): independent of traffic. An idle loop sleeps no longer.
const TICK: Duration = Duration::from_secs(1);
/// Prompt logprobs in one event: 20 alternatives each stay far below the message limit.
const LOGPROBS_PER_EVENT: usize = 256;

/// How an attempt ends here, as metrics count it; a failure has its cause's name.
const HANDED_OVER: &str = "handed_over";
const ENDED_AT_FIRST_TOKEN: &str = "ended_at_first_token";
const CANCELLED: &str = "cancelled";

/// What the loop is made of.
#[derive(Debug)]
pub struct StepLoopParts {
    pub runner: StepRunner,
    pub scheduler: Scheduler,
    pub inbox: mpsc::Receiver<Command>,
    pub handoffs: Handoffs,
    pub status: watch::Sender<NodeStatus>,
    pub prefixes: watch::Sender<PrefixLog>,
    pub pairs: watch::Receiver<Vec<PairHealth>>,
    pub metrics: Metrics,
}

/// Owned by its thread.
#[derive(Debug)]
pub struct StepLoop {
    parts: StepLoopParts,
    kv: Arc<KvMemory>,
    state: NodeState,
    live: BTreeMap<AttemptKey, Live>,
    /// By their legs: handoffs whose request is gone, until they say that they have ended. Each was told to.
    ending: BTreeMap<(AttemptKey, u64), Handoff>,
    is_stopping: bool,
}

impl StepLoop {
    pub fn new(parts: StepLoopParts) -> Self {
        Self {
            kv: parts.runner.engine().kv().clone(),
            parts,
            state: NodeState::Ready,
            live: BTreeMap::new(),
            ending: BTreeMap::new(),
            is_stopping: false,
        }
    }

    /// Runs until [`Command::Stop`], or until every sender is gone.
    pub fn run(mut self) {
        let mut next_tick = Clock::now() + TICK;
        let mut is_idle = true;
        while !self.is_stopping {
            let timers = self.parts.scheduler.next_timer().into_iter();
            let wake_at = timers.fold(next_tick, Time::min);
            self.select(is_idle.then_some(wake_at));
            self.note_progress();
            let now = Clock::now();
            if now >= next_tick || self.parts.scheduler.next_timer().is_some_and(|timer| timer <= now) {
                self.tick(now);
                next_tick = now + TICK;
            }
            self.carry_out();
            is_idle = !self.step();
            self.carry_out();
        }
    }

    /// Before the timers are looked at: a handoff whose blocks leave is not silent.
    fn note_progress(&mut self) {
        for (key, live) in &self.live {
            if let Some(at) = live.handoff.as_ref().and_then(Handoff::progressed_at) {
                self.parts.scheduler.push_progressed(at, *key);
            }
        }
    }

    /// A handoff that ended without a word, as one whose task has panicked, is forgotten here. The scheduler then asks for the end
    /// of a push that nobody carries any more, and has its answer.
    fn tick(&mut self, now: Time) {
        self.ending.retain(|_, handoff| !handoff.is_over());
        self.parts.scheduler.tick(now);
    }

    /// Takes what has come; waits for something, until `wake_at`, only when there is nothing to compute.
    fn select(&mut self, wake_at: Option<Time>) {
        if let Some(wake_at) = wake_at {
            match receive(&mut self.parts.inbox, wake_at.remaining(Clock::now())) {
                Poll::Ready(Some(command)) => self.apply(command),
                Poll::Ready(None) => self.is_stopping = true,
                Poll::Pending => {}
            }
        }
        // Bounded: a flood of commands must not keep steps from running.
        for _ in 0..INBOX_MAX {
            let Ok(command) = self.parts.inbox.try_recv() else {
                break;
            };
            self.apply(command);
        }
        let is_full = self.parts.handoffs.queue.is_full();
        self.parts
            .scheduler
            .pause_grants(is_full || self.state == NodeState::Draining);
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Prefill(new) => self.accept(*new),
            Command::Cancel { key, leg } => self.cancel(key, leg),
            Command::PushEnded { key, leg, end, report } => self.push_ended((key, leg), end, report),
            Command::Wake => {}
            Command::Report(answer) => {
                // Whoever asked may have left.
                let _ = answer.send(self.parts.scheduler.block_report(Clock::now()));
            }
            Command::Drain => self.state = NodeState::Draining,
            Command::GiveUp => {
                for key in self.live.keys().copied().collect::<Vec<_>>() {
                    self.parts.scheduler.fail(key, NodeFailure::Draining);
                }
            }
            Command::Stop => self.is_stopping = true,
        }
        self.carry_out();
    }

    fn accept(&mut self, new: NewPrefill) {
        let now = Clock::now();
        let NewPrefill {
            message,
            leg,
            events,
            received_at,
            span,
        } = new;
        if self.state == NodeState::Draining {
            let detail = "the node is leaving".to_owned();
            let reason = RefusedReason::Draining;
            return self.refuse(&events, Refused { reason, detail });
        }
        let key = AttemptKey {
            request: message.request.id,
            attempt: message.attempt,
        };
        let is_streamed = message
            .ticket
            .as_ref()
            .is_some_and(|ticket| self.streams_to(&ticket.decode_node));
        let request = Arc::new(message.request);
        let push = message.ticket.as_ref().map(|ticket| PushPlan {
            skip_blocks: ticket.prefix_blocks,
            is_streamed,
        });
        let admitted = self.parts.scheduler.admit(
            now,
            Admission {
                request: request.clone(),
                attempt: message.attempt,
                permits: u64::from(message.permit_tokens),
                coordinator: message.coordinator_epoch,
                work: Work::Prefill(push),
            },
        );
        let cached_tokens = match admitted {
            Ok(admitted) => admitted.cached_tokens,
            Err(refusal) => {
                let refused = Refused::from(&refusal);
                event_log::record(key, || Step::Refused {
                    reason: refused.reason.name().to_owned(),
                });
                return self.refuse(&events, refused);
            }
        };
        event_log::record(key, || Step::Accepted);
        let new = NewLive {
            leg,
            events,
            request,
            ticket: message.ticket,
            received_at,
            span,
        };
        self.live.insert(key, Live::new(now, new));
        let at = received_at;
        self.tell(key, Told::Accepted { cached_tokens, at });
        failpoints::hit(FaultPoint::PrefillScheduled);
    }

    /// As far as the pair is settled; the first prompts of a new pair are taken to go through shared memory.
    fn streams_to(&self, decode_node: &NodeId) -> bool {
        let pairs = self.parts.pairs.borrow();
        let pair = pairs.iter().find(|pair| pair.decode_node == *decode_node);
        pair.is_some_and(|pair| pair.transport.as_deref() == Some(TransportKind::Grpc.name()))
    }

    fn refuse(&self, events: &mpsc::Sender<Told>, refused: Refused) {
        tracing::debug!(
            reason = refused.reason.name(),
            detail = refused.detail,
            "refused a prefill"
        );
        self.parts.metrics.request("none", refused.reason.name());
        let _ = events.try_send(Told::Refused(refused));
    }

    fn cancel(&mut self, key: AttemptKey, leg: u64) {
        let Some(live) = self.live.get_mut(&key).filter(|live| live.leg == leg) else {
            return;
        };
        live.abort = AbortReason::Cancelled;
        self.parts.scheduler.cancel(key);
        self.carry_out();
        self.end(key, CANCELLED);
    }

    fn push_ended(&mut self, (key, leg): (AttemptKey, u64), end: PushEnd, report: Option<PushReport>) {
        event_log::record(key, || Step::PushEnded {
            end: end.name().to_owned(),
        });
        self.ending.remove(&(key, leg));
        match self.live.get_mut(&key) {
            // The end of an earlier life of the key: its blocks went back when it was told to stop.
            Some(live) if live.leg != leg => return,
            Some(live) => {
                live.report = report;
                live.handoff = None;
            }
            None => {}
        }
        self.parts.scheduler.push_ended(key, end);
    }

    /// Runs one step; false when nothing waits. What is published meanwhile counts the step's prompts as running.
    fn step(&mut self) -> bool {
        let started = Clock::now();
        self.parts.scheduler.next_step(started);
        self.publish();
        let Some(plan) = self.parts.scheduler.running_step() else {
            return false;
        };
        for row in plan.rows() {
            if let Some(live) = self.live.get_mut(&row.key) {
                live.begin(started, row.key, &self.parts.handoffs);
            }
        }
        let rows: Vec<(AttemptKey, u32)> = plan.rows().iter().map(|row| (row.key, row.token_count)).collect();
        let tokens = plan.token_count();
        failpoints::hit(FaultPoint::MidChunk);
        let ran = self.parts.runner.run(&plan);
        let ended = Clock::now();
        self.parts.metrics.step(tokens, rows.len(), ended.since(started));
        match ran {
            Ok(()) => self.step_done(ended, rows),
            Err(error) => {
                tracing::error!(%error, "a step failed");
                self.parts.scheduler.step_failed(&error.to_string());
            }
        }
        true
    }

    fn step_done(&mut self, now: Time, rows: Vec<(AttemptKey, u32)>) {
        for (key, tokens) in rows {
            if let Some(live) = self.live.get_mut(&key) {
                live.chunks.push((now, tokens));
            }
        }
        let output = self.parts.runner.output();
        for key in output.unscored.drain(..) {
            if let Some(live) = self.live.get_mut(&key) {
                live.is_unscored = true;
            }
        }
        let scored = std::mem::take(&mut output.prompt_logprobs);
        self.parts.scheduler.step_done(now, &mut output.sampled);
        for chunk in scored {
            self.tell_prompt_logprobs(chunk.key, chunk.first_position, chunk.tokens);
        }
        let unscored: Vec<AttemptKey> = self
            .live
            .iter()
            .filter(|(_, live)| live.is_unscored)
            .map(|(key, _)| *key)
            .collect();
        for key in unscored {
            self.parts.scheduler.fail(key, NodeFailure::Sampling);
        }
    }

    /// Does what the scheduler has decided.
    fn carry_out(&mut self) {
        while let Some(event) = self.parts.scheduler.take_event() {
            match event {
                SchedulerEvent::BlocksReady { key, blocks } => {
                    if let Some(handoff) = self.live.get(&key).and_then(|live| live.handoff.as_ref()) {
                        handoff.push(blocks);
                    }
                }
                SchedulerEvent::HashPrompt { key, blocks } => {
                    if let Some(live) = self.live.get_mut(&key) {
                        live.hash_prompt(&self.kv, &blocks);
                    }
                }
                SchedulerEvent::Token { key, event } => {
                    if let Some(live) = self.live.get_mut(&key) {
                        live.first_tokens.push(event);
                    }
                }
                SchedulerEvent::Held { key, timings } => self.first_tokens(key, timings, Outcome::HandedOver),
                SchedulerEvent::AbortPush { key } => self.abort_push(key),
                SchedulerEvent::Finished { key, report } => {
                    if report.outcome == Outcome::Complete {
                        self.first_tokens(key, report.timings.clone(), Outcome::Complete);
                    }
                    self.finished(key, *report);
                }
                SchedulerEvent::Failed { key, failure } => self.failed(key, &failure),
                SchedulerEvent::CopyBlock { .. }
                | SchedulerEvent::Committed { .. }
                | SchedulerEvent::CloseTransfer { .. } => {
                    tracing::error!(
                        ?event,
                        "the scheduler of a prefill node wants what only decode nodes do"
                    );
                }
            }
        }
        self.parts
            .metrics
            .push_queue(self.parts.handoffs.queue.waiting_blocks());
    }

    /// Asked for when a request ends before its push, and with every tick until the push has ended.
    fn abort_push(&mut self, key: AttemptKey) {
        if let Some(live) = self.live.get(&key)
            && let Some(handoff) = &live.handoff
        {
            return handoff.abort(live.abort);
        }
        let was_told = self.ending.keys().any(|(ending, _)| *ending == key);
        if !was_told {
            self.parts.scheduler.push_ended(key, PushEnd::Aborted);
        }
    }

    /// The first tokens go to the coordinator at once, and with the last frame to the decode node.
    fn first_tokens(&mut self, key: AttemptKey, mut timings: StageTimings, outcome: Outcome) {
        let Some(live) = self.live.get_mut(&key) else {
            return;
        };
        let (tokens, continues) = (std::mem::take(&mut live.first_tokens), outcome == Outcome::HandedOver);
        timings.lengthen(Stage::PrefillQueue, live.inbox_wait());
        live.forward_ended = Some(Instant::now());
        // By the stages' own account, so that they and the way back leave nothing between them.
        let stage = |stage| timings.get(stage).unwrap_or_default();
        let sampled_at = live.received_at + (stage(Stage::PrefillQueue) + stage(Stage::PrefillForward));
        failpoints::hit(FaultPoint::PrefillDone);
        event_log::record(key, || Step::FirstTokens { continues });
        if live.is_unscored {
            return;
        }
        if continues {
            if let Some(handoff) = &live.handoff {
                handoff.last(tokens.iter().filter(|token| token.finish.is_none()).cloned().collect());
            }
        } else {
            live.abort = AbortReason::EndedAtFirstToken;
        }
        self.parts.metrics.stages(&timings);
        // `max_tokens` 0 (echo) draws nothing and has no first token.
        if !tokens.is_empty() {
            self.tell(key, Told::FirstToken { timings, sampled_at });
            self.tell(key, Told::Tokens(TokenBatch::handed_over(tokens, sampled_at)));
        }
    }

    fn finished(&mut self, key: AttemptKey, report: Report) {
        let (outcome, mut timings) = (report.outcome, report.timings);
        let Some(live) = self.live.get_mut(&key) else {
            return;
        };
        if live.is_unscored {
            return self.failed(key, &NodeFailure::Sampling);
        }
        timings.lengthen(Stage::PrefillQueue, live.inbox_wait());
        if let Some(tail) = live.transfer_tail() {
            self.parts.metrics.stages(&tail);
            timings.extend(&tail);
        }
        let finished = live.finished(outcome, report.cached_tokens, timings);
        let _ = live.events.try_send(Told::Finished(finished));
        self.end(
            key,
            match outcome {
                Outcome::HandedOver => HANDED_OVER,
                Outcome::Complete => ENDED_AT_FIRST_TOKEN,
            },
        );
    }

    fn failed(&mut self, key: AttemptKey, failure: &NodeFailure) {
        tracing::debug!(request_id = %key.request, %failure, "a prefill failed");
        let Some(live) = self.live.get_mut(&key) else {
            return;
        };
        live.abort = match failure {
            NodeFailure::HoldExpired { .. } => AbortReason::HoldExpired,
            _ => AbortReason::PrefillFailed,
        };
        telemetry::set_failed(&live.span, failure.name(), failure.to_string());
        let _ = live.events.try_send(Told::Failed(Failed::from(failure)));
        self.end(key, failure.name());
    }

    /// The last of a request: its spans, its count, and an abort of the handoff unless it is over.
    fn end(&mut self, key: AttemptKey, outcome: &'static str) {
        let Some(mut live) = self.live.remove(&key) else {
            return;
        };
        event_log::record(key, || match outcome {
            HANDED_OVER | ENDED_AT_FIRST_TOKEN => Step::Finished,
            CANCELLED => Step::Cancelled,
            cause => Step::Failed {
                cause: cause.to_owned(),
            },
        });
        if let Some(handoff) = live.handoff.take() {
            handoff.abort(live.abort);
            self.ending.insert((key, live.leg), handoff);
        }
        live.record_spans();
        self.parts.metrics.request(live.transport(), outcome);
    }

    /// A reader that is too far behind fails its own request.
    fn tell(&mut self, key: AttemptKey, event: Told) {
        let told = self.live.get(&key).map(|live| live.tell(event));
        if let Some(Err(failure)) = told {
            self.parts.scheduler.fail(key, failure);
        }
    }

    fn tell_prompt_logprobs(&mut self, key: AttemptKey, first_position: u32, tokens: Vec<TokenLogprobs>) {
        let mut first_position = first_position;
        for part in tokens.chunks(LOGPROBS_PER_EVENT) {
            let tokens = part.to_vec();
            let next = first_position + tokens.len() as u32;
            self.tell(key, Told::PromptLogprobs(PromptLogprobs { first_position, tokens }));
            first_position = next;
        }
    }

    fn publish(&mut self) {
        if let Some(changes) = self.parts.scheduler.take_prefix_changes() {
            self.parts.prefixes.send_modify(|log| log.apply(changes));
        }
        let mut status = self.parts.scheduler.status(self.state);
        status.pairs = self.parts.pairs.borrow().clone();
        self.parts.metrics.status(&status, self.parts.scheduler.stages());
        self.parts.status.send_if_modified(|published| {
            let is_changed = *published != status;
            if is_changed {
                *published = status;
            }
            is_changed
        });
    }
}

#[cfg(test)]
#[path = "step_loop_tests.rs"]
mod tests;
