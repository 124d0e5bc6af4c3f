//! The step thread: takes what arrived, applies it to the scheduler, runs one engine step, hands results out.
//!
//! It owns the engine, the scheduler and every response stream, and waits for nobody: results go into bounded channels,
//! and a reader that lets one run full loses its request.

use std::sync::Arc;
use std::time::Duration;

use engine::StepRunner;
use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::{ReceiveEnd, Receiver, RefuseReason};
use proto::messages::{DecodeEvent as WireEvent, Opened as WireOpened, PromptLogprobs, Refused, RefusedReason};
use service_runtime::clock::Clock;
use service_runtime::event_log::{self, Step};
use service_runtime::failpoints::{self, FaultPoint};
use serving_core::ids::{NodeId, TransferId};
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::kv::reservation::Reservation;
use serving_core::node::{NodeState, NodeStatus, Ticket};
use serving_core::request::AttemptKey;
use serving_core::scheduler::{Admission, Admitted, Commit, CommitError, NodeFailure, Scheduler, Work};
use serving_core::time::Time;
use tokio::sync::watch;

use crate::delivery::{Delivery, NewStream};
use crate::handoff::HandoffDesk;
use crate::inbox::{Arrivals, CommitJob, Inbox, OpenJob};
use crate::metrics::Metrics;

/// The reaper's period (PROTOCOL, timers): independent of traffic.
const TICK: Duration = Duration::from_secs(1);
/// After the drain's grace everything has been told to end; transfers that still write get this long to stop.
const CLOSE_TIME_LIMIT: Duration = Duration::from_secs(1);

/// What the loop shares with the rest of the node.
#[derive(Clone, Debug)]
pub struct LoopParts {
    pub node: NodeId,
    /// host:port of this node's handoff service, for tickets.
    pub kv_address: String,
    pub reservation: Duration,
    pub inbox: Arc<Inbox>,
    pub desk: Arc<HandoffDesk>,
    pub receiver: Arc<Receiver>,
    pub metrics: Metrics,
    pub status: watch::Sender<NodeStatus>,
    pub prefixes: watch::Sender<PrefixLog>,
}

#[derive(Debug)]
pub struct StepLoop {
    parts: LoopParts,
    runner: StepRunner,
    delivery: Delivery,
    drain_until: Option<Time>,
}

impl StepLoop {
    pub fn new(parts: LoopParts, runner: StepRunner, scheduler: Scheduler) -> Self {
        // Before the first tick too: to whoever scrapes, a missing series is not zero blocks.
        parts
            .metrics
            .status(&scheduler.status(NodeState::Ready), scheduler.stages());
        let kv = runner.engine().kv().clone();
        let receiver = (parts.desk.clone(), parts.receiver.clone());
        let delivery = Delivery::new(scheduler, (kv, parts.metrics.clone()), receiver);
        Self {
            parts,
            runner,
            delivery,
            drain_until: None,
        }
    }

    /// Runs until a drain is over.
    pub fn run(mut self) {
        let mut next_tick = Clock::now() + TICK;
        let mut is_idle = true;
        while !self.is_over() {
            let timers = [self.delivery.scheduler.next_timer(), self.drain_until];
            let wake_at = timers.into_iter().flatten().fold(next_tick, Time::min);
            let arrivals = self.parts.inbox.take(is_idle.then_some(wake_at));
            self.apply(arrivals);
            let now = Clock::now();
            if now >= next_tick || self.delivery.scheduler.next_timer().is_some_and(|timer| timer <= now) {
                self.delivery.scheduler.tick(now);
                next_tick = now + TICK;
            }
            self.give_up_when_late(now);
            self.delivery.cancel_closed();
            self.delivery.deliver();
            is_idle = !self.step();
        }
        self.parts.inbox.close();
    }

    /// One engine step, when there is something to run. What is published meanwhile counts the step's prompts as running.
    fn step(&mut self) -> bool {
        self.delivery.scheduler.next_step(Clock::now());
        self.publish();
        let Some(plan) = self.delivery.scheduler.running_step() else {
            return false;
        };
        let (tokens, sequences) = (plan.token_count(), plan.rows().len());
        let (began, prompt_tokens) = (Clock::now(), plan.prompt_token_count());
        let ran = self.runner.run(&plan);
        failpoints::hit(FaultPoint::MidDecode);
        let now = Clock::now();
        self.parts.metrics.step(tokens, sequences, now.since(began));
        match ran {
            Ok(()) => {
                let output = self.runner.output();
                for chunk in output.prompt_logprobs.drain(..) {
                    let scored = PromptLogprobs {
                        first_position: chunk.first_position,
                        tokens: chunk.tokens,
                    };
                    self.delivery.send(chunk.key, WireEvent::PromptLogprobs(scored));
                }
                self.delivery.scheduler.step_done(now, &mut output.sampled);
                for key in output.unscored.drain(..) {
                    self.delivery.scheduler.fail(key, NodeFailure::Sampling);
                }
            }
            Err(error) => {
                tracing::error!(%error, "a model step failed");
                self.delivery.scheduler.step_failed(&error.to_string());
            }
        }
        self.delivery.deliver_step((began, now), prompt_tokens);
        true
    }

    fn apply(&mut self, arrivals: Arrivals) {
        let now = Clock::now();
        if let Some(until) = arrivals.drain_until {
            self.drain_until = Some(until);
            self.delivery.scheduler.pause_grants(true);
        }
        for job in arrivals.opens {
            self.open(now, job);
        }
        for transfer in arrivals.began {
            if let Some(key) = self.delivery.key_of(transfer) {
                self.delivery.scheduler.prefill_began(now, key);
            }
        }
        for transfer in arrivals.progressed {
            if let Some(key) = self.delivery.key_of(transfer) {
                self.delivery.scheduler.frame_arrived(now, key);
            }
        }
        for job in arrivals.commits {
            self.commit(now, job);
        }
        for (transfer, transport, end) in arrivals.ended {
            self.transfer_ended(transfer, transport, &end);
        }
        for answer in arrivals.questions {
            // Whoever asked may have left.
            let _ = answer.send(self.delivery.scheduler.block_report(now));
        }
    }

    fn open(&mut self, now: Time, job: OpenJob) {
        let refusal = |reason, detail: &str| Refused {
            reason,
            detail: detail.to_owned(),
        };
        if job.open.node_epoch != self.parts.node.epoch {
            let stale = refusal(
                RefusedReason::StaleEpoch,
                "this node has restarted since; read its new registration",
            );
            return refuse(&job, stale);
        }
        if self.drain_until.is_some() {
            return refuse(&job, refusal(RefusedReason::Draining, "this node is leaving"));
        }
        let work = match (job.open.local_prefill, &job.open.prefill_node) {
            (Some(_), _) => Work::Whole,
            (None, Some(_)) => Work::Decode(TransferId(rand::random())),
            (None, None) => return refuse(&job, refusal(RefusedReason::Invalid, "nobody computes the prompt")),
        };
        let request = Arc::new(job.open.request.clone());
        let admission = Admission {
            request: request.clone(),
            attempt: job.open.attempt,
            permits: u64::from(job.open.permit_blocks),
            coordinator: job.open.coordinator_epoch,
            work,
        };
        let key = AttemptKey {
            request: request.id,
            attempt: admission.attempt,
        };
        match self.delivery.scheduler.admit(now, admission) {
            Err(refusal) => {
                let refused = Refused::from(&refusal);
                event_log::record(key, || Step::Refused {
                    reason: refused.reason.name().to_owned(),
                });
                refuse(&job, refused);
            }
            Ok(opened) => {
                let ticket = self.mint(key, work, &job, &opened);
                event_log::record(key, || Step::Opened {
                    transfer: ticket.as_ref().map(|ticket| ticket.transfer.to_string()),
                });
                if let Some(reason) = job.open.local_prefill {
                    self.parts.metrics.local_prefill(reason);
                }
                let reply = WireOpened {
                    prefix_blocks: opened.prefix_blocks,
                    cached_tokens: opened.cached_tokens,
                    ticket,
                    at: job.received_at,
                };
                failpoints::hit(FaultPoint::DecodeReserved);
                let new = NewStream {
                    request,
                    job,
                    opened_at: now,
                };
                self.delivery.opened(key, new, reply);
            }
        }
    }

    /// The ticket of a handoff, and the offer that it is good for.
    fn mint(&self, key: AttemptKey, work: Work, job: &OpenJob, opened: &Admitted) -> Option<Ticket> {
        let (Work::Decode(transfer), Some(sender)) = (work, job.open.prefill_node.clone()) else {
            return None;
        };
        let geometry = *self.runner.engine().kv().geometry();
        self.parts.desk.offer(Reservation {
            transfer,
            key,
            sender,
            blocks: opened.ticket_blocks.clone(),
            layer_count: geometry.layer_count,
            layer_bytes: geometry.layer_bytes(),
        });
        Some(Ticket {
            transfer,
            decode_node: self.parts.node.clone(),
            decode_address: self.parts.kv_address.clone(),
            total_bytes: opened.ticket_blocks.len() as u64 * geometry.block_bytes() as u64,
            blocks: opened.ticket_blocks.clone(),
            prefix_blocks: opened.prefix_blocks,
            expires_in: self.parts.reservation,
        })
    }

    fn commit(&mut self, now: Time, job: CommitJob) {
        let CommitJob { arrived, answer } = job;
        let commit = Commit {
            key: arrived.key,
            transfer: arrived.transfer,
            last_frame_at: Clock::time_of(arrived.last_frame),
            first_tokens: arrived.first_tokens.clone(),
        };
        let committed = match self.delivery.scheduler.commit(now, commit) {
            Ok(()) => {
                let first = arrived.first_frame.unwrap_or(arrived.last_frame);
                let moving = arrived.last_frame.saturating_duration_since(first);
                let metrics = &self.parts.metrics;
                metrics.handoff_committed(arrived.transport, moving, arrived.kv_bytes);
                self.delivery.committed(&arrived);
                failpoints::hit(FaultPoint::Committed);
                Ok(())
            }
            Err(error) => {
                let label = match error {
                    CommitError::NotHere => "request_gone",
                    CommitError::NotReceiving => "not_receiving",
                    CommitError::Invalid(_) => "bad_first_tokens",
                };
                self.parts.metrics.handoff_failed(arrived.transport, label);
                let failure = NodeFailure::Transfer {
                    reason: label.to_owned(),
                    detail: error.to_string(),
                };
                self.delivery.scheduler.fail(arrived.key, failure);
                Err(RefuseReason::NotCommitted {
                    label,
                    detail: error.to_string(),
                })
            }
        };
        // The receiver's task may be gone with its pair: the commit stands all the same.
        let _ = answer.send(committed);
        self.delivery.deliver();
    }

    fn transfer_ended(&mut self, transfer: TransferId, transport: TransportKind, end: &ReceiveEnd) {
        event_log::record_transfer(transfer, |transfer| Step::TransferEnded {
            transfer,
            end: end.name().to_owned(),
        });
        if !matches!(end, ReceiveEnd::AbortedHere(_)) {
            self.parts.metrics.handoff_failed(transport, end.name());
        }
        match (end, self.delivery.key_of(transfer)) {
            // Not a failure: the request ended at its first token, or the prefill leg tells the coordinator why it
            // stopped. The coordinator closes this leg too; until then, or the reservation's end, the blocks wait.
            (ReceiveEnd::AbortedBySender(_), _) | (ReceiveEnd::AbortedHere(_), _) | (_, None) => {}
            (end, Some(key)) => {
                let (reason, detail) = (end.name().to_owned(), end.to_string());
                self.delivery
                    .scheduler
                    .fail(key, NodeFailure::Transfer { reason, detail });
            }
        }
        self.delivery.deliver();
        // Whatever was in quarantine for it: nothing writes any more.
        self.delivery.scheduler.transfer_ended(transfer);
    }

    fn give_up_when_late(&mut self, now: Time) {
        if self.drain_until.is_some_and(|until| until <= now) {
            let keys: Vec<AttemptKey> = self.delivery.scheduler.keys().collect();
            for key in keys {
                self.delivery.scheduler.fail(key, NodeFailure::Draining);
            }
        }
    }

    fn is_over(&self) -> bool {
        let Some(until) = self.drain_until else {
            return false;
        };
        let blocks = self.delivery.scheduler.pool().counts();
        let is_empty = self.delivery.scheduler.keys().next().is_none();
        is_empty && (blocks.quarantined == 0 || Clock::now() >= until + CLOSE_TIME_LIMIT)
    }

    fn publish(&mut self) {
        if let Some(changes) = self.delivery.scheduler.take_prefix_changes() {
            self.parts.prefixes.send_modify(|log| log.apply(changes));
        }
        let state = if self.drain_until.is_some() {
            NodeState::Draining
        } else {
            NodeState::Ready
        };
        let status = self.delivery.scheduler.status(state);
        self.parts.metrics.status(&status, self.delivery.scheduler.stages());
        self.parts.status.send_if_modified(|current| {
            let changes = *current != status;
            if changes {
                *current = status;
            }
            changes
        });
    }
}

fn refuse(job: &OpenJob, refused: Refused) {
    // A fresh channel has room; a client that has gone needs no answer.
    let _ = job.events.try_send(WireEvent::Refused(refused));
}
