//! Kept spans as OTLP, between processes and over HTTP (JSON as in the OTLP specification), and as plain values for
//! drawing.

use opentelemetry_proto::tonic::common::v1::any_value::Value as OtlpValue;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span, TracesData};
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::trace::SpanData;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// `{"resourceSpans": [...]}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Spans(TracesData);

/// One span, with the process in which it ended.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanView {
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// `None` for a root. The parent may be a span of another party.
    pub parent_id: Option<String>,
    pub name: String,
    /// `server`, `client` or `internal`.
    pub kind: &'static str,
    pub service: String,
    /// `service.instance.id`.
    pub process: String,
    pub start_unix_ns: u64,
    pub end_unix_ns: u64,
    pub attributes: Map<String, Value>,
    pub events: Vec<EventView>,
    /// Span ids.
    pub links: Vec<String>,
    /// Why the measured work failed. It may be empty.
    pub error: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct EventView {
    pub name: String,
    pub at_unix_ns: u64,
    pub attributes: Map<String, Value>,
}

impl Spans {
    pub(super) fn of(spans: Vec<SpanData>, resource: &ResourceAttributesWithSchema) -> Self {
        Self(TracesData {
            resource_spans: group_spans_by_resource_and_scope(spans, resource),
        })
    }

    pub fn append(&mut self, other: Self) {
        self.0.resource_spans.extend(other.0.resource_spans);
    }

    pub fn is_empty(&self) -> bool {
        let mut scopes = self.0.resource_spans.iter().flat_map(|resource| &resource.scope_spans);
        scopes.all(|scope| scope.spans.is_empty())
    }

    /// Every span, in no order.
    pub fn views(&self) -> Vec<SpanView> {
        let of_resource = |resource: &ResourceSpans| {
            let (service, process) = (
                resource_text(resource, "service.name"),
                resource_text(resource, "service.instance.id"),
            );
            let spans = resource.scope_spans.iter().flat_map(|scope| &scope.spans);
            spans
                .map(|span| view(span, (service.clone(), process.clone())))
                .collect::<Vec<_>>()
        };
        self.0.resource_spans.iter().flat_map(of_resource).collect()
    }
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn view(span: &Span, (service, process): (String, String)) -> SpanView {
    let kind = match SpanKind::try_from(span.kind) {
        Ok(SpanKind::Server) => "server",
        Ok(SpanKind::Client) => "client",
        _ => "internal",
    };
    let failed = span
        .status
        .as_ref()
        .filter(|status| status.code == StatusCode::Error as i32);
    let event = |event: &opentelemetry_proto::tonic::trace::v1::span::Event| EventView {
        name: event.name.clone(),
        at_unix_ns: event.time_unix_nano,
        attributes: attributes(&event.attributes),
    };
    SpanView {
        span_id: hex(&span.span_id),
        parent_id: Some(hex(&span.parent_span_id)).filter(|id| !id.is_empty()),
        name: span.name.clone(),
        kind,
        service,
        process,
        start_unix_ns: span.start_time_unix_nano,
        end_unix_ns: span.end_time_unix_nano,
        attributes: attributes(&span.attributes),
        events: span.events.iter().map(event).collect(),
        links: span.links.iter().map(|link| hex(&link.span_id)).collect(),
        error: failed.map(|status| status.message.clone()),
    }
}

/// A text attribute of the process in which spans ended.
fn resource_text(resource: &ResourceSpans, key: &str) -> String {
    let pairs = resource.resource.iter().flat_map(|resource| &resource.attributes);
    let pair = pairs.into_iter().find(|pair| pair.key == key);
    match pair.map(|pair| value(pair.value.as_ref())) {
        Some(Value::String(text)) => text,
        _ => "unknown".to_owned(),
    }
}

fn attributes(pairs: &[KeyValue]) -> Map<String, Value> {
    pairs
        .iter()
        .map(|pair| (pair.key.clone(), value(pair.value.as_ref())))
        .collect()
}

/// Attributes have at most lists of plain values. Deeper values are left out.
fn value(of: Option<&AnyValue>) -> Value {
    let plain = |value: &OtlpValue| match value {
        OtlpValue::StringValue(text) => json!(text),
        OtlpValue::BoolValue(is) => json!(is),
        OtlpValue::IntValue(number) => json!(number),
        OtlpValue::DoubleValue(number) => json!(number),
        _ => Value::Null,
    };
    match of.and_then(|any| any.value.as_ref()) {
        Some(OtlpValue::ArrayValue(list)) => list
            .values
            .iter()
            .map(|any| any.value.as_ref().map_or(Value::Null, plain))
            .collect(),
        Some(other) => plain(other),
        None => Value::Null,
    }
}
