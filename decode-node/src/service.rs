//! `DecodeService`: an `Open` becomes a request of the node's loop, and the loop's events become the response stream. When that stream
//! ends, for whatever reason, the request is cancelled. There is no other cancel.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use node::{Asked, EventStream, Handle, LegRequest, NodeEvent};
use proto::messages::{CONTROL_MESSAGE_BYTES_MAX, OpenRequest};
use proto::status::convert_status;
use proto::v1;
use proto::v1::decode_service_server::{DecodeService, DecodeServiceServer};
use service_runtime::telemetry;
use serving_core::request::LocalPrefillReason;
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

/// Adds the decode service to a node's port.
pub fn add_to_routes(routes: &mut RoutesBuilder, node: Handle) {
    let service = DecodeServiceServer::new(Service { node });
    routes.add_service(service.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX));
}

#[derive(Debug)]
struct Service {
    node: Handle,
}

#[tonic::async_trait]
impl DecodeService for Service {
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
            prompt_tokens = i64::from(open.request.prompt_tokens()),
        );
        telemetry::set_parent(&span, parent);
        let prepared = self.node.prepare(&open.request).await;
        let asked = prepared.and_then(|grammar| Ok((Asked::open(open, span, answer_parent)?, grammar)));
        Ok(Response::new(OpenStream(match asked {
            Ok((asked, grammar)) => self.node.submit(asked).keeping(grammar),
            Err(refused) => self
                .node
                .refuse(&LegRequest::Whole(LocalPrefillReason::CoLocated), refused),
        })))
    }
}

/// The response of one request.
#[derive(Debug)]
pub struct OpenStream(EventStream);

impl Stream for OpenStream {
    type Item = Result<v1::DecodeEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_event(context).map(|event| {
            event.map(|event| match event {
                NodeEvent::Decode(event) => Ok(event.into()),
                NodeEvent::Prefill(_) => Err(Status::internal(
                    "a prefill event on a decode stream; this is a bug in baton",
                )),
            })
        })
    }
}
