//! `/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes. Load generators cut their prompts to length with them, and
//! lm_eval needs no tokenizer of its own.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Request, State};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::forms::{self, Flag, Id, List, in_vocabulary};
use super::given_chat::GivenChat;
use super::limits::{DETOKENIZE_TOKENS_MAX, TOKENIZE_TOKENS_MAX};
use super::long_text::on_text;
use super::prepare::{Tokenizing, text_error};
use super::prompt::{ChatEnding, ChatMessages, Input, PromptSource, turns};
use super::record::RequestRecord;
use super::request::served_model;
use super::shapes::ids;
use super::tools::{GivenTools, Tools};
use super::{AppState, body};
use crate::text::{TextError, TextModel};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenizeFields {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<ChatMessages>,
    add_special_tokens: Option<Flag>,
    allow_special_tokens: Flag,
    add_generation_prompt: Option<Flag>,
    continue_final_message: Flag,
    tools: Option<Tools>,
    return_token_strs: Flag,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct DetokenizeFields {
    model: Option<String>,
    tokens: Option<List<Id, DETOKENIZE_TOKENS_MAX>>,
}

fn too_long(text: &TextModel, tokens_max: usize, param: &str) -> ApiError {
    let message = format!(
        "The text has more than {tokens_max} tokens, the most that is counted here; the context length of this model is {} \
         tokens. Send it in parts.",
        text.max_model_tokens
    );
    ApiError::too_long(param, message)
}

pub async fn tokenize(
    State(state): State<Arc<AppState>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let place = record.facts().in_use.clone();
    let (body, held) = body::text(&state, request.into_body(), place).await?;
    let fields: TokenizeFields = forms::read(&body)?;
    // The body is not needed while the text waits for its turn.
    drop(body);
    served_model(&state, fields.model)?;
    let ending = ChatEnding::of(fields.continue_final_message, fields.add_generation_prompt)?;
    let input = match (fields.messages, fields.prompt) {
        (Some(messages), _) => {
            let turns = turns(Some(messages))?;
            let tools = GivenTools::new(fields.tools, None)?;
            Input::Chat(GivenChat::new("messages", turns, tools.as_ref()), ending)
        }
        (None, Some(prompt)) => Input::Prompts(vec![PromptSource::Text(prompt)]),
        (None, None) => {
            let message = "Send `prompt` (a string) or `messages` (a list).";
            return Err(ApiError::invalid("prompt", message));
        }
    };
    let text = state.text.clone();
    let (param, bytes) = (input.param(), input.work_bytes());
    let tokens_max = TOKENIZE_TOKENS_MAX.max(text.max_model_tokens as usize);
    if text.fewest_tokens(input.text_bytes()) > tokens_max {
        return Err(too_long(&text, tokens_max, param));
    }
    let tokenizing = Tokenizing {
        tokens_max,
        kept_max: None,
        add_special: fields.add_special_tokens.map(|wanted| wanted.0),
        echo: false,
        text_controls: fields.allow_special_tokens.0,
    };
    let tokens = on_text(&state, (bytes, held), move || {
        let refuse = |error: &TextError| match error {
            TextError::TooLong { .. } => too_long(&text, tokens_max, param),
            error => text_error(&text, error, param),
        };
        let prompts = tokenizing.run(&text, input, refuse)?;
        Ok(prompts
            .into_iter()
            .flat_map(|prompt| prompt.tokens.to_vec())
            .collect::<Vec<_>>())
    });
    let tokens = tokens.await?;
    let mut answer = json!({
        "count": tokens.len(),
        "max_model_len": state.text.max_model_tokens,
        "tokens": ids(&tokens),
    });
    if fields.return_token_strs.0 {
        let strings = tokens.iter().map(|token| state.text.decode(&[*token], true));
        answer["token_strs"] = strings.collect();
    }
    Ok(Json(answer))
}

pub async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Json<Value>, ApiError> {
    let (body, _held) = body::text(&state, request.into_body(), None).await?;
    let fields: DetokenizeFields = forms::read(&body)?;
    served_model(&state, fields.model)?;
    let Some(List(tokens)) = fields.tokens else {
        return Err(ApiError::invalid("tokens", "`tokens` is missing: a list of token ids."));
    };
    let tokens = in_vocabulary(tokens, "tokens", state.text.codec().vocab_size())?;
    Ok(Json(json!({"prompt": state.text.decode(&tokens, true)})))
}

/// Beside the tokens: the class of transformers that reads such a tokenizer's `tokenizer.json`, and the longest sequence that is
/// served.
pub async fn tokenizer_info(State(state): State<Arc<AppState>>) -> Json<Value> {
    let info = state.text.codec().info();
    Json(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": info.begin,
        "eos_token": info.end,
        "pad_token": info.padding,
        "unk_token": info.unknown,
        "add_bos_token": info.adds_begin,
        "chat_template": info.chat_template,
        "model_max_length": state.text.max_model_tokens,
    }))
}
