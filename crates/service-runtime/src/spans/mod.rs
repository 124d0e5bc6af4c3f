//! Every span that ends in this process. It is kept for a while, and handed to the exporter when its trace is sampled.
//!
//! All spans are recorded, whatever the sampler decides: the waterfall of a request that went wrong is wanted afterwards,
//! when it is too late to sample it. The sampler only decides what a collector gets.

pub mod flavor;
pub mod otlp;
mod recorder;
pub mod sampler;
mod store;

use std::io;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{SpanKind, TraceId};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{BatchSpanProcessor, Span, SpanData, SpanProcessor};
use proto::messages::ClockOffset;
use serving_core::ids::NodeEpoch;

use crate::telemetry::MeasuredSpan;
use crate::wall_clocks;
use flavor::OtelFlavor;
use recorder::Recorder;
use store::SpanStore;

/// How long readers wait for a thread that is some milliseconds behind at most. A trace that is not whole by then is shown
/// as it is. Twice this time is less than a coordinator waits for a node's answer.
const FLUSHED_WITHIN: Duration = Duration::from_millis(500);

/// This process's kept spans. Set when telemetry is set up.
static HERE: OnceLock<Here> = OnceLock::new();

/// Clones lead to the same spans.
#[derive(Clone, Debug)]
struct Here {
    kept: KeptSpans,
    recorder: Recorder,
}

/// The handle of the kept spans.
#[derive(Clone, Debug, Default)]
struct KeptSpans {
    store: Arc<SpanStore>,
    /// A process that changes its role goes on as another service.
    service: Arc<RwLock<Arc<Service>>>,
    flavors: Arc<[OtelFlavor]>,
}

/// The service of the spans, and the exporter that gets them.
#[derive(Debug, Default)]
struct Service {
    resource: ResourceAttributesWithSchema,
    /// `None` where no collector is configured.
    exporter: Option<BatchSpanProcessor>,
}

impl Service {
    fn new(resource: &Resource, mut exporter: Option<BatchSpanProcessor>) -> Self {
        if let Some(exporter) = &mut exporter {
            exporter.set_resource(resource);
        }
        let resource = resource.into();
        Self { resource, exporter }
    }
}

impl KeptSpans {
    fn service(&self) -> Arc<Service> {
        self.service.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
    fn replace_service(&self, service: Service) -> Arc<Service> {
        let mut place = self.service.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut place, Arc::new(service))
    }
    /// Takes a span that has ended.
    fn add(&self, mut span: SpanData) {
        start_where_it_began(&mut span);
        if let Some(offset) = wall_clocks::reference() {
            shift(&mut span, offset);
        }
        flavor::dress(&mut span, &self.flavors);
        if span.span_context.is_sampled()
            && let Some(exporter) = &self.service().exporter
        {
            exporter.on_end(span.clone());
        }
        self.store.add(span);
    }
}

/// From now on spans belong to this service. The spans of the old name are forgotten, as after a restart. Those that wait
/// for export are sent, which blocks for twice `limit` at most.
pub(crate) fn change_service(resource: &Resource, exporter: Option<BatchSpanProcessor>, limit: Duration) {
    let Some(Here { kept, recorder }) = HERE.get() else {
        return;
    };
    // Spans that are not kept by then belong to the new service.
    let _ = recorder.flush(limit);
    let old = kept.replace_service(Service::new(resource, exporter));
    kept.store.clear();
    if let Some(exporter) = &old.exporter
        && let Err(error) = exporter.shutdown_with_timeout(limit)
    {
        tracing::warn!(%error, "the last spans of the old role were not delivered");
    }
}

/// The spans of one trace that ended here, as OTLP: on the wall clock of `reader`, where that is a coordinator of this node. Empty
/// when none is kept (or no longer kept).
pub async fn of_trace(trace: TraceId, reader: Option<NodeEpoch>) -> otlp::Spans {
    let Some(Here { kept, recorder }) = HERE.get() else {
        return otlp::Spans::default();
    };
    recorder.settled(FLUSHED_WITHIN).await;
    let mut spans = kept.store.get(trace);
    if let Some(by) = reader.and_then(wall_clocks::from_reference_to) {
        spans.iter_mut().for_each(|span| shift_on(span, by));
    }
    otlp::Spans::of(spans, &kept.service().resource)
}

/// Whether there is a collector that gets spans.
pub fn is_exporting() -> bool {
    HERE.get().is_some_and(|here| here.kept.service().exporter.is_some())
}

/// Hands the spans of a trace to the exporter although the trace was not sampled, because the request went wrong. Each span goes
/// once: a client may send one trace id with every request.
pub async fn export_anyway(trace: TraceId) {
    let Some(Here { kept, recorder }) = HERE.get() else {
        return;
    };
    if !is_exporting() {
        return;
    }
    recorder.settled(FLUSHED_WITHIN).await;
    // The service of now: the process may have changed its role in the meantime.
    let service = kept.service();
    let Some(exporter) = &service.exporter else { return };
    for span in kept.store.sample(trace) {
        exporter.on_end(span);
    }
}

/// Waits until all spans that ended before are kept, for `limit` at most. A later span is not worth more waiting. Blocks.
pub(crate) fn flush(limit: Duration) {
    if let Some(here) = HERE.get() {
        let _ = here.recorder.flush(limit);
    }
}

/// Makes a span of measured times, on the recorder's thread; at once where there is no such thread, or too much waits for
/// it.
pub(crate) fn record_later(span: MeasuredSpan, parent: Context) {
    let Some(here) = HERE.get() else {
        span.record(&parent);
        return;
    };
    if let Err(not_taken) = here.recorder.make(span, parent) {
        let (span, parent) = *not_taken;
        span.record(&parent);
    }
}

/// Takes the place of an exporter's processor.
#[derive(Debug)]
pub(crate) struct KeepSpans {
    here: Here,
    /// Used until the service of the spans is set. After the provider is shared, nobody can set it.
    unshared: Option<BatchSpanProcessor>,
}

impl KeepSpans {
    /// `exporter` is `None` where no collector is configured. Readers read the first one of a process.
    ///
    /// # Errors
    /// The system has no thread left for the recorder.
    pub(crate) fn start(exporter: Option<BatchSpanProcessor>, flavors: &[OtelFlavor]) -> io::Result<Self> {
        let kept = KeptSpans {
            flavors: flavors.into(),
            ..KeptSpans::default()
        };
        let takes_in = kept.clone();
        let recorder = Recorder::start(move |span| takes_in.add(span))?;
        let here = Here { kept, recorder };
        let _ = HERE.set(here.clone());
        Ok(Self {
            here,
            unshared: exporter,
        })
    }
}

impl SpanProcessor for KeepSpans {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if let Err(span) = self.here.recorder.keep(span) {
            self.here.kept.add(*span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        let _ = self.here.recorder.flush(FLUSHED_WITHIN);
        let service = self.here.kept.service();
        service.exporter.as_ref().map_or(Ok(()), SpanProcessor::force_flush)
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        let _ = self.here.recorder.flush(timeout);
        let service = self.here.kept.service();
        let exporter = service.exporter.as_ref();
        exporter.map_or(Ok(()), |exporter| exporter.shutdown_with_timeout(timeout))
    }

    fn set_resource(&mut self, resource: &Resource) {
        let service = Service::new(resource, self.unshared.take());
        self.here.kept.replace_service(service);
    }
}

/// An attribute that never leaves this process: when the work of a span began. A span that others must know before that starts too
/// early, and the SDK moves no start.
pub(crate) const BEGAN_UNIX_NS: &str = "baton.began_unix_ns";

fn start_where_it_began(span: &mut SpanData) {
    let is_mark = |pair: &KeyValue| pair.key.as_str() == BEGAN_UNIX_NS;
    let Some(at) = span.attributes.iter().position(is_mark) else {
        return;
    };
    if let Value::I64(nanoseconds) = span.attributes.remove(at).value {
        let since = Duration::from_nanos(nanoseconds.unsigned_abs());
        span.start_time = SystemTime::UNIX_EPOCH + since;
    }
}

/// Of a server span, on which other processes' spans depend: how much was added to its times, and by how much that may be wrong.
const CLOCK_OFFSET_MS: &str = "clock.offset_ms";
const CLOCK_ERROR_MS: &str = "clock.error_ms";

/// What an offset says in these attributes.
fn in_ms(offset: ClockOffset) -> [(&'static str, f64); 2] {
    [
        (CLOCK_OFFSET_MS, offset.unix_ns as f64 / 1e6),
        (CLOCK_ERROR_MS, offset.error.as_secs_f64() * 1e3),
    ]
}

/// Puts a span of this process's clock on the reference's.
fn shift(span: &mut SpanData, offset: ClockOffset) {
    shift_times(span, offset);
    if span.span_kind == SpanKind::Server {
        span.attributes
            .extend(in_ms(offset).map(|(key, ms)| KeyValue::new(key, ms)));
    }
}

/// Puts a span of the reference's clock on another coordinator's.
fn shift_on(span: &mut SpanData, by: ClockOffset) {
    shift_times(span, by);
    for pair in &mut span.attributes {
        let added = in_ms(by).into_iter().find(|(key, _)| pair.key.as_str() == *key);
        if let (Some((_, added)), Value::F64(ms)) = (added, &mut pair.value) {
            *ms += added;
        }
    }
}

fn shift_times(span: &mut SpanData, offset: ClockOffset) {
    let moved = |time: SystemTime| {
        let by = Duration::from_nanos(offset.unix_ns.unsigned_abs());
        let shifted = if offset.unix_ns < 0 {
            time.checked_sub(by)
        } else {
            time.checked_add(by)
        };
        shifted.unwrap_or(time)
    };
    span.start_time = moved(span.start_time);
    span.end_time = moved(span.end_time);
    for event in &mut span.events.events {
        event.timestamp = moved(event.timestamp);
    }
}

#[cfg(test)]
mod tests {
    use super::store::tests::span;
    use super::*;

    #[test]
    fn a_span_begins_with_its_work_and_does_not_say_how_that_was_told() {
        let mut late = span(1, 1);
        let began = Duration::from_secs(1_700_000_000);
        let mark = i64::try_from(began.as_nanos()).expect("before the year 2262");
        late.attributes = vec![KeyValue::new(BEGAN_UNIX_NS, mark), KeyValue::new("bytes", 7)];
        start_where_it_began(&mut late);
        assert_eq!(late.start_time, SystemTime::UNIX_EPOCH + began);
        assert_eq!(late.attributes, [KeyValue::new("bytes", 7)]);
    }

    #[test]
    fn a_span_on_one_coordinators_clock_moves_to_anothers_and_says_so() {
        let offset = |unix_ms: i64| ClockOffset {
            monotonic_ns: 0,
            unix_ns: unix_ms * 1_000_000,
            error: Duration::from_millis(1),
        };
        let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
        let mut served = span(1, 1);
        (served.start_time, served.end_time, served.span_kind) = (at(10_000), at(10_500), SpanKind::Server);
        shift(&mut served, offset(3_000));
        shift_on(&mut served, offset(-5_000));
        assert_eq!((served.start_time, served.end_time), (at(8_000), at(8_500)));
        let said = [(CLOCK_OFFSET_MS, -2_000.0), (CLOCK_ERROR_MS, 2.0)];
        assert_eq!(served.attributes, said.map(|(key, ms)| KeyValue::new(key, ms)));
    }
}
