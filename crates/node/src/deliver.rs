//! Carries out what the scheduler has decided: tokens and ends to response streams, pushes, copies, hashes, closed transfers.

use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::{ReceiveEnd, TransferRefusal};
use kv_transfer::transport::AbortReason;
use proto::messages::{DecodeEvent, DecodeFinished, PrefillEvent, StepNote, TokenBatch};
use service_runtime::clock::Clock;
use service_runtime::event_log::{self, Step};
use service_runtime::failpoints::{self, FaultPoint};
use serving_core::ids::TransferId;
use serving_core::request::AttemptKey;
use serving_core::scheduler::{Commit, CommitError, NodeFailure, Outcome, PushBlock, PushEnd, Report, SchedulerEvent};
use serving_core::stage::{Stage, StageTimings};
use serving_core::time::Time;

use crate::handoff_out::{Handoffs, NewHandoff};
use crate::inbox::{CommitJob, PushEnded};
use crate::node_loop::NodeLoop;
use crate::request::{LegRequest, NodeEvent, SharedEvent};
use crate::streams::{Stream, sampled_at};

/// How an attempt ends here.
#[derive(Clone, Copy, Debug)]
enum End {
    Finished(Outcome),
    Cancelled,
    Failed(&'static str),
}

impl End {
    /// As metrics count it; a failure has its cause's name.
    fn name(self) -> &'static str {
        match self {
            End::Finished(Outcome::HandedOver) => "handed_over",
            End::Finished(Outcome::Complete) => "ended_at_first_token",
            End::Cancelled => "cancelled",
            End::Failed(cause) => cause,
        }
    }

    fn log(self, key: AttemptKey) {
        event_log::record(key, || match self {
            End::Finished(_) => Step::Finished,
            End::Cancelled => Step::Cancelled,
            End::Failed(cause) => Step::Failed {
                cause: cause.to_owned(),
            },
        });
    }
}

impl Stream {
    pub fn is_prefill(&self) -> bool {
        matches!(self.leg, LegRequest::Prefill(_))
    }

    /// First chunk planned: the prefill has begun, and the decode node hears of it.
    pub fn begin_prefill(&mut self, now: Time, key: AttemptKey, handoffs: &Handoffs) {
        if let LegRequest::Prefill(ticket) = &self.leg
            && self.prefill.begins(now)
            && let Some(ticket) = ticket
        {
            self.prefill.handoff = Some(handoffs.start(NewHandoff {
                key,
                ticket: ticket.clone(),
                cached_tokens: self.prefill.cached_tokens,
                trace: self.trace.clone(),
            }));
        }
    }
}

impl NodeLoop {
    /// Carries out everything the scheduler has decided.
    pub(crate) fn deliver(&mut self) {
        loop {
            while let Some(event) = self.parts.scheduler.take_event() {
                self.carry_out(event);
            }
            for key in self.streams.take_fresh() {
                // The first tokens of a prefill leg wait until all of them are drawn.
                if self.streams.get(key).is_some_and(|stream| !stream.is_prefill()) {
                    self.tell_tokens(key);
                }
            }
            // A reader that was found too slow fails its request, which is one more event.
            match self.parts.scheduler.take_event() {
                Some(event) => self.carry_out(event),
                None => return,
            }
        }
    }

    /// Clients that have gone: their streams' channels are closed.
    pub(crate) fn cancel_closed(&mut self) {
        for key in self.streams.closed() {
            let report = self.parts.scheduler.report_of(key);
            if let Some(stream) = self.streams.get_mut(key) {
                stream.prefill.abort = Some(AbortReason::Cancelled);
                let uncommitted = stream.decode.transfer.filter(|_| stream.decode.transport.is_none());
                self.cancelled.extend(uncommitted);
                if let Some(mut report) = report.filter(|_| !stream.is_prefill()) {
                    stream.decode_ended(&mut report, Clock::now(), &self.parts.metrics);
                }
            }
            self.parts.scheduler.cancel(key);
            self.close(key, End::Cancelled);
        }
    }

    fn carry_out(&mut self, event: SchedulerEvent) {
        match event {
            SchedulerEvent::BlocksReady { key, blocks } => self.push(key, blocks),
            SchedulerEvent::Held { key, timings } => self.first_tokens(key, timings, Outcome::HandedOver),
            SchedulerEvent::AbortPush { key } => self.abort_push(key),
            SchedulerEvent::CopyBlock { key, from, to } => {
                if let Err(error) = self.kv.copy_block(from, to) {
                    let detail = error.to_string();
                    self.parts.scheduler.fail(key, NodeFailure::Engine { detail });
                }
            }
            SchedulerEvent::HashPrompt { key, blocks } => {
                let stream = self.streams.get_mut(key);
                if let Some(Err(failure)) = stream.map(|stream| stream.hash_prompt(&self.kv, &blocks)) {
                    self.parts.scheduler.fail(key, failure);
                }
            }
            SchedulerEvent::Committed { key, transfer, timings } => {
                if let Some(stream) = self.streams.get(key) {
                    event_log::record(key, || Step::Committed {
                        transfer: transfer.to_string(),
                    });
                    let cached_tokens = stream.decode.cached_at_sender;
                    stream.tell_last(NodeEvent::Decode(DecodeEvent::Committed { timings, cached_tokens }));
                }
            }
            SchedulerEvent::Token { key, event } => self.streams.drawn(key, event),
            SchedulerEvent::Finished { key, outcome, report } => self.finished(key, outcome, *report),
            SchedulerEvent::Failed { key, failure, report } => self.failed(key, &failure, *report),
            SchedulerEvent::CloseTransfer { transfer } => self.close_transfer(transfer),
        }
    }

    fn push(&mut self, key: AttemptKey, blocks: Vec<PushBlock>) {
        let stream = self.streams.get(key);
        if let Some(handoff) = stream.and_then(|stream| stream.prefill.handoff.as_ref()) {
            handoff.push(blocks);
        }
    }

    /// The scheduler asks for this when a request ends before its push, and again at every tick until the push has ended.
    fn abort_push(&mut self, key: AttemptKey) {
        if let Some(stream) = self.streams.get(key)
            && let Some(handoff) = &stream.prefill.handoff
        {
            return handoff.abort(stream.prefill.abort_reason());
        }
        let was_told = self.ending.values().any(|(ending, _)| *ending == key);
        if !was_told {
            self.parts.scheduler.push_ended(key, PushEnd::Aborted);
        }
    }

    /// First the reservation is withdrawn, so that nobody can claim the transfer any more. If somebody has claimed it, that stream is told to
    /// stop, and the end follows.
    fn close_transfer(&mut self, transfer: TransferId) {
        self.transfers.remove(&transfer);
        let Some(incoming) = &self.parts.incoming else {
            return;
        };
        incoming.reservations.withdraw(transfer);
        let reason = match self.cancelled.contains(&transfer) {
            true => AbortReason::Cancelled.name(),
            false => "closed",
        };
        if !incoming.receiver.abort(transfer, reason) {
            self.cancelled.remove(&transfer);
            self.parts.scheduler.transfer_ended(transfer);
        }
    }

    /// A prefill leg's tokens go to the coordinator at once, and those that go on to the decode node with the last frame.
    fn first_tokens(&mut self, key: AttemptKey, mut timings: StageTimings, outcome: Outcome) {
        let Some(stream) = self.streams.get_mut(key) else {
            return;
        };
        timings.lengthen(Stage::PrefillQueue, stream.inbox_wait());
        stream.prefill.forward_ended = Some(std::time::Instant::now());
        // This time is the sum of the stages, so that no time lies between the stages and the way back.
        let stage = |stage| timings.get(stage).unwrap_or_default();
        let waited = stage(Stage::StepWait) + stage(Stage::PrefillQueue);
        let sampled_at = stream.received_at + (waited + stage(Stage::PrefillForward));
        let continues = outcome == Outcome::HandedOver;
        failpoints::hit(FaultPoint::PrefillDone);
        event_log::record(key, || Step::FirstTokens { continues });
        let tokens = std::mem::take(&mut stream.tokens);
        if stream.broken.is_some() {
            return;
        }
        if !continues {
            stream.prefill.abort = Some(AbortReason::EndedAtFirstToken);
        } else if let Some(handoff) = &stream.prefill.handoff {
            handoff.last(tokens.iter().filter(|token| token.finish.is_none()).cloned().collect());
        }
        self.parts.metrics.stages(&timings);
        // `max_tokens` 0 (echo) draws nothing and has no first token.
        if !tokens.is_empty() {
            let first = NodeEvent::Prefill(PrefillEvent::FirstToken { timings, sampled_at });
            let batch = stream
                .leg
                .event(SharedEvent::Tokens(TokenBatch::handed_over(tokens, sampled_at)));
            if let Err(failure) = stream.tell(first).and_then(|()| stream.tell(batch)) {
                self.break_off(key, failure);
            }
        }
    }

    fn tell_tokens(&mut self, key: AttemptKey) {
        let step = self.step.map(|(ended, step)| {
            let preemptions = self.parts.scheduler.preemptions_of(key);
            (ended, StepNote { preemptions, ..step })
        });
        let Some(stream) = self.streams.get_mut(key) else {
            return;
        };
        if let Err(failure) = stream.tell_tokens(sampled_at(step), step.map(|(_, note)| note)) {
            self.break_off(key, failure);
        }
    }

    /// A part of the answer is lost. The stream fails, also if the scheduler has finished the request already.
    fn break_off(&mut self, key: AttemptKey, failure: NodeFailure) {
        if let Some(stream) = self.streams.get_mut(key) {
            stream.broken = Some(failure.clone());
        }
        self.parts.scheduler.fail(key, failure);
    }

    fn finished(&mut self, key: AttemptKey, outcome: Outcome, mut report: Report) {
        let Some(stream) = self.streams.get(key) else {
            return;
        };
        let is_prefill = stream.is_prefill();
        if is_prefill {
            if outcome == Outcome::Complete {
                self.first_tokens(key, report.timings.clone(), outcome);
            }
        } else {
            failpoints::hit(FaultPoint::LastToken);
            self.tell_tokens(key);
        }
        let Some(stream) = self.streams.get_mut(key) else {
            return;
        };
        if let Some(failure) = stream.broken.clone() {
            return self.failed(key, &failure, report);
        }
        if is_prefill {
            report.timings.lengthen(Stage::PrefillQueue, stream.inbox_wait());
            if let Some(tail) = stream.prefill.transfer_tail() {
                self.parts.metrics.stages(&tail);
                report.timings.extend(&tail);
            }
            let mut finished = stream.prefill.finished(outcome, report.cached_tokens, report.timings);
            finished.kv_hashes = std::mem::take(&mut stream.kv_hashes);
            stream.tell_last(NodeEvent::Prefill(PrefillEvent::Finished(finished)));
        } else {
            // The report counts from the end of the step. On a busy machine this line runs tens of milliseconds later.
            let ended = sampled_at(self.step);
            stream.decode_ended(&mut report, ended, &self.parts.metrics);
            let finished = DecodeFinished {
                timings: report.timings,
                cached_tokens: report.cached_tokens,
                preemptions: report.preemptions,
                drafted_tokens: report.drafts.drafted,
                accepted_tokens: report.drafts.accepted,
                kv_hashes: std::mem::take(&mut stream.kv_hashes),
                kv_bytes: stream.decode.kv_bytes,
                transport: stream.decode.transport.map_or("", TransportKind::name).to_owned(),
            };
            stream.tell_last(NodeEvent::Decode(DecodeEvent::Finished(finished)));
            failpoints::hit(FaultPoint::TerminalSent);
        }
        self.close(key, End::Finished(outcome));
    }

    fn failed(&mut self, key: AttemptKey, failure: &NodeFailure, mut report: Report) {
        tracing::debug!(request_id = %key.request, %failure, "a request failed");
        self.tell_tokens_left(key);
        if let Some(stream) = self.streams.get_mut(key) {
            if !stream.is_prefill() {
                stream.decode_ended(&mut report, sampled_at(self.step), &self.parts.metrics);
            }
            stream.prefill.failed(failure);
            stream.tell_failed(failure);
        }
        self.close(key, End::Failed(failure.name()));
    }

    /// Sends the tokens that a decode leg has drawn and not sent yet.
    fn tell_tokens_left(&mut self, key: AttemptKey) {
        if self.streams.get(key).is_some_and(|stream| !stream.is_prefill()) {
            self.tell_tokens(key);
        }
    }

    /// The last work for a request on this node: its log line, the spans and the count of a prefill leg, and an abort of a push that is not over.
    fn close(&mut self, key: AttemptKey, end: End) {
        let Some(mut stream) = self.streams.remove(key) else {
            return;
        };
        end.log(key);
        if let Some(transfer) = stream.decode.transfer {
            self.transfers.remove(&transfer);
        }
        let LegRequest::Prefill(ticket) = &stream.leg else {
            return;
        };
        if let Some(handoff) = stream.prefill.handoff.take() {
            handoff.abort(stream.prefill.abort_reason());
            self.ending.insert(handoff.serial, (key, handoff));
        }
        stream.prefill.record_spans(stream.received_at, &stream.trace);
        let transport = stream.prefill.transport(ticket.as_ref());
        self.parts.metrics.request(transport, end.name());
    }

    pub(crate) fn push_ended(&mut self, ended: PushEnded) {
        let PushEnded {
            key,
            serial,
            end,
            report,
        } = ended;
        event_log::record(key, || Step::PushEnded {
            end: end.name().to_owned(),
        });
        self.ending.remove(&serial);
        if let Some(stream) = self.streams.get_mut(key) {
            // This is the end of an earlier push with the same key. Its blocks went back when it was told to stop.
            if stream
                .prefill
                .handoff
                .as_ref()
                .is_none_or(|handoff| handoff.serial != serial)
            {
                return;
            }
            stream.prefill.report = report;
            stream.prefill.handoff = None;
        }
        self.parts.scheduler.push_ended(key, end);
        self.deliver();
    }

    pub(crate) fn commit(&mut self, now: Time, job: CommitJob) {
        let CommitJob { arrived, answer } = job;
        let commit = Commit {
            key: arrived.key,
            transfer: arrived.transfer,
            last_frame_at: Clock::time_of(arrived.last_frame),
            first_tokens: arrived.first_tokens.clone(),
        };
        let transport = arrived.transport.name();
        let committed = match self.parts.scheduler.commit(now, commit) {
            Ok(()) => {
                let first = arrived.first_frame.unwrap_or(arrived.last_frame);
                let moving = arrived.last_frame.saturating_duration_since(first);
                let metrics = &self.parts.metrics;
                metrics.handoff_done((transport, "committed"), arrived.kv_bytes, moving);
                if let Some(stream) = self.streams.get_mut(arrived.key) {
                    stream.decode.committed(now, &arrived, &stream.trace);
                }
                failpoints::hit(FaultPoint::Committed);
                Ok(())
            }
            Err(error) => {
                let label = match error {
                    CommitError::NotHere => "request_gone",
                    CommitError::NotReceiving => "not_receiving",
                    CommitError::Invalid(_) => "bad_first_tokens",
                };
                let detail = error.to_string();
                self.parts.metrics.transfer_failed(transport, label);
                let failure = NodeFailure::Transfer {
                    reason: label.to_owned(),
                    detail: detail.clone(),
                };
                self.parts.scheduler.fail(arrived.key, failure);
                Err(TransferRefusal::NotCommitted { label, detail })
            }
        };
        // The receiver's task may have ended with its pair. The commit is valid all the same.
        let _ = answer.send(committed);
        self.deliver();
    }

    /// Chance decides which side hears of a cancel first, so aborts by both sides are counted in the same way.
    fn count_end(&self, transport: &'static str, end: &ReceiveEnd) {
        let metrics = &self.parts.metrics;
        let faultless = match end {
            ReceiveEnd::AbortedBySender(reason) | ReceiveEnd::AbortedHere(reason) => AbortReason::FAULTLESS
                .map(AbortReason::name)
                .into_iter()
                .find(|name| name == reason),
            ReceiveEnd::Refused(_) | ReceiveEnd::PairLost => None,
        };
        match (faultless, end) {
            (Some(outcome), _) => metrics.handoff(transport, outcome),
            // The request has failed here. Its own failure says why.
            (None, ReceiveEnd::AbortedHere(_)) => metrics.handoff(transport, "failed"),
            (None, _) => metrics.transfer_failed(transport, end.name()),
        }
    }

    pub(crate) fn receive_ended(&mut self, transfer: TransferId, transport: TransportKind, end: &ReceiveEnd) {
        event_log::record_transfer(transfer, |transfer| Step::TransferEnded {
            transfer,
            end: end.name().to_owned(),
        });
        self.count_end(transport.name(), end);
        self.cancelled.remove(&transfer);
        match (end, self.transfers.get(&transfer)) {
            // Not a failure: the request ended at its first token, or the prefill leg tells the coordinator why it
            // stopped. The coordinator closes this leg too; until then, or the reservation's end, the blocks wait.
            (ReceiveEnd::AbortedBySender(_), _) | (ReceiveEnd::AbortedHere(_), _) | (_, None) => {}
            (end, Some(key)) => {
                let (reason, detail) = (end.name().to_owned(), end.to_string());
                let failure = NodeFailure::Transfer { reason, detail };
                self.parts.scheduler.fail(*key, failure);
            }
        }
        self.deliver();
        // Nothing writes any more, so blocks that were in quarantine for this transfer are released.
        self.parts.scheduler.transfer_ended(transfer);
    }
}
