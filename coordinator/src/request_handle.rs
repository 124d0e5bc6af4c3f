//! The boundary between the HTTP edge (`api/`) and the control loop: a validated request goes in, its events come out.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::messages::StepNote;
use serving_core::cluster::Reach;
use serving_core::ids::{Attempt, ChoiceIndex, NodeName, RequestId};
use serving_core::request::{
    FinishReason, LocalPrefillReason, RejectReason, Request, RequestError, TokenEvent, TokenLogprobs,
};
use serving_core::stage::StageTimings;
use tokio::sync::mpsc;

use crate::node_clocks::NodeInstant;

/// One validated request on its way into the control loop.
#[derive(Debug)]
pub struct Submission {
    pub request: Arc<Request>,
    /// When the edge was done with it. The wait for a place counts from here.
    pub tokenized_at: Instant,
    /// W3C trace context of the request's root span. It goes to the nodes as `traceparent` metadata.
    pub traceparent: Option<String>,
}

/// The events of a client stream. Each (choice, index) comes exactly once, in order for each choice. Exactly one of `Done`
/// and `Failed` ends the stream.
#[derive(Debug)]
pub enum ClientEvent {
    /// The nodes were chosen, for the first time or again after a retry. It is the first event of an accepted request.
    Placed(Placement),
    PromptLogprobs {
        first_position: u32,
        tokens: Vec<TokenLogprobs>,
    },
    Token(TokenEvent, TokenTimes),
    /// The facts so far. It comes before the first token, and again after the last one. The nodes' last reports are not in
    /// it.
    Known(Box<RequestSummary>),
    /// All choices have ended, and the nodes' last reports have come or are no longer awaited.
    Done(Box<RequestSummary>),
    Failed(RequestError),
    /// The facts about a request that fails. It comes right before `Failed`.
    BrokeOff(Box<RequestSummary>),
}

/// The moments of a token. All are on this process's clock.
#[derive(Clone, Copy, Debug)]
pub struct TokenTimes {
    /// When the coordinator received it, from the leg that brought it first.
    pub received_at: Instant,
    /// When the node sampled it; `None` while the offset of the node's clock is not known.
    pub sampled_at: Option<NodeInstant>,
    /// `None` for a token that came with a handoff.
    pub step: Option<StepNote>,
    pub attempt: Attempt,
}

impl TokenTimes {
    /// The times of a token about whose making nothing is known.
    pub fn received(received_at: Instant) -> Self {
        Self {
            received_at,
            sampled_at: None,
            step: None,
            attempt: Attempt(0),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub attempt: Attempt,
    /// `None` with local prefill.
    pub prefill_node: Option<NodeName>,
    /// `None` when the request ends at its first token, on the prefill node.
    pub decode_node: Option<NodeName>,
    /// Policy and reason of the choice, for the access log and the trace.
    pub route_reason: String,
    pub local_prefill: Option<LocalPrefillReason>,
    pub queued_for: Duration,
}

/// The facts about a request that has ended well. The request's record is made from them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestSummary {
    pub timings: StageTimings,
    /// By how much the stages between two processes may be wrong.
    pub clock_error: Duration,
    pub cached_tokens: u32,
    pub preemptions: u32,
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    pub kv_bytes: u64,
    pub transfer: Duration,
    pub transport: Option<String>,
    pub kv_hashes: Vec<u64>,
    pub attempts: u32,
    /// `leg:node:cause` of each leg that failed on the way; two for each attempt at most.
    pub failed_legs: Vec<String>,
}

/// The events of one request; the queue is bounded. Dropping the handle cancels the request on every leg. `finish_choice`
/// for the last running choice does so too (a stop string was found).
pub struct RequestHandle {
    events: mpsc::Receiver<ClientEvent>,
    control: Arc<dyn RequestControl>,
    id: RequestId,
}

/// What a handle can tell the control loop. The loop implements it; tests use a recorder.
pub trait RequestControl: Send + Sync {
    /// Idempotent, never blocks.
    fn cancel(&self, id: RequestId);
    /// The edge ended one choice itself (stop string). Idempotent, never blocks.
    fn finish_choice(&self, id: RequestId, choice: ChoiceIndex, reason: FinishReason);
}

impl RequestHandle {
    pub fn new(id: RequestId, events: mpsc::Receiver<ClientEvent>, control: Arc<dyn RequestControl>) -> Self {
        Self { events, control, id }
    }
    /// `None` only after `Done` or `Failed` has been returned, or when the coordinator died.
    pub async fn next(&mut self) -> Option<ClientEvent> {
        self.events.recv().await
    }
    pub fn finish_choice(&self, choice: ChoiceIndex, reason: FinishReason) {
        self.control.finish_choice(self.id, choice, reason);
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.control.cancel(self.id);
    }
}

impl fmt::Debug for RequestHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestHandle")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// The way in which the edge hands a request over. The control loop implements it; the tests of the edge use a scripted
/// one.
#[async_trait::async_trait]
pub trait Submit: Send + Sync {
    /// Returns within the queue limit of the lane. `Err` is a refusal by policy: a value that is mapped to 429, 503 or 400.
    async fn submit(&self, submission: Submission) -> Result<RequestHandle, Rejected>;
    /// PROTOCOL rule 15: at least one decode node with a working way to prefill.
    fn readiness(&self) -> Readiness;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    pub reason: RejectReason,
    /// With [`RejectReason::NotReady`]: what is missing, in words on which a person can act.
    pub missing: Option<String>,
    /// When to try again; `None` when another attempt never helps.
    pub retry_after: Option<Duration>,
}

impl Rejected {
    pub(crate) fn of(
        (reason, retry_after): (RejectReason, Option<Duration>),
        missing: impl FnOnce() -> Option<String>,
    ) -> Self {
        Self {
            missing: if reason == RejectReason::NotReady {
                missing()
            } else {
                None
            },
            reason,
            retry_after,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready(Reach),
    /// What is missing, in words on which a person can act.
    NotReady(String),
    Draining,
}
