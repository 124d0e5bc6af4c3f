//! Turns a checked plan into validated requests: template, tokenizer, and the context length that they must fit.

use std::sync::Arc;

use serving_core::ids::{RequestId, TokenId};
use serving_core::request::{Request, StopConditions};

use super::AppState;
use super::body::HeldBytes;
use super::error::ApiError;
use super::limits::COUNTED_CONTEXTS;
use super::long_text::on_text;
use super::prompt::{Input, PromptSource};
use super::record::RequestLabels;
use super::request::{CheckedRequest, Endpoint};
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
    let bytes = input.text_bytes();
    let longest = match &input {
        Input::Prompts(list) => list.iter().map(PromptSource::text_bytes).max().unwrap_or(0),
        Input::Chat(_) => bytes,
    };
    check_length(&state.text, longest, param)?;
    let tokenizing = Tokenizing {
        tokens_max: state.text.max_model_tokens as usize * COUNTED_CONTEXTS,
        add_special: true,
        add_generation_prompt: true,
        echo: plan.fields.echo.0,
    };
    let text = state.text.clone();
    let work = move || {
        tokenizing
            .run(&text, input)
            .map_err(|error| text_error(&text, &error, param))
    };
    on_text(state, (bytes, held), work).await
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

/// How a text becomes tokens.
#[derive(Clone, Copy, Debug)]
pub struct Tokenizing {
    pub tokens_max: usize,
    /// Only for a prompt: the chat template has the special tokens itself.
    pub add_special: bool,
    pub add_generation_prompt: bool,
    /// Keep the prompt as text.
    pub echo: bool,
}

impl Tokenizing {
    pub fn run(self, text: &TextModel, input: Input) -> Result<Vec<Prompt>, TextError> {
        let encode = |source: &str, add_special| text.codec().encode(source, add_special, self.tokens_max);
        let prompt = |source| {
            Ok(match source {
                PromptSource::Text(string) => Prompt {
                    tokens: Arc::from(encode(&string, self.add_special)?),
                    echo_text: self.echo.then_some(string),
                },
                PromptSource::Tokens(ids) => Prompt {
                    echo_text: self.echo.then(|| text.decode(&ids, true)),
                    tokens: Arc::from(ids),
                },
            })
        };
        match input {
            Input::Prompts(sources) => sources.into_iter().map(prompt).collect(),
            Input::Chat(turns) => {
                let rendered = text.codec().render_chat(&turns, self.add_generation_prompt)?;
                let tokens = Arc::from(encode(&rendered, false)?);
                Ok(vec![Prompt {
                    tokens,
                    echo_text: None,
                }])
            }
        }
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
    let end_tokens = state.text.codec().end_tokens();
    Ok(Request {
        id: RequestId(rand::random()),
        prompt: prompt.tokens.clone(),
        client_prompt_tokens: u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX),
        sampling: plan.sampling.clone(),
        stop: StopConditions {
            max_tokens,
            min_tokens: plan.min_tokens.min(max_tokens),
            end_tokens: if plan.fields.ignore_eos.0 {
                Vec::new()
            } else {
                end_tokens.to_vec()
            },
            stop_token_ids: plan.stop_token_ids.clone(),
        },
        choice_count: plan.choice_count,
        seed: plan.fields.seed.map_or_else(rand::random, |seed| seed.0),
        logprobs: plan.logprobs,
        prompt_logprobs: plan.logprobs.filter(|_| plan.fields.echo.0),
        report_kv_hashes: plan.fields.return_kv_hashes.0,
        lane: labels.lane,
        time_limit: labels.time_limit,
    })
}

/// The output budget: the client's number or the default, in both cases limited by the context.
fn max_tokens(state: &AppState, plan: &CheckedRequest, prompt_tokens: usize) -> Result<u32, ApiError> {
    let prompt_field = plan.endpoint.prompt_field();
    if prompt_tokens == 0 {
        let message = "The prompt has no tokens; the model needs at least one.";
        return Err(ApiError::invalid(prompt_field, message));
    }
    let limit = state.text.max_model_tokens;
    let room = u32::try_from(prompt_tokens)
        .ok()
        .and_then(|tokens| limit.checked_sub(tokens));
    let wanted = plan.max_tokens.unwrap_or(1);
    match (room.filter(|room| *room >= wanted), plan.max_tokens, plan.endpoint) {
        (Some(_), Some(asked), _) => Ok(asked),
        (Some(room), None, Endpoint::Completions) => Ok(COMPLETIONS_MAX_TOKENS_DEFAULT.min(room)),
        (Some(room), None, Endpoint::Chat) => Ok(room),
        (None, asked, _) => {
            let asked_words = asked.map_or(String::new(), |max| format!(" and asked for {max} output tokens"));
            let (field, sum) = (plan.max_tokens_field, prompt_tokens as u64 + u64::from(wanted));
            let message = format!(
                "The context length of this model is {limit} tokens. Your prompt has {prompt_tokens} tokens{asked_words}, {sum} \
                 together. Shorten the prompt or lower `{field}`."
            );
            Err(ApiError::too_long(
                if asked.is_some() { field } else { prompt_field },
                message,
            ))
        }
    }
}
