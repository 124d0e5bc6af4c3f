//! A validated request and what comes back for it. Built once, at the coordinator's edge; every limit is checked there.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ids::{Attempt, CacheTenant, ChoiceIndex, OutputIndex, PrefixSalt, QueueOwner, RequestId, TokenId};
use crate::node::NodeRole;

/// Which queue a request waits in; `Batch` is shed first under overload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    Interactive,
    Batch,
}

impl Lane {
    pub const ALL: [Self; 2] = [Self::Interactive, Self::Batch];

    pub fn name(self) -> &'static str {
        match self {
            Lane::Interactive => "interactive",
            Lane::Batch => "batch",
        }
    }
}

/// Whose request waits, and how much of the nodes' work is this owner's due while others wait, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QueueShare {
    pub owner: QueueOwner,
    /// An owner of weight 2 gets twice the tokens of one of weight 1.
    pub weight: NonZeroU32,
}

/// Logits are divided by it. A model's are far below 1e36, so none leaves the range of f32 by that.
pub const REPETITION_PENALTY_MIN: f32 = 0.01;

/// How output tokens are drawn. `temperature == 0` is greedy, ties broken by the lowest token id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    pub temperature: f32,
    /// Keep the k most likely tokens; `None` keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set whose probability reaches p; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens below `min_p` times the most likely one's probability; 0 keeps all.
    pub min_p: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// 1 is off. Counts prompt and output tokens, as in the CTRL paper (arXiv 1909.05858) and vLLM.
    /// At least [`REPETITION_PENALTY_MIN`].
    pub repetition_penalty: f32,
    /// Added to the logits before anything else; sorted by token id, ids unique.
    pub logit_bias: Vec<(TokenId, f32)>,
}

impl SamplingParams {
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

/// A text that the output tokens of each choice have to spell. It is the client's; a node needs the bytes of its tokens to
/// follow it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OutputGrammar {
    /// JSON that this schema describes.
    JsonSchema(Arc<str>),
    Regex(Arc<str>),
    /// Rules in the form of Lark.
    Lark(Arc<str>),
}

/// Which tokens may be drawn at all. All of it is a function of the output tokens so far, so a handoff, a retry or a migration
/// moves no state of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OutputConstraint {
    pub grammar: Option<OutputGrammar>,
    /// Empty: every token.
    pub allowed_tokens: Vec<TokenId>,
    /// None of these sequences of tokens appears in the output. No sequence is empty.
    pub bad_words: Vec<Vec<TokenId>>,
}

impl OutputConstraint {
    pub fn is_none(&self) -> bool {
        self.grammar.is_none() && self.allowed_tokens.is_empty() && self.bad_words.is_empty()
    }
}

/// When a sequence ends. Stop *strings* are the coordinator's business and are not here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopConditions {
    /// Budget of output tokens over all attempts.
    pub max_tokens: u32,
    /// End and stop tokens cannot be drawn before this many output tokens.
    pub min_tokens: u32,
    /// The model's end tokens; empty when the client set `ignore_eos`.
    pub end_tokens: Vec<TokenId>,
    /// Further tokens that end the sequence.
    pub stop_token_ids: Vec<TokenId>,
}

/// One validated client request: everything a node needs to run it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    pub id: RequestId,
    /// Prompt tokens; after a migration also the output tokens already delivered.
    pub prompt: Arc<[TokenId]>,
    /// How many tokens of `prompt` the client sent. The rest are outputs of earlier attempts: the next output index,
    /// penalties, `min_tokens` and the random counter all count from here.
    pub client_prompt_tokens: u32,
    pub sampling: SamplingParams,
    pub constraint: Arc<OutputConstraint>,
    pub stop: StopConditions,
    /// The OpenAI `n`: sequences that share the prompt. At least 1.
    pub choice_count: u32,
    /// Drawn by the coordinator when the client gave none. Choice i uses a hash of (seed, i).
    pub seed: u64,
    /// `Some(k)`: report the chosen token's logprob and the k best alternatives (k may be 0).
    pub logprobs: Option<u32>,
    /// `Some(k)`: also report logprobs of the prompt tokens (`echo` with logprobs). Bypasses prefix hits.
    pub prompt_logprobs: Option<u32>,
    /// Only blocks of requests with the same salt are taken from prefix caches; `None`: of those without one.
    pub prefix_salt: Option<PrefixSalt>,
    /// Whose cached blocks its own count as; `None`: nobody's, and they have no limit of their own.
    pub cache_tenant: Option<CacheTenant>,
    /// Report a hash of the committed KV bytes of every block of the client's prompt with the result (used to compare
    /// topologies and attempts).
    pub report_kv_hashes: bool,
    pub lane: Lane,
    /// Whose it is. `None`: nobody knows; all such requests have one owner together, of weight 1. Nodes do not see it.
    pub share: Option<QueueShare>,
    /// The place in the coordinator's queue among the new requests of the same owner and lane: lower numbers first, 0 unless the
    /// client says so. Nodes do not see it.
    pub priority: i64,
    /// Time allowed from arrival in the queue to last token: what the client allows, less what the edge has taken.
    pub time_limit: Duration,
}

impl Request {
    pub fn prompt_tokens(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap_or(u32::MAX)
    }
    /// Output tokens already delivered by earlier attempts.
    pub fn delivered_tokens(&self) -> u32 {
        self.prompt_tokens().saturating_sub(self.client_prompt_tokens)
    }
    /// Output tokens this attempt may still produce, per choice.
    pub(crate) fn remaining_tokens(&self) -> u32 {
        self.stop.max_tokens.saturating_sub(self.delivered_tokens())
    }
    /// True when prefill alone answers the request: nothing is handed to a decode node.
    pub fn ends_at_first_token(&self) -> bool {
        self.remaining_tokens() <= 1
    }
}

/// One sampled token, from whichever node sampled it. The coordinator delivers each index once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenEvent {
    pub choice: ChoiceIndex,
    /// Counted over all attempts: the first token the client sees is 0.
    pub index: OutputIndex,
    pub token: TokenId,
    pub logprobs: Option<TokenLogprobs>,
    /// Set on the last token of the choice.
    pub finish: Option<FinishReason>,
}

/// Natural-log probabilities from the softmax over the whole vocabulary, before temperature and filters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    pub logprob: f32,
    /// Best first, ties by lowest id; as many as were asked for.
    pub top: Vec<(TokenId, f32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model's end token.
    EndToken,
    /// One of the client's `stop_token_ids`.
    StopToken(TokenId),
    /// `max_tokens` or the context length was reached.
    Length,
    /// A stop string, found at the coordinator.
    StopString,
}

impl FinishReason {
    /// The OpenAI `finish_reason`.
    pub fn openai_name(self) -> &'static str {
        match self {
            FinishReason::Length => "length",
            FinishReason::EndToken | FinishReason::StopToken(_) | FinishReason::StopString => "stop",
        }
    }
}

/// Which limit ended the wait of a request that was never placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueueLimit {
    /// The request's own time limit, the client's or the default.
    RequestTime,
    /// The longest wait for a place that the coordinator allows.
    QueueWait,
}

/// Why policy said no: a value, not an error. Each maps to one HTTP status and one metric label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RejectReason {
    /// No decode node with a working way to prefill.
    NotReady,
    /// The waiting queue of this lane is full.
    QueueFull,
    /// Waited for its first place for as long as this limit allows.
    QueueTimeout { limit: QueueLimit, waited_ms: u64 },
    /// Can never fit the KV pool of a node of this role: prompt plus outputs a decode node's, the prompt a prefill node's.
    TooLargeForPool {
        role: NodeRole,
        needed_blocks: u32,
        pool_blocks: u32,
    },
    /// The only nodes that can hold it are away now.
    NodeAway,
    /// The coordinator is shutting down.
    Draining,
    /// No node of this role takes a prompt of so many tokens.
    PromptTooLong {
        role: NodeRole,
        prompt_tokens: u32,
        longest_tokens: u32,
    },
    /// It asks for more choices than any decode node computes at a time.
    TooManyChoices { choices: u32, most: u32 },
}

impl RejectReason {
    /// Every [`RejectReason::name`].
    pub const NAMES: [&'static str; 8] = [
        "not_ready",
        "queue_full",
        "queue_timeout",
        "too_large_for_pool",
        "prompt_too_long",
        "too_many_choices",
        "node_away",
        "draining",
    ];

    pub fn name(&self) -> &'static str {
        match self {
            RejectReason::NotReady => "not_ready",
            RejectReason::QueueFull => "queue_full",
            RejectReason::QueueTimeout { .. } => "queue_timeout",
            RejectReason::TooLargeForPool { .. } => "too_large_for_pool",
            RejectReason::PromptTooLong { .. } => "prompt_too_long",
            RejectReason::TooManyChoices { .. } => "too_many_choices",
            RejectReason::NodeAway => "node_away",
            RejectReason::Draining => "draining",
        }
    }
}

/// Why an accepted request broke. Closed: every wait on every leg ends in one of these, in success or in a cancel.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum RequestError {
    #[error("the request's deadline passed after {waited_ms} ms in stage {stage}")]
    DeadlineExceeded { stage: String, waited_ms: u64 },
    #[error(
        "an attempt broke, and no node could take the request again for {waited_ms} ms, the longest wait for a place"
    )]
    NoPlaceAgain { waited_ms: u64 },
    #[error("prefill node {node} failed: {detail}")]
    PrefillNodeFailed { node: String, detail: String },
    #[error("decode node {node} failed: {detail}")]
    DecodeNodeFailed { node: String, detail: String },
    #[error("KV transfer from {from} to {to} failed: {reason}")]
    TransferFailed { from: String, to: String, reason: String },
    #[error("node {node} could not run the model step: {detail}")]
    EngineFailed { node: String, detail: String },
    #[error("the client read too slowly: {behind_tokens} tokens behind for {waited_ms} ms")]
    SlowReader { behind_tokens: u32, waited_ms: u64 },
    #[error("internal error: {0}")]
    Internal(String),
    #[error(
        "grammar, allowed_token_ids, bad_words and min_tokens of the request together rule out every token at this place, or the grammar costs more than a node allows"
    )]
    RuledOut,
    /// Nothing of it ran: as [`RejectReason::QueueTimeout`], but nodes were asked.
    #[error("every node that was asked in {waited_ms} ms refused the request")]
    NoRoom { waited_ms: u64 },
}

impl RequestError {
    /// Every [`RequestError::name`].
    pub const NAMES: [&'static str; 10] = [
        "deadline",
        "no_place_again",
        "no_room",
        "prefill_node_failed",
        "decode_node_failed",
        "transfer_failed",
        "engine_failed",
        "ruled_out",
        "slow_reader",
        "internal",
    ];

    /// Short label for metrics and logs.
    pub fn name(&self) -> &'static str {
        match self {
            RequestError::DeadlineExceeded { .. } => "deadline",
            RequestError::NoPlaceAgain { .. } => "no_place_again",
            RequestError::NoRoom { .. } => "no_room",
            RequestError::PrefillNodeFailed { .. } => "prefill_node_failed",
            RequestError::DecodeNodeFailed { .. } => "decode_node_failed",
            RequestError::TransferFailed { .. } => "transfer_failed",
            RequestError::EngineFailed { .. } => "engine_failed",
            RequestError::RuledOut => "ruled_out",
            RequestError::SlowReader { .. } => "slow_reader",
            RequestError::Internal(_) => "internal",
        }
    }
}

/// Why the decode node computes a prompt itself (PROTOCOL rule 16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LocalPrefillReason {
    Short,
    Cached,
    NoPrefillNode,
    TransferFailed,
    CoLocated,
}

impl LocalPrefillReason {
    pub const ALL: [Self; 5] = [
        Self::Short,
        Self::Cached,
        Self::NoPrefillNode,
        Self::TransferFailed,
        Self::CoLocated,
    ];

    pub fn name(self) -> &'static str {
        match self {
            LocalPrefillReason::Short => "short",
            LocalPrefillReason::Cached => "cached",
            LocalPrefillReason::NoPrefillNode => "no_prefill_node",
            LocalPrefillReason::TransferFailed => "transfer_failed",
            LocalPrefillReason::CoLocated => "co_located",
        }
    }
}

/// One placement of one request: the key of everything a node holds for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttemptKey {
    pub request: RequestId,
    pub attempt: Attempt,
}
