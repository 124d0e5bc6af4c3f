//! Calls of tools in a model's text: the form in which its family writes them, and how they are read again.

use std::sync::Arc;

use serde_json::{Value, json};

/// A conversation as a chat template sees it: messages and tools are objects as in OpenAI's API.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    pub messages: Vec<Value>,
    pub tools: Vec<Value>,
}

/// How a family writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>`, as many as there are calls: Hermes, Qwen and their relatives.
    Tagged,
    /// A list of such objects alone, behind `[TOOL_CALLS]`: Mistral.
    List,
    /// One object with `name` and `parameters` alone, or several with `;` between them: Llama.
    Object,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const LIST_MARK: &str = "[TOOL_CALLS]";

impl ToolFormat {
    /// By the text of the template, which shows earlier calls to the model. `None`: the template knows no tools.
    pub fn of_template(source: &str) -> Option<Self> {
        if !source.contains("tools") {
            return None;
        }
        Some(match () {
            () if source.contains(LIST_MARK) => Self::List,
            () if source.contains(OPEN) => Self::Tagged,
            () if source.contains("<|python_tag|>") || source.contains("\"parameters\":") => Self::Object,
            () => Self::Tagged,
        })
    }
}

impl Chat {
    /// Whether there are tools, or calls and results of earlier ones: a client that wants no more calls may leave the tools out.
    pub fn has_tools(&self) -> bool {
        let is_of_tool = |message: &Value| message["role"] == "tool" || message.get("tool_calls").is_some();
        !self.tools.is_empty() || self.messages.iter().any(is_of_tool)
    }

    /// The same for a template that knows no tools: they stand in the system message, calls in the text, results in messages of
    /// the user. The model has not been trained for it, so it follows at best roughly.
    pub fn with_tools_as_text(&self) -> Self {
        let mut messages = self.messages_as_text();
        if !self.tools.is_empty() {
            self.order_calls(&mut messages);
        }
        Self {
            messages,
            tools: Vec::new(),
        }
    }

    /// Results that follow one another are one message: many templates take no two messages of the user in a row.
    fn messages_as_text(&self) -> Vec<Value> {
        let mut messages: Vec<Value> = Vec::new();
        let mut is_behind_result = false;
        for message in &self.messages {
            let (is_result, text) = (message["role"] == "tool", as_text(message));
            if is_result && is_behind_result {
                add_line(messages.last_mut(), &text);
            } else {
                messages.push(text);
            }
            is_behind_result = is_result;
        }
        messages
    }

    /// Puts the tools into the system message.
    fn order_calls(&self, messages: &mut Vec<Value>) {
        let list: Vec<String> = self.tools.iter().map(Value::to_string).collect();
        let orders = format!(
            "You can call functions. To call one, write {OPEN}{{\"name\": its name, \"arguments\": its arguments}}{CLOSE} and \
             nothing else. These are the functions:\n{}",
            list.join("\n")
        );
        match messages.first_mut().filter(|first| first["role"] == "system") {
            Some(system) => {
                let own = system["content"].as_str().unwrap_or_default();
                system["content"] = Value::from(format!("{own}\n\n{orders}"));
            }
            None => messages.insert(0, json!({"role": "system", "content": orders})),
        }
    }
}

/// Adds the content of a message to the one before it.
fn add_line(before: Option<&mut Value>, message: &Value) {
    let before = before.and_then(|before| before.get_mut("content"));
    if let (Some(Value::String(before)), Some(content)) = (before, message["content"].as_str()) {
        before.push('\n');
        before.push_str(content);
    }
}

fn as_text(message: &Value) -> Value {
    let content = message["content"].as_str().unwrap_or_default();
    if message["role"] == "tool" {
        let text = format!("<tool_response>{content}</tool_response>");
        return json!({"role": "user", "content": text});
    }
    let calls = message["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
    let calls: String = calls
        .iter()
        .map(|call| {
            let function = &call["function"];
            let call = json!({"name": function["name"], "arguments": function["arguments"]});
            format!("{OPEN}{call}{CLOSE}")
        })
        .collect();
    json!({"role": message["role"], "content": format!("{content}{calls}")})
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    Text(String),
    Call(ToolCall),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// JSON.
    pub arguments: String,
}

impl ToolCall {
    /// Of an object with `name`, one of `names`, and `arguments` or `parameters`. Other objects are answers.
    fn of(value: &Value, names: &[String]) -> Option<Self> {
        let arguments = value.get("arguments").or_else(|| value.get("parameters"))?;
        let name = value.get("name")?.as_str()?;
        names.iter().any(|known| known == name).then(|| Self {
            name: name.to_owned(),
            arguments: arguments_text(arguments),
        })
    }

    /// All calls of a JSON text, or nothing if something in it is no call.
    pub fn all_of(text: &str, names: &[String]) -> Option<Vec<Self>> {
        match serde_json::from_str(text).ok()? {
            Value::Array(values) if !values.is_empty() => values.iter().map(|value| Self::of(value, names)).collect(),
            value => Some(vec![Self::of(&value, names)?]),
        }
    }
}

/// Reads an answer as it comes. Text that may be the beginning of a call is held back until that is decided.
#[derive(Debug)]
pub struct ToolCallReader {
    format: ToolFormat,
    /// The functions that may be called.
    names: Arc<[String]>,
    held: String,
    /// Nothing but white space has been seen.
    is_at_start: bool,
    /// Nothing but white space has come since the last call.
    is_behind_call: bool,
    /// That white space, which belongs to the text that may follow.
    space: String,
}

impl ToolCallReader {
    pub fn new(format: ToolFormat, names: Arc<[String]>) -> Self {
        Self {
            format,
            names,
            held: String::new(),
            is_at_start: true,
            is_behind_call: false,
            space: String::new(),
        }
    }

    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        match self.format {
            ToolFormat::Tagged => self.tagged(),
            ToolFormat::List | ToolFormat::Object => self.bare(),
        }
    }

    /// The answer has ended.
    pub fn end(&mut self) -> Vec<Piece> {
        let held = std::mem::take(&mut self.held);
        let calls = match self.format {
            ToolFormat::Tagged => held
                .trim_start()
                .strip_prefix(OPEN)
                .and_then(|body| ToolCall::all_of(body.trim(), &self.names)),
            _ if !self.is_at_start => None,
            ToolFormat::List => ToolCall::all_of(held.trim().trim_start_matches(LIST_MARK).trim(), &self.names),
            ToolFormat::Object => objects(held.trim(), &self.names),
        };
        match calls {
            Some(calls) => calls.into_iter().map(Piece::Call).collect(),
            None => self.text(held),
        }
    }

    fn tagged(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        loop {
            let Some(open) = self.held.find(OPEN) else {
                let kept = self.held.len() - partial_end(&self.held, OPEN);
                let text = self.held.drain(..kept).collect();
                pieces.extend(self.text(text));
                return pieces;
            };
            let text = self.held.drain(..open).collect();
            pieces.extend(self.text(text));
            let Some(close) = self.held.find(CLOSE) else {
                return pieces;
            };
            let body = self.held[OPEN.len()..close].trim();
            match ToolCall::all_of(body, &self.names) {
                Some(calls) => {
                    self.is_behind_call = true;
                    self.space.clear();
                    pieces.extend(calls.into_iter().map(Piece::Call));
                    self.held.drain(..close + CLOSE.len());
                }
                None => {
                    let text = self.held.drain(..close + CLOSE.len()).collect();
                    pieces.extend(self.text(text));
                }
            }
        }
    }

    /// An answer is calls from its first character on, or it is text.
    fn bare(&mut self) -> Vec<Piece> {
        let first = self.held.trim_start();
        let may_be_calls = match self.format {
            ToolFormat::List => first.is_empty() || first.starts_with('['),
            _ => first.is_empty() || first.starts_with('{'),
        };
        if self.is_at_start && may_be_calls {
            return Vec::new();
        }
        self.is_at_start = false;
        let text = std::mem::take(&mut self.held);
        self.text(text)
    }

    /// White space between calls, and after the last one, is no answer.
    fn text(&mut self, text: String) -> Vec<Piece> {
        if self.is_behind_call && text.trim().is_empty() {
            self.space.push_str(&text);
            return Vec::new();
        }
        self.is_behind_call = false;
        match text.is_empty() {
            true => Vec::new(),
            false => vec![Piece::Text(std::mem::take(&mut self.space) + &text)],
        }
    }
}

/// Clients parse the arguments of a call and expect an object, also where the model wrote that there are none.
fn arguments_text(arguments: &Value) -> String {
    let text = match arguments {
        Value::String(text) => text.clone(),
        arguments => arguments.to_string(),
    };
    let is_none = matches!(text.trim(), "" | "null");
    if is_none { "{}".to_owned() } else { text }
}

fn objects(text: &str, names: &[String]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let mut at = 0;
    while let Some(value) = values.next() {
        calls.push(ToolCall::of(&value.ok()?, names)?);
        at += values.byte_offset();
        let rest = text.get(at..)?.trim_start_matches([';', ' ', '\n']);
        at = text.len() - rest.len();
        values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
    }
    (!calls.is_empty()).then_some(calls)
}

/// How many bytes at the end of `text` may be the beginning of `mark`.
fn partial_end(text: &str, mark: &str) -> usize {
    let most = mark.len().min(text.len());
    (1..=most)
        .rev()
        .find(|bytes| text.as_bytes().ends_with(&mark.as_bytes()[..*bytes]))
        .unwrap_or(0)
}

#[cfg(test)]
#[path = "tools_tests.rs"]
mod tests;
