//! Why a request is not let in, and why one that was let in is broken off.

use thiserror::Error;

use crate::ids::TokenId;
use crate::request::Request;
use crate::scheduler::NodeLimits;
use crate::stage::Stage;

/// Why a node broke off an accepted request. The label is closed; the details are for people.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NodeFailure {
    #[error("the request's deadline passed in stage {}; allow more time or lower the load", stage.name())]
    Deadline { stage: Stage },
    #[error(
        "nothing arrived on the reservation for {waited_ms} ms; the prefill node is gone or stuck, place the request anew"
    )]
    ReservationExpired { waited_ms: u64 },
    #[error("the decode node did not acknowledge the blocks within {held_ms} ms; place the request anew")]
    HoldExpired { held_ms: u64 },
    #[error("the KV transfer failed ({reason}): {detail}; place the request anew")]
    Transfer { reason: String, detail: String },
    #[error("the model step failed: {detail}")]
    Engine { detail: String },
    #[error("no token could be drawn: the logits are not numbers, so the model file or the engine is broken")]
    NotFinite,
    #[error(
        "grammar, allowed_token_ids, bad_words and min_tokens of the request together rule out every token, or the grammar costs more than a node allows"
    )]
    RuledOut,
    #[error("the reader of the token stream is {behind_tokens} tokens behind")]
    SlowReader { behind_tokens: u32 },
    #[error("the node is leaving; place the request anew")]
    Draining,
}

impl NodeFailure {
    /// Every [`NodeFailure::name`].
    pub const NAMES: [&'static str; 9] = [
        "deadline",
        "reservation_expired",
        "hold_expired",
        "transfer_failed",
        "engine_failed",
        "sampling_failed",
        "ruled_out",
        "slow_reader",
        "draining",
    ];

    /// Closed label for metrics and the wire.
    pub fn name(&self) -> &'static str {
        match self {
            NodeFailure::Deadline { .. } => "deadline",
            NodeFailure::ReservationExpired { .. } => "reservation_expired",
            NodeFailure::HoldExpired { .. } => "hold_expired",
            NodeFailure::Transfer { .. } => "transfer_failed",
            NodeFailure::Engine { .. } => "engine_failed",
            NodeFailure::NotFinite => "sampling_failed",
            NodeFailure::RuledOut => "ruled_out",
            NodeFailure::SlowReader { .. } => "slow_reader",
            NodeFailure::Draining => "draining",
        }
    }
}

/// Policy said no before anything was held: the coordinator puts the request back to the front of its queue.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    #[error("{needed_blocks} KV blocks are needed and {available_blocks} are available")]
    NoBlocks { needed_blocks: u32, available_blocks: u32 },
    #[error("{open} sequences are here already, {limit} may be")]
    TooManySequences { open: u32, limit: u32 },
    #[error("preempted sequences come first")]
    Preempting,
    #[error("this request and attempt is here already")]
    Duplicate,
    #[error("prompt and outputs need {needed_blocks} KV blocks, the pool has {pool_blocks}")]
    NeverFits { needed_blocks: u32, pool_blocks: u32 },
    #[error("the request breaks the contract: {0}")]
    Invalid(InvalidRequest),
}

/// What the coordinator should have checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InvalidRequest {
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("the prompt is longer than the model's {max_model_tokens} tokens")]
    PromptTooLong { max_model_tokens: u32 },
    #[error("token {token} is not in the vocabulary of {vocab_size}")]
    TokenOutOfVocabulary { token: TokenId, vocab_size: u32 },
    #[error("client_prompt_tokens is {got}, the prompt has {prompt_tokens}")]
    ClientPromptTokens { got: u32, prompt_tokens: u32 },
    #[error("choice_count is {got}, it must be 1 to {limit}")]
    ChoiceCount { got: u32, limit: u32 },
    #[error("a request that ends at its first token has nothing to hand over")]
    NothingToDecode,
    #[error("a first token is missing, repeated, misnumbered or ends its choice")]
    FirstTokens,
}

/// The wire's limit. A client may ask for 16 choices at most (`coordinator/src/api/limits.rs`).
pub const MOST_CHOICES: u32 = 128;

pub(super) fn check_request(request: &Request, limits: &NodeLimits) -> Result<(), InvalidRequest> {
    let prompt_tokens = request.prompt_tokens();
    if prompt_tokens == 0 {
        return Err(InvalidRequest::EmptyPrompt);
    }
    if prompt_tokens > limits.max_model_tokens {
        return Err(InvalidRequest::PromptTooLong {
            max_model_tokens: limits.max_model_tokens,
        });
    }
    if let Some(token) = request.prompt.iter().find(|token| token.0 >= limits.vocab_size) {
        return Err(InvalidRequest::TokenOutOfVocabulary {
            token: *token,
            vocab_size: limits.vocab_size,
        });
    }
    let client = request.client_prompt_tokens;
    if client == 0 || client > prompt_tokens {
        return Err(InvalidRequest::ClientPromptTokens {
            got: client,
            prompt_tokens,
        });
    }
    if !(1..=MOST_CHOICES).contains(&request.choice_count) {
        return Err(InvalidRequest::ChoiceCount {
            got: request.choice_count,
            limit: MOST_CHOICES,
        });
    }
    Ok(())
}
