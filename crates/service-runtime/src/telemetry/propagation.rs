//! W3C trace context in and out: over HTTP headers, gRPC metadata, and as text inside messages.

use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator as _};
use opentelemetry::trace::TraceContextExt as _;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::OpenSpan;

struct Metadata<'a>(&'a tonic::metadata::MetadataMap);
struct MetadataMut<'a>(&'a mut tonic::metadata::MetadataMap);
struct Headers<'a>(&'a http::HeaderMap);
struct HeadersMut<'a>(&'a mut http::HeaderMap);
#[derive(Default)]
struct Pairs(Vec<(String, String)>);

impl Extractor for Metadata<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }
    fn keys(&self) -> Vec<&str> {
        Vec::new()
    }
}
impl Injector for MetadataMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (tonic::metadata::MetadataKey::from_bytes(key.as_bytes()), value.parse()) {
            self.0.insert(key, value);
        }
    }
}
impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }
    fn keys(&self) -> Vec<&str> {
        Vec::new()
    }
}
impl Injector for HeadersMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (http::HeaderName::from_bytes(key.as_bytes()), value.parse()) {
            self.0.insert(key, value);
        }
    }
}
impl Extractor for Pairs {
    fn get(&self, key: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }
    fn keys(&self) -> Vec<&str> {
        Vec::new()
    }
}
impl Injector for Pairs {
    fn set(&mut self, key: &str, value: String) {
        self.0.push((key.to_owned(), value));
    }
}

/// Puts the current span's context into a call's metadata.
pub fn inject(metadata: &mut tonic::metadata::MetadataMap) {
    inject_context(&Span::current().context(), metadata);
}
pub fn inject_context(context: &Context, metadata: &mut tonic::metadata::MetadataMap) {
    TraceContextPropagator::new().inject_context(context, &mut MetadataMut(metadata));
}
/// The second context of a call: the span that ends with the call's first answer.
const ANSWER_PARENT: &str = "x-baton-answer-parent";

/// Names the span that waits for the call's first answer. The callee's span of that part becomes its child.
pub fn inject_answer_parent(span: &OpenSpan, metadata: &mut tonic::metadata::MetadataMap) {
    if let Some(value) = span.traceparent().and_then(|text| text.parse().ok()) {
        metadata.insert(ANSWER_PARENT, value);
    }
}
/// `None` when the caller named none.
pub fn extract_answer_parent(metadata: &tonic::metadata::MetadataMap) -> Option<Context> {
    let text = metadata.get(ANSWER_PARENT)?.to_str().ok()?;
    let context = context_of_traceparent(text);
    context.span().span_context().is_valid().then_some(context)
}
/// The caller's context. It is empty when the call has none, or a malformed one.
pub fn extract(metadata: &tonic::metadata::MetadataMap) -> Context {
    TraceContextPropagator::new().extract(&Metadata(metadata))
}
pub fn inject_headers(headers: &mut http::HeaderMap) {
    TraceContextPropagator::new().inject_context(&Span::current().context(), &mut HeadersMut(headers));
}
pub fn extract_headers(headers: &http::HeaderMap) -> Context {
    TraceContextPropagator::new().extract(&Headers(headers))
}
/// `traceparent` of a context, to be carried in plain data. `None` without a trace.
pub fn traceparent(context: &Context) -> Option<String> {
    let mut pairs = Pairs::default();
    TraceContextPropagator::new().inject_context(context, &mut pairs);
    pairs
        .0
        .into_iter()
        .find(|(name, _)| name == "traceparent")
        .map(|(_, value)| value)
}
pub fn context_of_traceparent(traceparent: &str) -> Context {
    TraceContextPropagator::new().extract(&Pairs(vec![("traceparent".to_owned(), traceparent.to_owned())]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_trace_context_survives_metadata_headers_and_text() {
        let context = context_of_traceparent(PARENT);
        assert_eq!(traceparent(&context).as_deref(), Some(PARENT));
        let mut metadata = tonic::metadata::MetadataMap::new();
        inject_context(&context, &mut metadata);
        assert_eq!(metadata.get("traceparent").unwrap().to_str().unwrap(), PARENT);
        assert_eq!(traceparent(&extract(&metadata)).as_deref(), Some(PARENT));
        let mut headers = http::HeaderMap::new();
        headers.insert("traceparent", PARENT.parse().unwrap());
        assert_eq!(traceparent(&extract_headers(&headers)).as_deref(), Some(PARENT));
    }

    #[test]
    fn malformed_contexts_are_no_context() {
        for text in [
            "",
            "00-0-0-0",
            "nonsense",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        ] {
            assert_eq!(traceparent(&context_of_traceparent(text)), None, "{text}");
        }
    }
}
