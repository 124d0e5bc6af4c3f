//! A served router on a free port, with a byte tokenizer and a control loop that plays what the test wrote.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use coordinator::Coordinator;
use coordinator::api::{ApiLimits, AppParts, AppState, EdgeMetrics, EndedRequest, HttpPort, router, serve_http};
use coordinator::request_handle::{
    ClientEvent, Placement, Readiness, Rejected, RequestControl, RequestHandle, RequestSummary, Submission, Submit,
    TokenTimes,
};
use coordinator::text::{Chat, TextCodec, TextError, TextModel, TextOf, TokenizerInfo, ToolFormat};
use identity::ServerCertificate;
use service_runtime::http_guard::{HttpGuard, WebOrigin};
use serving_core::cluster::Reach;
use serving_core::ids::{Attempt, ChoiceIndex, NodeName, OutputIndex, RequestId, TokenId};
use serving_core::request::{FinishReason, Lane, Request, TokenEvent, TokenLogprobs};
use serving_core::stage::{Stage, StageTimings};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

pub const MODEL: &str = "tiny";
pub const END: TokenId = TokenId(256);
pub const START: TokenId = TokenId(257);
/// Beyond the vocabulary: whoever reads its text panics.
pub const PANICS: TokenId = TokenId(4096);
/// Three quarters of them for one address.
pub const CONNECTIONS_MAX: usize = 64;
pub const MAX_MODEL_TOKENS: u32 = 512;
pub const BODY_BYTES_MAX: usize = 256 << 10;
/// One body of the largest size, and not two.
pub const BYTES_IN_FLIGHT_MAX: usize = BODY_BYTES_MAX;
/// Whose pages may use the server.
pub const CHOSEN_ORIGIN: &str = "https://chat.example.com";

/// One token per byte, two control tokens, one word.
struct Bytes {
    table: Vec<Vec<u8>>,
}

impl Bytes {
    fn new() -> Self {
        let mut table: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        table.extend([b"<end>".to_vec(), b"<start>".to_vec(), b"word".to_vec()]);
        Self { table }
    }
}

impl TextCodec for Bytes {
    /// `<end>` is found in texts; the other control token and the word are not.
    fn encode(&self, text: &str, _add_special: bool, tokens_max: usize) -> Result<Vec<TokenId>, TextError> {
        let bytes = |text: &str| -> Vec<TokenId> { text.bytes().map(|byte| TokenId(u32::from(byte))).collect() };
        let parts: Vec<Vec<TokenId>> = text.split("<end>").map(bytes).collect();
        let tokens = parts.join(&END);
        match tokens.len() > tokens_max {
            true => Err(TextError::TooLong { tokens_max }),
            false => Ok(tokens),
        }
    }
    fn hide_control(&self, text: &str, mark: char, _whose: TextOf) -> Option<String> {
        text.contains("<end>")
            .then(|| text.replace("<end>", &format!("<{mark}end>")))
    }
    fn encode_hidden(&self, text: &str, mark: char, limits: (bool, usize)) -> Result<Vec<TokenId>, TextError> {
        let mark = TokenId(u32::from(mark));
        let marked = text.chars().map(|c| TokenId(u32::from(c)));
        let plain: Vec<TokenId> = marked.filter(|id| *id != mark).collect();
        match plain.len() > limits.1 {
            true => Err(TextError::TooLong { tokens_max: limits.1 }),
            false => Ok(plain),
        }
    }
    fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        assert!(token != PANICS, "the test asked for a panic");
        self.table.get(token.0 as usize).map(Vec::as_slice)
    }
    fn is_special(&self, token: TokenId) -> bool {
        token == END || token == START
    }
    fn vocab_size(&self) -> u32 {
        self.table.len() as u32
    }
    fn end_tokens(&self) -> &[TokenId] {
        &[END]
    }
    fn tool_format(&self) -> Option<ToolFormat> {
        Some(ToolFormat::Tagged)
    }
    fn info(&self) -> TokenizerInfo {
        TokenizerInfo {
            begin: Some("<start>".to_owned()),
            end: Some("<end>".to_owned()),
            chat_template: Some("{{ messages }}".to_owned()),
            ..TokenizerInfo::default()
        }
    }
    fn render_chat(&self, chat: &Chat, add_generation_prompt: bool) -> Result<String, TextError> {
        let turn = |turn: &serde_json::Value| {
            let (role, content) = (turn["role"].as_str().unwrap(), turn["content"].as_str().unwrap());
            assert!(content != "panic", "the test asked for a panic");
            let calls = turn.get("tool_calls").map_or(String::new(), ToString::to_string);
            format!("[{role}]{content}{calls}")
        };
        let names = chat
            .tools
            .iter()
            .map(|tool| format!("({})", tool["function"]["name"].as_str().unwrap()));
        let body: String = names.chain(chat.messages.iter().map(turn)).collect();
        Ok(if add_generation_prompt {
            body + "[assistant]"
        } else {
            body
        })
    }
}

/// What the scripted loop does with one request.
pub enum Script {
    Reject(Rejected),
    Play(Vec<Step>),
}

pub enum Step {
    Event(ClientEvent),
    /// Waits until the test lets it go on.
    Wait(oneshot::Receiver<()>),
    /// Keeps the stream open until the edge drops it.
    Hang,
}

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

pub fn placed() -> Step {
    Step::Event(ClientEvent::Placed(Placement {
        attempt: Attempt(0),
        prefill_node: Some(NodeName::new("prefill-0")),
        decode_node: Some(NodeName::new("decode-0")),
        route_reason: "least_loaded".to_owned(),
        local_prefill: None,
        queued_for: Duration::from_millis(7),
    }))
}

/// One token; its logprobs, where asked for, are made from its id so that a test can foretell them.
/// `place`: choice and index.
pub fn token(request: &Request, place: (u32, u32), token: TokenId, finish: Option<FinishReason>) -> Step {
    let event = TokenEvent {
        choice: ChoiceIndex(place.0),
        index: OutputIndex(place.1),
        token,
        logprobs: request.logprobs.map(|k| logprobs(token, k)),
        finish,
    };
    Step::Event(ClientEvent::Token(event, TokenTimes::received(Instant::now())))
}

pub fn logprobs(token: TokenId, k: u32) -> TokenLogprobs {
    let top = (0..k)
        .map(|rank| (TokenId(b'a'.into()), rank))
        .map(|(a, rank)| (TokenId(a.0 + rank), -1.0 - rank as f32));
    TokenLogprobs {
        logprob: -(token.0 as f32) / 100.0,
        top: top.collect(),
    }
}

/// What a coordinator tells of a request before the nodes' last reports.
pub fn known() -> Step {
    Step::Event(ClientEvent::Known(Box::new(RequestSummary {
        timings: StageTimings(vec![(Stage::Queue, Duration::from_micros(10))]),
        cached_tokens: 3,
        attempts: 1,
        ..RequestSummary::default()
    })))
}

pub fn done() -> Step {
    let timings = StageTimings(vec![
        (Stage::Queue, Duration::from_micros(10)),
        (Stage::PrefillForward, Duration::from_micros(20)),
        (Stage::Decode, Duration::from_micros(30)),
    ]);
    Step::Event(ClientEvent::Done(Box::new(RequestSummary {
        timings,
        cached_tokens: 3,
        kv_bytes: 4096,
        transfer: Duration::from_micros(1500),
        transport: Some("grpc".to_owned()),
        kv_hashes: vec![0xab, 0x1_0000_0000],
        attempts: 1,
        ..RequestSummary::default()
    })))
}

/// Each choice says its text byte by byte and ends with the end token (or by length, when the budget is short).
pub fn say(request: &Request, text: impl Fn(u32) -> String) -> Vec<Step> {
    let mut steps = vec![placed()];
    if let Some(k) = request.prompt_logprobs {
        let tokens = request.prompt.iter().skip(1).map(|id| logprobs(*id, k)).collect();
        steps.push(Step::Event(ClientEvent::PromptLogprobs {
            first_position: 1,
            tokens,
        }));
    }
    let budget = request.stop.max_tokens;
    for choice in 0..request.choice_count {
        let mut tokens: Vec<TokenId> = text(choice).bytes().map(|byte| TokenId(u32::from(byte))).collect();
        tokens.push(END);
        for (index, id) in (0..budget).zip(tokens) {
            let finish = match id {
                END => Some(FinishReason::EndToken),
                _ if index + 1 == budget => Some(FinishReason::Length),
                _ => None,
            };
            steps.push(token(request, (choice, index), id, finish));
        }
    }
    steps.push(done());
    steps
}
