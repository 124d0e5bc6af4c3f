//! Turns a checked plan into validated requests: template, tokenizer, and the context length that they must fit.

use std::sync::Arc;

use serving_core::ids::{RequestId, TokenId};
use serving_core::request::{Lane, Request, StopConditions};

use super::AppState;
use super::body::HeldBytes;
use super::error::ApiError;
use super::limits::COUNTED_CONTEXTS;
use super::long_text::on_text;
use super::prompt::{Input, PromptSource};
use super::record::RequestLabels;
use super::validate::CheckedRequest;
use crate::text::{TextError, TextModel};

/// vLLM and OpenAI generate this many tokens on /v1/completions when the client does not say.
const COMPLETIONS_MAX_TOKENS_DEFAULT: u32 = 16;

/// One prompt, tokenized.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub tokens: Arc<[TokenId]>,
    /// With `echo`: the prompt as text.
    pub echo_text: Option<String>,
}

/// Tokenizes a text that may fit the context. A text that cannot fit is refused before, or as soon as that shows.
pub async fn prompts(state: &AppState, plan: &mut CheckedRequest, held: HeldBytes) -> Result<Vec<Prompt>, ApiError> {
    let param = plan.input.param();
    let input = std::mem::replace(&mut plan.input, Input::Prompts(Vec::new()));
    let bytes = text_bytes(&input);
    check_length(&state.text, bytes.longest, param)?;
    let (text, echo) = (state.text.clone(), plan.echo);
    on_text(state, (bytes.total, held), move || tokenize(&text, input, echo)).await
}

/// Refuses a text that has too many bytes for its context, however its tokens fall.
fn check_length(text: &TextModel, bytes: usize, param: &str) -> Result<(), ApiError> {
    let (fewest, limit) = (text.fewest_tokens(bytes), text.max_model_tokens as usize);
    if fewest <= limit {
        return Ok(());
    }
    let message = format!(
        "The context length of this model is {limit} tokens, and a prompt of {bytes} bytes has at least {fewest}. \
         Shorten it."
    );
    Err(ApiError::too_long(param, message))
}

struct TextBytes {
    total: usize,
    longest: usize,
}

fn text_bytes(input: &Input) -> TextBytes {
    let each = |source: &PromptSource| match source {
        PromptSource::Text(text) => text.len(),
        PromptSource::Tokens(_) => 0,
    };
    match input {
        Input::Prompts(list) => TextBytes {
            total: list.iter().map(each).sum(),
            longest: list.iter().map(each).max().unwrap_or(0),
        },
        Input::Chat(turns) => {
            let total = turns.iter().map(|turn| turn.content.len()).sum();
            TextBytes { total, longest: total }
        }
    }
}

fn tokenize(text: &TextModel, input: Input, echo: bool) -> Result<Vec<Prompt>, ApiError> {
    let most = text.max_model_tokens as usize * COUNTED_CONTEXTS;
    let encode = |source: &str, add_special: bool| {
        let tokens = text.codec().encode(source, add_special, most);
        tokens.map(Arc::<[TokenId]>::from)
    };
    match input {
        Input::Chat(turns) => {
            let rendered = text
                .codec()
                .render_chat(&turns, true)
                .map_err(|error| text_error(text, &error, "messages"))?;
            let tokens = encode(&rendered, false).map_err(|error| text_error(text, &error, "messages"))?;
            Ok(vec![Prompt {
                tokens,
                echo_text: None,
            }])
        }
        Input::Prompts(sources) => sources
            .into_iter()
            .map(|source| match source {
                PromptSource::Text(string) => {
                    let tokens = encode(&string, true).map_err(|error| text_error(text, &error, "prompt"))?;
                    Ok(Prompt {
                        tokens,
                        echo_text: echo.then_some(string),
                    })
                }
                PromptSource::Tokens(ids) => {
                    let echo_text = echo.then(|| text.decode(&ids, true));
                    Ok(Prompt {
                        tokens: Arc::from(ids),
                        echo_text,
                    })
                }
            })
            .collect(),
    }
}

pub fn text_error(text: &TextModel, error: &TextError, param: &str) -> ApiError {
    match error {
        TextError::TooLong { tokens_max } => {
            let limit = text.max_model_tokens;
            let message = format!(
                "The context length of this model is {limit} tokens. Your prompt has more than {tokens_max} tokens. Shorten it."
            );
            ApiError::too_long(param, message)
        }
        error => ApiError::invalid(param, error.to_string()),
    }
}

/// The validated requests of a plan, one per prompt.
pub fn requests(
    state: &AppState,
    plan: &CheckedRequest,
    prompts: &[Prompt],
    labels: &RequestLabels,
) -> Result<Vec<Arc<Request>>, ApiError> {
    prompts
        .iter()
        .map(|prompt| request(state, plan, prompt, labels).map(Arc::new))
        .collect()
}

fn request(
    state: &AppState,
    plan: &CheckedRequest,
    prompt: &Prompt,
    labels: &RequestLabels,
) -> Result<Request, ApiError> {
    let max_tokens = max_tokens(state, plan, prompt.tokens.len())?;
    let end_tokens = if plan.ignore_eos {
        Vec::new()
    } else {
        state.text.codec().end_tokens().to_vec()
    };
    Ok(Request {
        id: RequestId(rand::random()),
        prompt: prompt.tokens.clone(),
        client_prompt_tokens: u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX),
        sampling: plan.sampling.clone(),
        stop: StopConditions {
            max_tokens,
            min_tokens: plan.min_tokens.min(max_tokens),
            end_tokens,
            stop_token_ids: plan.stop_token_ids.clone(),
        },
        choice_count: plan.choice_count,
        seed: plan.seed.unwrap_or_else(rand::random),
        logprobs: plan.logprobs,
        prompt_logprobs: plan.logprobs.filter(|_| plan.echo),
        report_kv_hashes: plan.reply.return_kv_hashes,
        lane: labels.lane,
        time_limit: labels.time_limit,
    })
}

/// The output budget: the client's number or the default, in both cases limited by the context.
fn max_tokens(state: &AppState, plan: &CheckedRequest, prompt_tokens: usize) -> Result<u32, ApiError> {
    let param = if plan.max_tokens.is_some() {
        plan.max_tokens_field
    } else {
        plan_param(plan)
    };
    let limit = state.text.max_model_tokens;
    let room = u32::try_from(prompt_tokens)
        .ok()
        .and_then(|tokens| limit.checked_sub(tokens));
    if prompt_tokens == 0 {
        return Err(ApiError::invalid(
            plan_param(plan),
            "The prompt has no tokens; the model needs at least one.",
        ));
    }
    let wanted = plan.max_tokens.unwrap_or(1);
    let Some(room) = room.filter(|room| *room >= wanted) else {
        let asked = plan
            .max_tokens
            .map_or(String::new(), |max| format!(" and asked for {max} output tokens"));
        let message = format!(
            "The context length of this model is {limit} tokens. Your prompt has {prompt_tokens} tokens{asked}, {} \
             together. Shorten the prompt or lower `{}`.",
            prompt_tokens as u64 + u64::from(wanted),
            plan.max_tokens_field,
        );
        return Err(ApiError::too_long(param, message));
    };
    Ok(plan.max_tokens.unwrap_or(match plan.endpoint {
        super::fields::Endpoint::Completions => COMPLETIONS_MAX_TOKENS_DEFAULT.min(room),
        super::fields::Endpoint::Chat => room,
    }))
}

fn plan_param(plan: &CheckedRequest) -> &'static str {
    match plan.endpoint {
        super::fields::Endpoint::Completions => "prompt",
        super::fields::Endpoint::Chat => "messages",
    }
}

/// The lanes that `x-lane` names.
pub fn lane(name: &str) -> Option<Lane> {
    [Lane::Interactive, Lane::Batch]
        .into_iter()
        .find(|lane| lane.name() == name)
}
