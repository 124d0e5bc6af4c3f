//! The control loop's handle of a running leg. With it the loop can cancel the leg, or make it fail.

use std::pin::Pin;
use std::sync::Arc;

use service_runtime::telemetry::{self, opentelemetry};
use serving_core::cluster::{ClusterEvent, Leg, LegError, LegEvent};
use serving_core::ids::NodeId;
use serving_core::request::AttemptKey;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tracing::{Instrument as _, Span};

use crate::control_handle::Input;
use crate::node_clocks::NodeClocks;
use crate::token_stream::RequestStream;

/// What a leg's task needs besides its request.
#[derive(Clone, Debug)]
pub(crate) struct LegContext {
    pub key: AttemptKey,
    pub leg: Leg,
    pub node: NodeId,
    pub choice_count: u32,
    pub stream: Arc<RequestStream>,
    pub inbox: mpsc::Sender<Input>,
    pub clocks: NodeClocks,
    /// The root span of the request.
    pub parent: opentelemetry::Context,
}

impl LegContext {
    /// A leg has failed, by its own report or by a verdict of the brain.
    pub(crate) fn failed(&self, error: &LegError) {
        let (leg, node) = (self.leg.name(), &self.node);
        tracing::warn!(request = %self.key.request, attempt = i64::from(self.key.attempt.0), leg, %node, %error, "a leg of a request failed; it is placed again while it may be");
        self.stream.leg_failed(format!("{leg}:{}:{}", node.name, error.name()));
    }

    /// Waits when the control loop is behind. The stream of this leg then stands still, and no queue grows.
    pub(crate) async fn tell(&self, event: LegEvent) {
        self.tell_cluster(ClusterEvent::Leg { key: self.key, event }).await;
    }

    pub(crate) async fn tell_cluster(&self, event: ClusterEvent) {
        // The loop ends only with the process.
        let _ = self.inbox.send(Input::Event(event)).await;
    }
}

/// The work of a leg, until it ends or fails.
pub(crate) type LegFuture = Pin<Box<dyn Future<Output = Result<(), LegError>> + Send>>;

/// Dropping it cancels the leg.
#[derive(Debug)]
pub(crate) struct RunningLeg {
    context: Arc<LegContext>,
    task: AbortHandle,
    /// The sender of the verdict; `Some` until the verdict is given.
    verdict: Option<oneshot::Sender<LegError>>,
}

impl RunningLeg {
    /// Runs `leg` in `span`, below the request's root. `leg` tells the control loop everything except its failure.
    pub(crate) fn start(
        context: impl Into<Arc<LegContext>>,
        span: Span,
        leg: impl FnOnce(Arc<LegContext>) -> LegFuture,
    ) -> Self {
        let context = context.into();
        let leg = leg(context.clone());
        telemetry::set_parent(&span, context.parent.clone());
        let (give, mut verdict) = oneshot::channel();
        let of_task = context.clone();
        let run = async move {
            let by_itself = tokio::select! {
                biased;
                Ok(error) = &mut verdict => return mark_span(&error),
                ended = leg => ended,
            };
            verdict.close();
            // The verdict was given in this very moment, so it decides how the leg ended.
            if let Ok(error) = verdict.try_recv() {
                return mark_span(&error);
            }
            if let Err(error) = by_itself {
                of_task.failed(&error);
                mark_span(&error);
                let leg = of_task.leg;
                of_task.tell(LegEvent::Failed { leg, error }).await;
            }
        };
        Self {
            context,
            task: tokio::spawn(run.instrument(span)).abort_handle(),
            verdict: Some(give),
        }
    }

    /// Ends the leg's stream with a verdict. A leg that has ended by itself in the meantime has reported its own end.
    pub(crate) fn fail(mut self, error: LegError) {
        let verdict = self.verdict.take();
        if verdict.is_some_and(|verdict| verdict.send(error.clone()).is_ok()) {
            // This is done here and not in the leg's task, because the request may end with this verdict.
            self.context.failed(&error);
        }
    }
}

impl Drop for RunningLeg {
    fn drop(&mut self) {
        // After a verdict the task ends at once, and only the task can note the verdict on its span.
        if self.verdict.is_some() {
            self.task.abort();
        }
    }
}

fn mark_span(error: &LegError) {
    telemetry::set_failed(&Span::current(), error.name(), error.to_string());
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use service_runtime::metrics::config::MetricsConfig;
    use serving_core::ids::{Attempt, NodeEpoch, NodeName, RequestId};

    use super::*;
    use crate::metrics::Metrics;
    use crate::request_handle::ClientEvent;
    use crate::slo::SloConfig;
    use crate::token_stream::tests::request;

    /// More than it takes.
    const WITHIN: Duration = Duration::from_secs(20);

    /// What the control loop hears, and what the client does.
    type Heard = (mpsc::Receiver<Input>, mpsc::Receiver<ClientEvent>);

    fn context() -> (Arc<LegContext>, Heard) {
        let metrics = Arc::new(Metrics::new("m", MetricsConfig::default(), &SloConfig::default()));
        let (stream, events) = RequestStream::new(&request(1), Instant::now(), metrics);
        let (inbox, heard) = mpsc::channel(1);
        let context = LegContext {
            key: AttemptKey {
                request: RequestId(7),
                attempt: Attempt(0),
            },
            leg: Leg::Decode,
            node: NodeId {
                name: NodeName::new("decode-0"),
                epoch: NodeEpoch(1),
            },
            choice_count: 1,
            stream: Arc::new(stream),
            inbox,
            clocks: NodeClocks::default(),
            parent: telemetry::opentelemetry::Context::new(),
        };
        (Arc::new(context), (heard, events))
    }

    /// Ends the request.
    fn failed_legs(context: &LegContext, mut events: mpsc::Receiver<ClientEvent>) -> Vec<String> {
        context.stream.complete();
        match events.try_recv() {
            Ok(ClientEvent::Done(summary)) => summary.failed_legs,
            other => panic!("{other:?}"),
        }
    }

    /// A leg that never ends, and what tells that its task is gone.
    fn endless() -> (LegFuture, oneshot::Receiver<()>) {
        let (held, gone) = oneshot::channel::<()>();
        let leg = async move {
            let _held = held;
            std::future::pending().await
        };
        (Box::pin(leg), gone)
    }

    async fn is_gone(gone: oneshot::Receiver<()>) {
        let gone = tokio::time::timeout(WITHIN, gone).await.expect("the leg ends");
        assert!(gone.is_err());
    }

    #[tokio::test]
    async fn a_verdict_ends_a_leg_and_is_told_once() {
        let (context, (mut heard, events)) = context();
        let (leg, gone) = endless();
        RunningLeg::start(context.clone(), Span::none(), |_| leg).fail(LegError::NodeLost);
        assert_eq!(failed_legs(&context, events), ["decode:decode-0:node_lost"]);
        is_gone(gone).await;
        assert!(
            heard.try_recv().is_err(),
            "whoever gave the verdict need not hear of it"
        );
    }

    #[tokio::test]
    async fn a_leg_that_is_dropped_is_cancelled_without_a_word() {
        let (context, (mut heard, events)) = context();
        let (leg, gone) = endless();
        drop(RunningLeg::start(context.clone(), Span::none(), |_| leg));
        is_gone(gone).await;
        assert_eq!(failed_legs(&context, events), Vec::<String>::new());
        assert!(heard.try_recv().is_err());
    }

    #[tokio::test]
    async fn what_a_leg_said_itself_is_not_said_again() {
        let (context, (mut heard, events)) = context();
        let lost = LegError::ConnectionLost {
            detail: "reset".to_owned(),
        };
        let leg = Box::pin(std::future::ready(Err(lost.clone())));
        let running = RunningLeg::start(context.clone(), Span::none(), |_| leg);
        let told = tokio::time::timeout(WITHIN, heard.recv()).await.expect("told");
        let Some(Input::Event(ClusterEvent::Leg { event, .. })) = told else {
            panic!("{told:?}");
        };
        assert_eq!(
            event,
            LegEvent::Failed {
                leg: Leg::Decode,
                error: lost
            }
        );
        running.fail(LegError::NodeLost);
        assert_eq!(failed_legs(&context, events), ["decode:decode-0:connection_lost"]);
    }
}
