//! Carries work to nodes: one task per leg (`running_leg`), one gRPC stream per task. When the task is dropped the stream ends, and
//! the end of the stream is the cancel (PROTOCOL rule 8).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use identity::{Expected, Identity};
use proto::messages::{
    CONTROL_MESSAGE_BYTES_MAX, DecodeEvent, Failed, OpenRequest, PrefillEvent, PrefillRequest, Refused, TokenBatch,
};
use proto::status::{CallFailure, call_failure};
use proto::v1;
use proto::v1::decode_service_client::DecodeServiceClient;
use proto::v1::prefill_service_client::PrefillServiceClient;
use service_runtime::clock::Clock;
use service_runtime::failpoints::{self, FaultPoint};
use service_runtime::serve;
use service_runtime::telemetry::opentelemetry::trace::SpanKind;
use service_runtime::telemetry::{self, OpenSpan};
use serving_core::cluster::{ClusterEvent, FinishedBy, LegError, LegEvent, NodeFault, Target};
use serving_core::ids::NodeId;
use serving_core::time::Time;
use tonic::transport::Channel;

use crate::node_clocks::{LegClock, NodeInstant};
use crate::running_leg::{LegContext, RunningLeg};
use crate::token_stream::{Delivery, ReceivedTokens};

/// How often a leg tells the brain that tokens still come. This is far below any silence limit, and a thousand streams cause
/// only four thousand events a second.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// One channel for each life of a node. It connects when it is first used and closes when the life ends.
#[derive(Debug)]
pub(crate) struct Channels {
    by_node: BTreeMap<NodeId, Channel>,
    identity: Identity,
}

impl Channels {
    pub(crate) fn of(identity: Identity) -> Self {
        Self {
            by_node: BTreeMap::new(),
            identity,
        }
    }

    pub(crate) fn get(&mut self, target: &Target) -> Result<Channel, LegError> {
        if let Some(channel) = self.by_node.get(&target.node) {
            return Ok(channel.clone());
        }
        let endpoint = serve::endpoint(&target.address).map_err(|error| LegError::Unreachable {
            detail: format!("{}: {error}", target.address),
        })?;
        let expected = Expected::Node(target.node.name.to_string());
        let channel = self.identity.connect_lazy(&endpoint, expected);
        self.by_node.insert(target.node.clone(), channel.clone());
        Ok(channel)
    }

    pub(crate) fn close(&mut self, node: &NodeId) {
        self.by_node.remove(node);
    }
}

/// Whether a leg goes on after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    Over,
}

/// The state of one running leg.
#[derive(Debug, Default)]
struct Progress {
    clock: LegClock,
    had_tokens: bool,
    told_at: Option<Instant>,
}

pub(crate) fn start_open(context: LegContext, channel: Result<Channel, LegError>, open: OpenRequest) -> RunningLeg {
    let span = tracing::info_span!("decode", otel.kind = "client", node = %context.node, attempt = i64::from(context.key.attempt.0));
    RunningLeg::start(context, span, |context| Box::pin(decode(context, channel, open)))
}

pub(crate) fn start_prefill(
    context: LegContext,
    channel: Result<Channel, LegError>,
    prefill: PrefillRequest,
) -> RunningLeg {
    let span = tracing::info_span!("prefill", otel.kind = "client", node = %context.node, attempt = i64::from(context.key.attempt.0));
    RunningLeg::start(context, span, |context| {
        Box::pin(self::prefill(context, channel, prefill))
    })
}

async fn decode(
    context: Arc<LegContext>,
    channel: Result<Channel, LegError>,
    open: OpenRequest,
) -> Result<(), LegError> {
    let mut client = DecodeServiceClient::new(channel?)
        .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
    let mut request = tonic::Request::new(v1::OpenRequest::from(open));
    telemetry::inject(request.metadata_mut());
    let opening = OpenSpan::start("decode.open", SpanKind::Client, Clock::now(), &context.parent);
    telemetry::inject_answer_parent(&opening, request.metadata_mut());
    let mut opening = Some(opening);
    context.stream.mark(context.key.attempt, |clock, now| clock.sent(now));
    let response = client.open(request).await.map_err(|status| call_error(&status))?;
    let mut events = response.into_inner();
    let mut progress = Progress::default();
    while let Some(event) = events.message().await.map_err(|status| stream_error(&status))? {
        let event = DecodeEvent::try_from(event).map_err(broken_contract)?;
        if let Some(opening) = opening.take() {
            let is_opened = matches!(event, DecodeEvent::Opened(_));
            opening.end(Clock::now(), (!is_opened).then(|| "not opened".to_owned()));
        }
        if context.decode_event(event, &mut progress).await? == Next::Over {
            return Ok(());
        }
    }
    Err(ended_early())
}

async fn prefill(
    context: Arc<LegContext>,
    channel: Result<Channel, LegError>,
    prefill: PrefillRequest,
) -> Result<(), LegError> {
    let mut client = PrefillServiceClient::new(channel?)
        .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
    let mut request = tonic::Request::new(v1::PrefillRequest::from(prefill));
    telemetry::inject(request.metadata_mut());
    context.stream.mark(context.key.attempt, |clock, now| clock.sent(now));
    let response = client.prefill(request).await.map_err(|status| call_error(&status))?;
    let mut events = response.into_inner();
    let mut progress = Progress::default();
    while let Some(event) = events.message().await.map_err(|status| stream_error(&status))? {
        let event = PrefillEvent::try_from(event).map_err(broken_contract)?;
        if context.prefill_event(event, &mut progress).await? == Next::Over {
            return Ok(());
        }
    }
    Err(ended_early())
}

fn broken_contract(error: impl std::fmt::Display) -> LegError {
    LegError::Protocol {
        detail: error.to_string(),
    }
}

fn ended_early() -> LegError {
    LegError::ConnectionLost {
        detail: "the stream ended without a last event".into(),
    }
}

/// The call itself failed: no event came.
fn call_error(status: &tonic::Status) -> LegError {
    let detail = proto::status::words(status);
    match call_failure(status) {
        CallFailure::Unreachable => LegError::Unreachable { detail },
        CallFailure::Cancelled => LegError::ConnectionLost { detail },
        CallFailure::BadRequest | CallFailure::Broken => LegError::Node {
            fault: NodeFault::Internal,
            reason: "call_failed".into(),
            detail,
        },
    }
}

/// The stream broke after the node had answered.
fn stream_error(status: &tonic::Status) -> LegError {
    match call_error(status) {
        LegError::Unreachable { detail } => LegError::ConnectionLost { detail },
        other => other,
    }
}

impl LegContext {
    /// A time of the leg's node. `None` until the offset of its clock is known.
    fn there(&self, node_time: Time, progress: &mut Progress) -> Option<NodeInstant> {
        progress.clock.read(&self.clocks, &self.node, node_time)
    }

    async fn decode_event(&self, event: DecodeEvent, progress: &mut Progress) -> Result<Next, LegError> {
        let attempt = self.key.attempt;
        match event {
            DecodeEvent::Opened(opened) => {
                let there = self.there(opened.at, progress);
                self.stream.mark(attempt, |clock, now| clock.opened(now, there));
                self.stream.cached(attempt, opened.cached_tokens);
                self.tell(LegEvent::Opened { ticket: opened.ticket }).await;
            }
            DecodeEvent::Tokens(batch) => return self.tokens(batch, progress).await,
            DecodeEvent::PromptLogprobs(logprobs) => {
                return self
                    .delivered(self.stream.prompt_logprobs(self.key, logprobs), progress)
                    .await;
            }
            DecodeEvent::Committed { timings, cached_tokens } => {
                self.stream.node_timings(attempt, &timings);
                if let Some(cached_tokens) = cached_tokens {
                    self.stream.cached(attempt, cached_tokens);
                }
                self.tell(LegEvent::Committed).await;
            }
            DecodeEvent::Finished(finished) => {
                self.stream.decode_finished(attempt, finished);
                self.tell_count(progress).await;
                self.tell(LegEvent::DecodeFinished).await;
                return Ok(Next::Over);
            }
            DecodeEvent::Failed(failed) => return Err(node_error(failed)),
            DecodeEvent::Refused(refused) => return self.refused(refused).await,
        }
        Ok(Next::GoOn)
    }

    async fn prefill_event(&self, event: PrefillEvent, progress: &mut Progress) -> Result<Next, LegError> {
        let attempt = self.key.attempt;
        match event {
            PrefillEvent::Accepted { cached_tokens, at } => {
                let there = self.there(at, progress);
                self.stream.mark(attempt, |clock, now| clock.accepted(now, there));
                self.stream.cached(attempt, cached_tokens);
                self.tell(LegEvent::PrefillAccepted).await;
            }
            PrefillEvent::Tokens(batch) => return self.tokens(batch, progress).await,
            PrefillEvent::PromptLogprobs(logprobs) => {
                return self
                    .delivered(self.stream.prompt_logprobs(self.key, logprobs), progress)
                    .await;
            }
            PrefillEvent::FirstToken { timings, sampled_at } => {
                let there = self.there(sampled_at, progress);
                self.stream.mark(attempt, |clock, _| clock.sampled(there));
                self.stream.node_timings(attempt, &timings);
            }
            PrefillEvent::Finished(finished) => {
                let outcome = finished.outcome;
                self.stream.prefill_finished(attempt, finished);
                self.tell_count(progress).await;
                self.tell(LegEvent::PrefillFinished { outcome }).await;
                return Ok(Next::Over);
            }
            PrefillEvent::Failed(failed) => return Err(node_error(failed)),
            PrefillEvent::Refused(refused) => return self.refused(refused).await,
        }
        Ok(Next::GoOn)
    }

    async fn refused(&self, refused: Refused) -> Result<Next, LegError> {
        let (reason, leg) = (refused.reason, self.leg);
        tracing::debug!(request = %self.key.request, node = %self.node, leg = leg.name(), reason = reason.name(), detail = refused.detail, "a node refused a leg");
        self.tell(LegEvent::Refused { leg, reason }).await;
        Ok(Next::Over)
    }

    /// Tells the brain how many tokens came since the last time. They count as work of the request's owner, each once, whichever leg brought it.
    async fn tell_count(&self, progress: &mut Progress) {
        let count = self.stream.take_untold();
        if count > 0 {
            progress.told_at = Some(Instant::now());
            self.tell(LegEvent::TokensDelivered { leg: self.leg, count }).await;
        }
    }

    /// Tokens go straight to the client. The brain hears of the first tokens, of ends, and from time to time that more
    /// tokens came.
    async fn tokens(&self, batch: TokenBatch, progress: &mut Progress) -> Result<Next, LegError> {
        if !progress.had_tokens {
            failpoints::hit(FaultPoint::FirstTokenUnflushed);
        }
        let received = ReceivedTokens {
            tokens: batch.tokens,
            sampled_at: self.there(batch.sampled_at, progress),
            step: batch.step,
        };
        let delivery = self.stream.deliver(self.key, self.leg, received);
        if matches!(delivery, Delivery::Delivered { .. }) {
            if !progress.had_tokens {
                progress.had_tokens = true;
                progress.told_at = Some(Instant::now());
                self.tell(LegEvent::FirstToken { leg: self.leg }).await;
            } else if progress.told_at.is_none_or(|at| at.elapsed() >= PROGRESS_INTERVAL) {
                self.tell_count(progress).await;
            }
        }
        self.delivered(delivery, progress).await
    }

    /// Acts on the result of a delivery to the client.
    async fn delivered(&self, delivery: Delivery, progress: &mut Progress) -> Result<Next, LegError> {
        match delivery {
            Delivery::Stale => return Ok(Next::Over),
            Delivery::Violation(detail) => return Err(LegError::Protocol { detail }),
            Delivery::Broken(error) => {
                self.tell_count(progress).await;
                self.tell_cluster(ClusterEvent::StreamBroken {
                    request: self.key.request,
                    error,
                })
                .await;
                return Ok(Next::Over);
            }
            Delivery::Delivered { finished } => {
                // With one choice the node's last event says the same.
                if self.choice_count > 1 {
                    for choice in finished {
                        let request = self.key.request;
                        self.tell_cluster(ClusterEvent::ChoiceFinished {
                            request,
                            choice,
                            by: FinishedBy::Node,
                        })
                        .await;
                    }
                }
            }
        }
        Ok(Next::GoOn)
    }
}

fn node_error(failed: Failed) -> LegError {
    LegError::Node {
        fault: failed.fault,
        reason: failed.reason,
        detail: failed.detail,
    }
}
