//! The items of `input`: messages, calls that the model made before, and what the functions returned.

use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::api::error::{ApiError, short};
use crate::api::forms::Given;
use crate::api::limits::MESSAGES_MAX;
use crate::api::prompt::{ChatMessage, Content};
use crate::api::tools::MadeCall;

/// A text of the user, or a conversation.
#[derive(Debug)]
pub enum ResponseInput {
    Text(String),
    Items(Vec<Item>),
}

/// An item. A message may come without its type.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `type`")]
pub struct Item {
    r#type: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
}

impl<'de> Deserialize<'de> for ResponseInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = "a string or a list of items";
        match Given::read(deserializer, &wanted, MESSAGES_MAX)? {
            Given::Text(text) => Ok(Self::Text(text)),
            Given::List(items) => Ok(Self::Items(items)),
            other => Err(other.is_not(&wanted)),
        }
    }
}

impl ResponseInput {
    /// The messages as a template reads them. The instructions come first, as a message of the system.
    pub fn turns(self, instructions: Option<String>) -> Result<Vec<Value>, ApiError> {
        let mut turns = Vec::new();
        if let Some(instructions) = instructions {
            turns.push(json!({"role": "system", "content": instructions}));
        }
        match self {
            Self::Text(text) if text.is_empty() => return Err(empty()),
            Self::Text(text) => turns.push(json!({"role": "user", "content": text})),
            Self::Items(items) if items.is_empty() => return Err(empty()),
            Self::Items(items) => {
                for (at, item) in items.into_iter().enumerate() {
                    item.add_to(&mut turns, at)?;
                }
            }
        }
        Ok(turns)
    }
}

fn empty() -> ApiError {
    ApiError::invalid(
        "input",
        "`input` must not be empty: the model needs something to answer.",
    )
}

impl Item {
    fn add_to(self, turns: &mut Vec<Value>, at: usize) -> Result<(), ApiError> {
        let wrong = |field: &str, what: &str| {
            let path = format!("input[{at}].{field}");
            ApiError::invalid(&path, format!("`{path}` {what}."))
        };
        match self.r#type.as_deref() {
            None | Some("message") => {
                if self.role.as_deref() == Some("tool") {
                    return Err(wrong(
                        "role",
                        "must not be tool here: send what a function returned as a function_call_output",
                    ));
                }
                if self.name.is_some() {
                    return Err(ApiError::unsupported(&format!("input[{at}].name")));
                }
                let turn = ChatMessage::new(self.role, self.content).turn(("input", at))?;
                add_message(turns, turn);
            }
            Some("function_call") => {
                for (field, is_missing) in [
                    ("call_id", self.call_id.is_none()),
                    ("name", self.name.is_none()),
                    ("arguments", self.arguments.is_none()),
                ] {
                    if is_missing {
                        return Err(wrong(field, "is missing"));
                    }
                }
                let call = MadeCall::new(self.call_id, self.name, self.arguments);
                add_call(turns, call.for_template().map_err(|what| wrong("arguments", what))?);
            }
            Some("function_call_output") => {
                let id = self.call_id.ok_or_else(|| wrong("call_id", "is missing"))?;
                let output = self.output.ok_or_else(|| wrong("output", "is missing"))?;
                turns.push(json!({"role": "tool", "content": output.0, "tool_call_id": id}));
            }
            Some("item_reference") => {
                let what = "refers to something that was stored, and this server stores nothing: send the item itself \
                            (many clients do so with `\"store\": false`)";
                return Err(wrong("type", what));
            }
            Some(other) => {
                let what = format!(
                    "must be message, function_call or function_call_output, not {:?}",
                    short(other)
                );
                return Err(wrong("type", &what));
            }
        }
        Ok(())
    }
}

/// The results of calls have to follow their calls, so text that the model wrote between two of them goes before them.
fn add_message(turns: &mut Vec<Value>, turn: Value) {
    let last = turns.last_mut().filter(|last| last.get("tool_calls").is_some());
    match last.filter(|_| turn["role"] == "assistant") {
        Some(last) => {
            let text = |turn: &Value| turn["content"].as_str().unwrap_or_default().to_owned();
            last["content"] = Value::from(text(last) + &text(&turn));
        }
        None => turns.push(turn),
    }
}

/// Calls that follow one another, or the text before them, are one message of the assistant.
fn add_call(turns: &mut Vec<Value>, call: Value) {
    if let Some(last) = turns.last_mut().filter(|turn| turn["role"] == "assistant") {
        match last["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        }
        return;
    }
    turns.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
}
