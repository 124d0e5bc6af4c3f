//! The body of a completion or a chat: its fields with their ranges, and what no single field shows. Nothing is tokenized
//! yet.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serving_core::ids::TokenId;
use serving_core::request::SamplingParams;

use super::AppState;
use super::error::ApiError;
use super::forms::{
    self, BestOfOne, Count, Flag, Given, Id, List, NoToolChoice, NoTools, PlainText, Real, Seed, Unsupported, Whole,
    in_vocabulary, with_field_names,
};
use super::limits::*;
use super::prompt::{ChatMessages, Input, LogitBias, Prompts, turns};
use crate::text::{STOP_STRINGS_MAX, StopStrings};

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

with_field_names! {
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
        stream_options: Option<StreamOptions>,
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
        best_of: Option<BestOfOne>,
        suffix: Option<Unsupported>,
        include_stop_str_in_output: Option<Unsupported>,
        skip_special_tokens: Option<Unsupported>,
        priority: Option<Unsupported>,
        request_id: Option<Unsupported>,
        cache_salt: Option<Unsupported>,
        truncate_prompt_tokens: Option<Unsupported>,
        add_special_tokens: Option<Unsupported>,
        prompt_logprobs: Option<Unsupported>,
        stream_interval: Option<Unsupported>,
        session_id: Option<Unsupported>,
        json_schema: Option<Unsupported>,
        tools: Option<NoTools>,
        tool_choice: Option<NoToolChoice>,
        response_format: Option<PlainText>,
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, expecting = "an object")]
pub struct StreamOptions {
    pub include_usage: Flag,
    pub continuous_usage_stats: Flag,
}

impl<'de> Deserialize<'de> for StopStrings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = Given::read(deserializer, &Self::WANTED, STOP_STRINGS_MAX)?;
        let wrong = given.is_not(&Self::WANTED);
        let stops = match given {
            Given::Text(one) => Self::new(vec![one]),
            Given::List(stops) => Self::new(stops),
            _ => None,
        };
        stops.ok_or(wrong)
    }
}

/// Completions ask for a number of alternatives, chats for logprobs at all.
#[derive(Clone, Copy, Debug)]
enum Logprobs {
    Wanted(bool),
    Best(u32),
}

const LOGPROBS: &str = "true or false for a chat, or a whole number from 0 to 20 for a completion";

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = Given::<IgnoredAny>::read(deserializer, &LOGPROBS, 0)?;
        if let Given::Bool(wanted) = given {
            return Ok(Self::Wanted(wanted));
        }
        let best = given
            .whole_within(0, LOGPROBS_MAX)
            .ok_or_else(|| given.is_not(&LOGPROBS))?;
        Ok(Self::Best(best as u32))
    }
}

/// A request that can be tokenized.
#[derive(Debug)]
pub struct CheckedRequest {
    pub endpoint: Endpoint,
    pub fields: GenerateFields,
    /// The first served name, whichever of them the client used. Answers have it.
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
    forms::each_name(text, |name| {
        if !GenerateFields::FIELD_NAMES.contains(&name) {
            state.ignored_names.note(name);
        }
    })?;
    let mut fields: GenerateFields = forms::read(text)?;
    fields.check_endpoint(endpoint)?;
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
    let stop_token_ids = fields.stop_token_ids.take().map_or(Vec::new(), |ids| ids.0);
    Ok(CheckedRequest {
        endpoint,
        model,
        sampling: fields.sampling(vocab_size)?,
        max_tokens,
        max_tokens_field,
        min_tokens,
        stop_token_ids: in_vocabulary(stop_token_ids, "stop_token_ids", vocab_size)?,
        choice_count: fields.n.map_or(1, Whole::get),
        logprobs: fields.logprobs(endpoint)?,
        stream_options: fields.stream_options.unwrap_or_default(),
        input: match endpoint {
            Endpoint::Completions => Input::prompts(fields.prompt.take(), vocab_size)?,
            Endpoint::Chat => Input::Chat(turns(fields.messages.take())?),
        },
        fields,
    })
}

/// The first served name. `asked` must be one of them.
pub fn served_model(state: &AppState, asked: Option<String>) -> Result<String, ApiError> {
    let served = &state.served_models;
    match (asked, served.first()) {
        (Some(asked), Some(first)) if served.contains(&asked) => Ok(first.clone()),
        (Some(asked), _) => Err(ApiError::unknown_model(&asked, served)),
        (None, _) => {
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
        match (endpoint, self.logprobs.unwrap_or(Logprobs::Wanted(false))) {
            (Endpoint::Completions, Logprobs::Best(best)) => Ok(Some(best)),
            (Endpoint::Chat, Logprobs::Wanted(true)) => Ok(Some(top)),
            (_, Logprobs::Wanted(false)) if top == 0 => Ok(None),
            (_, Logprobs::Wanted(false)) => {
                let message = "`top_logprobs` needs `logprobs` to be true.";
                Err(ApiError::invalid("top_logprobs", message))
            }
            _ => Err(ApiError::invalid("logprobs", format!("`logprobs` must be {LOGPROBS}."))),
        }
    }

    /// Refuses the fields of the other endpoint. SDKs send `echo: false` along, which asks for nothing.
    fn check_endpoint(&self, endpoint: Endpoint) -> Result<(), ApiError> {
        let (other_path, others) = match endpoint {
            Endpoint::Completions => (
                "/v1/chat/completions",
                &[
                    ("messages", self.messages.is_some()),
                    ("max_completion_tokens", self.max_completion_tokens.is_some()),
                    ("top_logprobs", self.top_logprobs.is_some()),
                ][..],
            ),
            Endpoint::Chat => (
                "/v1/completions",
                &[("prompt", self.prompt.is_some()), ("echo", self.echo.0)][..],
            ),
        };
        match others.iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("`{name}` is a field of {other_path}; this endpoint does not have it.");
                Err(ApiError::invalid(name, message))
            }
        }
    }
}

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
