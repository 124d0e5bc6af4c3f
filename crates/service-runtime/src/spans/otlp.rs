//! Kept spans as OTLP, between processes and for whoever asks over HTTP: JSON as the OTLP specification has it.

use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, TracesData};
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::trace::SpanData;
use serde::{Deserialize, Serialize};

pub use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
pub use opentelemetry_proto::tonic::common::v1::{AnyValue as Any, KeyValue};
pub use opentelemetry_proto::tonic::trace::v1::Span;
pub use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
pub use opentelemetry_proto::tonic::trace::v1::status::StatusCode;

/// `{"resourceSpans": [...]}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Spans(pub TracesData);

impl Spans {
    pub(super) fn of(spans: Vec<SpanData>, resource: Option<&ResourceAttributesWithSchema>) -> Self {
        let nobody = ResourceAttributesWithSchema::default();
        Self(TracesData {
            resource_spans: group_spans_by_resource_and_scope(spans, resource.unwrap_or(&nobody)),
        })
    }

    pub fn append(&mut self, other: Self) {
        self.0.resource_spans.extend(other.0.resource_spans);
    }

    pub fn is_empty(&self) -> bool {
        self.each().next().is_none()
    }

    /// Every span with the process it ended in.
    pub fn each(&self) -> impl Iterator<Item = (&ResourceSpans, &Span)> {
        self.0.resource_spans.iter().flat_map(|resource| {
            let spans = resource.scope_spans.iter().flat_map(|scope| &scope.spans);
            spans.map(move |span| (resource, span))
        })
    }
}

/// A text attribute of the process a span ended in.
pub fn resource_text<'a>(resource: &'a ResourceSpans, key: &str) -> Option<&'a str> {
    let attributes = &resource.resource.as_ref()?.attributes;
    let value = attributes
        .iter()
        .find(|pair| pair.key == key)?
        .value
        .as_ref()?
        .value
        .as_ref()?;
    match value {
        AnyValue::StringValue(text) => Some(text),
        _ => None,
    }
}
