//! The decode leg of a request: where its KV came from, its steps, and its spans.

use std::collections::VecDeque;
use std::time::Duration;

use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::Arrived;
use proto::messages::StepNote;
use service_runtime::clock::Clock;
use service_runtime::telemetry::opentelemetry::trace::{SpanContext, SpanKind, TraceContextExt as _};
use service_runtime::telemetry::opentelemetry::{Context, KeyValue};
use service_runtime::telemetry::{self, MeasuredSpan};
use serving_core::ids::TransferId;
use serving_core::scheduler::Report;
use serving_core::stage::Stage;
use serving_core::time::Time;

type SpanEvent = (&'static str, Time, Vec<KeyValue>);
/// A mark in the span for every so many tokens.
const TOKENS_PER_MARK: u32 = 64;
/// Marks of one request; the oldest go first.
const MARKS_MAX: usize = 128;

#[derive(Debug, Default)]
pub struct DecodeLeg {
    pub transfer: Option<TransferId>,
    pub kv_bytes: u64,
    /// What carried its KV, once that is here.
    pub transport: Option<TransportKind>,
    /// Prompt tokens that the prefill node found in its prefix cache, once the KV is here.
    pub cached_at_sender: Option<u32>,
    /// First step that sampled a token of it.
    first_step: Option<(Time, Time)>,
    /// What its span tells besides its length.
    events: VecDeque<SpanEvent>,
    token_count: u32,
    preemptions: u32,
}

impl DecodeLeg {
    /// Its KV is here.
    pub fn committed(&mut self, arrived: &Arrived, trace: &Context) {
        self.kv_bytes = arrived.kv_bytes;
        self.transport = Some(arrived.transport);
        self.cached_at_sender = arrived.cached_tokens;
        let start = Clock::time_of(arrived.first_frame.unwrap_or(arrived.last_frame));
        let mut span = MeasuredSpan::new("kv.recv", start, Clock::time_of(arrived.last_frame));
        span.kind = SpanKind::Server;
        let bytes = i64::try_from(arrived.kv_bytes).unwrap_or(i64::MAX);
        span.attributes.push(KeyValue::new("bytes", bytes));
        let transport = KeyValue::new("baton.transport", arrived.transport.name());
        span.attributes.push(transport);
        span.attributes.push(KeyValue::new("frames", i64::from(arrived.frames)));
        let sender = arrived.traceparent.as_deref().map(telemetry::context_of_traceparent);
        let sender = sender.map(|context| context.span().span_context().clone());
        span.links.extend(sender.filter(SpanContext::is_valid));
        span.record_later(trace);
    }

    pub fn sampled(&mut self, at: Time, step: &StepNote, tokens: usize) {
        let began = back(at, step.took);
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
    pub fn record_spans(&mut self, report: &Report, ended: Time, trace: &Context) {
        let length = |stage| report.timings.get(stage).unwrap_or_default();
        let joined = back(ended, length(Stage::Decode));
        let committed = back(joined, length(Stage::DecodeQueue));
        MeasuredSpan::new("decode.queue", committed, joined).record_later(trace);
        if report.timings.get(Stage::PrefillForward).is_some() {
            let scheduled = back(committed, length(Stage::PrefillForward));
            let received = back(scheduled, length(Stage::StepWait) + length(Stage::PrefillQueue));
            MeasuredSpan::new("prefill.queue", received, scheduled).record_later(trace);
            MeasuredSpan::new("prefill.forward", scheduled, committed).record_later(trace);
        }
        if let Some((began, sampled)) = self.first_step {
            MeasuredSpan::new("decode.first_step", began, sampled).record_later(trace);
        }
        let mut span = MeasuredSpan::new("decode.loop", joined, ended);
        let preemptions = KeyValue::new("baton.preemptions", i64::from(report.preemptions));
        span.attributes = vec![preemptions, KeyValue::new("baton.tokens", i64::from(self.token_count))];
        if report.drafts.drafted > 0 {
            let count = |name, tokens| KeyValue::new(name, i64::try_from(tokens).unwrap_or(i64::MAX));
            let accepted = count("baton.accepted_tokens", report.drafts.accepted);
            span.attributes
                .extend([count("baton.drafted_tokens", report.drafts.drafted), accepted]);
        }
        span.events = std::mem::take(&mut self.events).into();
        span.record_later(trace);
    }
}

fn back(time: Time, by: Duration) -> Time {
    Time(time.0.saturating_sub(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)))
}
