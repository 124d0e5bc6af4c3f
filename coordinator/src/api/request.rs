//! The body of a completion or a chat: its fields with their ranges, and what no single field shows. Nothing is tokenized
//! yet.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serving_core::ids::TokenId;
use serving_core::request::{REPETITION_PENALTY_MIN, SamplingParams};

use super::AppState;
use super::constraint::{ConstraintFields, GivenConstraint, ResponseFormat, Schema, StructuredOutputs, Texts};
use super::error::ApiError;
use super::forms::{
    self, CacheSalt, Count, EmptyList, EmptyText, Flag, Given, Id, List, NoToolChoice, OnlyFlag, OnlyNumber, Real,
    Seed, Unsupported, Whole, in_vocabulary, with_field_names,
};
use super::given_chat::GivenChat;
use super::limits::*;
use super::prompt::{ChatEnding, ChatMessages, Input, LogitBias, Prompts, turns};
use super::tools::{CallableTools, GivenTools, ToolChoice, Tools};
use crate::text::{STOP_STRINGS_MAX, StopStrings};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Endpoint {
    #[default]
    Completions,
    Chat,
    /// A chat in the form of OpenAI's Responses API.
    Responses,
}

impl Endpoint {
    /// The OpenTelemetry `gen_ai.operation.name`.
    pub fn operation(self) -> &'static str {
        match self {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat | Endpoint::Responses => "chat",
        }
    }

    /// The field that the prompt comes from.
    pub fn prompt_field(self) -> &'static str {
        match self {
            Endpoint::Completions => "prompt",
            Endpoint::Chat => "messages",
            Endpoint::Responses => "input",
        }
    }
}

with_field_names! {
    /// What a client wrote, with each field in its range. Null and absent mean the same. `include_metrics` and
    /// `return_kv_hashes` are baton's own; see `shapes`.
    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    pub struct GenerateFields {
        pub model: Option<String>,
        pub prompt: Option<Prompts>,
        pub messages: Option<ChatMessages>,
        pub max_tokens: Option<Count>,
        pub max_completion_tokens: Option<Count>,
        pub temperature: Option<Real<0, TEMPERATURE_MAX>>,
        pub top_p: Option<Real<0, 1>>,
        pub top_k: Option<Whole<-1, { i32::MAX as i64 }>>,
        pub min_p: Option<Real<0, 1>>,
        pub n: Option<Whole<1, CHOICES_MAX>>,
        pub stop: Option<StopStrings>,
        pub seed: Option<Seed>,
        pub stream: Flag,
        pub stream_options: Option<StreamOptions>,
        pub logprobs: Option<Logprobs>,
        pub top_logprobs: Option<Whole<0, LOGPROBS_MAX>>,
        pub presence_penalty: Option<Real<{ -PENALTY_MAX }, PENALTY_MAX>>,
        pub frequency_penalty: Option<Real<{ -PENALTY_MAX }, PENALTY_MAX>>,
        pub repetition_penalty: Option<Real<0, REPETITION_PENALTY_MAX>>,
        pub logit_bias: Option<LogitBias>,
        pub user: Option<String>,
        pub ignore_eos: Flag,
        pub min_tokens: Option<Count>,
        pub stop_token_ids: Option<List<Id, STOP_TOKEN_IDS_MAX>>,
        pub echo: Flag,
        pub return_token_ids: Flag,
        pub include_metrics: Flag,
        pub return_kv_hashes: Flag,
        pub truncate_prompt_tokens: Option<Whole<-1, { u32::MAX as i64 }>>,
        pub add_special_tokens: Option<Flag>,
        pub allow_special_tokens: Flag,
        pub add_generation_prompt: Option<Flag>,
        pub continue_final_message: Flag,
        pub best_of: Option<OnlyNumber<1>>,
        pub suffix: Option<EmptyText>,
        pub include_stop_str_in_output: Option<OnlyFlag<false>>,
        pub skip_special_tokens: Option<OnlyFlag<true>>,
        pub spaces_between_special_tokens: Option<OnlyFlag<true>>,
        pub priority: Option<Whole<PRIORITY_MIN, PRIORITY_MAX>>,
        pub request_id: Option<Unsupported>,
        pub cache_salt: Option<CacheSalt>,
        pub prompt_logprobs: Option<Whole<0, LOGPROBS_MAX>>,
        pub stream_interval: Option<OnlyNumber<1>>,
        pub session_id: Option<Unsupported>,
        pub allowed_token_ids: Option<List<Id, ALLOWED_TOKEN_IDS_MAX>>,
        pub bad_words: Option<List<String, BAD_WORDS_MAX>>,
        pub use_beam_search: Option<OnlyFlag<false>>,
        pub length_penalty: Option<OnlyNumber<1>>,
        pub early_stopping: Option<OnlyFlag<false>>,
        pub no_repeat_ngram_size: Option<OnlyNumber<0>>,
        pub typical_p: Option<OnlyNumber<1>>,
        pub logits_processors: Option<EmptyList>,
        // What shapes the answer: OpenAI's names, then those of vLLM, SGLang and llama-server.
        pub response_format: Option<ResponseFormat>,
        pub tools: Option<Tools>,
        pub tool_choice: Option<ToolChoice>,
        pub parallel_tool_calls: Option<Flag>,
        pub functions: Option<EmptyList>,
        pub function_call: Option<NoToolChoice>,
        pub audio: Option<Unsupported>,
        pub web_search_options: Option<Unsupported>,
        pub structured_outputs: Option<StructuredOutputs>,
        pub guided_json: Option<Schema>,
        pub guided_regex: Option<String>,
        pub guided_choice: Option<Texts>,
        pub guided_grammar: Option<String>,
        pub chat_template: Option<Unsupported>,
        pub chat_template_kwargs: Option<Unsupported>,
        pub documents: Option<EmptyList>,
        pub json_schema: Option<Unsupported>,
        pub regex: Option<Unsupported>,
        pub ebnf: Option<Unsupported>,
        pub grammar: Option<EmptyText>,
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

/// In a completion the field is the number of alternatives. In a chat it says whether logprobs are wanted at all.
#[derive(Clone, Copy, Debug)]
pub enum Logprobs {
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
    /// The first served name, whichever served name the client used. Answers carry this name.
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
    pub truncation: Option<Truncation>,
    pub constraint: GivenConstraint,
    /// Functions that the answer may call.
    pub tools: Option<CallableTools>,
    /// What an answer of `/v1/responses` repeats.
    pub response: Option<Box<AskedResponse>>,
}

/// What an answer of `/v1/responses` repeats of its request, as it was written.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct AskedResponse {
    pub instructions: Option<String>,
    pub text: Option<Box<RawValue>>,
    pub tools: Option<Box<RawValue>>,
    pub tool_choice: Option<Box<RawValue>>,
    pub metadata: Option<Box<RawValue>>,
}

/// A prompt that is longer loses its first tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    /// To so many tokens, at least 1.
    Tokens(u32),
    /// To what the context holds beside the output.
    Context,
}

pub fn parse(state: &AppState, endpoint: Endpoint, text: &str) -> Result<CheckedRequest, ApiError> {
    note_ignored(state, text, GenerateFields::FIELD_NAMES)?;
    let mut fields: GenerateFields = forms::read(text)?;
    fields.check_endpoint(endpoint)?;
    let tools = GivenTools::new(fields.tools.take(), fields.tool_choice.take())?;
    let input = match endpoint {
        Endpoint::Completions => Input::prompts(fields.prompt.take(), state.text.codec().vocab_size())?,
        Endpoint::Chat | Endpoint::Responses => fields.chat(tools.as_ref())?,
    };
    check(state, endpoint, fields, (input, tools))
}

/// Logs the names in a body that are not fields.
pub fn note_ignored(state: &AppState, text: &str, known: &[&str]) -> Result<(), ApiError> {
    forms::each_name(text, |name| {
        if !known.contains(&name) {
            state.ignored_names.note(name);
        }
    })
}

/// Checks what cannot be seen in a single field.
pub fn check(
    state: &AppState,
    endpoint: Endpoint,
    mut fields: GenerateFields,
    (input, tools): (Input, Option<GivenTools>),
) -> Result<CheckedRequest, ApiError> {
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
    let constraint = fields.constraint(vocab_size, tools.as_ref())?;
    let truncation = fields.truncation()?;
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
        truncation,
        constraint,
        tools: tools.as_ref().map(GivenTools::callable),
        response: None,
        input,
        fields,
    })
}

/// The first served name. `asked` must be a served name. A client may leave it out, because all served names mean the one model.
pub fn served_model(state: &AppState, asked: Option<String>) -> Result<String, ApiError> {
    let served = &state.served_models;
    match asked {
        Some(asked) if !served.contains(&asked) => Err(ApiError::unknown_model(&asked, served)),
        _ => Ok(served.first().cloned().unwrap_or_default()),
    }
}

impl GenerateFields {
    pub fn stop_strings(&self) -> &[String] {
        self.stop.as_ref().map_or(&[], |stop| stop.0.as_slice())
    }

    fn max_tokens(&self, endpoint: Endpoint) -> Result<(Option<u32>, &'static str), ApiError> {
        let (asked, name) = match (endpoint, self.max_completion_tokens) {
            (Endpoint::Chat, Some(asked)) => (Some(asked), "max_completion_tokens"),
            (Endpoint::Responses, asked) => (asked, "max_output_tokens"),
            _ => (self.max_tokens, "max_tokens"),
        };
        // A value beyond any context is not a type error. It is refused as context_length_exceeded, which names the limit.
        let asked = asked.map(Count::get);
        if asked == Some(0) && !self.echo.0 {
            let message = format!("`{name}` must be at least 1 (0 only together with `echo`, for completions).");
            return Err(ApiError::invalid(name, message));
        }
        Ok((asked, name))
    }

    fn chat(&mut self, tools: Option<&GivenTools>) -> Result<Input, ApiError> {
        let ending = ChatEnding::of(self.continue_final_message, self.add_generation_prompt)?;
        let turns = turns(self.messages.take())?;
        Ok(Input::Chat(GivenChat::new("messages", turns, tools), ending))
    }

    /// A grammar decides where the output ends, so nothing else may move its end.
    fn constraint(&mut self, vocab_size: u32, tools: Option<&GivenTools>) -> Result<GivenConstraint, ApiError> {
        let is_parallel = self.parallel_tool_calls.is_none_or(|wanted| wanted.0);
        let given = ConstraintFields {
            response_format: self.response_format.take(),
            structured_outputs: self.structured_outputs.take(),
            guided_json: self.guided_json.take(),
            guided_regex: self.guided_regex.take(),
            guided_choice: self.guided_choice.take(),
            guided_grammar: self.guided_grammar.take(),
            allowed_token_ids: self.allowed_token_ids.take(),
            bad_words: self.bad_words.take(),
            tools: tools.and_then(|tools| tools.grammar(is_parallel)),
        };
        let given = given.check(vocab_size)?;
        let moved = [
            ("ignore_eos", self.ignore_eos.0),
            ("min_tokens", self.min_tokens.is_some_and(|least| least.get() > 0)),
        ];
        match moved.iter().find(|(_, is_set)| *is_set && given.has_grammar()) {
            None => Ok(given),
            Some((name, _)) => {
                let message =
                    format!("`{name}` does not go together with a grammar, which decides where the output ends.");
                Err(ApiError::invalid(name, message))
            }
        }
    }

    fn truncation(&self) -> Result<Option<Truncation>, ApiError> {
        match self.truncate_prompt_tokens.map(|tokens| tokens.0) {
            None => Ok(None),
            Some(-1) => Ok(Some(Truncation::Context)),
            Some(0) => Err(ApiError::invalid(
                "truncate_prompt_tokens",
                "`truncate_prompt_tokens` must be at least 1, or -1 for as much as the context holds.",
            )),
            Some(tokens) => Ok(Some(Truncation::Tokens(u32::try_from(tokens).unwrap_or(u32::MAX)))),
        }
    }

    fn sampling(&self, vocab_size: u32) -> Result<SamplingParams, ApiError> {
        let repetition_penalty = self.repetition_penalty.map_or(1.0, |penalty| penalty.0);
        if repetition_penalty < REPETITION_PENALTY_MIN {
            let message = format!("`repetition_penalty` must be at least {REPETITION_PENALTY_MIN}; 1 turns it off.");
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
        if self.prompt_logprobs.is_some() && self.stream.0 {
            let message = "`prompt_logprobs` does not go together with `stream`; leave one of the two out.";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        let top = self.top_logprobs.map_or(0, Whole::get);
        match (endpoint, self.logprobs.unwrap_or(Logprobs::Wanted(false))) {
            (Endpoint::Completions, Logprobs::Best(best)) => Ok(Some(best)),
            (Endpoint::Chat | Endpoint::Responses, Logprobs::Wanted(true)) => Ok(Some(top)),
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
                    ("continue_final_message", self.continue_final_message.0),
                    ("tools", self.tools.as_ref().is_some_and(|tools| !tools.0.is_empty())),
                ][..],
            ),
            Endpoint::Chat | Endpoint::Responses => (
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
