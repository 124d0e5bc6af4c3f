//! The gRPC edge: a request becomes a command to the step loop, the loop's events become the response stream.
//! The end of that stream, however it comes, cancels the request: there is no other cancel.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use proto::convert::ConvertError;
use proto::messages::{CONTROL_MESSAGE_BYTES_MAX, PrefillEvent, PrefillRequest, Refused, RefusedReason};
use proto::status::convert_status;
use proto::v1;
use proto::v1::prefill_service_server::{PrefillService, PrefillServiceServer};
use service_runtime::clock::Clock;
use service_runtime::telemetry;
use serving_core::ids::NodeEpoch;
use serving_core::request::AttemptKey;
use tokio::sync::mpsc;
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

use crate::inbox::{Command, NewPrefill};

/// Events of one request that the coordinator has not taken yet; the last place is kept for the terminal event. Enough
/// for the prompt logprobs of 32,000 tokens; a reader that is further behind fails its request, never the step loop.
pub const EVENTS_QUEUED_MAX: usize = 256;
/// The loop empties its inbox between two steps: only a flood in one long step makes a request wait here.
const INBOX_TIME_LIMIT: Duration = Duration::from_secs(5);

/// What requests are checked against before they reach the step loop.
#[derive(Clone, Copy, Debug)]
pub struct ServiceFacts {
    pub epoch: NodeEpoch,
    pub block_tokens: u32,
}

/// Adds the prefill service to a node's port.
pub fn add_to_routes(routes: &mut RoutesBuilder, facts: ServiceFacts, inbox: mpsc::Sender<Command>) {
    let service = PrefillServiceServer::new(Service {
        facts,
        inbox,
        next_leg: AtomicU64::new(0),
    })
    .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
    .max_encoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
    routes.add_service(service);
}

#[derive(Debug)]
struct Service {
    facts: ServiceFacts,
    inbox: mpsc::Sender<Command>,
    next_leg: AtomicU64,
}

#[tonic::async_trait]
impl PrefillService for Service {
    type PrefillStream = EventStream;

    async fn prefill(&self, request: Request<v1::PrefillRequest>) -> Result<Response<EventStream>, Status> {
        let parent = telemetry::extract(request.metadata());
        let message =
            PrefillRequest::try_from(request.into_inner()).map_err(|error: ConvertError| convert_status(&error))?;
        let span = tracing::info_span!(
            "prefill",
            otel.kind = "server",
            request_id = %message.request.id,
            attempt = i64::from(message.attempt.0),
            prompt_tokens = i64::from(message.request.prompt_tokens()),
        );
        telemetry::set_parent(&span, parent);
        let received_at = Clock::now();
        let (events, queue) = mpsc::channel(EVENTS_QUEUED_MAX);
        if let Err(refused) = self.facts.check(&message) {
            let _ = events.try_send(PrefillEvent::Refused(refused));
            return Ok(Response::new(EventStream { queue, _guard: None }));
        }
        let guard = CancelOnDrop {
            inbox: self.inbox.clone(),
            key: AttemptKey {
                request: message.request.id,
                attempt: message.attempt,
            },
            leg: self.next_leg.fetch_add(1, Ordering::Relaxed),
        };
        let new = Command::Prefill(Box::new(NewPrefill {
            message,
            leg: guard.leg,
            events,
            received_at,
            span,
        }));
        match self.inbox.send_timeout(new, INBOX_TIME_LIMIT).await {
            Ok(()) => Ok(Response::new(EventStream {
                queue,
                _guard: Some(guard),
            })),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => Err(Status::unavailable(
                "the step loop does not take requests; place it elsewhere",
            )),
            Err(mpsc::error::SendTimeoutError::Closed(_)) => Err(Status::unavailable("the node has stopped")),
        }
    }
}

impl ServiceFacts {
    /// What the wire's conversion cannot know and the scheduler does not look at.
    fn check(&self, message: &PrefillRequest) -> Result<(), Refused> {
        let refuse = |reason, detail: String| Err(Refused { reason, detail });
        if message.node_epoch != self.epoch {
            let detail = format!("this node lives under epoch {}, not {}", self.epoch, message.node_epoch);
            return refuse(RefusedReason::StaleEpoch, detail);
        }
        let prompt_tokens = message.request.prompt_tokens();
        let Some(ticket) = &message.ticket else {
            return match message.request.ends_at_first_token() {
                true => Ok(()),
                false => refuse(
                    RefusedReason::Invalid,
                    "a request that goes on after its first token needs a ticket".to_owned(),
                ),
            };
        };
        if message.request.ends_at_first_token() {
            let detail = "a request that ends at its first token has nothing to hand over".to_owned();
            return refuse(RefusedReason::Invalid, detail);
        }
        let wanted = u64::from(prompt_tokens.div_ceil(self.block_tokens));
        let offered = u64::from(ticket.prefix_blocks) + ticket.blocks.len() as u64;
        // At most all but the last token may be skipped, or there would be no logits.
        let skippable = prompt_tokens.saturating_sub(1) / self.block_tokens;
        if offered != wanted || ticket.prefix_blocks > skippable {
            let detail = format!(
                "the prompt has {wanted} blocks, the ticket skips {} and offers {}",
                ticket.prefix_blocks,
                ticket.blocks.len()
            );
            return refuse(RefusedReason::Invalid, detail);
        }
        Ok(())
    }
}

/// The response of one request. Dropping it, as the server does when the caller goes away, cancels the request.
#[derive(Debug)]
pub struct EventStream {
    queue: mpsc::Receiver<PrefillEvent>,
    /// Cancels when the stream is dropped; the step loop ignores a cancel of what has ended.
    _guard: Option<CancelOnDrop>,
}

impl Stream for EventStream {
    type Item = Result<v1::PrefillEvent, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        this.queue
            .poll_recv(context)
            .map(|event| event.map(|event| Ok(event.into())))
    }
}

#[derive(Debug)]
struct CancelOnDrop {
    inbox: mpsc::Sender<Command>,
    key: AttemptKey,
    leg: u64,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        let cancel = Command::Cancel {
            key: self.key,
            leg: self.leg,
        };
        let Err(mpsc::error::TrySendError::Full(cancel)) = self.inbox.try_send(cancel) else {
            return;
        };
        // One task per cancelled request at most, gone after the running step.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let inbox = self.inbox.clone();
            runtime.spawn(async move {
                let _ = inbox.send(cancel).await;
            });
        }
    }
}
