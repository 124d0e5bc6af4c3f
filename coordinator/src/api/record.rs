//! The facts of one HTTP request, gathered while it runs. Its end writes the access line and the metrics.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::http::{HeaderMap, HeaderName};
use opentelemetry::KeyValue;
use serving_core::request::{Lane, QueueShare, RejectReason};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::access_line::{Line, generation_line, plain_line};
use super::connection::{ConnectionTimes, Cut};
use super::error::ApiError;
use super::facts::{Facts, Generation, Reader, ToldError};
use super::limits::{LABEL_CHARS_MAX, REQUEST_TIMEOUT_MAX};
use super::metrics::{EdgeMetrics, EndedRequest};
use super::remember::{End, Known, remember};
use super::trace::{end_span, finish_root};
use super::trace_context::TraceContext;
use super::traces::took_part;
use crate::insight::Insight;
use crate::keys::{HeldKey, TenantSalt};
use crate::records::Running;
use crate::records::closing::Closing;
use crate::records::shape::{Detail, ms};
use crate::records::stalls::{Stall, StallCause};
use crate::slo::{SloProfile, SloRules};

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const LANE: &str = "x-lane";
const SLO: &str = "x-slo";
const TIMEOUT_MS: &str = "x-request-timeout-ms";
/// nginx's number for "client closed the request". It is only logged.
const STATUS_CLIENT_CLOSED: u16 = 499;
const STATUS_INTERNAL: u16 = 500;
const STATUS_UNAVAILABLE: u16 = 503;
/// What is kept of a request's first line. No method that is answered is longer, and few paths are.
const METHOD_CHARS_MAX: usize = 16;
const PATH_CHARS_MAX: usize = 256;

/// What a client may say about a request in its headers.
#[derive(Clone, Debug)]
pub struct RequestLabels {
    pub lane: Lane,
    pub slo: Option<Arc<SloProfile>>,
    pub time_limit: Duration,
    /// Whose cached prefixes it may use: its key says that, no header.
    pub tenant: Option<TenantSalt>,
    /// Whose turn in the queue it takes. Its key says that, too.
    pub share: Option<QueueShare>,
}

impl RequestLabels {
    pub(super) fn new(
        headers: &HeaderMap,
        key: Option<&HeldKey>,
        rules: &SloRules,
        default_limit: Duration,
    ) -> Result<Self, ApiError> {
        let lane = label(headers, LANE, "interactive or batch", |name| {
            Lane::ALL.into_iter().find(|lane| lane.name() == name)
        })?;
        let profiles = format!("one of {}", rules.config().names());
        let slo = label(headers, SLO, &profiles, |name| rules.config().by_name(name).cloned())?;
        let limits = format!("a whole number from 1 to {}", REQUEST_TIMEOUT_MAX.as_millis());
        let time_limit = label(headers, TIMEOUT_MS, &limits, |text| {
            let limit = Duration::from_millis(text.parse().ok()?);
            (!limit.is_zero() && limit <= REQUEST_TIMEOUT_MAX).then_some(limit)
        })?;
        Ok(Self {
            lane: allowed_lane(lane, key)?,
            slo,
            time_limit: time_limit.unwrap_or(default_limit),
            tenant: key.map(|key| key.tenant),
            share: key.map(|key| key.share),
        })
    }
}

/// A key may be for one lane only. Its requests wait in that lane, also if they name no lane.
fn allowed_lane(said: Option<Lane>, key: Option<&HeldKey>) -> Result<Lane, ApiError> {
    let only = key.and_then(|key| key.entry.lane);
    match (said, only) {
        (Some(said), Some(only)) if said != only => Err(ApiError::lane_missing(said, only)),
        _ => Ok(said.or(only).unwrap_or(Lane::Interactive)),
    }
}

/// The header `name`, if the client sent it.
fn label<T>(
    headers: &HeaderMap,
    name: &'static str,
    wanted: &str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, ApiError> {
    let Some(value) = headers.get(name) else {
        return Ok(None);
    };
    let read = value.to_str().ok().and_then(read);
    read.map(Some)
        .ok_or_else(|| ApiError::invalid(name, format!("The header `{name}` must be {wanted}.")))
}

/// The client's `x-request-id`, made fit for a header and a log line.
pub fn request_id(headers: &HeaderMap) -> String {
    headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= LABEL_CHARS_MAX && id.bytes().all(|b| b.is_ascii_graphic()))
        .map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}

/// The record is shared by the handler, the answer's body and the middleware. The last one to drop it writes the access
/// line. When no outcome was set by then, the client has left, or the server has broken the answer off.
pub struct RequestRecord {
    pub request_id: String,
    pub received_at: Instant,
    /// When the head was read. The time limit counts from here: `received_at` may be earlier than the request, where the one before it on
    /// the connection was answered before its body had been read.
    head_read_at: Instant,
    pub connection: Option<Arc<ConnectionTimes>>,
    /// What the client sent.
    pub incoming_trace: Option<TraceContext>,
    cut: Cut,
    metrics: Arc<dyn EdgeMetrics>,
    insight: Arc<Insight>,
    tokens_out: AtomicU32,
    answered_at: OnceLock<Instant>,
    facts: Mutex<Facts>,
    /// For an answer whose nodes report later: dropped after the record has ended.
    closing: OnceLock<Closing>,
}

/// What the middleware knows when a request comes in.
pub struct Arrival<'a> {
    pub method: &'a str,
    pub path: &'a str,
    pub headers: &'a HeaderMap,
    pub received_at: Instant,
    pub connection: Option<Arc<ConnectionTimes>>,
    pub cut: Cut,
}

impl RequestRecord {
    pub fn new(arrival: Arrival<'_>, metrics: Arc<dyn EdgeMetrics>, insight: Arc<Insight>) -> Arc<Self> {
        let incoming = arrival
            .headers
            .get("traceparent")
            .and_then(|value| value.to_str().ok())
            .and_then(TraceContext::parse);
        Arc::new(Self {
            request_id: request_id(arrival.headers),
            received_at: arrival.received_at,
            head_read_at: Instant::now(),
            connection: arrival.connection,
            incoming_trace: incoming,
            cut: arrival.cut,
            metrics,
            insight,
            tokens_out: AtomicU32::new(0),
            answered_at: OnceLock::new(),
            closing: OnceLock::new(),
            facts: Mutex::new(Facts {
                // Both are the client's text, of any length that fits its head.
                method: arrival.method.chars().take(METHOD_CHARS_MAX).collect(),
                path: arrival.path.chars().take(PATH_CHARS_MAX).collect(),
                status: None,
                outcome: None,
                error: None,
                key: None,
                in_use: None,
                generation: None,
                trace: TraceContext::of_root(&Span::none(), incoming),
            }),
        })
    }

    /// The answer is an error.
    pub fn failed(&self, error: &ApiError) {
        let short = |text: &String, most: usize| text.chars().take(most).collect();
        let told = ToldError {
            code: error.code,
            param: error.param.as_ref().map(|param| short(param, 64)),
            // A message may quote the client's text. The client gets it; no log line does.
            message: match error.outcome {
                "invalid_request" => {
                    let field = error
                        .param
                        .as_ref()
                        .map_or("the body".to_owned(), |param| short(param, 64));
                    format!("{} in {field}", error.code.unwrap_or("an invalid value"))
                }
                _ => short(&error.message, 256),
            },
        };
        let mut facts = self.facts();
        facts.outcome = Some(error.outcome);
        facts.error = Some(told);
    }

    /// An error as the caller may see it. It has the names of nodes where no keys are needed, and for operators.
    pub fn told(&self, error: ApiError) -> ApiError {
        match self.facts().reader() {
            Reader::Client => error.without_names(),
            Reader::Operator => error,
        }
    }

    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `change` on the facts of the generation, if this request is one.
    pub fn update(&self, change: impl FnOnce(&mut Generation)) {
        if let Some(generation) = self.facts().generation.as_mut() {
            change(generation);
        }
    }

    pub fn metrics(&self) -> &dyn EdgeMetrics {
        &*self.metrics
    }

    pub fn insight(&self) -> &Insight {
        &self.insight
    }

    pub fn tokens_out(&self) -> u32 {
        self.tokens_out.load(Ordering::Relaxed)
    }

    /// A token's chunk went to the connection. Returns true for the first one.
    pub fn token_left(&self) -> bool {
        self.tokens_out.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// The client has its whole answer. What comes later is not part of its time.
    pub fn answered(&self) {
        let now = Instant::now();
        if self.answered_at.set(now).is_err() {
            return;
        }
        let mut facts = self.facts();
        let in_use = facts.in_use.take();
        if let Some(generation) = &facts.generation {
            end_span(generation);
            // A request that was turned away has used nothing.
            if let Some(in_use) = in_use.filter(|_| self.has_run(generation)) {
                let answer_tokens = generation.output_tokens.max(self.tokens_out());
                in_use.used_tokens(generation.prompt_tokens.saturating_add(answer_tokens), now);
            }
        }
    }

    fn has_run(&self, generation: &Generation) -> bool {
        generation.has_been_placed || self.tokens_out() > 0
    }

    /// The record will end later, with the nodes' reports. Returns false when too many records wait already.
    pub fn close_later(&self) -> bool {
        let seq = self.facts().generation.as_ref().map(|generation| generation.seq);
        let closing = seq.and_then(|seq| self.insight.records.closing.begin(seq));
        closing.is_some_and(|closing| self.closing.set(closing).is_ok())
    }

    /// How much of the request's time limit has passed.
    pub fn waited(&self) -> Duration {
        self.head_read_at.elapsed()
    }

    /// The time from the first byte to the end of the answer, or to now.
    pub fn e2e(&self) -> Duration {
        let end = self.answered_at.get().copied().unwrap_or_else(Instant::now);
        end.saturating_duration_since(self.received_at)
    }

    /// From now on the request can be looked at and is in the list.
    pub fn begin(self: &Arc<Self>, generation: Generation) {
        let seq = generation.seq;
        self.facts().generation = Some(generation);
        let as_running: Arc<dyn Running> = self.clone();
        self.insight.records.began(seq, Arc::downgrade(&as_running));
        self.tell();
    }

    /// The end of an answer that was broken off: by a panic, by the drain or by the client. The status is the one of an answer that has
    /// not begun.
    fn broken_off(&self) -> End {
        let (outcome, status) = if std::thread::panicking() {
            ("internal", STATUS_INTERNAL)
        } else if self.cut.has_begun() {
            (RejectReason::Draining.name(), STATUS_UNAVAILABLE)
        } else {
            ("cancelled", STATUS_CLIENT_CLOSED)
        };
        End { outcome, status }
    }

    fn known<'a>(&'a self, facts: &'a Facts) -> Known<'a> {
        Known {
            facts,
            request_id: &self.request_id,
            received_at: self.received_at,
            e2e: self.e2e(),
            tokens_out: self.tokens_out(),
            insight: &self.insight,
        }
    }

    /// Tells followers of the records the state of this request.
    pub fn tell(&self) {
        if self.insight.records.has_followers()
            && let Some(detail) = self.detail()
        {
            self.insight.records.tell(detail.summary);
        }
    }
}

impl Running for RequestRecord {
    fn detail(&self) -> Option<Detail> {
        let facts = self.facts();
        let generation = facts.generation.as_ref()?;
        Some(remember(&self.known(&facts), generation, None).detail)
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        self.answered();
        let e2e = self.e2e();
        // A panic in a handler is caught before its record ends. This one was in the body of a stream, which nothing catches.
        if std::thread::panicking() {
            self.metrics.handler_panicked();
        }
        let broken_off = self.broken_off();
        let facts = std::mem::take(self.facts.get_mut().unwrap_or_else(PoisonError::into_inner));
        let outcome = facts.outcome.unwrap_or(broken_off.outcome);
        let status = facts.status.unwrap_or(broken_off.status);
        let line = Line {
            facts: &facts,
            request_id: &self.request_id,
            status,
            outcome,
            e2e,
        };
        match &facts.generation {
            None => plain_line(&line),
            Some(generation) => self.generation_ended(&line, generation),
        }
    }
}

impl RequestRecord {
    fn generation_ended(&self, line: &Line<'_>, generation: &Generation) {
        let (outcome, status) = (line.outcome, line.status);
        let remembered = remember(&self.known(line.facts), generation, Some(End { outcome, status }));
        let causes: Vec<StallCause> = remembered.stalls.iter().map(|stall| stall.cause).collect();
        self.metrics.request_ended(&EndedRequest {
            model: generation.model.as_deref().unwrap_or("unknown"),
            lane: generation.lane,
            outcome,
            finish: generation.finish,
            ttft: generation.ttft,
            tpot: generation.tpot,
            last_token_to_end: generation.last_token_to_end,
            e2e: line.e2e,
            has_run: self.has_run(generation),
            prompt_tokens: generation.prompt_tokens,
            output_tokens: generation.output_tokens,
            stages: &generation.stages(),
            trace_id: &line.facts.trace.trace_id_hex(),
            stalls: &causes,
            slo: remembered
                .breaches
                .as_ref()
                .map(|breaches| (generation.slo.name.as_str(), breaches.as_slice())),
        });
        if let Some(breaches) = &remembered.breaches {
            let whose = (generation.slo.name.as_str(), generation.lane);
            self.insight.slo.add(whose, breaches, Instant::now());
        }
        for stall in &remembered.stalls {
            generation
                .span
                .add_event_with_timestamp("stall", unix_time_of(stall.ended_at), stall_attributes(stall));
        }
        let error = line.facts.error.as_ref().map(|error| error.message.as_str());
        finish_root(generation, (outcome, error), line.e2e);
        let is_broken = remembered
            .breaches
            .as_ref()
            .is_some_and(|breaches| !breaches.is_empty());
        if is_broken && !line.facts.trace.is_sampled {
            let nodes = took_part(&remembered.detail).into_iter().map(str::to_owned).collect();
            let trace = line.facts.trace.trace_id.into();
            self.insight.export_anyway(trace, nodes);
        }
        generation_line(line, generation);
        self.insight.records.ended(remembered.detail);
    }
}

fn unix_time_of(instant: Instant) -> SystemTime {
    SystemTime::now() - instant.elapsed()
}

fn stall_attributes(stall: &Stall) -> Vec<KeyValue> {
    vec![
        KeyValue::new("baton.stall.cause", stall.cause.name()),
        KeyValue::new("baton.stall.gap_ms", ms(stall.gap)),
        KeyValue::new("baton.stall.token", i64::from(stall.token)),
        KeyValue::new("baton.stall.words", stall.words.clone()),
    ]
}
