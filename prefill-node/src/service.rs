//! `PrefillService`: a call becomes a request of the node's loop, and the loop's events become the response stream. When that stream
//! ends, for whatever reason, the request is cancelled. There is no other cancel.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use node::{Asked, EventStream, Handle, NodeEvent};
use proto::messages::{CONTROL_MESSAGE_BYTES_MAX, PrefillRequest, RefuseReason, Refused};
use proto::status::convert_status;
use proto::v1;
use proto::v1::prefill_service_server::{PrefillService, PrefillServiceServer};
use service_runtime::telemetry;
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

/// Adds the prefill service to a node's port.
pub fn add_to_routes(routes: &mut RoutesBuilder, node: Handle) {
    let service = PrefillServiceServer::new(Service { node })
        .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
    routes.add_service(service);
}

#[derive(Debug)]
struct Service {
    node: Handle,
}

#[tonic::async_trait]
impl PrefillService for Service {
    type PrefillStream = PrefillStream;

    async fn prefill(&self, request: Request<v1::PrefillRequest>) -> Result<Response<PrefillStream>, Status> {
        let parent = telemetry::extract(request.metadata());
        let message = PrefillRequest::try_from(request.into_inner()).map_err(|error| convert_status(&error))?;
        let span = tracing::info_span!(
            "prefill",
            otel.kind = "server",
            request_id = %message.request.id,
            attempt = i64::from(message.attempt.0),
            prompt_tokens = i64::from(message.request.prompt_tokens()),
        );
        telemetry::set_parent(&span, parent);
        let checked = match check(&message, self.node.block_tokens) {
            Ok(()) => self.node.prepare(&message.request).await,
            Err(refused) => Err(refused),
        };
        let asked = Asked::prefill(message, span);
        Ok(Response::new(PrefillStream(match checked {
            Ok(grammar) => self.node.submit(asked).keeping(grammar),
            Err(refused) => self.node.refuse(&asked.leg, refused),
        })))
    }
}

/// Checks what the conversion from the wire cannot know and the scheduler does not look at.
fn check(message: &PrefillRequest, block_tokens: u32) -> Result<(), Refused> {
    let invalid = |detail: String| {
        let reason = RefuseReason::Invalid;
        Err(Refused { reason, detail })
    };
    let prompt_tokens = message.request.prompt_tokens();
    let ends_at_first_token = message.request.ends_at_first_token();
    let Some(ticket) = &message.ticket else {
        return match ends_at_first_token {
            true => Ok(()),
            false => invalid("a request that goes on after its first token needs a ticket".to_owned()),
        };
    };
    if ends_at_first_token {
        return invalid("a request that ends at its first token has nothing to hand over".to_owned());
    }
    let wanted = u64::from(prompt_tokens.div_ceil(block_tokens));
    let offered = u64::from(ticket.prefix_blocks) + ticket.blocks.len() as u64;
    // The last token must be computed, because otherwise there would be no logits.
    let skippable = prompt_tokens.saturating_sub(1) / block_tokens;
    if offered != wanted || ticket.prefix_blocks > skippable {
        return invalid(format!(
            "the prompt has {wanted} blocks, the ticket skips {} and offers {}",
            ticket.prefix_blocks,
            ticket.blocks.len()
        ));
    }
    Ok(())
}

/// The response of one request.
#[derive(Debug)]
pub struct PrefillStream(EventStream);

impl Stream for PrefillStream {
    type Item = Result<v1::PrefillEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_event(context).map(|event| {
            event.map(|event| match event {
                NodeEvent::Prefill(event) => Ok(event.into()),
                NodeEvent::Decode(_) => Err(Status::internal(
                    "a decode event on a prefill stream; this is a bug in baton",
                )),
            })
        })
    }
}
