//! The JSON that is sent for each request of the trace.

use std::collections::BTreeMap;

use hyper::body::Bytes;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::Serialize;
use serde_json::{Map, Value};

use workload::trace::TraceRequest;

use super::plan::{Endpoint, LoadPlan, Prompts};
use super::prompt_tokens::PromptTokens;

/// Models have special tokens at the begin of their vocabulary and at its end. Every vocabulary has 32,000 tokens at least.
pub(super) const SAFE_TOKENS: std::ops::Range<u32> = 1_000..30_000;

/// Frequent English words. With the blank before it each is one token of the usual vocabularies.
const WORDS: &str = "the of and to in is that for was on as with by at from be this have or which had not are but all were \
     when we there can more been one would their who so out up into them some her time two about then may him like only \
     other its than now made over many new first any people after well such most through before must years where much \
     good work down day old state life same own system under last great us right use world still hand place long between \
     water house water part small number back little set public end head end while form program general fact school \
     course point order group money side line city study case family large local left best change class question during \
     power room human given look far name almost early second open light field country often story south river table";

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
    tokens: PromptTokens,
    words: Vec<&'static str>,
    /// What was said in each conversation of the chat endpoint, the real answers included.
    history: BTreeMap<u64, Vec<Message>>,
}

impl<'a> Bodies<'a> {
    pub(super) fn new(plan: &'a LoadPlan, model: &'a str) -> Self {
        Self {
            plan,
            model,
            tokens: PromptTokens::new(plan.seed, plan.trace.block_tokens),
            words: WORDS.split_whitespace().collect(),
            history: BTreeMap::new(),
        }
    }

    /// True if the body needs the answers before it.
    pub(super) fn needs_history(&self, request: &TraceRequest) -> bool {
        let is_later = request.conversation.is_some_and(|turn| turn.turn > 0);
        is_later && self.plan.server.endpoint == Endpoint::Chat
    }

    pub(super) fn body(&mut self, index: usize) -> Bytes {
        let request = &self.plan.trace.requests[index];
        let ids = self.tokens.of(request, index as u64, SAFE_TOKENS);
        self.finish(request, ids, Some(index))
    }

    /// The body of a request before the run. Its prompt is as long as that of the trace's request and shares nothing with it.
    pub(super) fn warm_up(&mut self, number: usize) -> Bytes {
        let requests = &self.plan.trace.requests;
        let mut request = requests[number % requests.len()].clone();
        request.prefix_blocks.clear();
        request.conversation = None;
        let ids = self.tokens.of(&request, u64::MAX - number as u64, SAFE_TOKENS);
        self.finish(&request, ids, None)
    }

    /// The answer to a turn, or what came of it.
    pub(super) fn answered(&mut self, index: usize, text: String) {
        let Some(turn) = self.plan.trace.requests[index].conversation else {
            return;
        };
        if self.plan.server.endpoint == Endpoint::Chat {
            let said = self.history.entry(turn.conversation).or_default();
            said.push(Message {
                role: "assistant",
                content: text,
            });
        }
    }

    fn finish(&mut self, request: &TraceRequest, ids: Vec<u32>, index: Option<usize>) -> Bytes {
        let text = match (&self.plan.prompts, index) {
            (Prompts::Given(texts), Some(index)) => texts.get(index).cloned(),
            (Prompts::TokenIds, _) if self.plan.server.endpoint == Endpoint::Completions => None,
            _ => Some(self.text(request, &ids)),
        };
        match (self.plan.server.endpoint, &text) {
            (Endpoint::Completions, Some(text)) => self.render(request, Prompt::Text(text)),
            (Endpoint::Completions, None) => self.render(request, Prompt::Ids(ids)),
            (Endpoint::Chat, text) => {
                let question = Message {
                    role: "user",
                    content: text.clone().unwrap_or_default(),
                };
                let Some(turn) = request.conversation else {
                    return self.render(request, Prompt::Messages(&[question]));
                };
                let mut said = self.history.remove(&turn.conversation).unwrap_or_default();
                said.push(question);
                let body = self.render(request, Prompt::Messages(&said));
                self.history.insert(turn.conversation, said);
                body
            }
        }
    }

    /// A word for each token. A later turn of a chat has those words that the history does not have.
    fn text(&self, request: &TraceRequest, ids: &[u32]) -> String {
        let words = self.words.len() as u32;
        let said = match request.conversation.filter(|_| self.needs_history(request)) {
            Some(turn) => self.history.get(&turn.conversation).map_or(0, |said| {
                let words = said.iter().map(|message| message.content.split_whitespace().count());
                words.sum()
            }),
            None => 0,
        };
        let new = ids
            .get(said..)
            .filter(|new| !new.is_empty())
            .unwrap_or(&ids[..ids.len().min(1)]);
        let new = new.iter().map(|id| self.words[(id % words) as usize]);
        new.collect::<Vec<_>>().join(" ")
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
