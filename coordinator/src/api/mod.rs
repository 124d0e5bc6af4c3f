//! The HTTP edge: OpenAI's API in, validated requests to the control loop, tokens back as JSON or events.
//!
//! Read `generate` first: it is the path of a completion from body to answer. `request`, `prompt` and `prepare` turn
//! JSON into requests, `run` merges the events that come back, `reply` and `sse` give them their looks.

mod access;
mod access_line;
mod admin;
mod answering;
mod body;
mod cache;
mod calls;
mod connection;
mod console;
mod constraint;
mod content;
mod error;
mod event_frame;
mod events;
mod facts;
mod form;
mod forms;
mod generate;
mod given_chat;
mod guard;
mod info;
mod json_tree;
mod late;
mod limits;
mod logprobs;
mod long_text;
mod metrics;
mod models;
mod nodes;
mod openapi;
mod pace;
mod places;
mod prepare;
mod probes;
mod prompt;
mod rates;
mod record;
mod remember;
mod reply;
mod reports;
mod request;
mod responses;
mod routes;
mod run;
mod server;
mod session;
mod shapes;
mod sse;
#[cfg(test)]
mod tests;
mod tokenize;
mod tools;
mod trace;
mod trace_context;
mod traces;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use grammar::{Grammars, Vocabulary};
use service_runtime::freed_memory;
use service_runtime::http_guard::{HttpGuard, WebOrigin};
use tokio::sync::Semaphore;
use tower::Layer;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::normalize_path::NormalizePathLayer;

pub use access::Access;
#[cfg(test)]
pub(crate) use access::COUNTED_REFUSALS;
pub use metrics::{EdgeMetrics, EndedRequest, NoMetrics};
pub use routes::routes;
pub use server::{BindError, HttpPort, bind, serve_http};

use crate::insight::Insight;
use crate::keys::Keys;
use crate::request_handle::Submit;
use crate::text::TextModel;
use connection::{ConnectionTimes, Cut};
use error::ApiError;
use record::{Arrival, REQUEST_ID, RequestRecord};

const PROCESSING_MS: HeaderName = HeaderName::from_static("openai-processing-ms");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Limits of the edge that the operator sets.
#[derive(Clone, Debug)]
pub struct ApiLimits {
    pub body_bytes_max: usize,
    /// Budget for all bodies together that are being read or tokenized.
    pub request_bytes_in_flight_max: usize,
    /// Time from arrival to the last token, where `x-request-timeout-ms` does not say otherwise.
    pub request_time_limit: Duration,
}

/// What the edge is given by the process.
pub struct AppParts {
    pub submit: Arc<dyn Submit>,
    pub text: Arc<TextModel>,
    /// At least one name. Clients name one of them in `model`.
    pub served_models: Vec<String>,
    pub metrics: Arc<dyn EdgeMetrics>,
    pub limits: ApiLimits,
    pub insight: Arc<Insight>,
    /// Decides which hosts and origins may ask.
    pub guard: HttpGuard,
    /// Origins whose pages may read the answers.
    pub cors_origins: Vec<WebOrigin>,
    /// `None`: nobody is asked who they are.
    pub keys: Option<Keys>,
}

/// Shared by all handlers.
pub struct AppState {
    submit: Arc<dyn Submit>,
    text: Arc<TextModel>,
    served_models: Vec<String>,
    metrics: Arc<dyn EdgeMetrics>,
    limits: ApiLimits,
    insight: Arc<Insight>,
    guard: HttpGuard,
    cors_origins: Vec<WebOrigin>,
    keys: Option<Keys>,
    ignored_names: request::IgnoredNames,
    /// Long texts are tokenized on blocking threads, at most as many at once as there are cores.
    long_texts: Arc<Semaphore>,
    bodies: body::BodyBudget,
    grammars: Arc<Grammars>,
    compiling: Arc<Semaphore>,
    started_at_unix_s: u64,
    started_at: Instant,
}

impl AppState {
    pub fn new(parts: AppParts) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            grammars: Arc::new(grammars_of(parts.text.clone())),
            compiling: Arc::new(Semaphore::new(limits::COMPILED_AT_ONCE)),
            submit: parts.submit,
            text: parts.text,
            served_models: parts.served_models,
            metrics: parts.metrics,
            limits: parts.limits.clone(),
            insight: parts.insight,
            guard: parts.guard,
            cors_origins: parts.cors_origins,
            keys: parts.keys,
            ignored_names: request::IgnoredNames::default(),
            long_texts: Arc::new(Semaphore::new(cores)),
            bodies: body::BodyBudget::new(parts.limits.request_bytes_in_flight_max),
            started_at_unix_s: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            started_at: Instant::now(),
        }
    }

    /// Builds the vocabulary for grammars, in the background.
    pub fn read_vocabulary_soon(&self) {
        self.grammars.read_vocabulary_soon(freed_memory::give_back);
    }
}

/// The grammars of the served model. Its vocabulary is built after the start, or for the first one.
fn grammars_of(text: Arc<TextModel>) -> Grammars {
    Grammars::new(move || {
        let codec = text.codec();
        Vocabulary::new(codec.vocab_size(), codec.end_tokens(), |token| {
            Some((codec.token_bytes(token)?, codec.is_special(token)))
        })
    })
}

impl fmt::Debug for AppParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AppParts")
            .field("served_models", &self.served_models)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for AppState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AppState")
            .field("served_models", &self.served_models)
            .finish_non_exhaustive()
    }
}

/// The whole HTTP surface of a coordinator.
pub fn router(state: AppState) -> Router {
    surface(Arc::new(state), |_| true)
}

/// What is for clients, and everything, for operators: two addresses of one coordinator.
pub(crate) fn routers(state: AppState) -> (Router, Router) {
    let state = Arc::new(state);
    (surface(state.clone(), Access::is_for_clients), surface(state, |_| true))
}

/// The routes that are wanted, and what is around all of them.
fn surface(state: Arc<AppState>, is_wanted: fn(Access) -> bool) -> Router {
    let panics = state.metrics.clone();
    let cors = guard::cors(&state.cors_origins);
    let mut all = Router::new();
    for (path, access, methods) in routes::routes() {
        if !is_wanted(access) {
            continue;
        }
        let checked = match state.keys.is_some() && !access.is_open() {
            true => methods.route_layer(from_fn_with_state((state.clone(), access), access::check)),
            false => methods,
        };
        all = all.route(path, checked);
    }
    let routes = all
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(RequestDecompressionLayer::new())
        .layer(from_fn(body::known_encoding))
        .layer(CatchPanicLayer::custom(move |_| {
            panics.handler_panicked();
            ApiError::internal("The server made a mistake handling this request; it goes on serving others.")
                .into_response()
        }))
        .layer(from_fn_with_state(state.clone(), guard::guarded))
        .layer(tower::util::option_layer(cors))
        .layer(from_fn_with_state(state.clone(), edge))
        .with_state(state);
    // A path with a slash at its end is the path without it. This has to happen before a route is looked for.
    Router::new().fallback_service(NormalizePathLayer::trim_trailing_slash().layer(routes))
}

/// Wraps every request: its record, and the headers that every answer has.
async fn edge(State(state): State<Arc<AppState>>, mut request: Request, next: Next) -> Response {
    let connection = request.extensions().get::<Arc<ConnectionTimes>>().cloned();
    let received_at = connection
        .as_ref()
        .and_then(|connection| connection.first_read())
        .unwrap_or_else(Instant::now);
    let arrival = Arrival {
        method: request.method().as_str(),
        path: request.uri().path(),
        headers: request.headers(),
        received_at,
        connection,
        cut: request.extensions().get::<Cut>().cloned().unwrap_or_default(),
    };
    let record = RequestRecord::new(arrival, state.metrics.clone(), state.insight.clone());
    request.extensions_mut().insert(record.clone());
    let mut response = next.run(request).await;
    let status = response.status();
    let traceparent = {
        let mut facts = record.facts();
        facts.status = Some(status.as_u16());
        if facts.outcome.is_none() && (facts.generation.is_none() || status.is_server_error()) {
            facts.outcome = Some(plain_outcome(status));
        }
        facts.trace.to_string()
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (REQUEST_ID, record.request_id.clone()),
        (TRACEPARENT, traceparent),
        (PROCESSING_MS, received_at.elapsed().as_millis().to_string()),
    ] {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    }
    response
}

fn plain_outcome(status: StatusCode) -> &'static str {
    match status.as_u16() {
        ..400 => "ok",
        400..500 => "invalid_request",
        503 => "not_ready",
        _ => "internal",
    }
}

async fn unknown_route(request: Request) -> ApiError {
    let path = error::short(request.uri().path());
    let message = format!("There is no {path} here. The API is under /v1; see GET /v1/models.");
    ApiError::not_found("unknown_url", message)
}

async fn wrong_method(method: Method, request: Request) -> ApiError {
    let path = error::short(request.uri().path());
    let message = format!("{method} is not allowed on {path}; see the Allow header.");
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).with_code("method_not_allowed")
}
