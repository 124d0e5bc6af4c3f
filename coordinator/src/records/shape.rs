//! The JSON of a record, for the coordinator that writes it and the client that reads it. `docs/reference/records.md` is its
//! reference. A reader takes a missing member for its default, because the server may be of another version.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use serving_core::stage::{Stage, StageTimings};

use super::prompts::PromptShape;
use super::stalls::Stall;

/// Milliseconds with three decimals.
pub fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// Where a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordState {
    #[default]
    Received,
    Queued,
    Placed,
    Streaming,
    Ended,
}

impl RecordState {
    pub fn name(self) -> &'static str {
        match self {
            RecordState::Received => "received",
            RecordState::Queued => "queued",
            RecordState::Placed => "placed",
            RecordState::Streaming => "streaming",
            RecordState::Ended => "ended",
        }
    }
}

/// One line of the list.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    pub seq: u64,
    pub id: String,
    pub trace_id: String,
    pub response_id: Option<String>,
    pub received_unix_ms: f64,
    pub endpoint: Cow<'static, str>,
    pub model: Option<String>,
    pub lane: Cow<'static, str>,
    pub is_streaming: bool,
    pub state: RecordState,
    pub outcome: Option<Cow<'static, str>>,
    pub status: Option<u16>,
    pub error: Option<String>,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub cached_tokens: u32,
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
    pub route_reason: Option<String>,
    pub local_prefill: Option<Cow<'static, str>>,
    pub attempts: u32,
    pub preemptions: u32,
    pub transport: Option<String>,
    pub kv_bytes: u64,
    pub kv_transfer_ms: Option<f64>,
    pub queue_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    pub tpot_ms: Option<f64>,
    pub itl_p50_ms: Option<f64>,
    pub itl_p99_ms: Option<f64>,
    pub itl_max_ms: Option<f64>,
    pub e2e_ms: f64,
    pub unattributed_ms: Option<f64>,
    pub last_token_to_end_ms: Option<f64>,
    pub stall_count: usize,
    pub slo: Cow<'static, str>,
    pub breached: Vec<Cow<'static, str>>,
    pub slow_because: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StageShape {
    pub stage: Cow<'static, str>,
    pub phase: Cow<'static, str>,
    pub ms: f64,
    /// The process that measured the stage.
    pub process: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StallShape {
    pub choice: u32,
    pub token: u32,
    pub at_ms: f64,
    pub gap_ms: f64,
    pub cause: Cow<'static, str>,
    pub words: String,
}

/// How far a node's clock was off when the request ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClockShape {
    pub node: String,
    /// The coordinator's wall clock less the node's.
    pub offset_ms: f64,
    pub error_ms: f64,
}

/// The whole record.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Detail {
    #[serde(flatten)]
    pub summary: Summary,
    pub stages: Vec<StageShape>,
    pub stalls: Vec<StallShape>,
    pub failed_legs: Vec<String>,
    /// Empty for one prompt, because the fields above describe it.
    pub prompts: Vec<PromptShape>,
    pub clocks: Vec<ClockShape>,
}

/// A trace, ready to draw: `/admin/traces/{id}?view=waterfall`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Waterfall {
    pub trace_id: String,
    pub request: Option<Detail>,
    pub spans: Vec<SpanShape>,
    pub clocks: Vec<ClockShape>,
    pub not_asked: Vec<NotAsked>,
    pub orphan_count: usize,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SpanShape {
    pub span_id: String,
    pub parent_span_id: Option<String>,
    pub name: String,
    pub kind: Cow<'static, str>,
    pub service: String,
    pub process: String,
    pub depth: usize,
    pub start_ms: f64,
    pub end_ms: f64,
    pub attributes: Map<String, Value>,
    pub events: Vec<SpanEvent>,
    pub links: Vec<String>,
    pub error: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SpanEvent {
    pub name: String,
    pub at_ms: f64,
    pub attributes: Map<String, Value>,
}

/// A process whose spans are missing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NotAsked {
    pub node: String,
    pub why: String,
}

impl StageShape {
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.process.as_ref().map_or(0, String::len)
    }
}

impl Detail {
    /// Each node that worked on the request at the end. A node may occur twice.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        let own = [&self.summary.prefill_node, &self.summary.decode_node];
        let own = own.into_iter().flatten().map(String::as_str);
        own.chain(self.prompts.iter().flat_map(PromptShape::nodes))
    }

    /// A rough upper estimate of the memory that the record takes. It bounds the store.
    pub fn bytes(&self) -> usize {
        let s = &self.summary;
        let texts = [
            &s.response_id,
            &s.model,
            &s.error,
            &s.prefill_node,
            &s.decode_node,
            &s.route_reason,
            &s.transport,
            &s.slow_because,
        ];
        let texts: usize = texts.iter().filter_map(|text| text.as_ref()).map(String::len).sum();
        let stages: usize = self.stages.iter().map(StageShape::bytes).sum();
        let prompts: usize = self.prompts.iter().map(PromptShape::bytes).sum();
        let stalls: usize = self
            .stalls
            .iter()
            .map(|stall| size_of::<StallShape>() + stall.words.len())
            .sum();
        let legs: usize = self.failed_legs.iter().map(|leg| size_of::<String>() + leg.len()).sum();
        let clocks: usize = self
            .clocks
            .iter()
            .map(|clock| size_of::<ClockShape>() + clock.node.len())
            .sum();
        size_of::<Self>() + s.id.len() + s.trace_id.len() + texts + stages + prompts + stalls + legs + clocks
    }
}

/// The stages in the order in which a request goes through them.
pub fn stage_shapes(stages: &StageTimings, nodes: (Option<&str>, Option<&str>)) -> Vec<StageShape> {
    let shape = |(stage, took): &(Stage, Duration)| StageShape {
        stage: stage.name().into(),
        phase: stage.phase().into(),
        ms: ms(*took),
        process: process_of(*stage, nodes),
    };
    let mut sorted = stages.0.clone();
    sorted.sort_by_key(|(stage, _)| *stage);
    sorted.iter().map(shape).collect()
}

/// The process that measured a stage.
fn process_of(stage: Stage, nodes: (Option<&str>, Option<&str>)) -> Option<String> {
    let (prefill, decode) = nodes;
    let node = match stage {
        Stage::PrefillQueue | Stage::PrefillForward => prefill.or(decode),
        Stage::TransferTail => prefill,
        Stage::Commit | Stage::DecodeQueue | Stage::Decode => decode,
        _ => return Some("coordinator".to_owned()),
    };
    node.map(str::to_owned)
}

/// The stage that took longest, in words, for a reader who asks why the request was slow.
pub fn slow_because(s: &Summary, stages: &StageTimings, stalls: &[Stall]) -> Option<String> {
    if let (Some(outcome), Some(error)) = (&s.outcome, &s.error) {
        return Some(format!("it failed ({outcome}): {error}"));
    }
    let ttft = s.ttft_ms?;
    let rest = s.e2e_ms - ttft;
    let worst = stalls.iter().max_by_key(|stall| stall.gap);
    let stalled: Duration = stalls.iter().map(|stall| stall.gap).sum();
    // A few gaps that take a third of the time after the first token are what a reader notices.
    if let Some(worst) = worst.filter(|_| ms(stalled) * 3.0 > rest && ms(stalled) > ttft / 2.0) {
        return Some(format!(
            "{} of {} ms before token {}: {}",
            "a gap",
            ms(worst.gap).round(),
            worst.token,
            worst.words
        ));
    }
    let before = stages.0.iter().filter(|(stage, _)| stage.is_before_first_token());
    let longest = before.max_by_key(|(_, took)| *took)?;
    let (stage, took) = longest;
    // Less than a third explains nothing: the nodes' stages are missing, because the request broke off.
    if ttft >= rest && ms(*took) * 3.0 > ttft {
        return Some(format!(
            "{} took {:.0} ms of the {ttft:.0} ms to the first token",
            stage.name(),
            ms(*took)
        ));
    }
    let gap = s.itl_p50_ms.or(s.tpot_ms)?;
    Some(format!("{} output tokens at {gap:.1} ms each", s.output_tokens))
}
