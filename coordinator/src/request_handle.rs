//! The seam between the HTTP edge (`api/`) and the control loop: a validated request goes in, its events come out.

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

/// One validated request on its way into the control loop.
#[derive(Debug)]
pub struct Submission {
    pub request: Arc<Request>,
    /// When the first byte of the HTTP request was read: TTFT counts from here.
    pub received_at: Instant,
    /// When the edge was done with it: waiting for a place counts from here.
    pub tokenized_at: Instant,
    /// Stages the edge itself measured: parse and tokenize.
    pub edge_timings: StageTimings,
    /// W3C trace context of the request's root span, handed on to the nodes as `traceparent` metadata.
    pub traceparent: Option<String>,
}

/// What a client stream is told. Each (choice, index) comes exactly once and in order per choice;
/// exactly one of `Done` and `Failed` ends the stream.
#[derive(Debug)]
pub enum ClientEvent {
    /// The nodes were chosen (again, after a retry). First event of an accepted request.
    Placed(Placement),
    PromptLogprobs {
        first_position: u32,
        tokens: Vec<TokenLogprobs>,
    },
    Token(TokenEvent, TokenTimes),
    /// What is known so far: comes before the first token, and again after the last one. The nodes' last reports are not in
    /// it.
    Known(Box<RequestSummary>),
    /// All choices have ended, and the nodes' last reports are there, or their time is over.
    Done(Box<RequestSummary>),
    Failed(RequestError),
    /// What is known of a request that fails: comes right before `Failed`.
    BrokeOff(Box<RequestSummary>),
}

/// When a token was where: all on this process's clock.
#[derive(Clone, Copy, Debug)]
pub struct TokenTimes {
    /// By the coordinator, from the leg that brought it first.
    pub received_at: Instant,
    /// On the node; `None` while that node's clock offset is not known.
    pub sampled_at: Option<Instant>,
    /// `None` for a token that came with a handoff.
    pub step: Option<StepNote>,
    pub attempt: Attempt,
}

impl TokenTimes {
    /// Of a token about whose making nothing is known.
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
    /// `None` when the request ends at its first token on the prefill node.
    pub decode_node: Option<NodeName>,
    /// Policy and reason of the choice, for the access log and the trace.
    pub route_reason: String,
    pub local_prefill: Option<LocalPrefillReason>,
    pub queued_for: Duration,
}

/// What is known when a request has ended well: the request record's raw material.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestSummary {
    pub timings: StageTimings,
    pub cached_tokens: u32,
    pub preemptions: u32,
    pub kv_bytes: u64,
    pub transfer: Duration,
    pub transport: Option<String>,
    pub kv_hashes: Vec<u64>,
    pub attempts: u32,
    /// `leg:node:cause` of each leg that failed on the way; two for each attempt at most.
    pub failed_legs: Vec<String>,
}

/// Events of one request, bounded. Dropping it cancels the request on every leg; so does `finish_choice` for the last
/// choice that was still running (a stop string was found).
pub struct RequestHandle {
    events: mpsc::Receiver<ClientEvent>,
    control: Arc<dyn RequestControl>,
    id: RequestId,
}

/// What a handle can still tell the control loop. The loop implements it; tests put a recorder in its place.
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
    pub fn id(&self) -> RequestId {
        self.id
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

/// How the edge hands a request over. Implemented by the control loop; the edge's tests use a scripted one.
#[async_trait::async_trait]
pub trait Submit: Send + Sync {
    /// Ends within the lane's queue limit. `Err` is policy saying no: a value, mapped to 429, 503 or 400.
    async fn submit(&self, submission: Submission) -> Result<RequestHandle, Rejected>;
    /// PROTOCOL rule 15: at least one decode node with a working way to prefill.
    fn readiness(&self) -> Readiness;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    pub reason: RejectReason,
    /// When trying again may help; `None` when it never will.
    pub retry_after: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready(Reach),
    /// What is missing, in words a person can act on.
    NotReady(String),
    Draining,
}
