//! The JSON of a record, for the coordinator that writes it and the client that reads it. `docs/reference/records.md` is its
//! reference. A reader takes a missing member for its default, because the server may be of another version.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use serving_core::ids::NodeName;
use serving_core::stage::{Stage, StageTimings};

use super::prefixes::PrefixShape;
use super::stalls::Stall;
use crate::request_handle::{Placement, RequestSummary};

/// Milliseconds with three decimals.
pub fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// This process's wall clock, for readers whose own clock differs.
pub(crate) fn now_unix_ms() -> f64 {
    ms(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
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

/// Where and how a prompt was served. Records and answers show it alike.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Serving {
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub cached_tokens: u32,
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
    pub route_reason: Option<String>,
    /// Why the decode node computed the prompt itself: short, cached, no_prefill_node, transfer_failed, co_located.
    pub local_prefill: Option<Cow<'static, str>>,
    pub attempts: u32,
    pub preemptions: u32,
    /// Tokens that the decode node guessed (`--speculative-tokens`), and how many of them were right.
    /// `None` where nothing was guessed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafted_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_tokens: Option<u64>,
    pub transport: Option<String>,
    pub kv_bytes: u64,
    /// From the first KV byte sent to the last one acknowledged. It overlaps with prefill.
    pub kv_transfer_ms: Option<f64>,
}

impl Serving {
    pub fn of(placement: Option<&Placement>, summary: &RequestSummary, (prompt, output): (u32, u32)) -> Self {
        let node = |name: &Option<NodeName>| name.as_ref().map(ToString::to_string);
        let guessed = Some(summary).filter(|summary| summary.drafted_tokens > 0);
        Self {
            prompt_tokens: prompt,
            output_tokens: output,
            cached_tokens: summary.cached_tokens,
            prefill_node: placement.and_then(|p| node(&p.prefill_node)),
            decode_node: placement.and_then(|p| node(&p.decode_node)),
            route_reason: placement.map(|p| p.route_reason.clone()),
            local_prefill: placement
                .and_then(|p| p.local_prefill)
                .map(|reason| reason.name().into()),
            attempts: summary.attempts,
            preemptions: summary.preemptions,
            drafted_tokens: guessed.map(|summary| summary.drafted_tokens),
            accepted_tokens: guessed.map(|summary| summary.accepted_tokens),
            transport: summary.transport.clone(),
            kv_bytes: summary.kv_bytes,
            kv_transfer_ms: summary.transport.is_some().then(|| ms(summary.transfer)),
        }
    }

    /// As it is told to somebody who is not to know nodes. Why a node was chosen may name another.
    #[must_use]
    pub(crate) fn without_names(self) -> Self {
        Self {
            prefill_node: None,
            decode_node: None,
            route_reason: None,
            ..self
        }
    }

    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        let nodes = [&self.prefill_node, &self.decode_node].into_iter();
        nodes.flatten().map(String::as_str)
    }

    /// Bytes outside of the struct.
    fn text_bytes(&self) -> usize {
        let texts = [
            &self.prefill_node,
            &self.decode_node,
            &self.route_reason,
            &self.transport,
        ];
        texts.into_iter().flatten().map(String::len).sum()
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
    #[serde(flatten)]
    pub serving: Serving,
    pub queue_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    pub tpot_ms: Option<f64>,
    pub itl_p50_ms: Option<f64>,
    pub itl_p99_ms: Option<f64>,
    pub itl_max_ms: Option<f64>,
    pub e2e_ms: f64,
    pub unattributed_ms: Option<f64>,
    pub last_token_ms: Option<f64>,
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

/// The JSON of one prompt: `docs/reference/records.md`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PromptShape {
    pub choices: Vec<u32>,
    #[serde(flatten)]
    pub serving: Serving,
    pub stages: Vec<StageShape>,
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
    /// Only on the page for recordings. Empty unless one was made.
    #[serde(skip)]
    pub prefixes: Arc<[PrefixShape]>,
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

impl PromptShape {
    fn bytes(&self) -> usize {
        let stages: usize = self.stages.iter().map(StageShape::bytes).sum();
        size_of::<Self>() + size_of_val(self.choices.as_slice()) + self.serving.text_bytes() + stages
    }
}

impl Detail {
    /// Each node that worked on the request at the end. A node may occur twice.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        let prompts = self.prompts.iter().map(|prompt| &prompt.serving);
        [&self.summary.serving]
            .into_iter()
            .chain(prompts)
            .flat_map(Serving::nodes)
    }

    /// How each prompt was served.
    pub(super) fn servings(&self) -> impl Iterator<Item = &Serving> {
        let only = self.prompts.is_empty().then_some(&self.summary.serving);
        only.into_iter()
            .chain(self.prompts.iter().map(|prompt| &prompt.serving))
    }

    /// A rough upper estimate of the memory that the record takes. It bounds the store.
    pub fn bytes(&self) -> usize {
        let s = &self.summary;
        let texts = [&s.response_id, &s.model, &s.error, &s.slow_because]
            .into_iter()
            .flatten();
        let texts = s.serving.text_bytes() + texts.map(String::len).sum::<usize>();
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
        let prefixes: usize = self.prefixes.iter().map(PrefixShape::bytes).sum();
        size_of::<Self>() + s.id.len() + s.trace_id.len() + texts + stages + prompts + stalls + legs + clocks + prefixes
    }
}

/// The stages in the order in which a request goes through them.
pub(crate) fn stage_shapes(stages: &StageTimings, nodes: (Option<&str>, Option<&str>)) -> Vec<StageShape> {
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
        Stage::StepWait | Stage::PrefillQueue | Stage::PrefillForward => prefill.or(decode),
        Stage::TransferTail => prefill,
        Stage::Commit | Stage::DecodeQueue | Stage::Decode => decode,
        _ => return Some("coordinator".to_owned()),
    };
    node.map(str::to_owned)
}

/// What a stage took for sure. Between two processes the clocks' error may be part of it: with local prefill the decode node's
/// mark ends `reserve`.
fn for_sure(stages: &StageTimings, (stage, took): (Stage, Duration), clock_error: Duration) -> Duration {
    let is_between = match stage {
        Stage::Dispatch | Stage::FirstTokenReturn => true,
        Stage::Reserve => stages.get(Stage::Dispatch).is_none(),
        _ => false,
    };
    took.saturating_sub(if is_between { clock_error } else { Duration::ZERO })
}

/// The stage that took longest, in words, for a reader who asks why the request was slow. No process is blamed for what the
/// clocks' error explains.
pub fn slow_because(s: &Summary, (stages, clock_error): (&StageTimings, Duration), stalls: &[Stall]) -> Option<String> {
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
    let sure = |stage: &(Stage, Duration)| for_sure(stages, *stage, clock_error);
    let longest = before.max_by_key(|stage| sure(stage))?;
    let (stage, took) = longest;
    // Less than a third explains nothing: the nodes' stages are missing, because the request broke off.
    if ttft >= rest && ms(sure(longest)) * 3.0 > ttft {
        return Some(format!(
            "{} took {:.0} ms of the {ttft:.0} ms to the first token",
            stage.name(),
            ms(*took)
        ));
    }
    let gap = s.tpot_ms.or(s.itl_p50_ms)?;
    Some(format!("{} output tokens at {gap:.1} ms each", s.serving.output_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_process_is_blamed_for_what_the_clocks_error_explains() {
        let summary = Summary {
            ttft_ms: Some(100.0),
            e2e_ms: 110.0,
            ..Summary::default()
        };
        let took = Duration::from_millis;
        let stages = StageTimings(vec![(Stage::Dispatch, took(50)), (Stage::PrefillForward, took(45))]);
        let why = |error_ms| slow_because(&summary, (&stages, took(error_ms)), &[]).expect("a reason");
        assert!(why(0).starts_with("dispatch took 50 ms"), "{}", why(0));
        assert!(why(10).starts_with("prefill_forward took 45 ms"), "{}", why(10));
    }
}
