//! The decode leg of a request: where its KV came from, its steps, and its spans.

use std::collections::VecDeque;

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
    /// Since when it could decode, where its KV came from a prefill node.
    committed_at: Option<Time>,
    /// First step that sampled a token of it.
    first_step: Option<(Time, Time)>,
    /// What its span tells besides its length.
    events: VecDeque<SpanEvent>,
    token_count: u32,
    preemptions: u32,
}

impl DecodeLeg {
    /// Its KV is here.
    pub fn committed(&mut self, now: Time, arrived: &Arrived, trace: &Context) {
        self.committed_at = Some(now);
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
        let began = at - step.took;
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

    /// `decode.queue`, `decode.first_step` and `decode.loop` of a request that ends, as far as it came; before them the prefill's,
    /// where it was computed here. What it was in when it was broken off lasts until `ended`.
    pub fn spans(&mut self, report: &Report, received_at: Time, ended: Time) -> Vec<MeasuredSpan> {
        let passed = |stage| report.timings.get(stage);
        let mut spans = Vec::new();
        let mut ready = self.committed_at;
        if let Some(queued) = passed(Stage::PrefillQueue) {
            let scheduled = received_at + (passed(Stage::StepWait).unwrap_or_default() + queued);
            spans.push(MeasuredSpan::new("prefill.queue", received_at, scheduled));
            ready = passed(Stage::PrefillForward).map(|forward| scheduled + forward);
            spans.extend(ready.map(|ready| MeasuredSpan::new("prefill.forward", scheduled, ready)));
        }
        let Some(ready) = ready else {
            return spans;
        };
        let joined = passed(Stage::DecodeQueue).map_or(ended, |waited| ready + waited);
        spans.push(MeasuredSpan::new("decode.queue", ready, joined));
        if let Some((began, sampled)) = self.first_step {
            spans.push(MeasuredSpan::new("decode.first_step", began, sampled));
        }
        let last = passed(Stage::Decode).map_or(ended, |decoding| joined + decoding);
        let mut decoding = MeasuredSpan::new("decode.loop", joined, last);
        decoding.attributes = self.loop_attributes(report);
        decoding.events = std::mem::take(&mut self.events).into();
        spans.push(decoding);
        spans
    }

    fn loop_attributes(&self, report: &Report) -> Vec<KeyValue> {
        let preemptions = KeyValue::new("baton.preemptions", i64::from(report.preemptions));
        let mut attributes = vec![preemptions, KeyValue::new("baton.tokens", i64::from(self.token_count))];
        if report.drafts.drafted > 0 {
            let count = |name, tokens| KeyValue::new(name, i64::try_from(tokens).unwrap_or(i64::MAX));
            attributes.push(count("baton.drafted_tokens", report.drafts.drafted));
            attributes.push(count("baton.accepted_tokens", report.drafts.accepted));
        }
        attributes
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serving_core::scheduler::DraftCounts;
    use serving_core::stage::StageTimings;

    use super::*;

    fn report(timings: &[(Stage, u64)]) -> Report {
        let of = |(stage, ms): &(Stage, u64)| (*stage, Duration::from_millis(*ms));
        Report {
            timings: StageTimings(timings.iter().map(of).collect()),
            cached_tokens: 0,
            preemptions: 0,
            drafts: DraftCounts::default(),
        }
    }

    /// Names, begins and ends in ms of a leg that came at 100 ms and ended at 500 ms.
    fn spans(leg: &mut DecodeLeg, timings: &[(Stage, u64)]) -> Vec<(&'static str, u64, u64)> {
        let ms = |time: Time| time.0 / 1_000_000;
        let spans = leg.spans(&report(timings), Time::from_millis(100), Time::from_millis(500));
        let drawn = spans.iter().map(|span| (span.name, ms(span.start), ms(span.end)));
        drawn.collect()
    }

    #[test]
    fn a_handed_over_leg_that_is_broken_off_has_the_spans_of_what_it_came_to() {
        let mut leg = DecodeLeg::default();
        assert!(spans(&mut leg, &[]).is_empty(), "no KV has come");
        leg.committed_at = Some(Time::from_millis(200));
        let waits = [("decode.queue", 200, 500), ("decode.loop", 500, 500)];
        assert_eq!(spans(&mut leg, &[(Stage::Commit, 1)]), waits);
        leg.first_step = Some((Time::from_millis(230), Time::from_millis(240)));
        let timings = [(Stage::Commit, 1), (Stage::DecodeQueue, 30), (Stage::Decode, 90)];
        let decodes = [
            ("decode.queue", 200, 230),
            ("decode.first_step", 230, 240),
            ("decode.loop", 230, 320),
        ];
        assert_eq!(spans(&mut leg, &timings), decodes);
    }

    #[test]
    fn a_leg_that_computed_its_prompt_has_the_prefills_spans_before() {
        let mut timings = vec![(Stage::StepWait, 5), (Stage::PrefillQueue, 15)];
        let queued = ("prefill.queue", 100, 120);
        assert_eq!(spans(&mut DecodeLeg::default(), &timings), [queued]);
        timings.extend([
            (Stage::PrefillForward, 80),
            (Stage::DecodeQueue, 10),
            (Stage::Decode, 50),
        ]);
        let whole = [
            queued,
            ("prefill.forward", 120, 200),
            ("decode.queue", 200, 210),
            ("decode.loop", 210, 260),
        ];
        assert_eq!(spans(&mut DecodeLeg::default(), &timings), whole);
    }
}
