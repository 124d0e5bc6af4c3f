//! What the edge tells the metrics registry; the coordinator's `metrics` implements it.

use std::sync::Arc;
use std::time::Duration;

use serving_core::request::Lane;
use serving_core::stage::{Stage, StageTimings};

use crate::records::stalls::StallCause;
use crate::slo::Breach;

/// Where the edge reports to. Calls never block.
pub trait EdgeMetrics: Send + Sync {
    /// Once per generation request, whatever its end.
    fn request_ended(&self, ended: &EndedRequest<'_>);
    /// The gap between two tokens of one choice, as they were handed to the client's connection. The trace id is for
    /// exemplars.
    fn token_gap(&self, lane: Lane, gap: Duration, trace_id: &str);
    /// A request is in this stage of the edge from now on.
    fn stage_entered(&self, stage: Stage);
    /// And no longer, however it ended.
    fn stage_left(&self, stage: Stage);
    /// A handler panicked and was answered with 500.
    fn handler_panicked(&self);
    /// The whole exposition, OpenMetrics text.
    fn render(&self) -> String;
}

/// One ended generation request.
#[derive(Clone, Copy, Debug)]
pub struct EndedRequest<'a> {
    /// A served name, or `unknown`: the label stays bounded whatever clients send.
    pub model: &'a str,
    pub lane: Lane,
    /// `ok`, `cancelled`, `invalid_request`, or the name of a reject reason or request error.
    pub outcome: &'a str,
    /// The OpenAI `finish_reason` of an answer that was sent whole: `length` when any choice of it has that.
    pub finish: Option<&'static str>,
    /// First byte received to first token event written; without streaming, to first token received.
    pub ttft: Option<Duration>,
    /// (last token - first token) / (tokens - 1) of the choice that took longest.
    pub tpot: Option<Duration>,
    /// From the last token's write to the write of the answer's end; `None` for one that did not end well.
    pub last_token_to_end: Option<Duration>,
    /// First byte received to the answer's end.
    pub e2e: Duration,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Every stage that was measured, the edge's own included, each once.
    pub stages: &'a StageTimings,
    /// For exemplars.
    pub trace_id: &'a str,
    /// What each of its stalls was caused by.
    pub stalls: &'a [StallCause],
    /// The profile it was judged by, and what it broke; `None` when it is nobody's failure.
    pub slo: Option<(&'static str, &'a [Breach])>,
}

/// A request is in a stage as long as this lives.
pub struct InStage {
    metrics: Arc<dyn EdgeMetrics>,
    stage: Stage,
}

impl InStage {
    pub fn new(metrics: Arc<dyn EdgeMetrics>, stage: Stage) -> Self {
        metrics.stage_entered(stage);
        Self { metrics, stage }
    }
}

impl Drop for InStage {
    fn drop(&mut self) {
        self.metrics.stage_left(self.stage);
    }
}
