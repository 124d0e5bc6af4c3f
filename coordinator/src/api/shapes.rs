//! The JSON of answers. The order of fields is their order on the wire. All chunks of a stream have the same head.
//!
//! Beyond OpenAI, only where the request asks for it:
//! - `return_token_ids`: `choices[i].token_ids`, `choices[i].prompt_token_ids` and, with one prompt, `prompt_token_ids`;
//! - `prompt_logprobs`: `prompt_logprobs` of a chat, and of the first choice of each prompt of a completion, see `logprobs`;
//! - `return_kv_hashes`: `kv_hashes`, 16 hex digits per committed prompt block (a list of such lists for several prompts);
//! - `include_metrics`: `metrics`, see `Metrics` (a list of such objects for several prompts).

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use serving_core::ids::TokenId;
use serving_core::stage::Stage;

use super::calls::ToolCallBody;
use super::facts::Reader;
use super::logprobs::PromptLogprobs;
use super::run::PromptRun;
use crate::records::shape::{Serving, ms};
use crate::text::StopReason;

/// What every chunk of an answer repeats.
#[derive(Clone, Debug, Serialize)]
pub struct Head {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub system_fingerprint: String,
    #[serde(skip)]
    pub reader: Reader,
}

/// A whole answer, or one chunk of a stream.
#[derive(Debug, Serialize)]
pub struct Answer<'a> {
    #[serde(flatten)]
    pub head: &'a Head,
    pub choices: Vec<ChoiceBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_hashes: Option<Value>,
}

#[derive(Debug, Serialize)]
pub struct ChoiceBody {
    pub index: u32,
    /// Completions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Chat, whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<Message>,
    /// Chat, streaming.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<Message>,
    pub logprobs: Option<Value>,
    pub finish_reason: Option<&'static str>,
    /// Of a choice that has ended; null unless something that the client asked for ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<Option<StopReason>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Debug, Serialize)]
pub struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Null where the answer only calls.
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallBody>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Tokens delivered, over all choices, end tokens included.
    pub completion_tokens: u32,
    pub total_tokens: u32,
    /// Absent while a stream runs, because prefix hits are known at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: u32,
}

/// `metrics` of an answer, for one prompt. Times are milliseconds with three decimals; null means that the request did not
/// pass through the stage.
#[derive(Debug, Serialize)]
pub struct Metrics {
    /// Waiting for permits and a place.
    pub queue_ms: Option<f64>,
    /// Prefill side: accepted to first token sampled.
    pub prefill_ms: Option<f64>,
    /// Decode node: joined the batch to last token sampled.
    pub decode_ms: Option<f64>,
    /// First byte of the request to first token written (streaming) or received (not).
    pub ttft_ms: Option<f64>,
    /// First byte of the request to this object being written.
    pub e2e_ms: f64,
    /// Output tokens after the first one, divided by the time after it.
    pub tokens_per_second: Option<f64>,
    /// The same facts under the names, and as the differences, that vLLM's clients read.
    #[serde(flatten)]
    pub vllm: VllmMetrics,
    #[serde(flatten)]
    pub serving: Serving,
    /// Every stage by name (the list in docs/reference/stages.md): those of the time to first token, and those after it.
    pub stages_ttft_ms: serde_json::Map<String, Value>,
    pub stages_rest_ms: serde_json::Map<String, Value>,
    /// TTFT less its stages: the time that no stage measured.
    pub unattributed_ms: Option<f64>,
}

/// vLLM's per-request metrics (its `tokens_per_second` has our name and meaning).
#[derive(Debug, Serialize)]
pub struct VllmMetrics {
    pub queue_time_ms: Option<f64>,
    /// From the end of the queue to the first token.
    pub time_to_first_token_ms: Option<f64>,
    /// From the first token to the last.
    pub generation_time_ms: Option<f64>,
    pub mean_itl_ms: Option<f64>,
}

impl VllmMetrics {
    fn new(times: &EdgeTimes, output_tokens: u32) -> Self {
        let queued = times.stages.get(Stage::Queue);
        let generation = times.ttft.map(|ttft| times.e2e.saturating_sub(ttft));
        let gaps = output_tokens.saturating_sub(1);
        Self {
            queue_time_ms: queued.map(ms),
            time_to_first_token_ms: times
                .ttft
                .map(|ttft| ms(ttft.saturating_sub(queued.unwrap_or_default()))),
            generation_time_ms: generation.map(ms),
            mean_itl_ms: generation.filter(|_| gaps > 0).map(|time| ms(time / gaps)),
        }
    }
}

pub fn ids(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

/// One value for one prompt, a list for several.
pub fn one_or_list(mut values: Vec<Value>) -> Value {
    if values.len() == 1 {
        values.remove(0)
    } else {
        Value::Array(values)
    }
}

pub fn kv_hashes(prompt: &PromptRun) -> Value {
    prompt
        .summary
        .kv_hashes
        .iter()
        .map(|hash| Value::from(format!("{hash:016x}")))
        .collect()
}

/// What the edge measured of one prompt's request.
#[derive(Clone, Debug)]
pub struct EdgeTimes {
    pub ttft: Option<Duration>,
    pub e2e: Duration,
    pub stages: serving_core::stage::StageTimings,
    /// Below zero when something was counted twice.
    pub unattributed_ms: Option<f64>,
}

pub fn metrics(prompt: &PromptRun, times: &EdgeTimes, reader: Reader) -> Metrics {
    let stages = |is_before: bool| {
        let of_phase = times
            .stages
            .0
            .iter()
            .filter(|(stage, _)| stage.is_before_first_token() == is_before);
        of_phase
            .map(|(stage, duration)| (stage.name().to_owned(), Value::from(ms(*duration))))
            .collect()
    };
    let prefill = [Stage::StepWait, Stage::PrefillQueue, Stage::PrefillForward]
        .iter()
        .filter_map(|s| times.stages.get(*s));
    let after_first = times
        .ttft
        .map(|ttft| times.e2e.saturating_sub(ttft).as_secs_f64())
        .filter(|s| *s > 0.0);
    let tokens = (prompt.request.client_prompt_tokens, prompt.output_tokens);
    let serving = Serving::of(prompt.placement.as_ref(), &prompt.summary, tokens);
    Metrics {
        queue_ms: times.stages.get(Stage::Queue).map(ms),
        prefill_ms: prefill.reduce(|a, b| a + b).map(ms),
        decode_ms: times.stages.get(Stage::Decode).map(ms),
        ttft_ms: times.ttft.map(ms),
        e2e_ms: ms(times.e2e),
        tokens_per_second: after_first
            .filter(|_| prompt.output_tokens > 1)
            .map(|seconds| (f64::from(prompt.output_tokens - 1) / seconds * 1e3).round() / 1e3),
        vllm: VllmMetrics::new(times, prompt.output_tokens),
        serving: match reader {
            Reader::Operator => serving,
            Reader::Client => serving.without_names(),
        },
        stages_ttft_ms: stages(true),
        stages_rest_ms: stages(false),
        unattributed_ms: times.unattributed_ms,
    }
}
