//! Logprobs in OpenAI's two shapes, the old object of completions and the content list of chat, and those of a prompt in vLLM's.

use std::iter;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use serving_core::ids::TokenId;
use serving_core::request::TokenLogprobs;

use super::forms::Whole;
use super::request::{CheckedRequest, Endpoint};
use super::run::{OutToken, PromptRun, Run};
use crate::text::{TextModel, Utf8Decoder};

/// OpenAI sends this value for "so unlikely that the number means nothing". JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

fn bounded(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob.max(LOGPROB_MIN)
    } else {
        LOGPROB_MIN
    }
}

fn finite(logprob: f32) -> Value {
    json!(bounded(logprob))
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
    /// The prompt's tokens; `echo` is its text. The first one has no logprob, because nothing stands before it.
    pub fn push_prompt(&mut self, text: &TextModel, prompt: &PromptRun, echo: &str) {
        let offsets = offsets_in(echo, &prompt.request.prompt, text);
        // With `prompt_logprobs` there may be more alternatives than `logprobs` asks for.
        let best = prompt.request.logprobs.unwrap_or(0) as usize;
        for (position, (token, offset)) in prompt.request.prompt.iter().zip(offsets).enumerate() {
            let entry = prompt.prompt_logprobs.get(position).and_then(Option::as_ref);
            let entry = entry.map(|entry| TokenLogprobs {
                logprob: entry.logprob,
                top: entry.top.iter().take(best).copied().collect(),
            });
            self.push(text, *token, entry.as_ref(), offset);
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
                let mut top = Map::new();
                for (id, logprob) in &entry.top {
                    // Tokens may have the same text, such as a letter and its byte. The better one counts, and it comes first.
                    top.entry(token_text(text, *id)).or_insert_with(|| finite(*logprob));
                }
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

/// Where each token of a prompt begins in the prompt's text, in characters. What the tokenizer puts in front of a text, a begin token or
/// a space, is not in it: such a token begins at 0, as the first one of the text does.
fn offsets_in(echo: &str, tokens: &[TokenId], text: &TextModel) -> Vec<usize> {
    let all = text.decode(tokens, true).chars().count();
    let in_front = all.saturating_sub(echo.chars().count());
    let (mut decoder, mut sink) = (Utf8Decoder::default(), String::new());
    let offset = |token: &TokenId| {
        let offset = decoder.chars().saturating_sub(in_front);
        decoder.push(text.codec().token_bytes(*token).unwrap_or_default(), &mut sink);
        offset
    };
    tokens.iter().map(offset).collect()
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

impl CheckedRequest {
    /// So many alternatives are reported for each token of the prompt: for `echo`, for `prompt_logprobs`, or for both.
    pub fn prompt_logprobs(&self) -> Option<u32> {
        let echoed = self.logprobs.filter(|_| self.fields.echo.0);
        echoed.max(self.fields.prompt_logprobs.map(Whole::get))
    }
}

/// The logprobs of a prompt's tokens in vLLM's shape: a list with null first, then an object for each token, by token ids. It
/// becomes JSON where it is written, because a tree of values would take some ten times as much memory.
#[derive(Debug)]
pub struct PromptLogprobs {
    text: Arc<TextModel>,
    tokens: Vec<(TokenId, Option<TokenLogprobs>)>,
    /// Alternatives for each token.
    best: usize,
}

impl PromptLogprobs {
    /// Those of a choice's prompt, if the client asks for them and the answer of this `endpoint` has them there. The choices of a
    /// prompt have them once, in the first.
    pub fn of(
        text: &Arc<TextModel>,
        plan: &CheckedRequest,
        endpoint: Endpoint,
        (run, choice): (&Run, u32),
    ) -> Option<Self> {
        let best = plan.fields.prompt_logprobs.map(Whole::get)?;
        let choice_count = plan.choice_count.max(1);
        if plan.endpoint != endpoint || !choice.is_multiple_of(choice_count) {
            return None;
        }
        let prompt = run.prompts.get((choice / choice_count) as usize)?;
        let tokens = prompt.request.prompt.iter().copied();
        Some(Self {
            text: text.clone(),
            tokens: tokens.zip(prompt.prompt_logprobs.iter().cloned()).collect(),
            best: best as usize,
        })
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().map(|(token, entry)| {
            entry.as_ref().map(|entry| PromptToken {
                text: &self.text,
                token: *token,
                logprob: entry.logprob,
                top: entry.top.get(..self.best).unwrap_or(&entry.top),
            })
        }))
    }
}

struct PromptToken<'a> {
    text: &'a TextModel,
    token: TokenId,
    logprob: f32,
    /// Best first.
    top: &'a [(TokenId, f32)],
}

#[derive(Serialize)]
struct Alternative {
    logprob: f32,
    /// From 1 on. The rank of a prompt's token that is not among the best is not known.
    rank: Option<usize>,
    decoded_token: String,
}

impl Serialize for PromptToken<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rank = self.top.iter().position(|(id, _)| *id == self.token).map(|at| at + 1);
        let ranked = self
            .top
            .iter()
            .zip(1..)
            .map(|((id, logprob), rank)| (*id, *logprob, Some(rank)));
        let others = ranked.filter(|(id, _, _)| *id != self.token);
        let all = iter::once((self.token, self.logprob, rank)).chain(others);
        serializer.collect_map(all.map(|(id, logprob, rank)| {
            let alternative = Alternative {
                logprob: bounded(logprob),
                rank,
                decoded_token: token_text(self.text, id),
            };
            (id.0, alternative)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_alternatives_with_the_same_text_the_best_one_is_shown() {
        let text = TextModel::open(&model_files::test_kit::model_path(), None).expect("the real model");
        let (one, other) = (TokenId(100), TokenId(200));
        let entry = TokenLogprobs {
            logprob: -0.5,
            top: vec![(one, -0.5), (other, -1.0), (one, -2.0)],
        };
        let mut lists = CompletionLogprobs::default();
        lists.push(&text, one, Some(&entry), 0);
        let wanted = [(token_text(&text, one), -0.5), (token_text(&text, other), -1.0)];
        let wanted: Value = wanted.into_iter().collect();
        assert_eq!(lists.into_value()["top_logprobs"][0], wanted);
    }

    #[test]
    fn offsets_count_the_characters_of_the_echoed_text() {
        let text = TextModel::open(&model_files::test_kit::model_path(), None).expect("the real model");
        let encode = |text_of: &str| text.codec().encode(text_of, false, usize::MAX).expect("is encoded");
        let written = encode("Köln is big");
        let plain = offsets_in("Köln is big", &written, &text);
        assert_eq!(plain.first(), Some(&0));
        assert_eq!(plain.last(), Some(&7), "where ` big` begins: {plain:?}");
        // A begin token that the server has put in front.
        let begin = encode("<|im_start|>");
        assert_eq!(begin.len(), 1);
        let with_begin = offsets_in("Köln is big", &[begin.clone(), written.clone()].concat(), &text);
        assert_eq!(with_begin[1..], plain);
        assert_eq!(with_begin[0], 0);
        // One that the client wrote is a part of the text.
        let own = offsets_in("<|im_start|>Köln is big", &[begin, written].concat(), &text);
        assert_eq!((own[0], own[1]), (0, "<|im_start|>".len()));
    }
}
