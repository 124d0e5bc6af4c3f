//! The input of a request: the four forms of `prompt`, and `messages`.

use serde_json::Value;
use serving_core::ids::TokenId;

use super::error::ApiError;
use super::json::{Fields, describe, short};
use super::limits::{MESSAGES_MAX, PROMPTS_MAX};
use super::validate::token_id;
use crate::text::ChatTurn;

#[derive(Debug)]
pub enum Input {
    Prompts(Vec<PromptSource>),
    Chat(Vec<ChatTurn>),
}

impl Input {
    /// The request's field this came from.
    pub fn param(&self) -> &'static str {
        match self {
            Input::Prompts(_) => "prompt",
            Input::Chat(_) => "messages",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptSource {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// `string | [string] | [int] | [[int]]`.
pub fn prompt_sources(fields: &Fields<'_>, vocab_size: u32) -> Result<Vec<PromptSource>, ApiError> {
    let Some(value) = fields.get("prompt") else {
        return Err(ApiError::invalid(
            "prompt",
            "`prompt` is missing: a string, a list of strings, or token ids.",
        ));
    };
    match value {
        Value::String(text) => Ok(vec![text_source(text)?]),
        Value::Array(items) => match items.first() {
            None => Err(empty()),
            Some(Value::Number(_)) => Ok(vec![PromptSource::Tokens(token_ids(items, "prompt", vocab_size)?)]),
            Some(_) => {
                if items.len() > PROMPTS_MAX {
                    let message = format!("`prompt` has {} prompts, the limit is {PROMPTS_MAX}.", items.len());
                    return Err(ApiError::invalid("prompt", message));
                }
                items
                    .iter()
                    .enumerate()
                    .map(|(i, item)| list_item(item, i, vocab_size))
                    .collect()
            }
        },
        other => Err(fields.wrong("prompt", "a string, a list of strings, or a list of token ids", other)),
    }
}

fn list_item(item: &Value, index: usize, vocab_size: u32) -> Result<PromptSource, ApiError> {
    match item {
        Value::String(text) => text_source(text),
        Value::Array(ids) if !ids.is_empty() => Ok(PromptSource::Tokens(token_ids(
            ids,
            &format!("prompt[{index}]"),
            vocab_size,
        )?)),
        Value::Array(_) => Err(empty()),
        other => {
            let got = describe(other);
            let message = format!("`prompt[{index}]` must be a string or a list of token ids, not {got}.");
            Err(ApiError::invalid("prompt", message))
        }
    }
}

fn text_source(text: &str) -> Result<PromptSource, ApiError> {
    if text.is_empty() {
        Err(empty())
    } else {
        Ok(PromptSource::Text(text.to_owned()))
    }
}

fn token_ids(ids: &[Value], name: &str, vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
    ids.iter()
        .enumerate()
        .map(|(i, id)| token_id(id, &format!("{name}[{i}]"), vocab_size))
        .collect()
}

fn empty() -> ApiError {
    ApiError::invalid(
        "prompt",
        "`prompt` must not be empty: the model needs at least one token to go on from.",
    )
}

pub fn chat_turns(fields: &Fields<'_>) -> Result<Vec<ChatTurn>, ApiError> {
    let messages = fields.array("messages")?.map(Vec::as_slice).unwrap_or_default();
    if messages.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "`messages` must be a list with at least one message.",
        ));
    }
    if messages.len() > MESSAGES_MAX {
        let message = format!(
            "`messages` has {} messages, the limit is {MESSAGES_MAX}.",
            messages.len()
        );
        return Err(ApiError::invalid("messages", message));
    }
    messages
        .iter()
        .enumerate()
        .map(|(i, message)| chat_turn(message, i))
        .collect()
}

fn chat_turn(message: &Value, index: usize) -> Result<ChatTurn, ApiError> {
    let name = format!("messages[{index}]");
    let Value::Object(map) = message else {
        let text = format!(
            "`{name}` must be an object with `role` and `content`, not {}.",
            describe(message)
        );
        return Err(ApiError::invalid("messages", text));
    };
    let fields = Fields::nested(map, format!("{name}."));
    for refused in ["name", "tool_calls", "tool_call_id", "function_call"] {
        if fields.get(refused).is_some() {
            return Err(ApiError::unsupported(&fields.path(refused)));
        }
    }
    let role = match fields.string("role")? {
        Some(role @ ("system" | "user" | "assistant")) => role,
        // OpenAI's newer name for the system role. The models that are served here know only "system".
        Some("developer") => "system",
        Some(other) => {
            let text = format!(
                "`{name}.role` must be system, developer, user or assistant, not {:?}.",
                short(other)
            );
            return Err(ApiError::invalid(&fields.path("role"), text));
        }
        None => {
            return Err(ApiError::invalid(
                &fields.path("role"),
                format!("`{name}.role` is missing."),
            ));
        }
    };
    Ok(ChatTurn {
        role: role.to_owned(),
        content: content(&fields, &name)?,
    })
}

/// A string, or a list of text parts that are joined.
fn content(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    match fields.get("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let mut joined = String::new();
            for (i, part) in parts.iter().enumerate() {
                let kind = part.get("type").and_then(Value::as_str);
                let Some(text) = part
                    .get("text")
                    .and_then(Value::as_str)
                    .filter(|_| kind == Some("text"))
                else {
                    let param = format!("{name}.content[{i}]");
                    let text =
                        format!("`{param}` must be {{\"type\": \"text\", \"text\": ...}}: this model reads text only.");
                    return Err(ApiError::invalid(&param, text));
                };
                joined.push_str(text);
            }
            Ok(joined)
        }
        Some(other) => Err(fields.wrong("content", "a string or a list of text parts", other)),
        None => Err(ApiError::invalid(
            &fields.path("content"),
            format!("`{name}.content` is missing."),
        )),
    }
}
