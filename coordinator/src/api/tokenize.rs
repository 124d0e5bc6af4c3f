//! `/tokenize` and `/detokenize`, in vLLM's shapes. Load generators cut their prompts to length with them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};
use serving_core::ids::TokenId;

use super::AppState;
use super::body::json_object;
use super::error::ApiError;
use super::json::Fields;
use super::limits::TOKENIZE_TOKENS_MAX;
use super::long_text::on_text;
use super::prepare::text_error;
use super::prompt::chat_turns;
use super::shapes::ids;
use super::validate::{model, token_id};
use crate::text::{ChatTurn, TextError, TextModel};

/// The text or the messages to tokenize.
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

    fn param(&self) -> &'static str {
        match self {
            Source::Text { .. } => "prompt",
            Source::Chat { .. } => "messages",
        }
    }

    fn tokenize(self, text: &TextModel) -> Result<Vec<TokenId>, ApiError> {
        let (most, param) = (tokens_max(text), self.param());
        let codec = text.codec();
        let tokens = match self {
            Source::Text {
                text: source,
                add_special,
            } => codec.encode(&source, add_special, most),
            Source::Chat {
                turns,
                add_generation_prompt,
            } => codec
                .render_chat(&turns, add_generation_prompt)
                .and_then(|rendered| codec.encode(&rendered, false, most)),
        };
        tokens.map_err(|error| match error {
            TextError::TooLong { .. } => too_long(text, param),
            error => text_error(text, &error, param),
        })
    }
}

fn tokens_max(text: &TextModel) -> usize {
    TOKENIZE_TOKENS_MAX.max(text.max_model_tokens as usize)
}

fn too_long(text: &TextModel, param: &str) -> ApiError {
    let message = format!(
        "The text has more than {} tokens, the most that is counted here; the context length of this model is {} tokens. \
         Send it in parts.",
        tokens_max(text),
        text.max_model_tokens
    );
    ApiError::too_long(param, message)
}

pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Json<Value>, ApiError> {
    let (body, held) = json_object(&state, request.into_body()).await?;
    let fields = Fields::new(&body);
    if fields.get("model").is_some() {
        model(&state, &fields)?;
    }
    let with_strings = fields.bool("return_token_strs")?.unwrap_or(false);
    let source = source(&fields)?;
    if state.text.fewest_tokens(source.bytes()) > tokens_max(&state.text) {
        return Err(too_long(&state.text, source.param()));
    }
    // The parsed body is not needed while the text waits for its turn.
    drop(body);
    let text = state.text.clone();
    let tokens = on_text(&state, (source.bytes(), held), move || source.tokenize(&text)).await?;
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
    let (body, _held) = json_object(&state, request.into_body()).await?;
    let fields = Fields::new(&body);
    if fields.get("model").is_some() {
        model(&state, &fields)?;
    }
    let Some(list) = fields.array("tokens")? else {
        return Err(ApiError::invalid("tokens", "`tokens` is missing: a list of token ids."));
    };
    let vocab_size = state.text.codec().vocab_size();
    let tokens = list
        .iter()
        .enumerate()
        .map(|(i, id)| token_id(id, &format!("tokens[{i}]"), vocab_size))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Json(json!({"prompt": state.text.decode(&tokens, true)})))
}
