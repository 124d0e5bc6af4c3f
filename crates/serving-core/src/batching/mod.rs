//! What a node runs next: the prefill node's and the decode node's brains, and what they share.

mod block_report;
pub mod decode;
mod decode_entry;
mod decode_open;
mod decode_step;
pub mod permit_shares;
pub mod permits;
pub mod prefill;
mod prefill_entry;
mod prefill_step;
mod sequence;
pub mod step_plan;

#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod test_kit;

use thiserror::Error;

use crate::ids::{ChoiceIndex, TokenId};
use crate::request::{FinishReason, Request, TokenLogprobs};
use crate::stage::Stage;

pub use block_report::{BlockHolder, BlockReport, HoldCounts};
pub use decode::{
    Commit, CommitError, DecodeBatcher, DecodeConfig, DecodeEvent, DecodeReport, OpenCommand, Opened, PromptSource,
};
pub use prefill::{PrefillBatcher, PrefillCommand, PrefillConfig, PrefillEvent, PrefillOutcome, PushBlock, PushEnd};
pub use step_plan::{PlannedRow, RowLogits, StepPlan};

/// What a node was given to work with; both batchers check requests against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeLimits {
    pub kv_blocks: u32,
    pub block_tokens: u32,
    /// Rows of one step together, prompt chunks included.
    pub max_batch_tokens: u32,
    /// Sequences in one step.
    pub max_sequences: u32,
    /// Prompt and outputs together; a sequence that reaches it ends with `Length`.
    pub max_model_tokens: u32,
    pub vocab_size: u32,
    pub prefix_cache: bool,
}

impl NodeLimits {
    /// At least one of everything; a step never has more sequences than tokens.
    fn sane(self) -> Self {
        let max_batch_tokens = self.max_batch_tokens.max(1);
        Self {
            block_tokens: self.block_tokens.max(1),
            max_batch_tokens,
            max_sequences: self.max_sequences.clamp(1, max_batch_tokens),
            ..self
        }
    }
}

/// One drawn token, in the order of the plan's draws.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    pub row: u32,
    pub choice: ChoiceIndex,
    /// `Err` when the row's logits could not be sampled (not a number): the request fails, its batch mates go on.
    pub token: Result<TokenId, SamplingFailed>,
    pub logprobs: Option<TokenLogprobs>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplingFailed;

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
    #[error("the logits could not be sampled: they are not numbers; check the model file")]
    Sampling,
    #[error("the reader of the token stream is {behind_tokens} tokens behind")]
    SlowReader { behind_tokens: u32 },
    #[error("the node is leaving; place the request anew")]
    Draining,
}

impl NodeFailure {
    /// Every [`NodeFailure::name`].
    pub const NAMES: [&'static str; 8] = [
        "deadline",
        "reservation_expired",
        "hold_expired",
        "transfer_failed",
        "engine_failed",
        "sampling_failed",
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
            NodeFailure::Sampling => "sampling_failed",
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

fn check_request(request: &Request, limits: &NodeLimits) -> Result<(), InvalidRequest> {
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

/// Why a sequence ends with `token` as its output number `output_count` (counted over all attempts), if it does.
/// An end token wins over a stop token, both win over length.
fn finish_reason(request: &Request, token: TokenId, length: SequenceLength) -> Option<FinishReason> {
    if request.stop.end_tokens.contains(&token) {
        Some(FinishReason::EndToken)
    } else if request.stop.stop_token_ids.contains(&token) {
        Some(FinishReason::StopToken(token))
    } else if length.outputs >= request.stop.max_tokens || length.total >= length.limit {
        Some(FinishReason::Length)
    } else {
        None
    }
}

/// Lengths of a sequence with its newest token.
#[derive(Clone, Copy, Debug)]
struct SequenceLength {
    outputs: u32,
    total: u32,
    limit: u32,
}
