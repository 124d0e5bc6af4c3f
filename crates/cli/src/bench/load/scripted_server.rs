//! A server whose delays are known: it answers as told and writes down when it sent each token. Tests and
//! `crates/cli/examples/client_accuracy.rs` compare what the client measured with it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use futures::stream;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep_until};

use super::processes::monotonic_ns;

const BODY_BYTES_MAX: usize = 64 << 20;
const MODEL: &str = "scripted";

/// How one request is answered.
#[derive(Clone, Debug)]
pub struct Script {
    /// 200, or the status of a refusal.
    pub status: u16,
    /// From the request's arrival to the first token.
    pub first: Duration,
    /// Between two tokens.
    pub gap: Duration,
    pub end: End,
}

/// How an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With usage and `[DONE]`.
    Whole,
    /// The connection closes after so many tokens.
    Breaks { after: u32 },
    /// An error event after so many tokens.
    Error { after: u32 },
}

/// Chooses the script of each request, from its x-request-id and its number among all requests.
pub type Director = dyn Fn(&str, u64) -> Script + Send + Sync;

/// What the server saw of one request. Times are of `CLOCK_MONOTONIC`, which all processes of a machine share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    pub arrived_ns: u64,
    /// When each token was handed to the socket.
    pub sent_ns: Vec<u64>,
    pub body: Value,
}

#[derive(Debug)]
pub struct ScriptedServer {
    pub address: SocketAddr,
    seen: Arc<Mutex<BTreeMap<String, Seen>>>,
    task: tokio::task::JoinHandle<()>,
}

impl ScriptedServer {
    /// Serves until it is dropped. During `stall` (from and until, counted from now) no token is sent.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn start(
        address: SocketAddr,
        director: Arc<Director>,
        stall: Option<(Duration, Duration)>,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .context("cannot bind the scripted server")?;
        let address = listener.local_addr()?;
        let seen = Arc::new(Mutex::new(BTreeMap::new()));
        let now = Instant::now();
        let stage = Arc::new(Stage {
            director,
            stall: stall.map(|(from, until)| (now + from, now + until)),
            seen: Arc::clone(&seen),
            count: std::sync::atomic::AtomicU64::new(0),
        });
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let _ = socket.set_nodelay(true);
                let stage = Arc::clone(&stage);
                let service = service_fn(move |request| Arc::clone(&stage).answer(request));
                // A connection that breaks is what some scripts ask for.
                connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(socket), service));
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { address, seen, task })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What it has seen so far, by x-request-id.
    pub fn seen(&self) -> BTreeMap<String, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

struct Stage {
    director: Arc<Director>,
    stall: Option<(Instant, Instant)>,
    seen: Arc<Mutex<BTreeMap<String, Seen>>>,
    count: std::sync::atomic::AtomicU64,
}

/// One answer that is being sent.
struct Playing {
    stage: Arc<Stage>,
    id: String,
    script: Script,
    is_chat: bool,
    prompt_tokens: u64,
    tokens: u32,
    sent: u32,
    next_at: Instant,
    is_over: bool,
}

impl Stage {
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let arrived_ns = monotonic_ns();
        let arrived = Instant::now();
        match request.uri().path() {
            "/v1/models" => {
                return Ok(json_answer(
                    StatusCode::OK,
                    &json!({"data": [{"id": MODEL, "root": MODEL}]}),
                ));
            }
            "/seen" => return Ok(json_answer(StatusCode::OK, &self.seen_page())),
            "/v1/completions" | "/v1/chat/completions" => {}
            _ => {
                return Ok(json_answer(
                    StatusCode::NOT_FOUND,
                    &json!({"error": {"message": "no such page"}}),
                ));
            }
        }
        let is_chat = request.uri().path().contains("chat");
        let id = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
        let number = self.count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let id = id.map_or_else(|| format!("request-{number}"), str::to_owned);
        let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
        let body: Value = body
            .ok()
            .and_then(|body| serde_json::from_slice(&body.to_bytes()).ok())
            .unwrap_or_default();
        let script = (self.director)(&id, number);
        let tokens = body["max_tokens"]
            .as_u64()
            .or(body["max_completion_tokens"].as_u64())
            .unwrap_or(16);
        let prompt_tokens = body["prompt"].as_array().map_or(1, Vec::len) as u64;
        let seen = Seen {
            arrived_ns,
            sent_ns: Vec::with_capacity(tokens as usize),
            body,
        };
        self.seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id.clone(), seen);
        if script.status != 200 {
            let status = StatusCode::from_u16(script.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            return Ok(json_answer(
                status,
                &json!({"error": {"message": "as the script says"}}),
            ));
        }
        let playing = Playing {
            next_at: arrived + script.first,
            stage: self,
            id,
            script,
            is_chat,
            prompt_tokens,
            tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            sent: 0,
            is_over: false,
        };
        let frames = stream::unfold(playing, Playing::next);
        let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
        let kind = header::HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        Ok(response)
    }

    fn seen_page(&self) -> Value {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let pages = seen.iter();
        let pages = pages.map(|(id, seen)| {
            (
                id.clone(),
                json!({"arrived_ns": seen.arrived_ns, "sent_ns": seen.sent_ns}),
            )
        });
        Value::Object(pages.collect())
    }
}

type Piece = Result<Frame<Bytes>, std::io::Error>;

impl Playing {
    /// The next event, when its time has come.
    async fn next(mut self) -> Option<(Piece, Playing)> {
        if self.is_over {
            return None;
        }
        let (limit, is_whole) = match self.script.end {
            End::Whole => (self.tokens, true),
            End::Breaks { after } | End::Error { after } => (after.min(self.tokens), false),
        };
        if self.sent < limit {
            let stalled_until = self
                .stage
                .stall
                .filter(|(from, until)| (*from..*until).contains(&self.next_at));
            self.next_at = stalled_until.map_or(self.next_at, |(_, until)| until);
            sleep_until(self.next_at).await;
            self.sent += 1;
            self.next_at += self.script.gap;
            let mut event = self.token(is_whole && self.sent == limit);
            if is_whole && self.sent == limit {
                event.push_str(&self.last_words());
                self.is_over = true;
            }
            let mut seen = self.stage.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(seen) = seen.get_mut(&self.id) {
                seen.sent_ns.push(monotonic_ns());
            }
            drop(seen);
            return Some((Ok(Frame::data(event.into())), self));
        }
        self.is_over = true;
        let piece = match self.script.end {
            End::Error { .. } => Ok(Frame::data(
                "data: {\"error\":{\"message\":\"as the script says\"}}\n\n".into(),
            )),
            _ => Err(std::io::Error::other("as the script says")),
        };
        Some((piece, self))
    }

    /// The event of a token, in the form of vLLM's server.
    fn token(&self, is_last: bool) -> String {
        let reason = if is_last { "\"length\"" } else { "null" };
        let (text, number) = (
            if self.is_chat {
                "\"delta\":{\"content\":\" tok\"}"
            } else {
                "\"text\":\" tok\""
            },
            self.sent,
        );
        format!(
            "data: {{\"id\":\"{}\",\"object\":\"text_completion\",\"created\":{number},\"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,{text},\"logprobs\":null,\"finish_reason\":{reason}}}],\"usage\":null}}\n\n",
            self.id
        )
    }

    fn last_words(&self) -> String {
        let (prompt, output) = (self.prompt_tokens, self.sent);
        format!(
            "data: {{\"id\":\"{}\",\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{output},\"total_tokens\":{}}}}}\n\ndata: [DONE]\n\n",
            self.id,
            prompt + u64::from(output)
        )
    }
}

fn json_answer(status: StatusCode, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
