//! A request between its gRPC service and the loop: what it asks for, and the events that answer it.

use std::sync::Arc;

use proto::messages::{DecodeEvent, Failed, PrefillEvent, PromptLogprobs, Refused, TokenBatch};
use service_runtime::telemetry::opentelemetry::Context as TraceContext;
use serving_core::ids::{Attempt, NodeEpoch, NodeId};
use serving_core::node::Ticket;
use serving_core::request::{AttemptKey, LocalPrefillReason, Request};
use serving_core::time::Time;
use tokio::sync::mpsc;

/// Which leg of a request this node has.
#[derive(Clone, Debug)]
pub enum LegRequest {
    /// The prompt. Without a ticket the request ends at its first token.
    Prefill(Option<Ticket>),
    /// Everything after the first token. Only this prefill node may write its KV.
    Decode(NodeId),
    /// The whole request.
    Whole(LocalPrefillReason),
}

/// One request on its way to the loop.
#[derive(Debug)]
pub struct NewRequest {
    pub request: Arc<Request>,
    pub attempt: Attempt,
    /// In the unit of this node's permits.
    pub permits: u64,
    /// The life of the coordinator that holds the permits.
    pub coordinator: NodeEpoch,
    pub leg: LegRequest,
    pub events: mpsc::Sender<NodeEvent>,
    pub received_at: Time,
    /// Of the request's span on this node.
    pub trace: TraceContext,
    /// Of the caller's span that ends with the first answer.
    pub answer_parent: Option<TraceContext>,
}

impl NewRequest {
    pub fn key(&self) -> AttemptKey {
        AttemptKey {
            request: self.request.id,
            attempt: self.attempt,
        }
    }
}

/// What a request is told, in its service's words.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeEvent {
    Prefill(PrefillEvent),
    Decode(DecodeEvent),
}

/// What both services say alike.
#[derive(Debug)]
pub(crate) enum SharedEvent {
    Tokens(TokenBatch),
    PromptLogprobs(PromptLogprobs),
    Failed(Failed),
    Refused(Refused),
}

impl LegRequest {
    pub(crate) fn event(&self, told: SharedEvent) -> NodeEvent {
        match self {
            LegRequest::Prefill(_) => NodeEvent::Prefill(match told {
                SharedEvent::Tokens(batch) => PrefillEvent::Tokens(batch),
                SharedEvent::PromptLogprobs(scored) => PrefillEvent::PromptLogprobs(scored),
                SharedEvent::Failed(failed) => PrefillEvent::Failed(failed),
                SharedEvent::Refused(refused) => PrefillEvent::Refused(refused),
            }),
            LegRequest::Decode(_) | LegRequest::Whole(_) => NodeEvent::Decode(match told {
                SharedEvent::Tokens(batch) => DecodeEvent::Tokens(batch),
                SharedEvent::PromptLogprobs(scored) => DecodeEvent::PromptLogprobs(scored),
                SharedEvent::Failed(failed) => DecodeEvent::Failed(failed),
                SharedEvent::Refused(refused) => DecodeEvent::Refused(refused),
            }),
        }
    }
}
