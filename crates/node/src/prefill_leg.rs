//! The prefill leg of a request: its chunks, its push to the decode node, its report and its spans.

use std::time::Instant;

use kv_transfer::transport::AbortReason;
use proto::messages::{PrefillFinished, PrefillOutcome};
use service_runtime::telemetry::MeasuredSpan;
use service_runtime::telemetry::opentelemetry::{Context, KeyValue};
use serving_core::node::Ticket;
use serving_core::scheduler::{NodeFailure, Outcome};
use serving_core::stage::{Stage, StageTimings};
use serving_core::time::Time;

use crate::handoff_out::Handoff;
use crate::inbox::PushReport;

#[derive(Debug, Default)]
pub struct PrefillLeg {
    pub handoff: Option<Handoff>,
    first_chunk_at: Option<Time>,
    /// Ends of chunks with their tokens, for the trace.
    pub chunks: Vec<(Time, u32)>,
    pub forward_ended: Option<Instant>,
    /// Prompt tokens found in this node's prefix cache.
    pub cached_tokens: u32,
    /// Why the handoff is aborted if it is; `None`: the prefill failed.
    pub abort: Option<AbortReason>,
    pub report: Option<PushReport>,
}

impl PrefillLeg {
    /// True for the first chunk: the prefill has begun.
    pub fn begins(&mut self, now: Time) -> bool {
        let is_first = self.first_chunk_at.is_none();
        self.first_chunk_at.get_or_insert(now);
        is_first
    }

    pub fn abort_reason(&self) -> AbortReason {
        self.abort.unwrap_or(AbortReason::PrefillFailed)
    }

    pub fn failed(&mut self, failure: &NodeFailure) {
        self.abort = Some(match failure {
            NodeFailure::HoldExpired { .. } => AbortReason::HoldExpired,
            _ => AbortReason::PrefillFailed,
        });
    }

    /// From the end of the last forward to the last frame written, when there was a handoff.
    pub fn transfer_tail(&self) -> Option<StageTimings> {
        let tail = self.report?.last_written.saturating_duration_since(self.forward_ended?);
        Some(StageTimings(vec![(Stage::TransferTail, tail)]))
    }

    pub fn finished(&self, outcome: Outcome, cached_tokens: u32, timings: StageTimings) -> PrefillFinished {
        PrefillFinished {
            outcome: match outcome {
                Outcome::HandedOver => PrefillOutcome::HandedOver,
                Outcome::Complete => PrefillOutcome::EndedAtFirstToken,
            },
            timings,
            kv_bytes: self.report.map_or(0, |report| report.kv_bytes),
            transfer: self.report.map_or(std::time::Duration::ZERO, |report| report.moving),
            transport: self.report.map_or(String::new(), |report| report.transport.to_owned()),
            cached_tokens,
            kv_hashes: Vec::new(),
        }
    }

    /// Label for metrics.
    pub fn transport(&self, ticket: Option<&Ticket>) -> &'static str {
        match (&self.report, ticket) {
            (Some(report), _) => report.transport,
            (None, Some(_)) => "unsettled",
            (None, None) => "none",
        }
    }

    pub fn record_spans(&self, received_at: Time, trace: &Context) {
        let Some(first_chunk_at) = self.first_chunk_at else {
            return;
        };
        MeasuredSpan::new("prefill.queue", received_at, first_chunk_at).record_later(trace);
        let Some((last_chunk_at, _)) = self.chunks.last() else {
            return;
        };
        let mut forward = MeasuredSpan::new("prefill.forward", first_chunk_at, *last_chunk_at);
        let tokens = |tokens: u32| vec![KeyValue::new("baton.tokens", i64::from(tokens))];
        let chunks = self.chunks.iter();
        forward.events = chunks.map(|(at, count)| ("chunk", *at, tokens(*count))).collect();
        forward.record_later(trace);
    }
}
