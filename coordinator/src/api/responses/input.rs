//! The items of `input`: messages, calls that the model made before, and what the functions returned.

use serde::{Deserialize, Deserializer};

use crate::api::error::{ApiError, short};
use crate::api::forms::Given;
use crate::api::given_chat::Turn;
use crate::api::limits::MESSAGES_MAX;
use crate::api::prompt::{ChatMessage, Content};
use crate::api::tools::EarlierCall;

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
    /// The messages of a chat. The instructions come first, as a message of the system.
    pub fn turns(self, instructions: Option<String>) -> Result<Vec<Turn>, ApiError> {
        let mut turns = Vec::new();
        if let Some(instructions) = instructions {
            turns.push(Turn::new("system", instructions));
        }
        match self {
            Self::Text(text) if text.is_empty() => return Err(empty()),
            Self::Text(text) => turns.push(Turn::new("user", text)),
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
    fn add_to(self, turns: &mut Vec<Turn>, at: usize) -> Result<(), ApiError> {
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
                let call = EarlierCall {
                    id: Some(self.call_id.ok_or_else(|| wrong("call_id", "is missing"))?),
                    name: self.name.ok_or_else(|| wrong("name", "is missing"))?,
                    arguments: self.arguments.ok_or_else(|| wrong("arguments", "is missing"))?,
                };
                add_call(turns, call);
            }
            Some("function_call_output") => {
                let id = self.call_id.ok_or_else(|| wrong("call_id", "is missing"))?;
                let output = self.output.ok_or_else(|| wrong("output", "is missing"))?;
                turns.push(Turn {
                    tool_call_id: Some(id),
                    ..Turn::new("tool", output.0)
                });
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
fn add_message(turns: &mut Vec<Turn>, turn: Turn) {
    let last = turns.last_mut().filter(|last| !last.calls.is_empty());
    match last.filter(|_| turn.role == "assistant") {
        Some(last) => last.content.push_str(&turn.content),
        None => turns.push(turn),
    }
}

/// Calls that follow one another, or the text before them, are one message of the assistant.
fn add_call(turns: &mut Vec<Turn>, call: EarlierCall) {
    match turns.last_mut().filter(|last| last.role == "assistant") {
        Some(last) => last.calls.push(call),
        None => turns.push(Turn {
            calls: vec![call],
            ..Turn::new("assistant", String::new())
        }),
    }
}
