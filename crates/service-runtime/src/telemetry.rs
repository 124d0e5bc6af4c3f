//! Logs on stderr, spans to an OTLP collector when the standard `OTEL_*` variables name one, and W3C propagation.
//!
//! Without an endpoint nothing is exported. But every process keeps its last spans, and every request has a trace id for
//! logs and the access log. With `OTEL_SDK_DISABLED=true` no span is kept, and only the access log has the id.
//!
//! Telemetry does not delay a request. A span that has ended waits for the thread that keeps it (`spans::recorder`); when
//! that queue is full, the caller keeps it. A span to be exported then waits for the exporter's own thread; when that queue
//! is full, the span is not exported, but still kept.

use std::io::IsTerminal as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::{
    Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, InstrumentationScope, KeyValue, Value, global};
use opentelemetry_sdk::trace::SdkTracerProvider;
use serving_core::time::Time;
use thiserror::Error;
use tracing::{Event, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::fmt::format::{Format, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::clock::Clock;
use crate::spans::flavor::OtelFlavor;
use crate::spans::{self, sampler};

mod export;
mod propagation;

use export::{exporter, is_disabled, provider, resource};

pub use opentelemetry;
pub use propagation::{
    context_of_traceparent, extract, extract_answer_parent, inject, inject_answer_parent, traceparent,
};

/// The identity of a process in traces.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    /// `baton-coordinator`, `baton-prefill` or `baton-decode`; `OTEL_SERVICE_NAME` wins.
    pub service: &'static str,
    /// The node's name: `service.instance.id`.
    pub instance: &'a str,
    pub version: &'static str,
    /// The naming conventions of its spans.
    pub flavors: &'a [OtelFlavor],
}

#[derive(Debug, Error)]
pub enum TelemetryError {
    #[error("RUST_LOG is not a filter: {0}; write for example `info` or `info,coordinator=debug`")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    #[error("the OTLP exporter cannot be set up: {0}; check OTEL_EXPORTER_OTLP_ENDPOINT, or unset it to run without")]
    Exporter(#[from] opentelemetry_otlp::ExporterBuildError),
    #[error(
        "{variable}={value} is not built in; set it to grpc (port 4317 by default) or http/protobuf (port 4318), or unset it"
    )]
    Protocol { variable: &'static str, value: String },
    #[error(transparent)]
    Sampler(#[from] sampler::UnknownSampler),
    #[error(
        "the thread that records spans cannot be started: {0}; is there a limit on this user's processes (ulimit -u)?"
    )]
    Recorder(std::io::Error),
    #[error("this process already has a log subscriber; telemetry is set up once, in main")]
    AlreadySet,
}

/// Logs of the transport's own crates are noise at `info`.
const LOG_FILTER: &str = "info,h2=warn,hyper=warn,tonic=warn,tower=warn,opentelemetry=error,opentelemetry_sdk=error";
/// The exporter's own traffic must not be traced. It would cause exports for ever.
const SPAN_FILTER: &str =
    "info,opentelemetry=off,opentelemetry_sdk=off,h2=off,hyper=off,hyper_util=off,tonic=off,tower=off";
/// A collector that is down must not delay the end of a process.
const FLUSH_TIME_LIMIT: Duration = Duration::from_secs(2);

/// Keeps the exporter alive. `shutdown` flushes it.
#[derive(Debug)]
pub struct Telemetry {
    /// `None` with `OTEL_SDK_DISABLED`.
    provider: Option<SdkTracerProvider>,
}

/// Sets up logs and traces. Call once, in main, inside a multi-thread runtime (the exporter needs one).
///
/// # Errors
/// [`TelemetryError`]: a bad filter or endpoint, or a second call.
pub fn init(identity: Identity<'_>) -> Result<Telemetry, TelemetryError> {
    let provider = match is_disabled(&|name| std::env::var(name).ok()) {
        true => None,
        false => Some(provider(identity)?),
    };
    let span_filter = EnvFilter::try_new(SPAN_FILTER)?;
    let spans = provider.as_ref().map(|provider| {
        let tracer = provider.tracer_with_scope(InstrumentationScope::builder("baton").build());
        tracing_opentelemetry::layer()
            .with_tracer(tracer)
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_target(false)
            .with_filter(span_filter)
    });
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(text)?,
        _ => EnvFilter::try_new(LOG_FILTER)?,
    };
    let is_terminal = std::io::stderr().is_terminal();
    let format = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(is_terminal && wants_colour());
    let logs = match is_terminal {
        true => format.boxed(),
        false => format
            .fmt_fields(JsonFields::new())
            .event_format(WithTraceId(Format::default().json().flatten_event(true)))
            .boxed(),
    };
    tracing_subscriber::registry()
        .with(spans)
        .with(logs.with_filter(filter))
        .try_init()
        .map_err(|_| TelemetryError::AlreadySet)?;
    if let Some(provider) = &provider {
        global::set_tracer_provider(provider.clone());
    }
    Ok(Telemetry { provider })
}

impl Telemetry {
    /// Sends what is queued. It runs off the async threads: the flush blocks, and on them it would wait for itself.
    pub async fn shutdown(self) {
        let Some(provider) = self.provider else { return };
        let flush = move || {
            // A provider that is shut down makes no more spans.
            spans::flush(FLUSH_TIME_LIMIT);
            provider.shutdown_with_timeout(FLUSH_TIME_LIMIT)
        };
        let flushed = tokio::task::spawn_blocking(flush).await;
        if let Ok(Err(error)) = flushed {
            tracing::warn!(%error, "the last spans were not delivered");
        }
    }
}

/// JSON lines that begin with the `trace_id` of the span they were written in, when there is one.
#[derive(Debug)]
struct WithTraceId<F>(F);

impl<S, N, F> FormatEvent<S, N> for WithTraceId<F>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        // The layer above activates the context of an entered span.
        let current = Context::current();
        let span = current.span().span_context().clone();
        match line.strip_prefix('{') {
            Some(rest) if span.is_valid() => write!(writer, r#"{{"trace_id":"{}",{rest}"#, span.trace_id()),
            _ => writer.write_str(&line),
        }
    }
}

/// Follows no-color.org, and terminals without colours.
fn wants_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) && std::env::var("TERM").as_deref() != Ok("dumb")
}

/// For a process that goes on in another role: its spans belong to another service from now on.
///
/// # Errors
/// The exporter cannot be made, although it could at the start.
pub async fn change_service(identity: Identity<'_>) -> Result<(), TelemetryError> {
    let env = |name: &str| std::env::var(name).ok();
    if is_disabled(&env) {
        return Ok(());
    }
    let exporter = exporter(&env)?;
    let resource = resource(identity);
    // Off the async threads: the flush blocks, and on them it would wait for itself.
    let change = move || spans::change_service(&resource, exporter, FLUSH_TIME_LIMIT);
    let _ = tokio::task::spawn_blocking(change).await;
    Ok(())
}

/// Gives a new span its remote parent. Call it at once, because a span that has started cannot change its parent.
pub fn set_parent(span: &Span, parent: Context) {
    if parent.span().span_context().is_valid() {
        let _ = span.set_parent(parent);
    }
}

/// Marks a span whose work failed. `kind` is a closed label, `words` say why.
pub fn set_failed(span: &Span, kind: impl Into<Value>, words: String) {
    span.set_attribute("error.type", kind);
    span.set_status(Status::error(words));
}

/// 32 hex digits, for logs and answers; `None` when no trace is kept.
pub fn trace_id(span: &Span) -> Option<String> {
    let context = span.context();
    let id = context.span().span_context().trace_id();
    (id != opentelemetry::trace::TraceId::INVALID).then(|| id.to_string())
}

/// A span whose context other processes need before it is over.
#[derive(Debug)]
pub struct OpenSpan {
    span: global::BoxedSpan,
    anchor: Anchor,
}

impl OpenSpan {
    pub fn start(name: &'static str, kind: SpanKind, start: Time, parent: &Context) -> Self {
        let anchor = Anchor::now();
        let builder = SpanBuilder::from_name(name)
            .with_kind(kind)
            .with_start_time(anchor.wall(start));
        let span = global::tracer("baton").build_with_context(builder, parent);
        Self { span, anchor }
    }

    pub fn traceparent(&self) -> Option<String> {
        let context = Context::new().with_remote_span_context(self.span.span_context().clone());
        traceparent(&context)
    }

    pub fn set_attributes(&mut self, attributes: Vec<KeyValue>) {
        self.span.set_attributes(attributes);
    }

    /// What the span measures begins at this time: others had to know the span before.
    pub fn begin_at(&mut self, start: Time) {
        let unix = self.anchor.wall(start).duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Ok(nanoseconds) = i64::try_from(unix.as_nanos()) {
            self.span
                .set_attribute(KeyValue::new(spans::BEGAN_UNIX_NS, nanoseconds));
        }
    }

    /// `error`: why the measured work failed.
    pub fn end(mut self, end: Time, error: Option<String>) {
        if let Some(error) = error {
            self.span.set_status(Status::error(error));
        }
        self.span.end_with_timestamp(self.anchor.wall(end));
    }
}

/// A span for a period that is known only when it is over: queue waits, chunks of prompts, transfers.
/// Times are of this process's clock.
#[derive(Debug)]
pub struct MeasuredSpan {
    pub name: &'static str,
    pub kind: SpanKind,
    pub start: Time,
    pub end: Time,
    pub attributes: Vec<KeyValue>,
    pub events: Vec<(&'static str, Time, Vec<KeyValue>)>,
    pub links: Vec<SpanContext>,
    pub error: Option<String>,
}

impl MeasuredSpan {
    pub fn new(name: &'static str, start: Time, end: Time) -> Self {
        Self {
            name,
            kind: SpanKind::Internal,
            start,
            end,
            attributes: Vec::new(),
            events: Vec::new(),
            links: Vec::new(),
            error: None,
        }
    }

    /// Records it under `parent` on telemetry's own thread, some milliseconds later. For places where a request waits.
    pub fn record_later(self, parent: &Context) {
        spans::record_later(self, parent.clone());
    }

    /// Records it under `parent`. Returns its own context for children and links.
    pub fn record(self, parent: &Context) -> SpanContext {
        let anchor = Anchor::now();
        let links = self
            .links
            .into_iter()
            .map(|link| opentelemetry::trace::Link::new(link, Vec::new(), 0))
            .collect();
        let builder = SpanBuilder::from_name(self.name)
            .with_kind(self.kind)
            .with_start_time(anchor.wall(self.start))
            .with_attributes(self.attributes)
            .with_links(links);
        let mut span = global::tracer("baton").build_with_context(builder, parent);
        for (name, at, attributes) in self.events {
            span.add_event_with_timestamp(name, anchor.wall(at), attributes);
        }
        if let Some(error) = self.error {
            span.set_status(Status::error(error));
        }
        let context = span.span_context().clone();
        span.end_with_timestamp(anchor.wall(self.end));
        context
    }
}

/// One reading of both clocks, so that the times of one span keep their distances to the nanosecond.
#[derive(Debug)]
struct Anchor {
    time: Time,
    wall: SystemTime,
}

impl Anchor {
    fn now() -> Self {
        Self {
            time: Clock::now(),
            wall: SystemTime::now(),
        }
    }
    fn wall(&self, time: Time) -> SystemTime {
        match self.time >= time {
            true => self.wall - self.time.since(time),
            false => self.wall + time.since(self.time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::export::exports;
    use super::*;

    #[test]
    fn spans_are_exported_only_to_a_named_endpoint() {
        let env = |pairs: &'static [(&str, &str)]| {
            move |name: &str| {
                pairs
                    .iter()
                    .find(|(key, _)| *key == name)
                    .map(|(_, value)| (*value).to_owned())
            }
        };
        assert!(!exports(&env(&[])));
        assert!(!exports(&env(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "")])));
        assert!(exports(&env(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")])));
        assert!(exports(&env(&[(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "http://c:4317"
        )])));
        assert!(!exports(&env(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317"),
            ("OTEL_SDK_DISABLED", "true")
        ])));
        assert!(!exports(&env(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317"),
            ("OTEL_TRACES_EXPORTER", "none")
        ])));
    }

    #[test]
    fn without_an_exporter_spans_still_have_trace_ids() {
        let provider = SdkTracerProvider::builder().build();
        let span = provider.tracer("test").start("chat");
        assert!(span.span_context().is_valid());
    }
}
