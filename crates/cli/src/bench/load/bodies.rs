//! The JSON that is sent for each request of the trace.

use std::collections::BTreeMap;

use hyper::body::Bytes;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::Serialize;
use serde_json::{Map, Value};

use workload::prompts::{TokenPrompts, WordPrompts};
use workload::trace::{Trace, TraceRequest};

use super::plan::{Endpoint, LoadPlan, Prompts};

/// Models have special tokens at the begin of their vocabulary and at its end. Every vocabulary has 32,000 tokens at least.
pub(super) const SAFE_TOKENS: std::ops::Range<u32> = 1_000..30_000;

/// Each word is one token of the usual vocabularies.
const WORDS_PER_TOKEN: f64 = 1.0;
/// Requests before the run have prompts of their own.
const SEED_BEFORE: u64 = 0x5741_524D;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(flatten)]
    prompt: Prompt<'a>,
    max_tokens: u32,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    ignore_eos: bool,
    #[serde(flatten)]
    extra: &'a Map<String, Value>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Prompt<'a> {
    #[serde(rename = "prompt")]
    Ids(Vec<u32>),
    #[serde(rename = "prompt")]
    Text(&'a str),
    Messages(&'a [Message]),
}

#[derive(Clone, Debug, Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

#[derive(Debug)]
pub(super) struct Bodies<'a> {
    plan: &'a LoadPlan,
    model: &'a str,
    drawn: Drawn,
    /// Draws the prompts of the requests before the run, which share nothing with one another or with the trace.
    before: Drawn,
    trace_before: Trace,
    /// What was said in each conversation of the chat endpoint, the real answers included.
    history: BTreeMap<u64, Vec<Message>>,
}

/// Content for prompts that have none, as token ids and as words.
#[derive(Debug)]
struct Drawn {
    ids: TokenPrompts,
    words: WordPrompts,
}

impl Drawn {
    fn new(seed: u64) -> anyhow::Result<Self> {
        let words_per_token = WORDS_PER_TOKEN;
        Ok(Self {
            ids: TokenPrompts::new(SAFE_TOKENS, &[], seed)?,
            words: WordPrompts { words_per_token, seed },
        })
    }
}

impl<'a> Bodies<'a> {
    /// # Errors
    /// There are too few token ids to draw from.
    pub(super) fn new(plan: &'a LoadPlan, model: &'a str) -> anyhow::Result<Self> {
        let requests = plan.trace.requests.iter().cycle().take(plan.warm_up_requests as usize);
        let requests = requests.map(|request| TraceRequest {
            prefix_blocks: Vec::new(),
            conversation: None,
            ..request.clone()
        });
        Ok(Self {
            plan,
            model,
            drawn: Drawn::new(plan.seed)?,
            before: Drawn::new(plan.seed ^ SEED_BEFORE)?,
            trace_before: Trace {
                name: String::new(),
                block_tokens: 0,
                requests: requests.collect(),
            },
            history: BTreeMap::new(),
        })
    }

    /// True if the body needs the answers before it.
    pub(super) fn needs_history(&self, request: &TraceRequest) -> bool {
        let is_later = request.conversation.is_some_and(|turn| turn.turn > 0);
        is_later && self.plan.server.endpoint == Endpoint::Chat
    }

    pub(super) fn body(&mut self, index: usize) -> Bytes {
        let request = &self.plan.trace.requests[index];
        let words = || self.drawn.words.text(&self.plan.trace, index);
        let text = match (&self.plan.prompts, self.plan.server.endpoint) {
            (Prompts::Given(texts), _) => texts.get(index).cloned().unwrap_or_else(words),
            (Prompts::TokenIds, Endpoint::Completions) => {
                let ids = self.drawn.ids.token_ids(&self.plan.trace, index);
                return self.render(request, Prompt::Ids(ids));
            }
            _ => words(),
        };
        match (self.plan.server.endpoint, request.conversation) {
            (Endpoint::Completions, _) => self.render(request, Prompt::Text(&text)),
            (Endpoint::Chat, None) => self.render(request, Prompt::Messages(&[Message::question(text)])),
            (Endpoint::Chat, Some(turn)) => {
                let mut said = self.history.remove(&turn.conversation).unwrap_or_default();
                let is_drawn = !matches!(self.plan.prompts, Prompts::Given(_));
                let text = if is_drawn { without(&text, &said) } else { text };
                said.push(Message::question(text));
                let body = self.render(request, Prompt::Messages(&said));
                self.history.insert(turn.conversation, said);
                body
            }
        }
    }

    /// The requests before the run: those that bring prefixes into the cache, then those that warm the server up.
    pub(super) fn before(&self) -> Vec<(TraceRequest, Bytes)> {
        let prefixes = self.plan.prefixes.iter();
        let prefixes = prefixes.flat_map(|trace| (0..trace.requests.len()).map(move |at| (&self.drawn, trace, at)));
        let others = (0..self.trace_before.requests.len()).map(|at| (&self.before, &self.trace_before, at));
        let all = prefixes.chain(others).map(|(drawn, trace, at)| {
            let request = &trace.requests[at];
            let body = match (&self.plan.prompts, self.plan.server.endpoint) {
                (Prompts::TokenIds, Endpoint::Completions) => {
                    self.render(request, Prompt::Ids(drawn.ids.token_ids(trace, at)))
                }
                (_, Endpoint::Completions) => self.render(request, Prompt::Text(&drawn.words.text(trace, at))),
                (_, Endpoint::Chat) => {
                    let question = Message::question(drawn.words.text(trace, at));
                    self.render(request, Prompt::Messages(&[question]))
                }
            };
            (request.clone(), body)
        });
        all.collect()
    }

    /// The answer to a turn, or what came of it.
    pub(super) fn answered(&mut self, index: usize, text: &str) {
        let Some(turn) = self.plan.trace.requests[index].conversation else {
            return;
        };
        if self.plan.server.endpoint == Endpoint::Chat {
            let said = self.history.entry(turn.conversation).or_default();
            said.push(Message {
                role: "assistant",
                content: text.to_owned(),
            });
        }
    }

    fn render(&self, request: &TraceRequest, prompt: Prompt<'_>) -> Bytes {
        let body = Body {
            model: self.model,
            prompt,
            max_tokens: request.output_tokens,
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            ignore_eos: self.plan.ignore_eos,
            extra: &self.plan.extra_body,
        };
        // Strings, numbers and lists always have JSON.
        serde_json::to_vec(&body).unwrap_or_default().into()
    }

    /// After how many tokens the request is given up, if it is one of those that are.
    pub(super) fn cancel_after(&self, index: usize) -> Option<usize> {
        let mut random = StdRng::seed_from_u64(self.plan.seed ^ (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let is_chosen = random.random::<f64>() < self.plan.cancel_rate;
        let tokens = self.plan.trace.requests[index].output_tokens.max(1);
        is_chosen.then(|| random.random_range(1..=tokens) as usize)
    }
}

impl Message {
    fn question(content: String) -> Self {
        Self { role: "user", content }
    }
}

/// The words of a prompt that the messages before it do not stand for. A turn's length in the trace includes those.
fn without(text: &str, said: &[Message]) -> String {
    let count = said
        .iter()
        .map(|message| message.content.split_whitespace().count())
        .sum();
    let words: Vec<&str> = text.split_whitespace().collect();
    // There is always something to ask.
    let new = words.get(count..).filter(|new| !new.is_empty());
    new.unwrap_or(&words[..words.len().min(1)]).join(" ")
}
