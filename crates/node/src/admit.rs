//! Lets a request in or refuses it, and sends its first answer: the ticket, the prefix, or the reason of the refusal.

use proto::messages::{DecodeEvent, Opened, PrefillEvent, RefuseReason, Refused};
use service_runtime::clock::Clock;
use service_runtime::event_log::{self, Step};
use service_runtime::failpoints::{self, FaultPoint};
use service_runtime::telemetry::MeasuredSpan;
use service_runtime::telemetry::opentelemetry::KeyValue;
use service_runtime::telemetry::opentelemetry::trace::SpanKind;
use serving_core::ids::{NodeId, TransferId};
use serving_core::kv::reservation::Reservation;
use serving_core::node::Ticket;
use serving_core::request::AttemptKey;
use serving_core::scheduler::{Admission, Admitted, PushPlan, Work};
use serving_core::time::Time;

use crate::node_loop::NodeLoop;
use crate::request::{LegRequest, NewRequest, NodeEvent, SharedEvent};
use crate::streams::Stream;

impl NodeLoop {
    pub(crate) fn admit(&mut self, now: Time, new: NewRequest) {
        if self.drain_until.is_some() {
            return self.refuse_leaving(&new);
        }
        let key = new.key();
        let work = match &new.leg {
            LegRequest::Prefill(ticket) => Work::Prefill(ticket.as_ref().map(|ticket| PushPlan {
                skip_blocks: ticket.prefix_blocks,
                is_streamed: self.streams_to(&ticket.decode_node),
            })),
            LegRequest::Decode(_) => Work::Decode(TransferId(rand::random())),
            LegRequest::Whole(_) => Work::Whole,
        };
        let admission = Admission {
            request: new.request.clone(),
            attempt: new.attempt,
            permits: new.permits,
            coordinator: new.coordinator,
            work,
        };
        match self.parts.scheduler.admit(now, admission) {
            Ok(admitted) => self.admitted((now, key, work), new, &admitted),
            Err(refusal) => {
                let refused = Refused::from(&refusal);
                event_log::record(key, || Step::Refused {
                    reason: refused.reason.name().to_owned(),
                });
                self.refuse(&new, refused);
            }
        }
    }

    fn admitted(&mut self, (now, key, work): (Time, AttemptKey, Work), new: NewRequest, admitted: &Admitted) {
        let mut stream = Stream::new(now, new);
        let (at, cached_tokens) = (stream.received_at, admitted.cached_tokens);
        let first = match &stream.leg {
            LegRequest::Prefill(_) => {
                event_log::record(key, || Step::Accepted);
                stream.prefill.cached_tokens = cached_tokens;
                NodeEvent::Prefill(PrefillEvent::Accepted { cached_tokens, at })
            }
            LegRequest::Decode(_) | LegRequest::Whole(_) => {
                let ticket = self.mint((key, work), &stream.leg, admitted);
                let transfer = ticket.as_ref().map(|ticket| ticket.transfer);
                event_log::record(key, || Step::Opened {
                    transfer: transfer.map(|transfer| transfer.to_string()),
                });
                self.transfers.extend(transfer.map(|transfer| (transfer, key)));
                stream.decode.transfer = transfer;
                if let LegRequest::Whole(reason) = &stream.leg {
                    self.parts.metrics.local_prefill(*reason);
                }
                record_open(&stream, admitted);
                failpoints::hit(FaultPoint::DecodeReserved);
                NodeEvent::Decode(DecodeEvent::Opened(Opened {
                    prefix_blocks: admitted.prefix_blocks,
                    cached_tokens,
                    ticket,
                    at,
                }))
            }
        };
        let is_prefill = stream.is_prefill();
        // A new channel has room.
        stream.tell_last(first);
        self.streams.insert(key, stream);
        if is_prefill {
            failpoints::hit(FaultPoint::PrefillScheduled);
        }
    }

    /// Whether KV goes to this decode node over gRPC. While a new pair has not settled on a transport, its first prompts are treated as if
    /// they went through shared memory.
    fn streams_to(&self, decode_node: &NodeId) -> bool {
        let Some(outgoing) = &self.parts.outgoing else {
            return false;
        };
        let pairs = outgoing.pairs.borrow();
        let pair = pairs.iter().find(|pair| pair.decode_node == *decode_node);
        pair.is_some_and(|pair| pair.transport.as_deref() == Some(kv_transfer::grpc::KIND.name()))
    }

    pub(crate) fn refuse_leaving(&self, new: &NewRequest) {
        let detail = "this node is leaving".to_owned();
        let reason = RefuseReason::Draining;
        self.refuse(new, Refused { reason, detail });
    }

    fn refuse(&self, new: &NewRequest, refused: Refused) {
        tracing::debug!(
            reason = refused.reason.name(),
            detail = refused.detail,
            "refused a request"
        );
        self.parts.metrics.refused(&new.leg, refused.reason);
        // A new channel has room, and a caller that has gone needs no answer.
        let _ = new.events.try_send(new.leg.event(SharedEvent::Refused(refused)));
    }

    /// Makes the ticket of a handoff and the reservation for which the ticket is valid.
    fn mint(&self, (key, work): (AttemptKey, Work), leg: &LegRequest, admitted: &Admitted) -> Option<Ticket> {
        let (Work::Decode(transfer), LegRequest::Decode(sender)) = (work, leg) else {
            return None;
        };
        let incoming = self.parts.incoming.as_ref()?;
        let geometry = *self.kv.geometry();
        incoming.reservations.offer(Reservation {
            transfer,
            key,
            sender: sender.clone(),
            blocks: admitted.ticket_blocks.clone(),
            layer_count: geometry.layer_count,
            layer_bytes: geometry.layer_bytes(),
        });
        Some(Ticket {
            transfer,
            decode_node: self.parts.node.clone(),
            decode_address: incoming.kv_address.clone(),
            total_bytes: admitted.ticket_blocks.len() as u64 * geometry.block_bytes() as u64,
            blocks: admitted.ticket_blocks.clone(),
            prefix_blocks: admitted.prefix_blocks,
            expires_in: incoming.reservation,
        })
    }
}

fn record_open(stream: &Stream, admitted: &Admitted) {
    let mut span = MeasuredSpan::new("decode.open", stream.received_at, Clock::now());
    span.kind = SpanKind::Server;
    span.attributes
        .push(KeyValue::new("prefix_blocks", i64::from(admitted.prefix_blocks)));
    span.attributes
        .push(KeyValue::new("local_prefill", stream.decode.transfer.is_none()));
    span.record_later(stream.answer_parent.as_ref().unwrap_or(&stream.trace));
}
