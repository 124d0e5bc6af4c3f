//! `/tokenize` and `/detokenize`, in vLLM's shapes: load generators align their prompts with them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};
use serving_core::ids::TokenId;

use super::AppState;
use super::body::json_object;
use super::error::ApiError;
use super::json::Fields;
use super::limits::{DETOKENIZE_TOKENS_MAX, TOKENIZE_INLINE_BYTES_MAX};
use super::prepare::text_error;
use super::prompt::chat_turns;
use super::shapes::ids;
use super::validate::{model, token_id};
use crate::text::{ChatTurn, TextModel};

/// What is to be tokenized.
enum Source {
    Text {
        text: String,
        add_special: bool,
    },
    Chat {
        turns: Vec<ChatTurn>,
        add_generation_prompt: bool,
    },
}

impl Source {
    fn bytes(&self) -> usize {
        match self {
            Source::Text { text, .. } => text.len(),
            Source::Chat { turns, .. } => turns.iter().map(|turn| turn.content.len()).sum(),
        }
    }

    fn tokenize(self, text: &TextModel) -> Result<Vec<TokenId>, ApiError> {
        match self {
            Source::Text {
                text: source,
                add_special,
            } => text
                .codec()
                .encode(&source, add_special)
                .map_err(|error| text_error(&error, "prompt")),
            Source::Chat {
                turns,
                add_generation_prompt,
            } => text
                .codec()
                .render_chat(&turns, add_generation_prompt)
                .and_then(|rendered| text.codec().encode(&rendered, false))
                .map_err(|error| text_error(&error, "messages")),
        }
    }
}

pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = json_object(request.into_body(), state.limits.body_bytes_max).await?;
    let fields = Fields::new(&body);
    if fields.get("model").is_some() {
        model(&state, &fields)?;
    }
    let with_strings = fields.bool("return_token_strs")?.unwrap_or(false);
    let source = source(&fields)?;
    let tokens = if source.bytes() <= TOKENIZE_INLINE_BYTES_MAX {
        source.tokenize(&state.text)?
    } else {
        let _slot = state
            .long_texts
            .acquire()
            .await
            .map_err(|_| ApiError::internal("the tokenizer is shut down"))?;
        let text = state.text.clone();
        let joined = tokio::task::spawn_blocking(move || source.tokenize(&text)).await;
        joined.map_err(|_| ApiError::internal("the tokenizer broke on this text; please report it"))??
    };
    let mut answer = json!({
        "count": tokens.len(),
        "max_model_len": state.text.max_model_tokens,
        "tokens": ids(&tokens),
    });
    if with_strings && let Value::Object(map) = &mut answer {
        let strings: Value = tokens
            .iter()
            .map(|token| Value::from(state.text.decode(&[*token], true)))
            .collect();
        map.insert("token_strs".to_owned(), strings);
    }
    Ok(Json(answer))
}

fn source(fields: &Fields<'_>) -> Result<Source, ApiError> {
    if fields.get("messages").is_some() {
        let turns = chat_turns(fields)?;
        let add_generation_prompt = fields.bool("add_generation_prompt")?.unwrap_or(true);
        return Ok(Source::Chat {
            turns,
            add_generation_prompt,
        });
    }
    let Some(text) = fields.string("prompt")? else {
        return Err(ApiError::invalid(
            "prompt",
            "Send `prompt` (a string) or `messages` (a list).",
        ));
    };
    Ok(Source::Text {
        text: text.to_owned(),
        add_special: fields.bool("add_special_tokens")?.unwrap_or(true),
    })
}

pub async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = json_object(request.into_body(), state.limits.body_bytes_max).await?;
    let fields = Fields::new(&body);
    if fields.get("model").is_some() {
        model(&state, &fields)?;
    }
    let Some(list) = fields.array("tokens")? else {
        return Err(ApiError::invalid("tokens", "`tokens` is missing: a list of token ids."));
    };
    if list.len() > DETOKENIZE_TOKENS_MAX {
        let message = format!("`tokens` has {} ids, the limit is {DETOKENIZE_TOKENS_MAX}.", list.len());
        return Err(ApiError::invalid("tokens", message));
    }
    let vocab_size = state.text.codec().vocab_size();
    let tokens = list
        .iter()
        .enumerate()
        .map(|(i, id)| token_id(id, &format!("tokens[{i}]"), vocab_size))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Json(json!({"prompt": state.text.decode(&tokens, true)})))
}
