//! What is known of one HTTP request: as it came, and as a generation that runs or has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serving_core::request::Lane;
use serving_core::stage::{Stage, StageTimings};
use tracing::Span;

use super::content::Content;
use super::trace_context::TraceContext;
use crate::keys::file::Scope;
use crate::keys::{HeldKey, InUse};
use crate::records::prefixes::PrefixShape;
use crate::records::prompts::PromptRecord;
use crate::records::shape::ms;
use crate::records::stalls::Gaps;
use crate::request_handle::{Placement, RequestSummary};
use crate::slo::SloProfile;

#[derive(Debug, Default)]
pub struct Facts {
    pub method: String,
    pub path: String,
    pub status: Option<u16>,
    pub outcome: Option<&'static str>,
    /// The answer that the client got.
    pub error: Option<ToldError>,
    /// Whose key came with it.
    pub key: Option<Arc<HeldKey>>,
    /// The place that it takes of the key's limits, until the answer and the work on its text have ended.
    pub in_use: Option<Arc<InUse>>,
    /// The rest is set for generation requests only.
    pub generation: Option<Generation>,
    pub trace: TraceContext,
}

/// Who gets an answer, or an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// No key was asked for, or it has the scope `admin`.
    Operator,
    /// Nodes and addresses are none of its business.
    Client,
}

impl Facts {
    pub fn reader(&self) -> Reader {
        match &self.key {
            Some(key) if !key.entry.scopes.contains(&Scope::Admin) => Reader::Client,
            _ => Reader::Operator,
        }
    }
}

/// An error as the client saw it.
#[derive(Clone, Debug, Default)]
pub struct ToldError {
    pub code: Option<&'static str>,
    /// The field that the error is about.
    pub param: Option<String>,
    pub message: String,
}

#[derive(Debug)]
pub struct Generation {
    pub span: Span,
    /// Number in the record store.
    pub seq: u64,
    /// `chat` or `text_completion`.
    pub endpoint: &'static str,
    pub is_streaming: bool,
    pub is_submitted: bool,
    pub response_id: Option<String>,
    pub slo: Arc<SloProfile>,
    pub gaps: Gaps,
    pub model: Option<String>,
    pub lane: Lane,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub placement: Option<Placement>,
    /// A node was given one of its prompts, which need not be the prompt of `placement`.
    pub has_been_placed: bool,
    pub summary: RequestSummary,
    /// For a request with several prompts; `placement` and `summary` are then those of the prompt that the client heard of
    /// first.
    pub prompts: Vec<PromptRecord>,
    /// While a recording is made: the fingerprints of the prompts.
    pub prefixes: Arc<[PrefixShape]>,
    pub tokenized_at: Option<Instant>,
    /// Stages measured at the edge: parse, tokenize, both egress stages.
    pub edge: StageTimings,
    pub ttft: Option<Duration>,
    pub tpot: Option<Duration>,
    /// From the first byte of the request until the last token was handed to the connection. Known at the answer's end.
    pub last_token: Option<Duration>,
    /// From the last token's write to the write of the answer's end.
    pub last_token_to_end: Option<Duration>,
    /// Set for an answer that was sent whole.
    pub finish: Option<&'static str>,
    /// Where content is traced, and the body could be read.
    pub content: Option<Content>,
}

impl Generation {
    /// `slo` judges the request until its headers and its model are known.
    pub fn new(span: Span, (seq, endpoint): (u64, &'static str), slo: Arc<SloProfile>) -> Self {
        Self {
            span,
            seq,
            endpoint,
            is_streaming: false,
            is_submitted: false,
            response_id: None,
            slo,
            gaps: Gaps::default(),
            model: None,
            lane: Lane::Interactive,
            prompt_tokens: 0,
            output_tokens: 0,
            placement: None,
            has_been_placed: false,
            summary: RequestSummary::default(),
            prompts: Vec::new(),
            prefixes: Arc::default(),
            tokenized_at: None,
            edge: StageTimings::default(),
            ttft: None,
            tpot: None,
            last_token: None,
            last_token_to_end: None,
            finish: None,
            content: None,
        }
    }

    /// Each stage once: those of the edge, of the nodes and of the control loop.
    pub fn stages(&self) -> StageTimings {
        let is_edges = |stage: Stage| {
            matches!(
                stage,
                Stage::Parse | Stage::Tokenize | Stage::Egress | Stage::EgressRest
            )
        };
        let mut all = self.edge.clone();
        all.0.extend(
            self.summary
                .timings
                .0
                .iter()
                .filter(|(stage, _)| !is_edges(*stage))
                .copied(),
        );
        all
    }

    /// TTFT less every stage before the first token, in ms: the time that no stage measured (PROTOCOL: at most 1 ms). It is
    /// below zero when something was counted twice, and is shown then, too. It is `None` while the nodes have not reported
    /// their stages.
    pub fn unattributed_ms(&self) -> Option<f64> {
        let stages = self.stages();
        stages.get(Stage::Queue).and(stages.get(Stage::PrefillForward))?;
        let before = stages.0.iter().filter(|(stage, _)| stage.is_before_first_token());
        let known: Duration = before.map(|(_, d)| *d).sum();
        self.ttft.map(|ttft| ((ms(ttft) - ms(known)) * 1e3).round() / 1e3)
    }
}
