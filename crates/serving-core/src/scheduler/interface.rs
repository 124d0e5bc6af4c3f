//! What a node's loop tells the scheduler, and what the scheduler has the loop do.

use std::sync::Arc;

use crate::ids::{Attempt, BlockId, ChoiceIndex, Generation, NodeEpoch, TokenId, TransferId};
use crate::request::{AttemptKey, Request, TokenEvent, TokenLogprobs};
use crate::scheduler::NodeFailure;
use crate::stage::StageTimings;

/// A request that wants to be let in.
#[derive(Clone, Debug)]
pub struct Admission {
    pub request: Arc<Request>,
    pub attempt: Attempt,
    /// Permits that this request takes, in the node's unit.
    pub permits: u64,
    /// The life of the coordinator that holds the permits.
    pub coordinator: NodeEpoch,
    pub work: Work,
}

/// Which part of a request is done here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The prompt and its first token. With a push the KV is then held for a decode node; without one the request ends at its
    /// first token.
    Prefill(Option<PushPlan>),
    /// Everything after the first token: this transfer brings the prompt's KV.
    Decode(TransferId),
    /// The prompt and all tokens.
    Whole,
}

/// How the KV of a prompt leaves this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushPlan {
    /// Leading blocks of the prompt that the decode node has already.
    pub skip_blocks: u32,
    /// It goes over a stream, which takes as long as some decode steps, and not through memory that both nodes map.
    pub is_streamed: bool,
}

/// A request that was let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Leading whole blocks of the prompt that are here already.
    pub prefix_blocks: u32,
    pub cached_tokens: u32,
    /// Blocks that the transfer must fill, in sequence order; empty when no transfer comes.
    pub ticket_blocks: Vec<(BlockId, Generation)>,
}

/// A block whose bytes are complete and will not change until the push has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushBlock {
    pub ticket_index: u32,
    pub block: BlockId,
}

/// How a push came to its end. Whatever it was, nothing reads the blocks any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PushEnd {
    /// The decode node has committed.
    Acked,
    Failed {
        reason: String,
        detail: String,
    },
    /// Answer to `AbortPush`.
    Aborted,
}

impl PushEnd {
    /// Closed label for the event log.
    pub fn name(&self) -> &'static str {
        match self {
            PushEnd::Acked => "acked",
            PushEnd::Failed { .. } => "failed",
            PushEnd::Aborted => "aborted",
        }
    }
}

/// What the loop must do or tell, in order. `Finished` and `Failed` are terminal; a cancel has no event.
#[derive(Clone, Debug, PartialEq)]
pub enum SchedulerEvent {
    /// Give these to the push. Never waits: a push queue that is full is reported with `pause_grants`.
    BlocksReady {
        key: AttemptKey,
        blocks: Vec<PushBlock>,
    },
    /// The first tokens are out (their `Token` events came before) and the request goes on elsewhere: send the last frame with
    /// the tokens that go on, then report `push_ended`.
    Held {
        key: AttemptKey,
        timings: StageTimings,
    },
    /// Stop the push, then report `push_ended`: until then its blocks are quarantined. Said again with every tick until then.
    AbortPush {
        key: AttemptKey,
    },
    /// The handoff is committed: acknowledge it.
    Committed {
        key: AttemptKey,
        transfer: TransferId,
        timings: StageTimings,
    },
    /// Take no further frame of this transfer, then report `transfer_ended`: until then its blocks are quarantined. Said again
    /// with every tick until then.
    CloseTransfer {
        transfer: TransferId,
    },
    /// Copy one block's bytes now, before the next call: the source may be given away by it.
    CopyBlock {
        key: AttemptKey,
        from: BlockId,
        to: BlockId,
    },
    /// The prompt's KV is complete; hash these blocks now, before the next call. Only when the request wants hashes, and only
    /// where its last token is drawn.
    HashPrompt {
        key: AttemptKey,
        blocks: Vec<BlockId>,
    },
    Token {
        key: AttemptKey,
        event: TokenEvent,
    },
    Finished {
        key: AttemptKey,
        outcome: Outcome,
        report: Box<Report>,
    },
    Failed {
        key: AttemptKey,
        failure: NodeFailure,
        report: Box<Report>,
    },
}

/// How a request that did not fail left the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The decode node has committed its KV.
    HandedOver,
    /// All its tokens are drawn.
    Complete,
}

/// What guesses have brought to a request, or to a node since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Guessed and computed.
    pub drafted: u64,
    /// Equal to the token that was drawn.
    pub accepted: u64,
}

/// What a request has come to here, at its end or until it was broken off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The stages that it has passed. `Decode` ends with the last token that was drawn.
    pub timings: StageTimings,
    pub cached_tokens: u32,
    pub preemptions: u32,
    /// Guesses of this request's tokens.
    pub drafts: DraftCounts,
}

/// One drawn token, in the order of the plan's draws.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    pub row: u32,
    pub choice: ChoiceIndex,
    /// `Err` when nothing could be drawn: the request fails, its batch mates go on.
    pub token: Result<TokenId, SamplingFailed>,
    pub logprobs: Option<TokenLogprobs>,
}

/// Why no token was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingFailed {
    /// A logit is no number.
    NotFinite,
    /// The request's own constraints leave no token.
    RuledOut,
}

impl From<SamplingFailed> for NodeFailure {
    fn from(failed: SamplingFailed) -> Self {
        match failed {
            SamplingFailed::NotFinite => Self::NotFinite,
            SamplingFailed::RuledOut => Self::RuledOut,
        }
    }
}
