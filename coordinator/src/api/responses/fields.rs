//! The body of `POST /v1/responses`.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::input::ResponseInput;
use crate::api::AppState;
use crate::api::constraint::{ResponseFormat, Schema};
use crate::api::error::ApiError;
use crate::api::forms::{
    self, AutoWord, Count, DisabledWord, Flag, Id, List, OnlyFlag, OnlyNumber, Real, Seed, Unsupported, Whole,
    with_field_names,
};
use crate::api::limits::*;
use crate::api::prompt::{ChatEnding, Input, LogitBias};
use crate::api::request::{AskedResponse, CheckedRequest, Endpoint, GenerateFields, check, note_ignored};
use crate::api::tools::{FlatTool, FlatToolChoice, GivenTools, Tool};
use crate::text::{Chat, StopStrings};

with_field_names! {
    /// What a client wrote. `store` is accepted with any value and has no effect: the answer says `"store": false`. The
    /// sampling fields beyond OpenAI's are those of chats.
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
    let chat = Chat {
        messages: fields.messages()?,
        tools: tools.as_ref().map_or(Vec::new(), |tools| tools.for_template.clone()),
    };
    let input = Input::Chat(chat, ChatEnding::NewMessage);
    let asked: AskedResponse = forms::read(text)?;
    let checked = check(state, Endpoint::Responses, fields.into(), (input, tools))?;
    Ok(CheckedRequest {
        response: Some(Box::new(asked)),
        ..checked
    })
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

    fn messages(&mut self) -> Result<Vec<serde_json::Value>, ApiError> {
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
            ..Self::default()
        }
    }
}
