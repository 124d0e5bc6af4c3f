//! Reads the bytes of a streamed answer: which events hold a token, the text, and what the last events say.
//!
//! Two thousand streams are read by one core, so an event with a token is searched for two keys and not made into a tree. Only
//! the first event, the last one, and those without a token are parsed.

use memchr::{memchr, memchr2, memmem};
use serde_json::Value;
use thiserror::Error;

use super::plan::Endpoint;

/// An event of a stream is a few hundred bytes; with the token ids of a long prompt it has a few hundred thousand.
const LINE_BYTES_MAX: usize = 4 << 20;
/// More text than any model's context can hold.
const TEXT_BYTES_MAX: usize = 64 << 20;
const ERROR_CHARS_MAX: usize = 200;

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(super) enum AnswerError {
    #[error("a line of more than {LINE_BYTES_MAX} bytes; is this an OpenAI-compatible server?")]
    LineTooLong,
    #[error("more than {TEXT_BYTES_MAX} bytes of text in one answer")]
    TextTooLong,
    #[error("an event that is not JSON: {0}")]
    NotJson(String),
    #[error("the server gave up in the middle of the stream: {0}")]
    InStream(String),
    #[error("the server gave the answer up: its finish reason is `{0}`")]
    GivenUp(String),
    #[error("the stream ended before the answer did")]
    Broken,
    #[error("the answer ended without a token")]
    NoToken,
}

/// What the server counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub prompt_tokens: Option<u32>,
    pub completion_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    pub text: String,
    pub usage: Usage,
}

#[derive(Debug)]
pub(super) struct AnswerReader {
    endpoint: Endpoint,
    /// The begin of a line whose end has not come.
    pending: Vec<u8>,
    text: String,
    /// The last event with a choice.
    last: Vec<u8>,
    /// Of the newest event without a choice. Usage beside a choice is a count so far, unless it is in the last one.
    usage: Option<Usage>,
    tokens: usize,
    is_done: bool,
}

impl AnswerReader {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            pending: Vec::new(),
            text: String::new(),
            last: Vec::new(),
            usage: None,
            tokens: 0,
            is_done: false,
        }
    }

    /// Takes the next bytes, which may be cut anywhere. Returns how many of the events that end in them hold a token.
    ///
    /// # Errors
    /// The server reports an error, or this is no stream of such a server.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<usize, AnswerError> {
        let before = self.tokens;
        while let Some(end) = memchr(b'\n', bytes) {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            if self.pending.is_empty() {
                self.line(line)?;
            } else {
                let mut whole = std::mem::take(&mut self.pending);
                whole.extend_from_slice(line);
                self.line(&whole)?;
                whole.clear();
                self.pending = whole;
            }
            bytes = rest;
        }
        self.pending.extend_from_slice(bytes);
        if self.pending.len() > LINE_BYTES_MAX {
            return Err(AnswerError::LineTooLong);
        }
        Ok(self.tokens - before)
    }

    /// The text so far.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// The answer, when the connection says that there is no more.
    ///
    /// # Errors
    /// The answer is not whole.
    pub(super) fn finish(mut self) -> Result<Answer, AnswerError> {
        let last: Value = serde_json::from_slice(&self.last).unwrap_or_default();
        let reason = last["choices"][0]["finish_reason"].as_str();
        // Some servers do not send `[DONE]`.
        if !self.is_done && reason.is_none() {
            return Err(AnswerError::Broken);
        }
        // vLLM and SGLang end the stream as if the answer were whole.
        if let Some(reason @ ("abort" | "error")) = reason {
            return Err(AnswerError::GivenUp(reason.to_owned()));
        }
        if self.tokens == 0 {
            return Err(AnswerError::NoToken);
        }
        // Some servers put the usage into the last event with a choice.
        let usage = self.usage.take().or_else(|| usage(&last)).unwrap_or_default();
        Ok(Answer { text: self.text, usage })
    }

    /// One line. The servers of this interface put an event's data into one line, so the line is the event.
    fn line(&mut self, line: &[u8]) -> Result<(), AnswerError> {
        // Comments (`: ping`), event names and empty lines are not data.
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(());
        };
        let data = data.trim_ascii();
        match data {
            b"" => Ok(()),
            b"[DONE]" => {
                self.is_done = true;
                Ok(())
            }
            _ => self.event(data),
        }
    }

    fn event(&mut self, data: &[u8]) -> Result<(), AnswerError> {
        let is_known = self.tokens > 0 && has_choice(data);
        let text = match self.endpoint {
            Endpoint::Completions => text_of(data, b"\"text\""),
            Endpoint::Chat => text_of(data, b"\"content\"").filter(|text| !text.is_empty()),
        };
        match text {
            Some(text) if is_known => self.append(text)?,
            _ => return self.rare_event(data),
        }
        self.token(data);
        Ok(())
    }

    /// The first event, one without text, or one without a choice.
    fn rare_event(&mut self, data: &[u8]) -> Result<(), AnswerError> {
        let event: Value = serde_json::from_slice(data).map_err(|_| AnswerError::NotJson(shown(data)))?;
        if !event["error"].is_null() {
            let error = &event["error"];
            let message = error["message"].as_str().or(error.as_str());
            let message = message.map_or_else(|| error.to_string(), str::to_owned);
            return Err(AnswerError::InStream(shown(message.as_bytes())));
        }
        let choice = &event["choices"][0];
        if choice.is_null() {
            self.usage = usage(&event).or(self.usage);
            return Ok(());
        }
        let (text, is_token) = match self.endpoint {
            // A token may have no text of its own, so each choice counts.
            Endpoint::Completions => (choice["text"].as_str(), true),
            Endpoint::Chat => (choice["delta"]["content"].as_str(), is_chat_token(&choice["delta"])),
        };
        let text = text.unwrap_or_default();
        self.check_room(text.len())?;
        self.text.push_str(text);
        if is_token {
            self.token(data);
        } else {
            self.keep(data);
        }
        Ok(())
    }

    fn token(&mut self, data: &[u8]) {
        self.tokens += 1;
        self.keep(data);
    }

    fn keep(&mut self, data: &[u8]) {
        self.last.clear();
        self.last.extend_from_slice(data);
    }

    fn check_room(&self, more_bytes: usize) -> Result<(), AnswerError> {
        if self.text.len() + more_bytes > TEXT_BYTES_MAX {
            return Err(AnswerError::TextTooLong);
        }
        Ok(())
    }

    /// Adds a JSON string without its quotes.
    fn append(&mut self, quoted: &[u8]) -> Result<(), AnswerError> {
        self.check_room(quoted.len())?;
        if memchr(b'\\', quoted).is_some() {
            let whole = [b"\"", quoted, b"\""].concat();
            let text: String = serde_json::from_slice(&whole).map_err(|_| AnswerError::NotJson(shown(&whole)))?;
            self.text.push_str(&text);
        } else {
            self.text
                .push_str(std::str::from_utf8(quoted).map_err(|_| AnswerError::NotJson(shown(quoted)))?);
        }
        Ok(())
    }
}

/// As `vllm bench serve` decides it: an event that only names the role holds no token. One with an empty text and no role does,
/// because a token may have no text of its own.
fn is_chat_token(delta: &Value) -> bool {
    let has_output = [
        "content",
        "reasoning",
        "reasoning_content",
        "tool_calls",
        "function_call",
    ]
    .into_iter()
    .any(|member| match &delta[member] {
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
        _ => false,
    });
    has_output || (delta["content"] == "" && delta["role"].is_null())
}

fn usage(event: &Value) -> Option<Usage> {
    let usage = event["usage"].as_object()?;
    let count = |value: Option<&Value>| {
        value
            .and_then(Value::as_u64)
            .and_then(|count| u32::try_from(count).ok())
    };
    Some(Usage {
        prompt_tokens: count(usage.get("prompt_tokens")),
        completion_tokens: count(usage.get("completion_tokens")),
        cached_tokens: count(
            usage
                .get("prompt_tokens_details")
                .and_then(|details| details.get("cached_tokens")),
        ),
    })
}

/// True if the event's list of choices has a member. Within a JSON string the quotes of the key would be escaped.
fn has_choice(data: &[u8]) -> bool {
    value_of(data, b"\"choices\"")
        .and_then(|value| value.strip_prefix(b"["))
        .is_some_and(|list| !list.trim_ascii_start().starts_with(b"]"))
}

/// The text of the first member `key` (with its quotes) that is a string, without the string's quotes.
fn text_of<'a>(data: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let mut rest = data;
    loop {
        let value = value_of(rest, key)?;
        if let Some(text) = value.strip_prefix(b"\"") {
            return string_end(text).map(|end| &text[..end]);
        }
        rest = value;
    }
}

/// What stands behind `key:`.
fn value_of<'a>(data: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let mut rest = data;
    loop {
        let at = memmem::find(rest, key)?;
        let after = rest[at + key.len()..].trim_ascii_start();
        if let Some(value) = after.strip_prefix(b":") {
            return Some(value.trim_ascii_start());
        }
        // The same word as a value.
        rest = after;
    }
}

/// Where the string ends that begins with `text`.
fn string_end(text: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + memchr2(b'"', b'\\', text.get(from..)?)?;
        if text[at] == b'"' {
            return Some(at);
        }
        from = at + 2;
    }
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().take(ERROR_CHARS_MAX).collect()
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
