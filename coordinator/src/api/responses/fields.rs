//! The body of `POST /v1/responses`.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::input::ResponseInput;
use crate::api::AppState;
use crate::api::constraint::{ResponseFormat, Schema, StructuredOutputs, Texts};
use crate::api::error::ApiError;
use crate::api::forms::{
    self, AutoWord, CacheSalt, Count, DisabledWord, EmptyList, EmptyText, Flag, Id, List, NoToolChoice, OnlyFlag,
    OnlyNumber, Real, Seed, Unsupported, Whole, with_field_names,
};
use crate::api::given_chat::{GivenChat, Turn};
use crate::api::limits::*;
use crate::api::prompt::{ChatEnding, Input, LogitBias};
use crate::api::request::{AskedResponse, CheckedRequest, Endpoint, GenerateFields, check, note_ignored};
use crate::api::tools::{FlatTool, FlatToolChoice, GivenTools, Tool};
use crate::text::StopStrings;

with_field_names! {
    /// What a client wrote. `store` is accepted with any value and has no effect: the answer says `"store": false`. The
    /// sampling fields beyond OpenAI's are those of chats. No field of chats is unknown here, so none is silently ignored.
    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    pub struct ResponseFields {
        model: Option<String>,
        input: Option<ResponseInput>,
        instructions: Option<String>,
        max_output_tokens: Option<Count>,
        temperature: Option<Real<0, TEMPERATURE_MAX>>,
        top_p: Option<Real<0, 1>>,
        stream: Flag,
        tools: Option<List<FlatTool, TOOLS_MAX>>,
        tool_choice: Option<FlatToolChoice>,
        parallel_tool_calls: Option<Flag>,
        text: Option<TextFields>,
        user: Option<String>,
        store: Flag,
        include: Option<List<String, INCLUDED_MAX>>,
        top_k: Option<Whole<-1, { i32::MAX as i64 }>>,
        min_p: Option<Real<0, 1>>,
        seed: Option<Seed>,
        stop: Option<StopStrings>,
        presence_penalty: Option<Real<{ -PENALTY_MAX }, PENALTY_MAX>>,
        frequency_penalty: Option<Real<{ -PENALTY_MAX }, PENALTY_MAX>>,
        repetition_penalty: Option<Real<0, REPETITION_PENALTY_MAX>>,
        logit_bias: Option<LogitBias>,
        ignore_eos: Flag,
        min_tokens: Option<Count>,
        stop_token_ids: Option<List<Id, STOP_TOKEN_IDS_MAX>>,
        include_metrics: Flag,
        priority: Option<Whole<PRIORITY_MIN, PRIORITY_MAX>>,
        allow_special_tokens: Flag,
        cache_salt: Option<CacheSalt>,
        allowed_token_ids: Option<List<Id, ALLOWED_TOKEN_IDS_MAX>>,
        bad_words: Option<List<String, BAD_WORDS_MAX>>,
        structured_outputs: Option<StructuredOutputs>,
        guided_json: Option<Schema>,
        guided_regex: Option<String>,
        guided_choice: Option<Texts>,
        guided_grammar: Option<String>,
        background: Option<OnlyFlag<false>>,
        conversation: Option<Unsupported>,
        max_tool_calls: Option<Unsupported>,
        n: Option<OnlyNumber<1>>,
        previous_response_id: Option<Unsupported>,
        prompt: Option<Unsupported>,
        reasoning: Option<Unsupported>,
        service_tier: Option<AutoWord>,
        top_logprobs: Option<OnlyNumber<0>>,
        truncation: Option<DisabledWord>,
        // Fields of chats and completions: they would change the answer.
        add_generation_prompt: Option<OnlyFlag<true>>,
        add_special_tokens: Option<OnlyFlag<false>>,
        audio: Option<Unsupported>,
        best_of: Option<OnlyNumber<1>>,
        chat_template: Option<Unsupported>,
        chat_template_kwargs: Option<Unsupported>,
        continue_final_message: Option<OnlyFlag<false>>,
        documents: Option<EmptyList>,
        early_stopping: Option<OnlyFlag<false>>,
        ebnf: Option<Unsupported>,
        echo: Option<OnlyFlag<false>>,
        function_call: Option<NoToolChoice>,
        functions: Option<EmptyList>,
        grammar: Option<EmptyText>,
        include_stop_str_in_output: Option<OnlyFlag<false>>,
        json_schema: Option<Unsupported>,
        length_penalty: Option<OnlyNumber<1>>,
        logits_processors: Option<EmptyList>,
        logprobs: Option<OnlyFlag<false>>,
        max_completion_tokens: Option<Unsupported>,
        max_tokens: Option<Unsupported>,
        messages: Option<Unsupported>,
        no_repeat_ngram_size: Option<OnlyNumber<0>>,
        prompt_logprobs: Option<Unsupported>,
        regex: Option<Unsupported>,
        request_id: Option<Unsupported>,
        response_format: Option<Unsupported>,
        return_kv_hashes: Option<OnlyFlag<false>>,
        return_token_ids: Option<OnlyFlag<false>>,
        session_id: Option<Unsupported>,
        skip_special_tokens: Option<OnlyFlag<true>>,
        spaces_between_special_tokens: Option<OnlyFlag<true>>,
        stream_interval: Option<OnlyNumber<1>>,
        suffix: Option<EmptyText>,
        truncate_prompt_tokens: Option<Unsupported>,
        typical_p: Option<OnlyNumber<1>>,
        use_beam_search: Option<OnlyFlag<false>>,
        web_search_options: Option<Unsupported>,
        // What only the answer repeats, or what belongs to other parts of OpenAI's service.
        metadata: Option<Box<RawValue>>,
        stream_options: Option<Box<RawValue>>,
        prompt_cache_key: Option<String>,
        prompt_cache_retention: Option<String>,
        safety_identifier: Option<String>,
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `format`")]
struct TextFields {
    format: Option<TextFormat>,
    verbosity: Option<Unsupported>,
}

/// The name, the description and `strict` change nothing: a schema is always followed.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `type`")]
struct TextFormat {
    r#type: Option<String>,
    schema: Option<Schema>,
}

/// Reads a body as a chat, and keeps what the answer repeats.
pub fn parse(state: &AppState, text: &str) -> Result<CheckedRequest, ApiError> {
    note_ignored(state, text, ResponseFields::FIELD_NAMES)?;
    let mut fields: ResponseFields = forms::read(text)?;
    fields.check_included()?;
    let tools = fields
        .tools
        .take()
        .map(|tools| List(tools.0.into_iter().map(Tool::from).collect()));
    let choice = fields.tool_choice.take().map(|choice| choice.0);
    let tools = GivenTools::new(tools, choice)?;
    let chat = GivenChat::new("input", fields.turns()?, tools.as_ref());
    let input = Input::Chat(chat, ChatEnding::NewMessage);
    let mut asked: AskedResponse = forms::read(text)?;
    if fields.text.as_ref().is_none_or(|text| text.format.is_none()) {
        asked.text = None;
    }
    check_repeated(&asked)?;
    let checked = check(state, Endpoint::Responses, fields.into(), (input, tools))?;
    Ok(CheckedRequest {
        response: Some(Box::new(asked)),
        ..checked
    })
}

/// What an answer repeats becomes no prompt, so nothing else limits it.
fn check_repeated(asked: &AskedResponse) -> Result<(), ApiError> {
    let fields = [
        ("metadata", &asked.metadata),
        ("tools", &asked.tools),
        ("text", &asked.text),
        ("tool_choice", &asked.tool_choice),
    ];
    let sizes = fields.map(|(name, field)| (field.as_ref().map_or(0, |raw| raw.get().len()), name));
    let sum: usize = sizes.iter().map(|(bytes, _)| bytes).sum();
    match sizes.iter().max() {
        Some((_, largest)) if sum > REPEATED_BYTES_MAX => Err(ApiError::invalid(
            largest,
            format!(
                "`metadata`, `tools`, `text` and `tool_choice` have {sum} bytes together, and may have {REPEATED_BYTES_MAX}: the \
                 answer repeats them. The largest is `{largest}`."
            ),
        )),
        _ => Ok(()),
    }
}

impl ResponseFields {
    /// A client may ask for the encrypted reasoning of an answer that has none. Everything else would be missed.
    fn check_included(&self) -> Result<(), ApiError> {
        let names = self.include.as_ref().map_or(&[][..], |list| list.0.as_slice());
        match names.iter().find(|name| *name != "reasoning.encrypted_content") {
            None => Ok(()),
            Some(_) => Err(ApiError::unsupported("include")),
        }
    }

    fn turns(&mut self) -> Result<Vec<Turn>, ApiError> {
        let input = self.input.take().ok_or_else(|| {
            ApiError::invalid(
                "input",
                "`input` is missing: a string, or a list of messages, calls and their outputs.",
            )
        })?;
        input.turns(self.instructions.take())
    }
}

impl From<ResponseFields> for GenerateFields {
    fn from(fields: ResponseFields) -> Self {
        let format = fields.text.and_then(|text| text.format);
        Self {
            model: fields.model,
            max_completion_tokens: fields.max_output_tokens,
            temperature: fields.temperature,
            top_p: fields.top_p,
            top_k: fields.top_k,
            min_p: fields.min_p,
            stop: fields.stop,
            seed: fields.seed,
            stream: fields.stream,
            presence_penalty: fields.presence_penalty,
            frequency_penalty: fields.frequency_penalty,
            repetition_penalty: fields.repetition_penalty,
            logit_bias: fields.logit_bias,
            user: fields.user,
            ignore_eos: fields.ignore_eos,
            min_tokens: fields.min_tokens,
            stop_token_ids: fields.stop_token_ids,
            include_metrics: fields.include_metrics,
            response_format: format.map(|format| ResponseFormat::of_text(format.r#type, format.schema)),
            parallel_tool_calls: fields.parallel_tool_calls,
            priority: fields.priority,
            allow_special_tokens: fields.allow_special_tokens,
            cache_salt: fields.cache_salt,
            allowed_token_ids: fields.allowed_token_ids,
            bad_words: fields.bad_words,
            structured_outputs: fields.structured_outputs,
            guided_json: fields.guided_json,
            guided_regex: fields.guided_regex,
            guided_choice: fields.guided_choice,
            guided_grammar: fields.guided_grammar,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_field_of_chats_and_completions_is_silently_ignored() {
        let unknown = |name: &&&str| !ResponseFields::FIELD_NAMES.contains(*name);
        let unknown: Vec<_> = GenerateFields::FIELD_NAMES.iter().filter(unknown).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}
