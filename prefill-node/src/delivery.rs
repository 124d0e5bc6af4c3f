//! One request on this node, as far as the scheduler does not know it: what its coordinator is told, its handoff, its spans.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::KvMemory;
use kv_transfer::transport::AbortReason;
use proto::messages::{PrefillEvent, PrefillFinished};
use service_runtime::telemetry::MeasuredSpan;
use service_runtime::telemetry::opentelemetry::{Context, KeyValue};
use serving_core::ids::BlockId;
use serving_core::node::Ticket;
use serving_core::request::{AttemptKey, Request, TokenEvent};
use serving_core::scheduler::{NodeFailure, Outcome};
use serving_core::stage::{Stage, StageTimings};
use serving_core::time::Time;
use tokio::sync::mpsc;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::handoff::{Handoff, Handoffs, NewHandoff, PushReport};

/// What an accepted request comes with.
#[derive(Debug)]
pub struct NewLive {
    /// Tells its stream from that of a refused duplicate.
    pub leg: u64,
    pub events: mpsc::Sender<PrefillEvent>,
    pub request: Arc<Request>,
    pub ticket: Option<Ticket>,
    pub received_at: Time,
    pub span: tracing::Span,
}

#[derive(Debug)]
pub struct Live {
    pub leg: u64,
    pub events: mpsc::Sender<PrefillEvent>,
    pub request: Arc<Request>,
    pub ticket: Option<Ticket>,
    pub handoff: Option<Handoff>,
    pub span: tracing::Span,
    pub trace: Context,
    pub received_at: Time,
    pub accepted_at: Time,
    pub first_chunk_at: Option<Time>,
    /// Ends of chunks with their tokens, for the trace.
    pub chunks: Vec<(Time, u32)>,
    pub forward_ended: Option<Instant>,
    /// Drawn and not told yet.
    pub first_tokens: Vec<TokenEvent>,
    /// Why the handoff is aborted if it is.
    pub abort: AbortReason,
    pub report: Option<PushReport>,
    pub kv_hashes: Vec<u64>,
    /// The prompt could not be scored: the request fails whatever else it gives.
    pub is_unscored: bool,
}

impl Live {
    pub fn new(now: Time, new: NewLive) -> Self {
        Self {
            leg: new.leg,
            events: new.events,
            request: new.request,
            ticket: new.ticket,
            handoff: None,
            trace: new.span.context(),
            span: new.span,
            received_at: new.received_at,
            accepted_at: now,
            first_chunk_at: None,
            chunks: Vec::new(),
            forward_ended: None,
            first_tokens: Vec::new(),
            abort: AbortReason::PrefillFailed,
            report: None,
            kv_hashes: Vec::new(),
            is_unscored: false,
        }
    }

    /// First chunk planned: the prefill has begun, and the decode node hears of it.
    pub fn begin(&mut self, now: Time, key: AttemptKey, handoffs: &Handoffs) {
        if self.first_chunk_at.is_some() {
            return;
        }
        self.first_chunk_at = Some(now);
        if let Some(ticket) = &self.ticket {
            self.handoff = Some(handoffs.start(NewHandoff {
                key,
                leg: self.leg,
                ticket: ticket.clone(),
                trace: self.trace.clone(),
            }));
        }
    }

    /// Queues an event for the coordinator, the last place kept free for the terminal one.
    ///
    /// # Errors
    /// The queue is full: the reader is too far behind.
    pub fn tell(&self, event: PrefillEvent) -> Result<(), NodeFailure> {
        if self.events.capacity() <= 1 {
            let behind_tokens = u32::try_from(self.events.max_capacity()).unwrap_or(u32::MAX);
            return Err(NodeFailure::SlowReader { behind_tokens });
        }
        // Closed: the stream is gone, its cancel is on the way.
        let _ = self.events.try_send(event);
        Ok(())
    }

    /// Hashes the blocks of the client's prompt; their bytes are this request's until the next call of the scheduler.
    pub fn hash_prompt(&mut self, kv: &KvMemory, blocks: &[BlockId]) {
        match kv.prompt_hashes(blocks, self.request.client_prompt_tokens) {
            Ok(hashes) => self.kv_hashes = hashes,
            Err(error) => tracing::error!(%error, "a computed block could not be hashed"),
        }
    }

    /// The step that was running when it came: the request waited for it before the scheduler knew of it.
    pub fn inbox_wait(&self) -> Duration {
        self.accepted_at.since(self.received_at)
    }

    /// From the end of the last forward to the last frame written, when there was a handoff.
    pub fn transfer_tail(&self) -> Option<StageTimings> {
        let tail = self.report?.last_written.saturating_duration_since(self.forward_ended?);
        Some(StageTimings(vec![(Stage::TransferTail, tail)]))
    }

    pub fn finished(&mut self, outcome: Outcome, cached_tokens: u32, timings: StageTimings) -> PrefillFinished {
        PrefillFinished {
            outcome: match outcome {
                Outcome::HandedOver => proto::messages::PrefillOutcome::HandedOver,
                Outcome::Complete => proto::messages::PrefillOutcome::EndedAtFirstToken,
            },
            timings,
            kv_bytes: self.report.map_or(0, |report| report.kv_bytes),
            transfer: self.report.map_or(Duration::ZERO, |report| report.moving),
            transport: self.report.map_or(String::new(), |report| report.transport.to_owned()),
            cached_tokens,
            kv_hashes: std::mem::take(&mut self.kv_hashes),
        }
    }

    /// Label for metrics.
    pub fn transport(&self) -> &'static str {
        match (&self.report, &self.ticket) {
            (Some(report), _) => report.transport,
            (None, Some(_)) => "unsettled",
            (None, None) => "none",
        }
    }

    pub fn record_spans(&self) {
        let Some(first_chunk_at) = self.first_chunk_at else {
            return;
        };
        MeasuredSpan::new("prefill.queue", self.received_at, first_chunk_at).record_later(&self.trace);
        let Some((last_chunk_at, _)) = self.chunks.last() else {
            return;
        };
        let mut forward = MeasuredSpan::new("prefill.forward", first_chunk_at, *last_chunk_at);
        forward.events = self
            .chunks
            .iter()
            .map(|(at, tokens)| ("chunk", *at, vec![KeyValue::new("baton.tokens", i64::from(*tokens))]))
            .collect();
        forward.record_later(&self.trace);
    }
}
