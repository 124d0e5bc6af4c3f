//! How a request gets from its gRPC service into the loop, and the stream on which it is answered.

use std::sync::Arc;
use std::task::{Context, Poll};

use grammar::{CompiledGrammar, Grammars};
use proto::messages::{DecodeEvent, OpenRequest, PrefillEvent, PrefillRequest, RefuseReason, Refused};
use service_runtime::clock::Clock;
use service_runtime::telemetry;
use service_runtime::telemetry::opentelemetry::Context as TraceContext;
use serving_core::ids::{Attempt, NodeEpoch};
use serving_core::request::Request;
use tokio::sync::{Semaphore, mpsc};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::inbox::{Inbox, NotTaken};
use crate::metrics::Metrics;
use crate::request::{LegRequest, NewRequest, NodeEvent, SharedEvent};

/// Events that may wait for the network. A step gives a request at most a few; a reader that is so far behind is cut off.
pub const EVENTS_QUEUED_MAX: usize = 1024;

/// What a service needs of its node.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) grammars: Arc<Grammars>,
    /// Of [`crate::constraints::COMPILED_AT_ONCE`].
    pub(crate) compiling: Arc<Semaphore>,
    pub(crate) metrics: Metrics,
    pub epoch: NodeEpoch,
    pub block_tokens: u32,
}

/// What came over the wire, before it is a request of the loop.
#[derive(Debug)]
pub struct Asked {
    pub node_epoch: NodeEpoch,
    pub attempt: Attempt,
    pub request: Request,
    pub permits: u64,
    pub coordinator: NodeEpoch,
    pub leg: LegRequest,
    pub span: Span,
    pub answer_parent: Option<TraceContext>,
}

impl Asked {
    pub fn prefill(message: PrefillRequest, span: Span) -> Self {
        Self {
            node_epoch: message.node_epoch,
            attempt: message.attempt,
            request: message.request,
            permits: u64::from(message.permit_tokens),
            coordinator: message.coordinator_epoch,
            leg: LegRequest::Prefill(message.ticket),
            span,
            answer_parent: None,
        }
    }

    /// # Errors
    /// Nobody computes the prompt.
    pub fn open(message: OpenRequest, span: Span, answer_parent: Option<TraceContext>) -> Result<Self, Refused> {
        let leg = match (message.local_prefill, message.prefill_node) {
            (Some(reason), _) => LegRequest::Whole(reason),
            (None, Some(node)) => LegRequest::Decode(node),
            (None, None) => {
                return Err(Refused {
                    reason: RefuseReason::Invalid,
                    detail: "nobody computes the prompt".to_owned(),
                });
            }
        };
        Ok(Self {
            node_epoch: message.node_epoch,
            attempt: message.attempt,
            request: message.request,
            permits: u64::from(message.permit_blocks),
            coordinator: message.coordinator_epoch,
            leg,
            span,
            answer_parent,
        })
    }
}

impl Handle {
    /// Queues the request for the loop. A refusal is the stream's only event.
    pub fn submit(&self, asked: Asked) -> EventStream {
        // After the span has begun: what is measured from here is drawn inside it.
        let received_at = Clock::now();
        let (events, queue) = mpsc::channel(EVENTS_QUEUED_MAX);
        let refusal = |reason, detail: &str| {
            let detail = detail.to_owned();
            Refused { reason, detail }
        };
        let new = NewRequest {
            request: Arc::new(asked.request),
            attempt: asked.attempt,
            permits: asked.permits,
            coordinator: asked.coordinator,
            leg: asked.leg,
            events,
            received_at,
            trace: asked.span.context(),
            answer_parent: asked.answer_parent,
        };
        let refused = if asked.node_epoch == self.epoch {
            self.inbox.request(new).err().map(|(new, why)| match why {
                NotTaken::Full => (
                    new,
                    refusal(RefuseReason::NoCapacity, "too many requests wait for the node's loop"),
                ),
                NotTaken::Closed => (new, refusal(RefuseReason::Draining, "this node is leaving")),
            })
        } else {
            let detail = format!(
                "this node lives under epoch {}, not {}; read its new registration",
                self.epoch, asked.node_epoch
            );
            Some((Box::new(new), refusal(RefuseReason::StaleEpoch, &detail)))
        };
        if let Some((new, refused)) = refused {
            self.metrics.refused(&new.leg, refused.reason);
            // A fresh channel has room.
            let _ = new.events.try_send(new.leg.event(SharedEvent::Refused(refused)));
        }
        EventStream {
            queue,
            inbox: self.inbox.clone(),
            span: asked.span,
            grammar: None,
        }
    }

    /// A stream that only refuses, of a request that the loop need not see.
    pub fn refuse(&self, leg: &LegRequest, refused: Refused) -> EventStream {
        self.metrics.refused(leg, refused.reason);
        let (events, queue) = mpsc::channel(1);
        let _ = events.try_send(leg.event(SharedEvent::Refused(refused)));
        EventStream {
            queue,
            inbox: self.inbox.clone(),
            span: Span::none(),
            grammar: None,
        }
    }
}

/// What a request is told. Dropping it, for whatever reason, is the cancel: the loop sees the closed channel and is woken.
#[derive(Debug)]
pub struct EventStream {
    queue: mpsc::Receiver<NodeEvent>,
    inbox: Arc<Inbox>,
    /// The request's span on this node lasts as long as the stream.
    span: Span,
    grammar: Option<Arc<CompiledGrammar>>,
}

impl EventStream {
    /// Keeps what [`Handle::prepare`] gave for as long as the request runs.
    pub fn keeping(mut self, grammar: Option<Arc<CompiledGrammar>>) -> Self {
        self.grammar = grammar;
        self
    }

    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<NodeEvent>> {
        let polled = self.queue.poll_recv(context);
        if let Poll::Ready(Some(
            NodeEvent::Prefill(PrefillEvent::Failed(failed)) | NodeEvent::Decode(DecodeEvent::Failed(failed)),
        )) = &polled
        {
            telemetry::set_failed(&self.span, failed.reason.clone(), failed.detail.clone());
        }
        polled
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.queue.close();
        self.inbox.wake();
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::node_loop::tests::message;

    // A gauge of the async runtime is in the registry.
    #[tokio::test]
    async fn a_request_that_is_refused_before_the_loop_sees_it_is_counted() {
        let mut registry = Registry::default();
        let inbox = Arc::<Inbox>::default();
        let handle = Handle {
            inbox: inbox.clone(),
            grammars: Arc::new(Grammars::unknown()),
            compiling: Arc::new(Semaphore::new(1)),
            metrics: Metrics::of_prefill(&mut registry, Arc::default(), None),
            epoch: message(1).node_epoch,
            block_tokens: 16,
        };
        let mut stale = message(1);
        stale.node_epoch = NodeEpoch(handle.epoch.0 + 1);
        drop(handle.submit(Asked::prefill(stale, Span::none())));
        inbox.close();
        let asked = || Asked::prefill(message(1), Span::none());
        drop(handle.submit(asked()));
        let detail = "its ticket is wrong".to_owned();
        let reason = RefuseReason::Invalid;
        drop(handle.refuse(&asked().leg, Refused { reason, detail }));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("a string takes everything");
        for (outcome, count) in [("stale_epoch", 1), ("draining", 1), ("invalid", 1), ("no_capacity", 0)] {
            let line = format!(r#"baton_prefill_requests_total{{transport="none",outcome="{outcome}"}} {count}"#);
            assert!(text.contains(&line), "{line} is not in\n{text}");
        }
    }
}
