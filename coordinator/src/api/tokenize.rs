//! `/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes. Load generators cut their prompts to length with them, and
//! lm_eval needs no tokenizer of its own.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use serving_core::ids::TokenId;

use super::AppState;
use super::body::{self, Held};
use super::error::ApiError;
use super::forms::{self, Flag, Id, List, in_vocabulary};
use super::given_chat::GivenChat;
use super::limits::{DETOKENIZE_TOKENS_MAX, TOKEN_ID_BYTES, TOKENIZE_TOKENS_MAX};
use super::long_text::on_text;
use super::prepare::{Tokenizing, text_error};
use super::prompt::{ChatEnding, ChatMessages, Input, PromptSource, turns};
use super::record::RequestRecord;
use super::request::served_model;
use super::shapes::ids;
use super::tools::{GivenTools, Tools};
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

/// What a request asks for. Its body ends here: it is not needed while the text waits for its turn.
async fn fields<T: DeserializeOwned>(
    state: &AppState,
    record: &RequestRecord,
    request: Request,
) -> Result<(T, Held), ApiError> {
    let place = record.facts().in_use.clone();
    let (body, held) = body::text(state, request.into_body(), place, None).await?;
    Ok((forms::read(&body)?, held))
}

pub async fn tokenize(
    State(state): State<Arc<AppState>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (fields, held) = fields::<TokenizeFields>(&state, &record, request).await?;
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
    let with_strings = fields.return_token_strs.0;
    let answer = on_text(&state, (bytes, held), move || {
        let refuse = |error: &TextError| match error {
            TextError::TooLong { .. } => too_long(&text, tokens_max, param),
            error => text_error(&text, error, param),
        };
        let prompts = tokenizing.run(&text, input, refuse)?;
        let tokens: Vec<TokenId> = prompts.iter().flat_map(|prompt| prompt.tokens.to_vec()).collect();
        let mut answer = json!({
            "count": tokens.len(),
            "max_model_len": text.max_model_tokens,
            "tokens": ids(&tokens),
        });
        if with_strings {
            let strings = tokens.iter().map(|token| text.decode(&[*token], true));
            answer["token_strs"] = strings.collect();
        }
        // Written as JSON here, too.
        Ok(Json(answer).into_response())
    });
    answer.await
}

pub async fn detokenize(
    State(state): State<Arc<AppState>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (fields, held) = fields::<DetokenizeFields>(&state, &record, request).await?;
    served_model(&state, fields.model)?;
    let Some(List(tokens)) = fields.tokens else {
        return Err(ApiError::invalid("tokens", "`tokens` is missing: a list of token ids."));
    };
    let tokens = in_vocabulary(tokens, "tokens", state.text.codec().vocab_size())?;
    let bytes = tokens.len() * TOKEN_ID_BYTES;
    let text = state.text.clone();
    let work = move || Ok(Json(json!({"prompt": text.decode(&tokens, true)})).into_response());
    on_text(&state, (bytes, held), work).await
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::body::Body;
    use axum::http::{Request, StatusCode, header};
    use grammar::Grammars;
    use tower::ServiceExt as _;

    use crate::api::router;
    use crate::api::tests::state;

    /// Longer than the work takes that it must not do yet.
    const A_WHILE: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn many_ids_become_text_beside_the_threads_that_serve_all_clients() {
        let state = state(Grammars::unknown());
        let places = state.long_texts.clone();
        let all = u32::try_from(places.available_permits()).expect("a few");
        let taken = places.acquire_many(all).await.expect("places are never closed");
        let body = serde_json::json!({"tokens": vec![0; 8192]}).to_string();
        let request = Request::post("/detokenize")
            .header(header::HOST, "127.0.0.1:1")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body))
            .expect("a request");
        let mut answered = std::pin::pin!(router(state).oneshot(request));
        let early = tokio::time::timeout(A_WHILE, &mut answered).await;
        assert!(early.is_err(), "the work waits for a place");
        drop(taken);
        let response = answered.await.expect("the router never fails");
        assert_eq!(response.status(), StatusCode::OK);
    }
}
