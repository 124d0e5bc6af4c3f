//! `DecodeService`: an `Open` becomes loop work, its events become the response stream, its end becomes a cancel.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use proto::messages::{DecodeEvent, OpenRequest, Refused, RefusedReason};
use proto::status::convert_status;
use proto::v1;
use proto::v1::decode_service_server::DecodeService;
use service_runtime::clock::Clock;
use service_runtime::telemetry;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::inbox::{Inbox, OpenJob};

/// Events that may wait for the network. A step gives a request at most one; a reader that is so far behind is cut off.
pub const EVENTS_QUEUED_MAX: usize = 1024;

/// The gRPC face of the node.
#[derive(Debug)]
pub struct DecodeApi {
    inbox: Arc<Inbox>,
}

impl DecodeApi {
    pub fn new(inbox: Arc<Inbox>) -> Self {
        Self { inbox }
    }
}

#[tonic::async_trait]
impl DecodeService for DecodeApi {
    type OpenStream = OpenStream;

    async fn open(&self, request: Request<v1::OpenRequest>) -> Result<Response<OpenStream>, Status> {
        let parent = telemetry::extract(request.metadata());
        let answer_parent = telemetry::extract_answer_parent(request.metadata());
        let open = OpenRequest::try_from(request.into_inner()).map_err(|error| convert_status(&error))?;
        let span = tracing::info_span!(
            "decode",
            otel.kind = "server",
            request_id = %open.request.id,
            attempt = i64::from(open.attempt.0),
            prompt_tokens = open.request.prompt.len() as i64,
        );
        telemetry::set_parent(&span, parent);
        // After the span has begun: what is measured from here is drawn inside it.
        let received_at = Clock::now();
        let (events, receiver) = mpsc::channel(EVENTS_QUEUED_MAX);
        let job = OpenJob {
            open,
            events,
            received_at,
            context: span.context(),
            answer_parent,
        };
        if let Err(job) = self.inbox.open(job) {
            let detail = "too many requests wait for the node's step loop, or it is shutting down".to_owned();
            let refused = Refused {
                reason: RefusedReason::NoCapacity,
                detail,
            };
            // A fresh channel has room.
            let _ = job.events.try_send(DecodeEvent::Refused(refused));
        }
        let inbox = self.inbox.clone();
        Ok(Response::new(OpenStream {
            events: receiver,
            inbox,
            span,
        }))
    }
}

/// The response stream. Dropping it, for whatever reason, is the cancel: the loop sees the closed channel and is woken.
#[derive(Debug)]
pub struct OpenStream {
    events: mpsc::Receiver<DecodeEvent>,
    inbox: Arc<Inbox>,
    /// The `decode` span lasts as long as the stream.
    span: Span,
}

impl Stream for OpenStream {
    type Item = Result<v1::DecodeEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let event = ready!(self.events.poll_recv(context));
        if let Some(DecodeEvent::Failed(failed)) = &event {
            telemetry::set_failed(&self.span, failed.reason.clone(), failed.detail.clone());
        }
        Poll::Ready(event.map(|event| Ok(event.into())))
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.events.close();
        self.inbox.wake();
    }
}
