//! The body of a completion or a chat: its fields with their ranges, and what no single field shows. Nothing is tokenized
//! yet.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use serde::Deserialize;
use serde::de::{Expected, Visitor};
use serving_core::ids::TokenId;
use serving_core::request::SamplingParams;

use super::AppState;
use super::error::ApiError;
use super::forms::{
    self, Count, Flag, Id, List, Object, Range, Real, Seed, Whole, read_by_visitor, visit_whole_numbers,
};
use super::limits::*;
use super::prompt::{ChatMessages, Input, LogitBias, Prompts, turns};
use crate::text::StopStrings;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Endpoint {
    #[default]
    Completions,
    Chat,
}

impl Endpoint {
    /// The OpenTelemetry `gen_ai.operation.name`.
    pub fn operation(self) -> &'static str {
        match self {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat => "chat",
        }
    }

    /// The field that the prompt comes from.
    pub fn prompt_field(self) -> &'static str {
        match self {
            Endpoint::Completions => "prompt",
            Endpoint::Chat => "messages",
        }
    }
}

/// What a client wrote, with each field in its range. Null and absent mean the same. `include_metrics` and
/// `return_kv_hashes` are baton's own; see `shapes`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct GenerateFields {
    model: Option<String>,
    prompt: Option<Prompts>,
    messages: Option<ChatMessages>,
    max_tokens: Option<Count>,
    max_completion_tokens: Option<Count>,
    temperature: Option<Real<0, TEMPERATURE_MAX>>,
    top_p: Option<Real<0, 1>>,
    top_k: Option<Whole<-1, { i32::MAX as i64 }>>,
    min_p: Option<Real<0, 1>>,
    n: Option<Whole<1, CHOICES_MAX>>,
    stop: Option<StopStrings>,
    pub seed: Option<Seed>,
    pub stream: Flag,
    stream_options: Option<Object<StreamOptions>>,
    logprobs: Option<Logprobs>,
    top_logprobs: Option<Whole<0, LOGPROBS_MAX>>,
    presence_penalty: Option<Real<{ -PENALTY_MAX }, PENALTY_MAX>>,
    frequency_penalty: Option<Real<{ -PENALTY_MAX }, PENALTY_MAX>>,
    repetition_penalty: Option<Real<0, REPETITION_PENALTY_MAX>>,
    logit_bias: Option<LogitBias>,
    user: Option<String>,
    pub ignore_eos: Flag,
    min_tokens: Option<Count>,
    stop_token_ids: Option<List<Id, STOP_TOKEN_IDS_MAX>>,
    pub echo: Flag,
    pub return_token_ids: Flag,
    pub include_metrics: Flag,
    pub return_kv_hashes: Flag,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    pub include_usage: Flag,
    pub continuous_usage_stats: Flag,
}

/// Completions ask for a number of alternatives, chats for logprobs at all.
#[derive(Clone, Copy, Debug)]
enum Logprobs {
    Wanted(bool),
    Best(u32),
}

impl Default for Logprobs {
    fn default() -> Self {
        Self::Wanted(false)
    }
}

impl Visitor<'_> for Logprobs {
    type Value = Self;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "true or false (chat), or a whole number from 0 to {LOGPROBS_MAX} (completions)"
        )
    }
    fn visit_bool<E>(self, wanted: bool) -> Result<Self, E> {
        Ok(Self::Wanted(wanted))
    }
    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Self, E> {
        let best = Range::whole(0, LOGPROBS_MAX).visit_f64(number)?;
        Ok(Self::Best(best as u32))
    }
    visit_whole_numbers!();
}

read_by_visitor!(Logprobs);

/// A request that can be tokenized.
#[derive(Debug)]
pub struct CheckedRequest {
    pub endpoint: Endpoint,
    pub fields: GenerateFields,
    /// The served name that the client used. Answers repeat it.
    pub model: String,
    pub input: Input,
    pub sampling: SamplingParams,
    /// `None`: the endpoint's default.
    pub max_tokens: Option<u32>,
    /// The field `max_tokens` came from, for messages.
    pub max_tokens_field: &'static str,
    pub min_tokens: u32,
    pub stop_token_ids: Vec<TokenId>,
    pub choice_count: u32,
    /// `Some(k)`: logprobs with the k best alternatives.
    pub logprobs: Option<u32>,
    pub stream_options: StreamOptions,
}

pub fn parse(state: &AppState, endpoint: Endpoint, text: &str) -> Result<CheckedRequest, ApiError> {
    check_names(text, endpoint, &state.ignored_names)?;
    let mut fields: GenerateFields = forms::read(text)?;
    let model = served_model(state, fields.model.take())?;
    let vocab_size = state.text.codec().vocab_size();
    let (max_tokens, max_tokens_field) = fields.max_tokens(endpoint)?;
    if fields.user.as_ref().is_some_and(|user| user.len() > LABEL_CHARS_MAX) {
        let message = format!("`user` must be at most {LABEL_CHARS_MAX} bytes long.");
        return Err(ApiError::invalid("user", message));
    }
    let min_tokens = fields.min_tokens.map_or(0, Count::get);
    if let Some(max) = max_tokens.filter(|max| min_tokens > *max) {
        let message = format!("`min_tokens` ({min_tokens}) must not exceed `{max_tokens_field}` ({max}).");
        return Err(ApiError::invalid("min_tokens", message));
    }
    if fields.stream_options.is_some() && !fields.stream.0 {
        return Err(ApiError::invalid(
            "stream_options",
            "`stream_options` needs `stream` to be true.",
        ));
    }
    let stop_token_ids = fields.stop_token_ids.take().unwrap_or_default();
    Ok(CheckedRequest {
        endpoint,
        model,
        sampling: fields.sampling(vocab_size)?,
        max_tokens,
        max_tokens_field,
        min_tokens,
        stop_token_ids: in_vocabulary(stop_token_ids.0, "stop_token_ids", vocab_size)?,
        choice_count: fields.n.map_or(1, Whole::get),
        logprobs: fields.logprobs(endpoint)?,
        stream_options: fields
            .stream_options
            .take()
            .map_or_else(Default::default, |options| options.0),
        input: match endpoint {
            Endpoint::Completions => Input::prompts(fields.prompt.take(), vocab_size)?,
            Endpoint::Chat => Input::Chat(turns(fields.messages.take())?),
        },
        fields,
    })
}

/// The served name in `model`, checked.
pub fn served_model(state: &AppState, asked: Option<String>) -> Result<String, ApiError> {
    let served = &state.served_models;
    match asked {
        Some(asked) if served.contains(&asked) => Ok(asked),
        Some(asked) => Err(ApiError::unknown_model(&asked, served)),
        None => {
            let message = format!("`model` is missing. This server serves: {}.", served.join(", "));
            Err(ApiError::invalid("model", message))
        }
    }
}

impl GenerateFields {
    pub fn stop_strings(&self) -> &[String] {
        self.stop.as_ref().map_or(&[], |stop| stop.0.as_slice())
    }

    fn max_tokens(&self, endpoint: Endpoint) -> Result<(Option<u32>, &'static str), ApiError> {
        let (asked, name) = match (endpoint, self.max_completion_tokens) {
            (Endpoint::Chat, Some(asked)) => (Some(asked), "max_completion_tokens"),
            _ => (self.max_tokens, "max_tokens"),
        };
        // Values beyond any context are no type error. They end as context_length_exceeded, which names the limit.
        let asked = asked.map(Count::get);
        if asked == Some(0) && !self.echo.0 {
            let message = format!("`{name}` must be at least 1 (0 only together with `echo`, for completions).");
            return Err(ApiError::invalid(name, message));
        }
        Ok((asked, name))
    }

    fn sampling(&self, vocab_size: u32) -> Result<SamplingParams, ApiError> {
        let repetition_penalty = self.repetition_penalty.map_or(1.0, |penalty| penalty.0);
        if repetition_penalty <= 0.0 {
            let message = "`repetition_penalty` must be above 0; 1 turns it off.";
            return Err(ApiError::invalid("repetition_penalty", message));
        }
        Ok(SamplingParams {
            temperature: self.temperature.map_or(1.0, |temperature| temperature.0),
            // In vLLM's spelling 0 and -1 keep all tokens.
            top_k: self.top_k.map(Whole::get).filter(|k| *k > 0 && *k < vocab_size),
            // 0 keeps the likeliest token alone, as the smallest positive share does.
            top_p: self.top_p.map_or(1.0, |share| share.0.max(f32::MIN_POSITIVE)),
            min_p: self.min_p.map_or(0.0, |share| share.0),
            presence_penalty: self.presence_penalty.map_or(0.0, |penalty| penalty.0),
            frequency_penalty: self.frequency_penalty.map_or(0.0, |penalty| penalty.0),
            repetition_penalty,
            logit_bias: match &self.logit_bias {
                Some(biases) => biases.in_vocabulary(vocab_size)?,
                None => Vec::new(),
            },
        })
    }

    fn logprobs(&self, endpoint: Endpoint) -> Result<Option<u32>, ApiError> {
        let top = self.top_logprobs.map_or(0, Whole::get);
        match (endpoint, self.logprobs.unwrap_or_default()) {
            (Endpoint::Completions, Logprobs::Best(best)) => Ok(Some(best)),
            (Endpoint::Chat, Logprobs::Wanted(true)) => Ok(Some(top)),
            (_, Logprobs::Wanted(false)) if top == 0 => Ok(None),
            (_, Logprobs::Wanted(false)) => {
                let message = "`top_logprobs` needs `logprobs` to be true.";
                Err(ApiError::invalid("top_logprobs", message))
            }
            _ => {
                let wanted: &dyn Expected = &Logprobs::default();
                Err(ApiError::invalid("logprobs", format!("`logprobs` must be {wanted}.")))
            }
        }
    }
}

/// Checks token ids against the vocabulary. `name` is the list's name in messages.
pub fn in_vocabulary(ids: Vec<Id>, name: &str, vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
    if let Some(at) = ids.iter().position(|id| id.0.0 >= vocab_size) {
        let (most, wrong) = (vocab_size - 1, ids[at].0);
        let top = name.split('[').next().unwrap_or(name);
        let message = format!("`{name}[{at}]` must be a token id from 0 to {most}, not {wrong}.");
        return Err(ApiError::invalid(top, message));
    }
    Ok(ids.into_iter().map(|id| id.0).collect())
}

const COMPLETIONS_ONLY: &[&str] = &["prompt", "echo"];
const CHAT_ONLY: &[&str] = &["messages", "max_completion_tokens", "top_logprobs"];

/// Fields that OpenAI or vLLM have and baton has not. A client that sends one gets an error: it would otherwise believe
/// that the field had an effect. SDKs and frameworks send some of them with a value that asks for the default behaviour.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("include_stop_str_in_output", ""),
    ("skip_special_tokens", ""),
    ("priority", ""),
    ("request_id", ""),
    ("cache_salt", ""),
    ("truncate_prompt_tokens", ""),
    ("add_special_tokens", ""),
    ("response_format", "{text}"),
    ("tools", "[]"),
    ("tool_choice", "none"),
    ("prompt_logprobs", ""),
    ("stream_interval", ""),
    ("session_id", ""),
    ("json_schema", ""),
    ("suffix", ""),
    ("best_of", "1"),
];

/// Remembers which ignored names were logged: each name once, and a limited number of names.
#[derive(Debug, Default)]
pub struct IgnoredNames(Mutex<BTreeSet<String>>);

impl IgnoredNames {
    fn note(&self, name: &str) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() < IGNORED_NAMES_LOGGED_MAX && name.len() <= 64 && seen.insert(name.to_owned()) {
            tracing::info!(
                field = name,
                "ignoring a request field this server does not know (logged once per name)"
            );
        }
    }
}

/// Refuses fields that are known and not built, and notes fields that are unknown.
fn check_names(text: &str, endpoint: Endpoint, ignored: &IgnoredNames) -> Result<(), ApiError> {
    let (other, other_path) = match endpoint {
        Endpoint::Completions => (CHAT_ONLY, "/v1/chat/completions"),
        Endpoint::Chat => (COMPLETIONS_ONLY, "/v1/completions"),
    };
    let known = forms::field_names::<GenerateFields>();
    forms::each_field(text, |name, value| {
        if let Some((_, default)) = UNSUPPORTED.iter().find(|(unsupported, _)| *unsupported == name) {
            let asks_for_nothing = value == "null" || value == *default;
            return if asks_for_nothing {
                Ok(())
            } else {
                Err(ApiError::unsupported(name))
            };
        }
        // SDKs send `echo: false` along. Only a value that asks for something is an error.
        if other.contains(&name) && !matches!(value, "null" | "false") {
            let message = format!("`{name}` is a field of {other_path}; this endpoint does not have it.");
            return Err(ApiError::invalid(name, message));
        }
        if !known.contains(&name) && value != "null" {
            ignored.note(name);
        }
        Ok(())
    })
}
