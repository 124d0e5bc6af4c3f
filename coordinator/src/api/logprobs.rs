//! Logprobs in OpenAI's two shapes: the old object of completions, and the content list of chat.

use serde_json::{Map, Value, json};
use serving_core::ids::TokenId;
use serving_core::request::TokenLogprobs;

use super::run::OutToken;
use crate::text::{TextModel, Utf8Decoder};

/// OpenAI sends this value for "so unlikely that the number means nothing". JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

fn finite(logprob: f32) -> Value {
    json!(if logprob.is_finite() {
        logprob.max(LOGPROB_MIN)
    } else {
        LOGPROB_MIN
    })
}

/// A token as a string. Half a character is written as OpenAI does, `bytes:\xe2\x82`, so that two such tokens differ.
fn token_text(text: &TextModel, token: TokenId) -> String {
    let bytes = text.codec().token_bytes(token).unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(string) => string.to_owned(),
        Err(_) => bytes
            .iter()
            .fold("bytes:".to_owned(), |all, byte| all + &format!("\\x{byte:02x}")),
    }
}

/// The four parallel lists of completions.
#[derive(Debug, Default)]
pub struct CompletionLogprobs {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
}

impl CompletionLogprobs {
    /// The prompt's tokens (`echo`). The first one has no logprob, because nothing stands before it.
    pub fn push_prompt(&mut self, text: &TextModel, prompt: &[TokenId], logprobs: &[Option<TokenLogprobs>]) {
        let mut decoder = Utf8Decoder::default();
        let mut sink = String::new();
        for (position, token) in prompt.iter().enumerate() {
            let entry = logprobs.get(position).and_then(Option::as_ref);
            self.push(text, *token, entry, decoder.chars());
            decoder.push(text.codec().token_bytes(*token).unwrap_or_default(), &mut sink);
        }
    }

    /// `offset` counts the characters before the generated text.
    pub fn push_token(&mut self, text: &TextModel, out: &OutToken, offset: usize) {
        if let Some(token) = out.token {
            self.push(text, token, out.logprobs.as_ref(), offset + out.text_offset);
        }
    }

    fn push(&mut self, text: &TextModel, token: TokenId, logprobs: Option<&TokenLogprobs>, offset: usize) {
        let string = token_text(text, token);
        self.text_offset.push(offset.into());
        match logprobs {
            None => {
                self.token_logprobs.push(Value::Null);
                self.top_logprobs.push(Value::Null);
            }
            Some(entry) => {
                self.token_logprobs.push(finite(entry.logprob));
                let mut top: Map<String, Value> = entry
                    .top
                    .iter()
                    .map(|(id, logprob)| (token_text(text, *id), finite(*logprob)))
                    .collect();
                // The chosen token is always in the list, also when it was not among the best.
                top.entry(string.clone()).or_insert_with(|| finite(entry.logprob));
                self.top_logprobs.push(Value::Object(top));
            }
        }
        self.tokens.push(string.into());
    }

    pub fn into_value(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}

/// `{"content": [{token, logprob, bytes, top_logprobs}]}` of some tokens of one chat choice.
pub fn chat_logprobs<'a>(text: &TextModel, tokens: impl Iterator<Item = &'a OutToken>) -> Value {
    let item = |id: TokenId, logprob: f32| {
        // A control token has a name and no bytes, so the bytes that a client joins are exactly the text.
        let bytes = text.codec().token_bytes(id).filter(|_| !text.codec().is_special(id));
        json!({"token": token_text(text, id), "logprob": finite(logprob), "bytes": bytes})
    };
    let content: Vec<Value> = tokens
        .filter_map(|out| Some((out.token?, out.logprobs.as_ref()?)))
        .map(|(token, entry)| {
            let mut one = item(token, entry.logprob);
            let top: Vec<Value> = entry.top.iter().map(|(id, logprob)| item(*id, *logprob)).collect();
            if let Value::Object(map) = &mut one {
                map.insert("top_logprobs".to_owned(), top.into());
            }
            one
        })
        .collect();
    json!({"content": content, "refusal": null})
}
