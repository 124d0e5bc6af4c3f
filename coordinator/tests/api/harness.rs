//! A served router on a free port, with the model of bytes and a control loop that plays what the test wrote.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coordinator::Coordinator;
use coordinator::api::{ApiLimits, AppParts, AppState, EdgeMetrics, EndedRequest, HttpPort, router, serve_http};
use coordinator::request_handle::{Readiness, Rejected, RequestControl, RequestHandle, Submission, Submit};
use coordinator::text::TextModel;
use identity::ServerCertificate;
use service_runtime::http_guard::{HttpGuard, WebOrigin};
use serving_core::cluster::Reach;
use serving_core::ids::{ChoiceIndex, RequestId};
use serving_core::request::{FinishReason, Lane, Request};
use serving_core::stage::{Stage, StageTimings};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use super::byte_model::Bytes;
use super::script::{Script, Step, say};

pub const MODEL: &str = "tiny";
/// Three quarters of them for one address.
pub const CONNECTIONS_MAX: usize = 64;
pub const MAX_MODEL_TOKENS: u32 = 512;
pub const BODY_BYTES_MAX: usize = 256 << 10;
/// One body of the largest size, and not two.
pub const BYTES_IN_FLIGHT_MAX: usize = BODY_BYTES_MAX;
/// Whose pages may use the server.
pub const CHOSEN_ORIGIN: &str = "https://chat.example.com";

type Play = Box<dyn Fn(&Request) -> Script + Send + Sync>;

/// What the edge told the loop.
#[derive(Default)]
pub struct Heard {
    pub requests: Vec<Arc<Request>>,
    pub traceparents: Vec<Option<String>>,
    pub cancelled: Vec<RequestId>,
    pub finished: Vec<(ChoiceIndex, FinishReason)>,
}

struct Loop {
    play: Play,
    heard: Arc<Mutex<Heard>>,
    readiness: Mutex<Readiness>,
}

struct Control(Arc<Mutex<Heard>>);

impl RequestControl for Control {
    fn cancel(&self, id: RequestId) {
        self.0.lock().unwrap().cancelled.push(id);
    }
    fn finish_choice(&self, _id: RequestId, choice: ChoiceIndex, reason: FinishReason) {
        self.0.lock().unwrap().finished.push((choice, reason));
    }
}

#[async_trait::async_trait]
impl Submit for Loop {
    async fn submit(&self, submission: Submission) -> Result<RequestHandle, Rejected> {
        let id = submission.request.id;
        {
            let mut heard = self.heard.lock().unwrap();
            heard.requests.push(submission.request.clone());
            heard.traceparents.push(submission.traceparent.clone());
        }
        match (self.play)(&submission.request) {
            Script::Reject(rejected) => Err(rejected),
            Script::Play(steps) => {
                let (sender, events) = mpsc::channel(8);
                tokio::spawn(async move {
                    for step in steps {
                        let sent = match step {
                            Step::Event(event) => sender.send(event).await.is_ok(),
                            Step::Wait(gate) => gate.await.is_ok(),
                            Step::Hang => {
                                sender.closed().await;
                                false
                            }
                        };
                        if !sent {
                            return;
                        }
                    }
                });
                Ok(RequestHandle::new(id, events, Arc::new(Control(self.heard.clone()))))
            }
        }
    }
    fn readiness(&self) -> Readiness {
        self.readiness.lock().unwrap().clone()
    }
}

/// One ended request as the metrics saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    pub model: String,
    pub lane: Lane,
    pub outcome: String,
    pub finish: Option<&'static str>,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub ttft: Option<Duration>,
    pub e2e: Duration,
    pub last_token_to_end: Option<Duration>,
    pub stages: StageTimings,
    /// The limits that it broke; `None` when it was not judged.
    pub breached: Option<Vec<&'static str>>,
}

#[derive(Default)]
pub struct Recorded {
    pub ended: Mutex<Vec<Ended>>,
    pub gaps: Mutex<u32>,
    pub panics: Mutex<u32>,
    /// The limits of keys that refused a request.
    pub key_refusals: Mutex<Vec<&'static str>>,
    /// How many are in each stage of the edge that any has ever been in.
    pub in_stages: Mutex<BTreeMap<Stage, i32>>,
}

impl EdgeMetrics for Recorded {
    fn request_ended(&self, ended: &EndedRequest<'_>) {
        self.ended.lock().unwrap().push(Ended {
            model: ended.model.to_owned(),
            lane: ended.lane,
            outcome: ended.outcome.to_owned(),
            finish: ended.finish,
            prompt_tokens: ended.prompt_tokens,
            output_tokens: ended.output_tokens,
            ttft: ended.ttft,
            e2e: ended.e2e,
            last_token_to_end: ended.last_token_to_end,
            stages: ended.stages.clone(),
            breached: ended
                .slo
                .map(|(_, breaches)| breaches.iter().map(|breach| breach.name()).collect()),
        });
    }
    fn token_gap(&self, _lane: Lane, _gap: Duration, trace_id: &str) {
        assert_eq!(trace_id.len(), 32, "{trace_id}");
        *self.gaps.lock().unwrap() += 1;
    }
    fn stage_entered(&self, stage: Stage) {
        *self.in_stages.lock().unwrap().entry(stage).or_default() += 1;
    }
    fn stage_left(&self, stage: Stage) {
        *self.in_stages.lock().unwrap().entry(stage).or_default() -= 1;
    }
    fn handler_panicked(&self) {
        *self.panics.lock().unwrap() += 1;
    }
    fn key_refused(&self, reason: &'static str) {
        self.key_refusals.lock().unwrap().push(reason);
    }
    fn render(&self) -> String {
        "baton_test 1\n# EOF\n".to_owned()
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    pub address: SocketAddr,
    pub heard: Arc<Mutex<Heard>>,
    pub metrics: Arc<Recorded>,
    control: Arc<Loop>,
    stop: Option<oneshot::Sender<()>>,
    pub served: tokio::task::JoinHandle<()>,
}

const REACH: Reach = Reach {
    unsplit: None,
    suspected: Vec::new(),
    prefill_nodes: 1,
    decode_nodes: 1,
    usable_pairs: 1,
};

impl Server {
    pub async fn start(play: impl Fn(&Request) -> Script + Send + Sync + 'static) -> Self {
        Self::start_with(play, |_| {}).await
    }

    /// With a folder of reports for `/admin/reports`.
    pub async fn start_with_reports(
        play: impl Fn(&Request) -> Script + Send + Sync + 'static,
        reports_dir: Option<PathBuf>,
    ) -> Self {
        Self::start_with(play, |parts| {
            if let Some(insight) = Arc::get_mut(&mut parts.insight) {
                insight.reports_dir = reports_dir;
            }
        })
        .await
    }

    /// In front of a coordinator's nodes. Requests do not reach them.
    pub async fn in_front_of(cluster: &Coordinator) -> Self {
        Self::start_with(
            |_| Script::Play(Vec::new()),
            |parts| {
                if let Some(insight) = Arc::get_mut(&mut parts.insight) {
                    insight.cluster = Some(cluster.metrics.clone());
                }
            },
        )
        .await
    }

    /// With other parts than those of most tests.
    pub async fn start_with(
        play: impl Fn(&Request) -> Script + Send + Sync + 'static,
        change: impl FnOnce(&mut AppParts),
    ) -> Self {
        Self::start_behind(None, play, change).await
    }

    /// With a certificate for clients.
    pub async fn start_behind(
        certificate: Option<ServerCertificate>,
        play: impl Fn(&Request) -> Script + Send + Sync + 'static,
        change: impl FnOnce(&mut AppParts),
    ) -> Self {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let metrics = Arc::new(Recorded::default());
        let control = Arc::new(Loop {
            play: Box::new(play),
            heard: heard.clone(),
            readiness: Mutex::new(Readiness::Ready(REACH)),
        });
        let chosen: Vec<WebOrigin> = vec![CHOSEN_ORIGIN.parse().expect("an origin")];
        let text = TextModel::new(
            Box::new(Bytes::new()),
            MAX_MODEL_TOKENS,
            "own-name-of-tiny".into(),
            "fp-1".into(),
        );
        let mut parts = AppParts {
            submit: control.clone(),
            text: Arc::new(text),
            served_models: vec![MODEL.to_owned(), "org/alias".to_owned()],
            metrics: metrics.clone(),
            limits: ApiLimits {
                body_bytes_max: BODY_BYTES_MAX,
                request_bytes_in_flight_max: BYTES_IN_FLIGHT_MAX,
                request_time_limit: Duration::from_secs(60),
            },
            insight: Arc::default(),
            guard: HttpGuard::default().with_origins(&chosen),
            cors_origins: chosen,
            keys: None,
        };
        change(&mut parts);
        let state = AppState::new(parts);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async move {
            let _ = stopped.await;
        };
        let served = tokio::spawn(serve_http(
            HttpPort {
                listener,
                connections_max: CONNECTIONS_MAX,
                certificate,
            },
            router(state),
            shutdown,
            Duration::from_millis(500),
        ));
        Self {
            address,
            heard,
            metrics,
            control,
            stop: Some(stop),
            served,
        }
    }

    /// Answers every request with this text, one byte a token, then the end token.
    pub async fn saying(text: &'static str) -> Self {
        Self::start(move |request| Script::Play(say(request, |_| text.to_owned()))).await
    }

    pub fn set_readiness(&self, readiness: Readiness) {
        *self.control.readiness.lock().unwrap() = readiness;
    }
    pub fn stop(&mut self) {
        self.stop.take();
    }
    /// The text of the last request's prompt: a token is a byte here.
    pub fn prompt_text(&self) -> String {
        String::from_utf8(self.request().prompt.iter().map(|id| id.0 as u8).collect()).unwrap()
    }
    pub fn request(&self) -> Arc<Request> {
        self.heard
            .lock()
            .unwrap()
            .requests
            .last()
            .expect("a request was submitted")
            .clone()
    }
    pub fn submitted(&self) -> usize {
        self.heard.lock().unwrap().requests.len()
    }
    /// The metrics' view of the only request, once it has ended.
    pub async fn ended(&self) -> Ended {
        until(|| self.metrics.ended.lock().unwrap().first().cloned()).await
    }
}

/// Polls until there is something, or fails.
pub async fn until<T>(mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + super::client::PATIENCE;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "it never came");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
