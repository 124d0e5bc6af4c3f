//! From the scheduler's events to response streams, block copies, KV hashes and closed transfers. Never blocks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use engine::KvMemory;
use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::{Arrived, Receiver};
use proto::messages::{DecodeEvent as WireEvent, DecodeFinished, Failed, Opened as WireOpened, StepNote, TokenBatch};
use service_runtime::clock::Clock;
use service_runtime::event_log::{self, Step};
use service_runtime::failpoints::{self, FaultPoint};
use service_runtime::telemetry::opentelemetry::trace::{SpanContext, SpanKind, TraceContextExt as _};
use service_runtime::telemetry::opentelemetry::{Context, KeyValue};
use service_runtime::telemetry::{self, MeasuredSpan};
use serving_core::ids::{BlockId, TransferId};
use serving_core::request::{AttemptKey, Request, TokenEvent};
use serving_core::scheduler::{NodeFailure, Report, Scheduler, SchedulerEvent};
use serving_core::stage::Stage;
use serving_core::time::Time;
use tokio::sync::mpsc;

use crate::handoff::HandoffDesk;
use crate::inbox::OpenJob;
use crate::metrics::Metrics;

/// Places in a stream's channel kept for its last events, which must never be lost.
const PLACES_KEPT: usize = 4;

/// A request that the scheduler has taken in.
#[derive(Debug)]
pub struct NewStream {
    pub request: Arc<Request>,
    pub job: OpenJob,
    pub opened_at: Time,
}

#[derive(Debug)]
struct OpenStream {
    request: Arc<Request>,
    replies: mpsc::Sender<WireEvent>,
    /// Tokens of the current step, sent together.
    tokens: Vec<TokenEvent>,
    transfer: Option<TransferId>,
    kv_hashes: Vec<u64>,
    kv_bytes: u64,
    /// What carried its KV, once that is here.
    transport: Option<TransportKind>,
    context: Context,
    /// The step that was running when the request came: it waited for it before the scheduler knew of it.
    inbox_wait: Duration,
    /// First step that sampled a token of it.
    first_step: Option<(Time, Time)>,
    /// What its span tells besides its length.
    events: VecDeque<SpanEvent>,
    token_count: u32,
    preemptions: u32,
}

type SpanEvent = (&'static str, Time, Vec<KeyValue>);
/// A mark in the span for every so many tokens.
const TOKENS_PER_MARK: u32 = 64;
/// Marks of one request; the oldest go first.
const MARKS_MAX: usize = 128;

/// The scheduler and what its events act on.
#[derive(Debug)]
pub struct Delivery {
    pub scheduler: Scheduler,
    kv: Arc<KvMemory>,
    metrics: Metrics,
    desk: Arc<HandoffDesk>,
    receiver: Arc<Receiver>,
    streams: BTreeMap<AttemptKey, OpenStream>,
    transfers: BTreeMap<TransferId, AttemptKey>,
    /// Streams that have tokens to send.
    fresh: Vec<AttemptKey>,
    /// The step whose tokens are being delivered.
    step: Option<(Time, StepNote)>,
}

impl Delivery {
    pub fn new(
        scheduler: Scheduler,
        (kv, metrics): (Arc<KvMemory>, Metrics),
        handoff: (Arc<HandoffDesk>, Arc<Receiver>),
    ) -> Self {
        Self {
            scheduler,
            kv,
            metrics,
            desk: handoff.0,
            receiver: handoff.1,
            streams: BTreeMap::new(),
            transfers: BTreeMap::new(),
            fresh: Vec::new(),
            step: None,
        }
    }

    /// Carries out what a step has brought; its tokens say which step it was.
    pub fn deliver_step(&mut self, (began, ended): (Time, Time), prompt_tokens: u32) {
        let step = StepNote {
            took: ended.since(began),
            prompt_tokens,
            preemptions: 0,
        };
        self.step = Some((ended, step));
        self.deliver();
        self.step = None;
    }

    /// The request that waits for a transfer.
    pub fn key_of(&self, transfer: TransferId) -> Option<AttemptKey> {
        self.transfers.get(&transfer).copied()
    }

    pub fn opened(&mut self, key: AttemptKey, new: NewStream, reply: WireOpened) {
        let NewStream {
            request,
            job,
            opened_at,
        } = new;
        let transfer = reply.ticket.as_ref().map(|ticket| ticket.transfer);
        self.transfers.extend(transfer.map(|transfer| (transfer, key)));
        let mut span = MeasuredSpan::new("decode.open", job.received_at, Clock::now());
        span.kind = SpanKind::Server;
        span.attributes
            .push(KeyValue::new("prefix_blocks", i64::from(reply.prefix_blocks)));
        span.attributes.push(KeyValue::new("local_prefill", transfer.is_none()));
        span.record_later(job.answer_parent.as_ref().unwrap_or(&job.context));
        let stream = OpenStream {
            request,
            replies: job.events,
            tokens: Vec::new(),
            transfer,
            kv_hashes: Vec::new(),
            kv_bytes: 0,
            transport: None,
            context: job.context,
            inbox_wait: opened_at.since(job.received_at),
            first_step: None,
            events: VecDeque::new(),
            token_count: 0,
            preemptions: 0,
        };
        self.streams.insert(key, stream);
        self.send(key, WireEvent::Opened(reply));
    }

    pub fn committed(&mut self, arrived: &Arrived) {
        if let Some(stream) = self.streams.get_mut(&arrived.key) {
            stream.kv_bytes = arrived.kv_bytes;
            stream.transport = Some(arrived.transport);
            let start = Clock::time_of(arrived.first_frame.unwrap_or(arrived.last_frame));
            let mut span = MeasuredSpan::new("kv.recv", start, Clock::time_of(arrived.last_frame));
            span.kind = SpanKind::Server;
            span.attributes.push(KeyValue::new(
                "bytes",
                i64::try_from(arrived.kv_bytes).unwrap_or(i64::MAX),
            ));
            let transport = KeyValue::new("baton.transport", arrived.transport.name());
            span.attributes.push(transport);
            span.attributes.push(KeyValue::new("frames", i64::from(arrived.frames)));
            let sender = arrived.traceparent.as_deref().map(telemetry::context_of_traceparent);
            let sender = sender.map(|context| context.span().span_context().clone());
            span.links.extend(sender.filter(SpanContext::is_valid));
            span.record_later(&stream.context);
        }
    }

    /// Clients that have gone: their streams' channels are closed.
    pub fn cancel_closed(&mut self) {
        let closed = self.streams.iter().filter(|(_, stream)| stream.replies.is_closed());
        let closed: Vec<AttemptKey> = closed.map(|(key, _)| *key).collect();
        for key in closed {
            self.scheduler.cancel(key);
            event_log::record(key, || Step::Cancelled);
            self.close(key);
        }
    }

    /// Carries out everything the scheduler has decided.
    pub fn deliver(&mut self) {
        loop {
            while let Some(event) = self.scheduler.take_event() {
                self.carry_out(event);
            }
            let mut fresh = std::mem::take(&mut self.fresh);
            for key in fresh.drain(..) {
                self.send_tokens(key);
            }
            // A reader that was found too slow fails its request, which is one more event.
            if self.fresh.is_empty() {
                self.fresh = fresh;
            }
            match self.scheduler.take_event() {
                Some(event) => self.carry_out(event),
                None => return,
            }
        }
    }

    fn carry_out(&mut self, event: SchedulerEvent) {
        match event {
            SchedulerEvent::CopyBlock { key, from, to } => {
                if let Err(error) = self.kv.copy_block(from, to) {
                    let detail = error.to_string();
                    self.scheduler.fail(key, NodeFailure::Engine { detail });
                }
            }
            SchedulerEvent::HashPrompt { key, blocks } => self.hash_prompt(key, &blocks),
            SchedulerEvent::Committed { key, transfer, timings } => {
                self.note(key, || Step::Committed {
                    transfer: transfer.to_string(),
                });
                self.send(key, WireEvent::Committed { timings });
            }
            SchedulerEvent::Token { key, event } => {
                if let Some(stream) = self.streams.get_mut(&key) {
                    if stream.tokens.is_empty() {
                        self.fresh.push(key);
                    }
                    stream.tokens.push(event);
                }
            }
            SchedulerEvent::Finished { key, report } => {
                self.note(key, || Step::Finished);
                self.finished(key, *report);
            }
            SchedulerEvent::Failed { key, failure } => {
                self.note(key, || Step::Failed {
                    cause: failure.name().to_owned(),
                });
                self.send_tokens(key);
                self.send(key, WireEvent::Failed(Failed::from(&failure)));
                self.close(key);
            }
            SchedulerEvent::CloseTransfer { transfer } => {
                self.transfers.remove(&transfer);
                // First nobody can claim it, then whoever has is told to stop; `ended` follows if somebody has.
                self.desk.withdraw(transfer);
                if !self.receiver.abort(transfer, "closed") {
                    self.scheduler.transfer_ended(transfer);
                }
            }
            SchedulerEvent::BlocksReady { .. } | SchedulerEvent::Held { .. } | SchedulerEvent::AbortPush { .. } => {
                tracing::error!(
                    ?event,
                    "the scheduler of a decode node wants what only prefill nodes do"
                );
            }
        }
    }

    /// An attempt whose stream is closed has been logged as cancelled: what its running step still brings is no step.
    fn note(&self, key: AttemptKey, step: impl FnOnce() -> Step) {
        if self.streams.contains_key(&key) {
            event_log::record(key, step);
        }
    }

    fn finished(&mut self, key: AttemptKey, mut report: Report) {
        failpoints::hit(FaultPoint::LastToken);
        self.send_tokens(key);
        // The step's own end, from which the report counts: on a busy machine this line runs tens of milliseconds later.
        let ended = self.step.map_or_else(Clock::now, |(ended, _)| ended);
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        report.timings.lengthen(Stage::PrefillQueue, stream.inbox_wait);
        stream.record_spans(&report, ended);
        self.metrics.stages(&report.timings);
        let finished = DecodeFinished {
            timings: report.timings,
            cached_tokens: report.cached_tokens,
            preemptions: report.preemptions,
            kv_hashes: std::mem::take(&mut stream.kv_hashes),
            kv_bytes: stream.kv_bytes,
            transport: stream.transport.map_or(String::new(), |kind| kind.name().to_owned()),
        };
        self.send(key, WireEvent::Finished(finished));
        failpoints::hit(FaultPoint::TerminalSent);
        self.close(key);
    }

    /// Of the client's prompt, also when the request has moved here with tokens of an earlier attempt behind it. Before
    /// any decode step writes into the last, partly filled block.
    fn hash_prompt(&mut self, key: AttemptKey, blocks: &[BlockId]) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        match self.kv.prompt_hashes(blocks, stream.request.client_prompt_tokens) {
            Ok(hashes) => stream.kv_hashes = hashes,
            Err(error) => {
                let detail = error.to_string();
                self.scheduler.fail(key, NodeFailure::Engine { detail });
            }
        }
    }

    fn send_tokens(&mut self, key: AttemptKey) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        let tokens = std::mem::take(&mut stream.tokens);
        if tokens.is_empty() {
            return;
        }
        if stream.replies.capacity() <= PLACES_KEPT {
            let behind = stream.replies.max_capacity() - stream.replies.capacity() + tokens.len();
            let behind_tokens = u32::try_from(behind).unwrap_or(u32::MAX);
            return self.scheduler.fail(key, NodeFailure::SlowReader { behind_tokens });
        }
        let step = self.step.map(|(_, step)| StepNote {
            preemptions: self.scheduler.preemptions_of(key),
            ..step
        });
        let sampled_at = self.step.map_or_else(Clock::now, |(ended, _)| ended);
        if let Some(step) = &step {
            stream.sampled(sampled_at, step, tokens.len());
        }
        let batch = TokenBatch {
            tokens,
            sampled_at,
            step,
        };
        self.send(key, WireEvent::Tokens(batch));
    }

    /// Full is impossible while places are kept; closed means a cancel that is noticed next.
    pub fn send(&mut self, key: AttemptKey, event: WireEvent) {
        if let Some(stream) = self.streams.get(&key) {
            let _ = stream.replies.try_send(event);
        }
    }

    fn close(&mut self, key: AttemptKey) {
        if let Some(transfer) = self.streams.remove(&key).and_then(|stream| stream.transfer) {
            self.transfers.remove(&transfer);
        }
    }
}

impl OpenStream {
    fn sampled(&mut self, at: Time, step: &StepNote, tokens: usize) {
        let began = Time(at.0.saturating_sub(u64::try_from(step.took.as_nanos()).unwrap_or(u64::MAX)));
        self.first_step.get_or_insert((began, at));
        let marks = self.token_count / TOKENS_PER_MARK;
        self.token_count = self
            .token_count
            .saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
        if self.token_count / TOKENS_PER_MARK > marks {
            let count = KeyValue::new("baton.tokens", i64::from(self.token_count));
            self.mark(("tokens", at, vec![count]));
        }
        if step.preemptions > self.preemptions {
            self.preemptions = step.preemptions;
            self.mark(("preempt", began, Vec::new()));
        }
    }

    fn mark(&mut self, event: SpanEvent) {
        if self.events.len() == MARKS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// `decode.queue`, `decode.first_step` and `decode.loop` of a request whose last token has just been drawn; before them
    /// the prefill's, where it was computed here.
    fn record_spans(&mut self, report: &Report, ended: Time) {
        let length = |stage| report.timings.get(stage).unwrap_or_default();
        let back =
            |time: Time, by: Duration| Time(time.0.saturating_sub(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)));
        let joined = back(ended, length(Stage::Decode));
        let committed = back(joined, length(Stage::DecodeQueue));
        MeasuredSpan::new("decode.queue", committed, joined).record_later(&self.context);
        if report.timings.get(Stage::PrefillForward).is_some() {
            let scheduled = back(committed, length(Stage::PrefillForward));
            let received = back(scheduled, length(Stage::PrefillQueue));
            MeasuredSpan::new("prefill.queue", received, scheduled).record_later(&self.context);
            MeasuredSpan::new("prefill.forward", scheduled, committed).record_later(&self.context);
        }
        if let Some((began, sampled)) = self.first_step {
            MeasuredSpan::new("decode.first_step", began, sampled).record_later(&self.context);
        }
        let mut span = MeasuredSpan::new("decode.loop", joined, ended);
        let preemptions = KeyValue::new("baton.preemptions", i64::from(report.preemptions));
        span.attributes = vec![preemptions, KeyValue::new("baton.tokens", i64::from(self.token_count))];
        span.events = std::mem::take(&mut self.events).into();
        span.record_later(&self.context);
    }
}
