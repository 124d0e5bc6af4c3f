//! How requests are written into flight records: with what decisions depend on, and without anything that the client said.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::{RequestId, TokenId};
use crate::request::{Lane, QueueShare, Request, SamplingParams, StopConditions};

/// The longest prompt that is read back. Its tokens take four bytes each although none is known, twice while they become a request,
/// so the number in a file that somebody made up must not ask for more than 32 MiB.
const WRITTEN_TOKENS_MAX: u32 = 1 << 22;

/// Stands for every token that was left out.
const UNKNOWN: TokenId = TokenId(0);

/// A request without its content. What the cluster looks at beside it are the keys of the prompt (`PromptKeys`).
#[derive(Serialize, Deserialize)]
struct Outline {
    id: RequestId,
    prompt_tokens: u32,
    client_prompt_tokens: u32,
    max_tokens: u32,
    choice_count: u32,
    prompt_logprobs: Option<u32>,
    turn: QueueTurn,
    time_limit: Duration,
}

/// What orders a request in the queue. Without a priority and an owner it has the bytes of a lane, as older records have them.
#[derive(Serialize, Deserialize)]
enum QueueTurn {
    Interactive,
    Batch,
    Prioritised {
        lane: Lane,
        priority: i64,
    },
    Owned {
        lane: Lane,
        priority: i64,
        share: QueueShare,
    },
}

impl QueueTurn {
    fn of(request: &Request) -> Self {
        let (lane, priority) = (request.lane, request.priority);
        match (request.share, lane, priority) {
            (Some(share), ..) => Self::Owned { lane, priority, share },
            (None, Lane::Interactive, 0) => Self::Interactive,
            (None, Lane::Batch, 0) => Self::Batch,
            (None, ..) => Self::Prioritised { lane, priority },
        }
    }

    fn parts(self) -> (Lane, i64, Option<QueueShare>) {
        match self {
            Self::Interactive => (Lane::Interactive, 0, None),
            Self::Batch => (Lane::Batch, 0, None),
            Self::Prioritised { lane, priority } => (lane, priority, None),
            Self::Owned { lane, priority, share } => (lane, priority, Some(share)),
        }
    }
}

impl Outline {
    fn of(request: &Request) -> Self {
        Self {
            id: request.id,
            prompt_tokens: request.prompt_tokens(),
            client_prompt_tokens: request.client_prompt_tokens,
            max_tokens: request.stop.max_tokens,
            choice_count: request.choice_count,
            prompt_logprobs: request.prompt_logprobs,
            turn: QueueTurn::of(request),
            time_limit: request.time_limit,
        }
    }

    /// What nodes look at and the cluster does not is as if the client had not set it.
    fn into_request(self, prompt: Vec<TokenId>) -> Request {
        let (lane, priority, share) = self.turn.parts();
        Request {
            id: self.id,
            prompt: prompt.into(),
            client_prompt_tokens: self.client_prompt_tokens,
            constraint: Default::default(),
            sampling: SamplingParams::greedy(),
            stop: StopConditions {
                max_tokens: self.max_tokens,
                min_tokens: 0,
                end_tokens: Vec::new(),
                stop_token_ids: Vec::new(),
            },
            choice_count: self.choice_count,
            seed: 0,
            logprobs: None,
            prompt_logprobs: self.prompt_logprobs,
            prefix_salt: None,
            cache_tenant: None,
            report_kv_hashes: false,
            lane,
            share,
            priority,
            time_limit: self.time_limit,
        }
    }
}

fn unknown_tokens<E: serde::de::Error>(count: u32) -> Result<Vec<TokenId>, E> {
    if count > WRITTEN_TOKENS_MAX {
        return Err(E::custom("more tokens than a prompt can have"));
    }
    Ok(vec![UNKNOWN; count as usize])
}

pub(super) mod request {
    use super::{Arc, Deserialize, Deserializer, Outline, Request, Serialize, Serializer, unknown_tokens};

    pub fn serialize<S: Serializer>(request: &Arc<Request>, serializer: S) -> Result<S::Ok, S::Error> {
        Outline::of(request).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<Request>, D::Error> {
        let outline = Outline::deserialize(deserializer)?;
        let prompt = unknown_tokens(outline.prompt_tokens)?;
        Ok(Arc::new(outline.into_request(prompt)))
    }
}

/// Tokens as their number.
pub(super) mod tokens {
    use super::{Deserialize, Deserializer, Serialize, Serializer, TokenId, unknown_tokens};

    pub fn serialize<S: Serializer>(tokens: &[TokenId], serializer: S) -> Result<S::Ok, S::Error> {
        u32::try_from(tokens.len()).unwrap_or(u32::MAX).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<TokenId>, D::Error> {
        unknown_tokens(u32::deserialize(deserializer)?)
    }
}
