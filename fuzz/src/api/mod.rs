//! The coordinator's whole HTTP surface before a control loop that answers each request with chosen bytes.

pub(crate) mod answers;
pub(crate) mod bodies;
pub(crate) mod http;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request as HttpRequest, StatusCode, header};
use coordinator::api::{ApiLimits, AppParts, AppState, NoMetrics, router};
use coordinator::request_handle::{
    ClientEvent, Placement, Readiness, Rejected, RequestControl, RequestHandle, Submission, Submit, TokenTimes,
};
use coordinator::text::TextModel;
use http_body_util::BodyExt as _;
use model_files::test_kit::TinyModel;
use service_runtime::http_guard::HttpGuard;
use serving_core::cluster::Reach;
use serving_core::ids::{Attempt, ChoiceIndex, NodeName, OutputIndex, RequestId, TokenId};
use serving_core::request::{FinishReason, Request, TokenEvent, TokenLogprobs};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tower::ServiceExt as _;

use crate::folder::Folder;

pub(crate) const MODEL: &str = "tiny";
/// A request that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(20);
const BODY_BYTES_MAX: usize = 64 << 10;

/// The surface, with a runtime of one thread: what is ready happens in the same order for the same input.
pub(crate) struct Edge {
    pub(crate) runtime: Runtime,
    pub(crate) router: Router,
    says: Arc<Mutex<Vec<u8>>>,
}

/// One whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

thread_local! {
    static EDGE: Edge = Edge::new();
}

/// Shows the surface, which is made once in each thread.
pub(crate) fn with_edge<T>(look: impl FnOnce(&Edge) -> T) -> T {
    EDGE.with(look)
}

impl Edge {
    fn new() -> Self {
        let folder = Folder::new();
        let model = TinyModel {
            context_length: 1024,
            ..TinyModel::default()
        };
        let file = folder.write("tiny.gguf", &model.build().build());
        let text = Arc::new(TextModel::open(&file, None).expect("a sound model"));
        let says = Arc::new(Mutex::new(Vec::new()));
        let codec = text.codec();
        let token_of = |byte: u8| {
            let mut all = (0..codec.vocab_size()).map(TokenId);
            let of_byte = all.find(|token| codec.token_bytes(*token) == Some(&[byte]));
            of_byte.expect("the tiny model has a token for each byte")
        };
        let submit = Arc::new(Loop {
            tokens: (0..=255).map(token_of).collect(),
            ends: codec.end_tokens().to_vec(),
            says: says.clone(),
        });
        let parts = AppParts {
            submit,
            text,
            served_models: vec![MODEL.to_owned()],
            metrics: Arc::new(NoMetrics),
            limits: ApiLimits {
                body_bytes_max: BODY_BYTES_MAX,
                request_bytes_in_flight_max: BODY_BYTES_MAX,
                request_time_limit: PATIENCE,
            },
            insight: Arc::default(),
            guard: HttpGuard::default(),
            cors_origins: Vec::new(),
            keys: None,
        };
        let mut runtime = Builder::new_current_thread();
        // Sockets are looked at in each turn, so that turns can be counted instead of waiting.
        let runtime = runtime.enable_all().event_interval(1).build().expect("a runtime");
        let router = runtime.block_on(async { router(AppState::new(parts)) });
        Self { runtime, router, says }
    }

    /// What the model answers from now on: these bytes, each a token, and the end.
    pub(crate) fn says(&self, bytes: &[u8]) {
        *lock(&self.says) = bytes.to_vec();
    }

    pub(crate) fn post(&self, path: &str, body: &[u8]) -> Answer {
        let request = HttpRequest::post(path)
            .header(header::HOST, "127.0.0.1:1")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_vec()))
            .expect("a request");
        let answered = async {
            let response = self.router.clone().oneshot(request).await;
            let (head, body) = response.expect("the router never fails").into_parts();
            let body = body.collect().await.expect("an answer is never cut");
            Answer {
                status: head.status,
                headers: head.headers,
                body: body.to_bytes(),
            }
        };
        let in_time = self
            .runtime
            .block_on(async { tokio::time::timeout(PATIENCE, answered).await });
        in_time.expect("an answer in time")
    }
}

/// The control loop: it takes every request and says the same bytes in each choice.
struct Loop {
    /// Of each byte.
    tokens: Vec<TokenId>,
    ends: Vec<TokenId>,
    says: Arc<Mutex<Vec<u8>>>,
}

struct Control;

impl RequestControl for Control {
    fn cancel(&self, _: RequestId) {}
    fn finish_choice(&self, _: RequestId, _: ChoiceIndex, _: FinishReason) {}
}

#[async_trait::async_trait]
impl Submit for Loop {
    async fn submit(&self, submission: Submission) -> Result<RequestHandle, Rejected> {
        let request = submission.request;
        let (sender, events) = mpsc::channel(8);
        let said = self.events(&request);
        let id = request.id;
        tokio::spawn(async move {
            for event in said {
                if sender.send(event).await.is_err() {
                    return;
                }
            }
        });
        Ok(RequestHandle::new(id, events, Arc::new(Control)))
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready(Reach {
            unsplit: None,
            suspected: Vec::new(),
            prefill_nodes: 1,
            decode_nodes: 1,
            usable_pairs: 1,
        })
    }
}

impl Loop {
    fn events(&self, request: &Request) -> Vec<ClientEvent> {
        let mut events = vec![ClientEvent::Placed(Placement {
            attempt: Attempt(0),
            prefill_node: Some(NodeName::new("prefill-0")),
            decode_node: Some(NodeName::new("decode-0")),
            route_reason: "least_loaded".to_owned(),
            local_prefill: None,
            queued_for: Duration::ZERO,
        })];
        if let Some(count) = request.prompt_logprobs {
            let tokens = request.prompt.iter().skip(1).map(|token| logprobs(*token, count));
            events.push(ClientEvent::PromptLogprobs {
                first_position: 1,
                tokens: tokens.collect(),
            });
        }
        let token_of = |byte: &u8| self.tokens[usize::from(*byte)];
        let mut tokens: Vec<TokenId> = lock(&self.says).iter().map(token_of).collect();
        tokens.extend(self.ends.first());
        for choice in 0..request.choice_count {
            for (index, token) in (0..request.stop.max_tokens).zip(&tokens) {
                let finish = match () {
                    () if self.ends.contains(token) => Some(FinishReason::EndToken),
                    () if index + 1 == request.stop.max_tokens => Some(FinishReason::Length),
                    () => None,
                };
                let event = TokenEvent {
                    choice: ChoiceIndex(choice),
                    index: OutputIndex(index),
                    token: *token,
                    logprobs: request.logprobs.map(|count| logprobs(*token, count)),
                    finish,
                };
                events.push(ClientEvent::Token(event, TokenTimes::received(Instant::now())));
            }
        }
        events.push(ClientEvent::Done(Box::default()));
        events
    }
}

fn logprobs(token: TokenId, count: u32) -> TokenLogprobs {
    TokenLogprobs {
        logprob: -1.0,
        top: (0..count)
            .map(|rank| (TokenId(token.0 + rank), -1.0 - rank as f32))
            .collect(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
