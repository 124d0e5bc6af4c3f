//! The input of a request: the four forms of `prompt`, `messages`, and `logit_bias`.

use std::fmt;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serving_core::ids::TokenId;

use super::error::{ApiError, short};
use super::forms::{Flag, Given, Id, List, Real, Unsupported, in_vocabulary};
use super::given_chat::{GivenChat, Turn};
use super::limits::{
    CALLS_MAX, LOGIT_BIAS_ENTRIES_MAX, LOGIT_BIAS_MAX, MESSAGES_MAX, PROMPT_ELEMENTS_MAX, PROMPTS_MAX, TOKEN_ID_BYTES,
};
use super::tools::{EarlierCall, MadeCall};

#[derive(Debug)]
pub enum Input {
    Prompts(Vec<PromptSource>),
    Chat(GivenChat, ChatEnding),
}

/// What the model goes on with after the messages of a chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatEnding {
    /// A new message of the assistant, whose head the template writes.
    NewMessage,
    /// The last message, which is left open.
    LastMessage,
    /// The text as the template ends it.
    Nothing,
}

impl ChatEnding {
    /// From the fields `continue_final_message` and `add_generation_prompt`.
    pub fn of(continues: Flag, generation_prompt: Option<Flag>) -> Result<Self, ApiError> {
        match (continues.0, generation_prompt) {
            (true, Some(Flag(true))) => Err(ApiError::invalid(
                "continue_final_message",
                "`continue_final_message` and `add_generation_prompt` cannot both be true: the answer either continues the \
                 last message or begins a new one.",
            )),
            (true, _) => Ok(Self::LastMessage),
            (false, Some(Flag(false))) => Ok(Self::Nothing),
            (false, _) => Ok(Self::NewMessage),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptSource {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// `string | [string] | [int] | [[int]]`.
#[derive(Debug)]
pub enum Prompts {
    One(Element),
    Several(Vec<Element>),
}

/// An element of the list, or the prompt itself.
#[derive(Debug)]
pub enum Element {
    Text(String),
    Id(TokenId),
    Ids(Vec<Id>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = "a string, a token id or a list of token ids";
        match Given::read(deserializer, &wanted, usize::MAX)? {
            Given::Text(text) => Ok(Self::Text(text)),
            Given::List(ids) => Ok(Self::Ids(ids)),
            other => other.token_id().map(Self::Id).ok_or_else(|| other.is_not(&wanted)),
        }
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = "a string, a list of strings, or a list of token ids";
        let elements = match Given::<Element>::read(deserializer, &wanted, PROMPT_ELEMENTS_MAX)? {
            Given::Text(text) => return Ok(Self::One(Element::Text(text))),
            Given::List(elements) => elements,
            other => return Err(other.is_not(&wanted)),
        };
        let is_id = |element: &Element| matches!(element, Element::Id(_));
        if let Some(at) = elements.windows(2).position(|pair| is_id(&pair[0]) != is_id(&pair[1])) {
            let wrong =
                "is of another kind than the element before it: either all are token ids, or none is a token id";
            return Err(D::Error::custom(format!("`prompt[{}]` {wrong}", at + 1)));
        }
        let id = |element: &Element| match element {
            Element::Id(id) => Some(Id(*id)),
            _ => None,
        };
        let ids: Vec<Id> = elements.iter().filter_map(id).collect();
        match elements.len() {
            _ if !ids.is_empty() => Ok(Self::One(Element::Ids(ids))),
            ..=PROMPTS_MAX => Ok(Self::Several(elements)),
            more => Err(D::Error::invalid_length(
                more,
                &format!("at most {PROMPTS_MAX} prompts").as_str(),
            )),
        }
    }
}

impl PromptSource {
    pub fn text_bytes(&self) -> usize {
        match self {
            PromptSource::Text(text) => text.len(),
            PromptSource::Tokens(_) => 0,
        }
    }

    fn work_bytes(&self) -> usize {
        match self {
            PromptSource::Text(text) => text.len(),
            PromptSource::Tokens(ids) => ids.len().saturating_mul(TOKEN_ID_BYTES),
        }
    }
}

impl Input {
    /// The request's field this came from.
    pub fn param(&self) -> &'static str {
        match self {
            Input::Prompts(_) => "prompt",
            Input::Chat(..) => "messages",
        }
    }

    /// Bytes of text in all prompts together, of tools and calls as well.
    pub fn text_bytes(&self) -> usize {
        match self {
            Input::Prompts(prompts) => prompts.iter().map(PromptSource::text_bytes).sum(),
            Input::Chat(chat, _) => chat.text_bytes(),
        }
    }

    /// How much there is to do until the prompts are tokens.
    pub fn work_bytes(&self) -> usize {
        match self {
            Input::Prompts(prompts) => prompts.iter().map(PromptSource::work_bytes).sum(),
            Input::Chat(chat, _) => chat.work_bytes(),
        }
    }

    pub fn prompts(given: Option<Prompts>, vocab_size: u32) -> Result<Self, ApiError> {
        let source = |name: &str, element| match element {
            Element::Text(text) if !text.is_empty() => Ok(PromptSource::Text(text)),
            Element::Ids(ids) if !ids.is_empty() => in_vocabulary(ids, name, vocab_size).map(PromptSource::Tokens),
            _ => Err(empty()),
        };
        match given {
            None => Err(ApiError::invalid(
                "prompt",
                "`prompt` is missing: a string, a list of strings, or token ids.",
            )),
            Some(Prompts::One(prompt)) => Ok(Self::Prompts(vec![source("prompt", prompt)?])),
            Some(Prompts::Several(prompts)) if prompts.is_empty() => Err(empty()),
            Some(Prompts::Several(prompts)) => {
                let sources = prompts.into_iter().enumerate();
                let sources = sources.map(|(at, prompt)| source(&format!("prompt[{at}]"), prompt));
                sources.collect::<Result<_, _>>().map(Self::Prompts)
            }
        }
    }
}

fn empty() -> ApiError {
    ApiError::invalid(
        "prompt",
        "`prompt` must not be empty: the model needs at least one token to go on from.",
    )
}

pub type ChatMessages = List<ChatMessage, MESSAGES_MAX>;

#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `role` and `content`")]
pub struct ChatMessage {
    role: Option<String>,
    content: Option<Content>,
    name: Option<String>,
    tool_calls: Option<List<MadeCall, CALLS_MAX>>,
    tool_call_id: Option<String>,
    function_call: Option<Unsupported>,
}

/// A string, or a list of text parts: one line break stands between two of them, as in vLLM and llama.cpp.
#[derive(Debug)]
pub struct Content(pub String);

/// One part of a content, which must be text.
#[derive(Deserialize)]
#[serde(try_from = "PartFields")]
struct Part(String);

#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `type` and `text`")]
struct PartFields {
    r#type: Option<String>,
    text: Option<String>,
}

impl TryFrom<PartFields> for Part {
    type Error = &'static str;

    fn try_from(part: PartFields) -> Result<Self, Self::Error> {
        let is_text = matches!(part.r#type.as_deref(), Some("text" | "input_text" | "output_text"));
        part.text
            .filter(|_| is_text)
            .map(Self)
            .ok_or("must be {\"type\": \"text\", \"text\": ...}: this model reads text only")
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = "a string or a list of text parts";
        match Given::<Part>::read(deserializer, &wanted, usize::MAX)? {
            Given::Text(text) => Ok(Self(text)),
            Given::List(parts) => {
                let texts: Vec<String> = parts.into_iter().map(|part| part.0).collect();
                Ok(Self(texts.join("\n")))
            }
            other => Err(other.is_not(&wanted)),
        }
    }
}

pub fn turns(messages: Option<ChatMessages>) -> Result<Vec<Turn>, ApiError> {
    let messages = messages.map_or(Vec::new(), |messages| messages.0);
    if messages.is_empty() {
        let message = "`messages` must be a list with at least one message.";
        return Err(ApiError::invalid("messages", message));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(at, message)| message.turn(("messages", at)))
        .collect()
}

impl ChatMessage {
    pub fn new(role: Option<String>, content: Option<Content>) -> Self {
        Self {
            role,
            content,
            ..Self::default()
        }
    }

    /// The message, if it is one. `list` is the field that it is an element of.
    pub fn turn(self, (list, at): (&str, usize)) -> Result<Turn, ApiError> {
        let wrong = |field: &str, what: &str| {
            let path = format!("{list}[{at}].{field}");
            ApiError::invalid(&path, format!("`{path}` {what}."))
        };
        let role = match self.role.as_deref() {
            // OpenAI's newer name for the system role. The models that are served here know only "system".
            Some("system" | "developer") => "system",
            Some("user") => "user",
            Some("assistant") => "assistant",
            Some("tool") => "tool",
            Some(other) => {
                let other = short(other);
                let what = format!("must be system, developer, user, assistant or tool, not {other:?}");
                return Err(wrong("role", &what));
            }
            None => return Err(wrong("role", "is missing")),
        };
        let unsupported = |field: &str| Err(ApiError::unsupported(&format!("{list}[{at}].{field}")));
        if self.name.is_some() && role != "tool" {
            return unsupported("name");
        }
        if self.tool_call_id.is_some() && role != "tool" {
            return unsupported("tool_call_id");
        }
        let calls = self.tool_calls.map_or(Vec::new(), |calls| calls.0);
        if !calls.is_empty() && role != "assistant" {
            return unsupported("tool_calls");
        }
        let content = match self.content {
            Some(content) => content.0,
            // The content of a message that only calls.
            None if !calls.is_empty() => String::new(),
            None => return Err(wrong("content", "is missing")),
        };
        let calls: Result<Vec<EarlierCall>, _> = calls.into_iter().map(MadeCall::checked).collect();
        Ok(Turn {
            role,
            content,
            calls: calls.map_err(|what| wrong("tool_calls", what))?,
            tool_call_id: self.tool_call_id,
            name: self.name,
        })
    }
}

/// What is added to the logits of tokens. The keys are token ids.
#[derive(Debug)]
pub struct LogitBias(Vec<(TokenId, f32)>);

struct LogitBiasVisitor;

impl<'de> Visitor<'de> for LogitBiasVisitor {
    type Value = LogitBias;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "an object of at most {LOGIT_BIAS_ENTRIES_MAX} token ids with their numbers"
        )
    }
    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<LogitBias, A::Error> {
        let mut biases = Vec::new();
        while let Some(key) = entries.next_key::<String>()? {
            let id = key.parse().map_err(|_| {
                let key = short(&key);
                A::Error::custom(format!("the keys must be token ids, and {key:?} is none"))
            })?;
            let Real(bias) = entries.next_value::<Real<{ -LOGIT_BIAS_MAX }, LOGIT_BIAS_MAX>>()?;
            if biases.len() == LOGIT_BIAS_ENTRIES_MAX {
                return Err(A::Error::invalid_length(LOGIT_BIAS_ENTRIES_MAX + 1, &self));
            }
            biases.push((TokenId(id), bias));
        }
        biases.sort_by_key(|(token, _)| *token);
        Ok(LogitBias(biases))
    }
}

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LogitBiasVisitor)
    }
}

impl LogitBias {
    /// The biases, sorted by token.
    pub fn in_vocabulary(&self, vocab_size: u32) -> Result<Vec<(TokenId, f32)>, ApiError> {
        let wrong = |message| Err(ApiError::invalid("logit_bias", message));
        if let Some((id, _)) = self.0.iter().find(|(id, _)| id.0 >= vocab_size) {
            let most = vocab_size - 1;
            return wrong(format!(
                "`logit_bias` names {id}: keys must be token ids from 0 to {most}."
            ));
        }
        // "7" and "07" are two keys and one token. Which of them counts would be a guess.
        if let Some(pair) = self.0.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return wrong(format!("`logit_bias` names token {} twice.", pair[0].0));
        }
        Ok(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::limits::TOKENIZE_INLINE_BYTES_MAX;

    #[test]
    fn token_ids_are_work_though_they_are_no_text() {
        let ids = PromptSource::Tokens(vec![TokenId(0); TOKENIZE_INLINE_BYTES_MAX / 2]);
        let input = Input::Prompts(vec![ids]);
        assert_eq!(input.text_bytes(), 0);
        assert!(input.work_bytes() > TOKENIZE_INLINE_BYTES_MAX);
    }
}
