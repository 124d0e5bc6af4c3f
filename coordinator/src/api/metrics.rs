//! What the edge reports to the metrics registry. The coordinator's `metrics` module implements the trait.

use std::sync::Arc;
use std::time::Duration;

use serving_core::request::Lane;
use serving_core::stage::{Stage, StageTimings};

use crate::records::stalls::StallCause;
use crate::slo::Breach;

/// The receiver of the edge's reports. Calls never block.
pub trait EdgeMetrics: Send + Sync {
    /// Called once for each generation request, however it ends.
    fn request_ended(&self, ended: &EndedRequest<'_>);
    /// The gap between two tokens of one choice, as they were handed to the client's connection. The trace id is for
    /// exemplars.
    fn token_gap(&self, lane: Lane, gap: Duration, trace_id: &str);
    /// A request is in this stage of the edge from now on.
    fn stage_entered(&self, stage: Stage);
    /// The request has left the stage, for whatever reason.
    fn stage_left(&self, stage: Stage);
    /// A handler panicked: the answer is a 500, or a stream has broken off.
    fn handler_panicked(&self);
    /// A request was refused for its key, or for want of one, before anything had read what it asks for. `reason` is the error's code, or
    /// the name of a limit in the file of keys.
    fn key_refused(&self, reason: &'static str);
    /// The whole exposition, OpenMetrics text.
    fn render(&self) -> String;
}

/// Counts nothing, for an edge whose figures nobody reads.
#[derive(Clone, Copy, Debug)]
pub struct NoMetrics;

impl EdgeMetrics for NoMetrics {
    fn request_ended(&self, _: &EndedRequest<'_>) {}
    fn token_gap(&self, _: Lane, _: Duration, _: &str) {}
    fn stage_entered(&self, _: Stage) {}
    fn stage_left(&self, _: Stage) {}
    fn handler_panicked(&self) {}
    fn key_refused(&self, _: &'static str) {}
    fn render(&self) -> String {
        "# EOF\n".to_owned()
    }
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
    /// A node was given the request, or one of its prompts.
    pub has_run: bool,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Every stage that was measured, the edge's own included, each once.
    pub stages: &'a StageTimings,
    /// The trace id for exemplars.
    pub trace_id: &'a str,
    pub stalls: &'a [StallCause],
    /// The SLO profile that judged the request, and the limits that it broke. `None` when the request is not judged.
    pub slo: Option<(&'a str, &'a [Breach])>,
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
