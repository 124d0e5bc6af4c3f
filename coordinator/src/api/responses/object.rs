//! The JSON of a response. The order of fields is their order on the wire.

use axum::http::StatusCode;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use serving_core::request::FinishReason;

use crate::api::error::ApiError;
use crate::api::request::CheckedRequest;
use crate::api::run::Run;
use crate::api::shapes::Head;

/// How far a response is.
#[derive(Clone, Debug)]
pub enum Status {
    InProgress,
    Completed,
    /// The budget of tokens was used up.
    Incomplete,
    Failed(ApiError),
}

impl Status {
    pub fn of(finish: Option<FinishReason>) -> Self {
        match finish.map(FinishReason::openai_name) {
            Some("length") => Self::Incomplete,
            _ => Self::Completed,
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed(_) => "failed",
        }
    }

    /// The event that tells of it.
    pub fn event(&self) -> &'static str {
        match self {
            Self::InProgress => "response.in_progress",
            Self::Completed => "response.completed",
            Self::Incomplete => "response.incomplete",
            Self::Failed(_) => "response.failed",
        }
    }
}

#[derive(Debug, Serialize)]
pub struct ResponseUsage {
    input_tokens: u32,
    input_tokens_details: CachedTokens,
    output_tokens: u32,
    output_tokens_details: ReasoningTokens,
    total_tokens: u32,
}

#[derive(Debug, Serialize)]
struct CachedTokens {
    cached_tokens: u32,
}

/// The served models write no reasoning beside their answers.
#[derive(Debug, Serialize)]
struct ReasoningTokens {
    reasoning_tokens: u32,
}

impl ResponseUsage {
    pub fn of(run: &Run) -> Self {
        let (input_tokens, output_tokens) = (run.prompt_tokens(), run.output_tokens());
        Self {
            input_tokens,
            input_tokens_details: CachedTokens {
                cached_tokens: run.cached_tokens(),
            },
            output_tokens,
            output_tokens_details: ReasoningTokens { reasoning_tokens: 0 },
            total_tokens: input_tokens.saturating_add(output_tokens),
        }
    }
}

/// A response. Fields that are the same in every answer say what this server does: it stores nothing and runs nothing in the
/// background.
#[derive(Debug, Serialize)]
pub struct ResponseObject<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    background: bool,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    instructions: Option<&'a str>,
    max_output_tokens: Option<u32>,
    model: &'a str,
    output: &'a [Value],
    parallel_tool_calls: bool,
    previous_response_id: Option<&'a str>,
    store: bool,
    temperature: f32,
    text: Written<'a>,
    tool_choice: Written<'a>,
    tools: Written<'a>,
    top_p: f32,
    truncation: &'static str,
    usage: Option<ResponseUsage>,
    user: Option<&'a str>,
    metadata: Written<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Value>,
}

/// A field as the client wrote it, or as OpenAI writes it where it was left out.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Written<'a> {
    Given(&'a RawValue),
    Default(Value),
}

impl<'a> Written<'a> {
    fn new(given: Option<&'a RawValue>, default: impl FnOnce() -> Value) -> Self {
        given.map_or_else(|| Self::Default(default()), Self::Given)
    }
}

impl<'a> ResponseObject<'a> {
    pub fn new(head: &'a Head, plan: &'a CheckedRequest, status: &Status, output: &'a [Value]) -> Self {
        let asked = plan.response.as_deref();
        let raw = |field: Option<&'a Box<RawValue>>| field.map(|raw| &**raw);
        Self {
            id: &head.id,
            object: "response",
            created_at: head.created,
            status: status.name(),
            background: false,
            error: match status {
                Status::Failed(error) => Some(json!({"code": code_of(error), "message": error.message})),
                _ => None,
            },
            incomplete_details: match status {
                Status::Incomplete => Some(json!({"reason": "max_output_tokens"})),
                _ => None,
            },
            instructions: asked.and_then(|asked| asked.instructions.as_deref()),
            max_output_tokens: plan.max_tokens,
            model: &head.model,
            output,
            parallel_tool_calls: plan.fields.parallel_tool_calls.is_none_or(|wanted| wanted.0),
            previous_response_id: None,
            store: false,
            temperature: plan.sampling.temperature,
            text: Written::new(
                raw(asked.and_then(|asked| asked.text.as_ref())),
                || json!({"format": {"type": "text"}}),
            ),
            tool_choice: Written::new(raw(asked.and_then(|asked| asked.tool_choice.as_ref())), || {
                json!("auto")
            }),
            tools: Written::new(raw(asked.and_then(|asked| asked.tools.as_ref())), || json!([])),
            top_p: plan.sampling.top_p,
            truncation: "disabled",
            usage: None,
            user: plan.fields.user.as_deref(),
            metadata: Written::new(raw(asked.and_then(|asked| asked.metadata.as_ref())), || json!({})),
            metrics: None,
        }
    }

    /// What is known at the end.
    pub fn with_figures(self, usage: ResponseUsage, metrics: Option<Value>) -> Self {
        Self {
            usage: Some(usage),
            metrics,
            ..self
        }
    }
}

/// The code of OpenAI's closed list for the errors of a response (`ResponseErrorCode` in its specification). The other codes of that
/// list are about images and stored files, which this server does not have.
fn code_of(error: &ApiError) -> &'static str {
    match error.status {
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_exceeded",
        // What the client asks for fails in the same way each time.
        StatusCode::BAD_REQUEST => "invalid_prompt",
        _ => "server_error",
    }
}
