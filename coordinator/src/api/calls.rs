//! The calls in an answer: what the model wrote becomes `tool_calls`, whole or as it comes.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::tools::{CallableTools, ToolChoice};
use crate::text::{Piece, ToolCall, ToolCallReader, ToolFormat};

/// Reads the calls of one answer, choice by choice.
#[derive(Debug)]
pub struct Calls {
    choice: ToolChoice,
    format: ToolFormat,
    names: Arc<[String]>,
    is_streaming: bool,
    readers: BTreeMap<u32, Reader>,
}

#[derive(Debug)]
struct Reader {
    in_text: ToolCallReader,
    /// Of a list of calls that is not complete.
    held: String,
    calls: u32,
}

/// A call. In a stream it has an index, and may come in parts: the first one has all fields, the others more of the arguments.
#[derive(Debug, Serialize)]
pub struct ToolCallBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    pub function: FunctionBody,
}

#[derive(Debug, Serialize)]
pub struct FunctionBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// JSON.
    pub arguments: String,
}

/// A part of a choice's answer, in the order of the model's words.
#[derive(Debug, Default)]
pub struct Said(pub Vec<SaidPiece>);

#[derive(Debug)]
pub enum SaidPiece {
    Text(String),
    Call(ToolCallBody),
}

impl Said {
    pub fn of_text(text: String) -> Self {
        Self(vec![SaidPiece::Text(text)])
    }

    /// As a message of a chat has it: all the text, and beside it the calls.
    pub fn text_and_calls(self) -> (String, Vec<ToolCallBody>) {
        let (mut all, mut calls) = (String::new(), Vec::new());
        for piece in self.0 {
            match piece {
                SaidPiece::Text(text) => all.push_str(&text),
                SaidPiece::Call(call) => calls.push(call),
            }
        }
        (all, calls)
    }
}

impl Calls {
    pub fn new(tools: &CallableTools, format: ToolFormat, is_streaming: bool) -> Self {
        Self {
            choice: tools.choice.clone(),
            format,
            names: tools.names.clone(),
            is_streaming,
            readers: BTreeMap::new(),
        }
    }

    /// The next text of a choice. With the last one, what was held back comes out.
    pub fn take(&mut self, choice: u32, text: &str, is_last: bool) -> Said {
        let reader = self.readers.entry(choice).or_insert_with(|| Reader {
            in_text: ToolCallReader::new(self.format, self.names.clone()),
            held: String::new(),
            calls: 0,
        });
        let pieces = match &self.choice {
            ToolChoice::Named(name) => return named(reader, name, text, (self.is_streaming, self.format)),
            ToolChoice::Required => {
                reader.held.push_str(text);
                match is_last {
                    true => all_calls(std::mem::take(&mut reader.held), &self.names),
                    false => Vec::new(),
                }
            }
            ToolChoice::None | ToolChoice::Auto => {
                let mut pieces = reader.in_text.push(text);
                if is_last {
                    pieces.extend(reader.in_text.end());
                }
                pieces
            }
        };
        let mut said = Said::default();
        for piece in pieces {
            said.0.push(match piece {
                Piece::Text(text) => SaidPiece::Text(text),
                Piece::Call(call) => {
                    let index = self.is_streaming.then_some(reader.calls);
                    reader.calls += 1;
                    SaidPiece::Call(whole(call, index, self.format))
                }
            });
        }
        said
    }

    /// OpenAI's reason for the end of a choice: `tool_calls` where the model chose to call.
    pub fn finish(&self, choice: u32, finish: &'static str) -> &'static str {
        let has_called = self.readers.get(&choice).is_some_and(|reader| reader.calls > 0);
        let is_forced = matches!(self.choice, ToolChoice::Named(_));
        if finish == "stop" && has_called && !is_forced {
            return "tool_calls";
        }
        finish
    }
}

/// The whole answer is the arguments.
fn named(reader: &mut Reader, name: &str, text: &str, (is_streaming, format): (bool, ToolFormat)) -> Said {
    let is_first = reader.calls == 0;
    reader.calls = 1;
    let index = is_streaming.then_some(0);
    let call = match is_first {
        true => {
            let (name, arguments) = (name.to_owned(), text.to_owned());
            whole(ToolCall { name, arguments }, index, format)
        }
        false => ToolCallBody {
            index,
            id: None,
            kind: None,
            function: FunctionBody {
                name: None,
                arguments: text.to_owned(),
            },
        },
    };
    Said(vec![SaidPiece::Call(call)])
}

fn all_calls(text: String, names: &[String]) -> Vec<Piece> {
    match ToolCall::all_of(&text, names) {
        Some(calls) => calls.into_iter().map(Piece::Call).collect(),
        // It was cut by its budget.
        None => vec![Piece::Text(text)],
    }
}

/// Mistral's templates take ids of nine letters and digits only.
fn call_id(format: ToolFormat) -> String {
    match format {
        ToolFormat::List => format!("{:09x}", rand::random::<u64>() >> 28),
        ToolFormat::Tagged | ToolFormat::Object => format!("call_{:024x}", rand::random::<u128>() >> 32),
    }
}

fn whole(call: ToolCall, index: Option<u32>, format: ToolFormat) -> ToolCallBody {
    ToolCallBody {
        index,
        id: Some(call_id(format)),
        kind: Some("function"),
        function: FunctionBody {
            name: Some(call.name),
            arguments: call.arguments,
        },
    }
}
