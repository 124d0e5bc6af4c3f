//! What a request says, on its root span: the client's name for its user always, and prompt, answer and tool calls where the
//! operator asked for content (`trace_content`).
//!
//! The names and the form are those of OpenTelemetry's conventions for generative AI (`gen_ai.input.messages`,
//! `gen_ai.output.messages`), as JSON in a string, because attributes of spans have no deeper values. Each of the two is
//! cut at [`CONTENT_BYTES_MAX`], and `baton.content.is_cut` says so.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use serving_core::ids::TokenId;
use serving_core::request::FinishReason;

use super::AppState;
use super::calls::Calls;
use super::given_chat::Turn;
use super::prompt::{Input, PromptSource};
use super::request::CheckedRequest;
use super::tools::CallableTools;
use crate::text::ToolFormat;

/// Bytes of one attribute. A process keeps 20,000 spans, of which about 2,000 are roots: content then takes 64 MiB of it.
const CONTENT_BYTES_MAX: usize = 16 << 10;
/// A message or a part of it without its texts: a call has 55 bytes, a result 80, and a message of the assistant with one text
/// and a finish reason 88.
const FRAME_BYTES: usize = 96;

/// The answer so far, as far as it fits.
#[derive(Debug)]
pub struct Content {
    is_input_cut: bool,
    /// The functions that the answer may call, and how the model writes calls.
    tools: Option<(CallableTools, ToolFormat)>,
    choices: BTreeMap<u32, Choice>,
    room: Room,
}

#[derive(Debug, Default)]
struct Choice {
    text: String,
    finish: Option<&'static str>,
}

/// What an attribute still has room for.
#[derive(Debug)]
struct Room {
    left_bytes: usize,
    is_cut: bool,
}

impl Room {
    fn new() -> Self {
        Self {
            // Without the brackets of the list.
            left_bytes: CONTENT_BYTES_MAX - 2,
            is_cut: false,
        }
    }

    /// Whether another message or part fits. Its texts come on top.
    fn take_frame(&mut self) -> bool {
        self.take(FRAME_BYTES)
    }

    fn take(&mut self, bytes: usize) -> bool {
        match self.left_bytes.checked_sub(bytes) {
            Some(left) => self.left_bytes = left,
            None => self.is_cut = true,
        }
        !self.is_cut
    }

    /// As much of a text as fits.
    fn take_text(&mut self, text: &str) -> String {
        for (at, c) in text.char_indices() {
            if !self.take(bytes_in_json(c)) {
                return text.split_at(at).0.to_owned();
            }
        }
        text.to_owned()
    }

    fn take_text_of(&mut self, text: Option<&str>) -> Value {
        text.map_or(Value::Null, |text| Value::from(self.take_text(text)))
    }

    /// The arguments of a call: an object, or the beginning of their text where they are none or do not fit.
    fn take_arguments(&mut self, text: &str) -> Value {
        // A value takes many times its text, so what does not fit is not read.
        let fits = text.len() <= self.left_bytes;
        let read: Option<Value> = fits.then(|| serde_json::from_str(text).ok()).flatten();
        let Some(arguments @ Value::Object(_)) = read else {
            return Value::from(self.take_text(text));
        };
        let text = arguments.to_string();
        if text.len() <= self.left_bytes {
            self.left_bytes -= text.len();
            return arguments;
        }
        Value::from(self.take_text(&text))
    }
}

/// Bytes of a character in a string that serde_json writes.
fn bytes_in_json(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        other => other.len_utf8(),
    }
}

/// The prompt as an attribute, and the answer, which is still empty. `None` where the operator asked for no content.
pub fn of_request(state: &AppState, plan: &CheckedRequest) -> Option<(String, Content)> {
    if !state.insight.traces_content {
        return None;
    }
    let mut room = Room::new();
    let decode = |ids: &[TokenId]| state.text.decode(ids, true);
    let messages = Value::from(input_messages(&plan.input, decode, &mut room));
    let content = Content {
        is_input_cut: room.is_cut,
        tools: plan.tools.clone().map(|tools| (tools, state.text.tool_format())),
        choices: BTreeMap::new(),
        room: Room::new(),
    };
    Some((messages.to_string(), content))
}

/// The newest messages of a chat, or the first of several prompts. A prompt of token ids is shown as its text.
fn input_messages(input: &Input, decode: impl Fn(&[TokenId]) -> String, room: &mut Room) -> Vec<Value> {
    let mut messages = Vec::new();
    match input {
        Input::Prompts(prompts) => {
            for prompt in prompts {
                if !room.take_frame() {
                    break;
                }
                let said = match prompt {
                    PromptSource::Text(said) => room.take_text(said),
                    // A token has at least one byte.
                    PromptSource::Tokens(ids) => room.take_text(&decode(ids.get(..CONTENT_BYTES_MAX).unwrap_or(ids))),
                };
                messages.push(json!({"role": "user", "parts": [{"type": "text", "content": said}]}));
            }
        }
        Input::Chat(chat, _) => {
            for turn in chat.turns.iter().rev() {
                if !room.take_frame() {
                    break;
                }
                messages.push(json!({"role": turn.role, "parts": parts(turn, room)}));
            }
            messages.reverse();
        }
    }
    messages
}

/// The parts of a message that a client sent.
fn parts(turn: &Turn, room: &mut Room) -> Vec<Value> {
    if turn.role == "tool" {
        let id = room.take_text_of(turn.tool_call_id.as_deref());
        let response = room.take_text(&turn.content);
        return vec![json!({"type": "tool_call_response", "id": id, "response": response})];
    }
    let mut parts = Vec::new();
    if !turn.content.is_empty() {
        parts.push(json!({"type": "text", "content": room.take_text(&turn.content)}));
    }
    for call in &turn.calls {
        if !room.take_frame() {
            break;
        }
        let id = room.take_text_of(call.id.as_deref());
        let name = room.take_text(&call.name);
        let arguments = room.take_arguments(&call.arguments);
        parts.push(json!({"type": "tool_call", "id": id, "name": name, "arguments": arguments}));
    }
    parts
}

impl Content {
    /// A token of a choice goes to the client.
    pub fn said(&mut self, choice: u32, text: &str, finish: Option<FinishReason>) {
        if !self.choices.contains_key(&choice) && !self.room.take_frame() {
            return;
        }
        let choice = self.choices.entry(choice).or_default();
        choice.text.push_str(&self.room.take_text(text));
        choice.finish = finish.map(FinishReason::openai_name).or(choice.finish);
    }

    pub fn has_answer(&self) -> bool {
        !self.choices.is_empty()
    }

    pub fn is_cut(&self) -> bool {
        self.is_input_cut || self.room.is_cut
    }

    /// One message for each choice. Calls are read out of the text, as they are for the client, unless they would need more
    /// room than the text.
    pub fn output_messages(&self) -> String {
        let with_calls = self.messages(|index, choice| self.parts(index, choice)).to_string();
        if with_calls.len() <= CONTENT_BYTES_MAX {
            return with_calls;
        }
        let as_written = |_, choice: &Choice| vec![json!({"type": "text", "content": choice.text})];
        self.messages(as_written).to_string()
    }

    fn messages(&self, parts: impl Fn(u32, &Choice) -> Vec<Value>) -> Value {
        let message = |(index, choice): (&u32, &Choice)| {
            let parts = parts(*index, choice);
            let has_called = parts.iter().any(|part| part["type"] == "tool_call");
            let finish = match choice.finish {
                // The answer broke off.
                None => "error",
                Some("stop") if has_called => "tool_call",
                Some(finish) => finish,
            };
            json!({"role": "assistant", "parts": parts, "finish_reason": finish})
        };
        self.choices.iter().map(message).collect()
    }

    fn parts(&self, index: u32, choice: &Choice) -> Vec<Value> {
        let Some((tools, format)) = &self.tools else {
            return vec![json!({"type": "text", "content": choice.text})];
        };
        let (said, calls) = Calls::new(tools, *format, false)
            .take(index, &choice.text, true)
            .text_and_calls();
        let mut parts = Vec::new();
        if !said.is_empty() {
            parts.push(json!({"type": "text", "content": said}));
        }
        // The ids are drawn when a call is read, so those here would not be the client's.
        parts.extend(calls.into_iter().map(|call| {
            let text = call.function.arguments;
            let arguments = serde_json::from_str(&text).unwrap_or(Value::from(text));
            json!({"type": "tool_call", "name": call.function.name, "arguments": arguments})
        }));
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::given_chat::GivenChat;
    use crate::api::prompt::{ChatEnding, ChatMessages, turns};
    use crate::api::tools::GivenTools;

    fn content(tools: Option<CallableTools>) -> Content {
        Content {
            is_input_cut: false,
            tools: tools.map(|tools| (tools, ToolFormat::Tagged)),
            choices: BTreeMap::new(),
            room: Room::new(),
        }
    }

    fn output(content: &Content) -> Value {
        let text = content.output_messages();
        assert!(text.len() <= CONTENT_BYTES_MAX, "{} bytes", text.len());
        serde_json::from_str(&text).expect("JSON")
    }

    #[test]
    fn each_choice_is_a_message_with_its_finish_reason() {
        let mut content = content(None);
        content.said(0, "He", None);
        content.said(1, "No", Some(FinishReason::Length));
        content.said(0, "llo", Some(FinishReason::EndToken));
        content.said(2, "bro", None);
        let message = |text: &str, finish: &str| json!({"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": finish});
        let expected = json!([
            message("Hello", "stop"),
            message("No", "length"),
            message("bro", "error")
        ]);
        assert_eq!(output(&content), expected);
        assert!(!content.room.is_cut);
    }

    #[test]
    fn calls_are_parts_of_their_own() {
        let tools = json!([{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]);
        let tools = serde_json::from_str(&tools.to_string()).expect("tools");
        let tools = GivenTools::new(Some(tools), None).expect("tools");
        let mut content = content(tools.map(|tools| tools.callable()));
        let said = "<tool_call>{\"name\": \"find\", \"arguments\": {\"q\": 1}}</tool_call>";
        content.said(0, said, Some(FinishReason::EndToken));
        let call = json!({"type": "tool_call", "name": "find", "arguments": {"q": 1}});
        let output = output(&content);
        assert_eq!(
            output[0]["parts"].as_array().and_then(|parts| parts.last()),
            Some(&call),
            "{output}"
        );
        assert_eq!(output[0]["finish_reason"], "tool_call");
    }

    #[test]
    fn no_answer_is_larger_than_the_limit_however_it_is_written() {
        for text in ["x", "\"", "\u{1}", "ä", "<tool_call>{}</tool_call>"] {
            let mut content = content(None);
            for turn in 0..3 * CONTENT_BYTES_MAX {
                content.said(u32::try_from(turn % 300).expect("small"), text, None);
            }
            output(&content);
            assert!(content.room.is_cut, "{text:?}");
        }
    }

    fn input(messages: Vec<Value>) -> (Value, bool) {
        let messages: ChatMessages = serde_json::from_str(&Value::from(messages).to_string()).expect("messages");
        let chat = GivenChat::new("messages", turns(Some(messages)).expect("turns"), None);
        let mut room = Room::new();
        let input = Input::Chat(chat, ChatEnding::NewMessage);
        let messages = Value::from(input_messages(&input, |_| String::new(), &mut room));
        assert!(messages.to_string().len() <= CONTENT_BYTES_MAX);
        (messages, room.is_cut)
    }

    #[test]
    fn a_conversation_has_the_parts_of_the_conventions() {
        let (messages, is_cut) = input(vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "assistant", "content": "", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{\"q\": \"x\"}"}}]}),
            json!({"role": "tool", "content": "found", "tool_call_id": "c1"}),
        ]);
        let expected = json!([
            {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
            {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "find", "arguments": {"q": "x"}}]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "found"}]},
        ]);
        assert_eq!((messages, is_cut), (expected, false));
    }

    #[test]
    fn of_a_long_conversation_the_newest_messages_are_kept() {
        let long = "y".repeat(CONTENT_BYTES_MAX);
        let arguments = json!({"q": long}).to_string();
        let call = json!({"id": long, "type": "function", "function": {"name": "f", "arguments": arguments}});
        let (messages, is_cut) = input(vec![
            json!({"role": "user", "content": "first"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            json!({"role": "user", "content": "last"}),
        ]);
        let messages = messages.as_array().expect("a list");
        assert!(is_cut && messages.len() == 2, "{}", messages.len());
        assert_eq!(messages[1]["parts"][0]["content"], "last");
    }
}
