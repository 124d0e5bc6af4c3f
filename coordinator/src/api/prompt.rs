//! The input of a request: the four forms of `prompt`, `messages`, and `logit_bias`.

use std::fmt;

use serde::Deserialize;
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serving_core::ids::TokenId;

use super::error::ApiError;
use super::forms::{Id, List, Object, Real, TOKEN_ID, read_by_visitor, short, visit_whole_numbers};
use super::limits::{LOGIT_BIAS_ENTRIES_MAX, LOGIT_BIAS_MAX, MESSAGES_MAX, PROMPTS_MAX};
use super::request::in_vocabulary;
use crate::text::ChatTurn;

#[derive(Debug)]
pub enum Input {
    Prompts(Vec<PromptSource>),
    Chat(Vec<ChatTurn>),
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

impl Default for Prompts {
    fn default() -> Self {
        Self::Several(Vec::new())
    }
}

/// An element of the list, or the prompt itself.
#[derive(Debug)]
pub enum Element {
    Text(String),
    Id(Id),
    Ids(Vec<Id>),
}

impl Default for Element {
    fn default() -> Self {
        Self::Ids(Vec::new())
    }
}

impl<'de> Visitor<'de> for Element {
    type Value = Self;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id or a list of token ids")
    }
    fn visit_str<E>(self, text: &str) -> Result<Self, E> {
        Ok(Self::Text(text.to_owned()))
    }
    fn visit_f64<E: Error>(self, number: f64) -> Result<Self, E> {
        let id = TOKEN_ID.visit_f64(number)?;
        Ok(Self::Id(Id(TokenId(id as u32))))
    }
    visit_whole_numbers!();
    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = elements.next_element()? {
            ids.push(id);
        }
        Ok(Self::Ids(ids))
    }
}

impl<'de> Visitor<'de> for Prompts {
    type Value = Self;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a string, a list of at most {PROMPTS_MAX} strings, or a list of token ids"
        )
    }
    fn visit_str<E>(self, text: &str) -> Result<Self, E> {
        Ok(Self::One(Element::Text(text.to_owned())))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self, A::Error> {
        let (mut ids, mut prompts) = (Vec::new(), Vec::new());
        while let Some(element) = elements.next_element()? {
            match element {
                Element::Id(id) if prompts.is_empty() => ids.push(id),
                Element::Text(_) | Element::Ids(_) if ids.is_empty() => prompts.push(element),
                _ => {
                    let at = ids.len() + prompts.len();
                    let wrong = "is of another kind than the elements before it: either all are token ids, or none is a token id";
                    return Err(A::Error::custom(format!("`prompt[{at}]` {wrong}")));
                }
            }
            if prompts.len() > PROMPTS_MAX {
                return Err(A::Error::invalid_length(prompts.len(), &Self::default()));
            }
        }
        match ids.is_empty() {
            true => Ok(Self::Several(prompts)),
            false => Ok(Self::One(Element::Ids(ids))),
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
}

impl Input {
    /// The request's field this came from.
    pub fn param(&self) -> &'static str {
        match self {
            Input::Prompts(_) => "prompt",
            Input::Chat(_) => "messages",
        }
    }

    /// Bytes of text in all prompts together.
    pub fn text_bytes(&self) -> usize {
        match self {
            Input::Prompts(prompts) => prompts.iter().map(PromptSource::text_bytes).sum(),
            Input::Chat(turns) => turns.iter().map(|turn| turn.content.len()).sum(),
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

pub type ChatMessages = List<Object<ChatMessage>, MESSAGES_MAX>;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ChatMessage {
    role: Option<String>,
    content: Option<Content>,
    name: Option<IgnoredAny>,
    tool_calls: Option<IgnoredAny>,
    tool_call_id: Option<IgnoredAny>,
    function_call: Option<IgnoredAny>,
}

/// A string, or a list of text parts that are joined.
#[derive(Debug, Default)]
struct Content(String);

/// One part of a content, which must be text.
#[derive(Deserialize)]
#[serde(try_from = "Object<PartFields>")]
struct Part(String);

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PartFields {
    r#type: Option<String>,
    text: Option<String>,
}

impl TryFrom<Object<PartFields>> for Part {
    type Error = &'static str;

    fn try_from(Object(part): Object<PartFields>) -> Result<Self, Self::Error> {
        let text = part.text.filter(|_| part.r#type.as_deref() == Some("text"));
        text.map(Self)
            .ok_or("must be {\"type\": \"text\", \"text\": ...}: this model reads text only")
    }
}

impl<'de> Visitor<'de> for Content {
    type Value = Self;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of text parts")
    }
    fn visit_str<E>(self, text: &str) -> Result<Self, E> {
        Ok(Self(text.to_owned()))
    }
    fn visit_seq<A: SeqAccess<'de>>(mut self, mut parts: A) -> Result<Self, A::Error> {
        while let Some(Part(text)) = parts.next_element()? {
            self.0.push_str(&text);
        }
        Ok(self)
    }
}

pub fn turns(messages: Option<ChatMessages>) -> Result<Vec<ChatTurn>, ApiError> {
    let messages = messages.unwrap_or_default().0;
    if messages.is_empty() {
        let message = "`messages` must be a list with at least one message.";
        return Err(ApiError::invalid("messages", message));
    }
    let turns = messages.into_iter().enumerate();
    turns.map(|(at, Object(message))| message.turn(at)).collect()
}

impl ChatMessage {
    fn turn(self, at: usize) -> Result<ChatTurn, ApiError> {
        let path = |field: &str| format!("messages[{at}].{field}");
        let wrong = |field: &str, what: &str| ApiError::invalid(&path(field), format!("`{}` {what}.", path(field)));
        let refused = [
            ("name", self.name),
            ("tool_calls", self.tool_calls),
            ("tool_call_id", self.tool_call_id),
            ("function_call", self.function_call),
        ];
        if let Some((field, _)) = refused.iter().find(|(_, value)| value.is_some()) {
            return Err(ApiError::unsupported(&path(field)));
        }
        let role = match self.role.as_deref() {
            Some(role @ ("system" | "user" | "assistant")) => role,
            // OpenAI's newer name for the system role. The models that are served here know only "system".
            Some("developer") => "system",
            Some(other) => {
                let other = short(other);
                let what = format!("must be system, developer, user or assistant, not {other:?}");
                return Err(wrong("role", &what));
            }
            None => return Err(wrong("role", "is missing")),
        };
        Ok(ChatTurn {
            role: role.to_owned(),
            content: self.content.ok_or_else(|| wrong("content", "is missing"))?.0,
        })
    }
}

/// What is added to the logits of tokens. The keys are token ids.
#[derive(Debug, Default)]
pub struct LogitBias(Vec<(TokenId, f32)>);

impl<'de> Visitor<'de> for LogitBias {
    type Value = Self;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "an object of at most {LOGIT_BIAS_ENTRIES_MAX} token ids with their numbers"
        )
    }
    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<Self, A::Error> {
        while let Some(key) = entries.next_key::<String>()? {
            let id = key.parse().map_err(|_| {
                let key = short(&key);
                A::Error::custom(format!("the keys must be token ids, and {key:?} is none"))
            })?;
            let Real(bias) = entries.next_value::<Real<{ -LOGIT_BIAS_MAX }, LOGIT_BIAS_MAX>>()?;
            if self.0.len() == LOGIT_BIAS_ENTRIES_MAX {
                return Err(A::Error::invalid_length(LOGIT_BIAS_ENTRIES_MAX + 1, &self));
            }
            self.0.push((TokenId(id), bias));
        }
        self.0.sort_by_key(|(token, _)| *token);
        Ok(self)
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

read_by_visitor!(Prompts, Element, Content, LogitBias);
