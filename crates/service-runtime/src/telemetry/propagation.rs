//! W3C trace context in and out: over gRPC metadata, and as text inside messages.

use std::collections::HashMap;

use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::TraceContextExt as _;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::{MetadataKey, MetadataMap};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::OpenSpan;

/// Puts the current span's context into a call's metadata.
pub fn inject(metadata: &mut MetadataMap) {
    inject_context(&Span::current().context(), metadata);
}
fn inject_context(context: &Context, metadata: &mut MetadataMap) {
    for (name, value) in headers_of(context) {
        if let (Ok(name), Ok(value)) = (MetadataKey::from_bytes(name.as_bytes()), value.parse()) {
            metadata.insert(name, value);
        }
    }
}
/// The second context of a call: the span that ends with the call's first answer.
const ANSWER_PARENT: &str = "x-baton-answer-parent";

/// Names the span that waits for the call's first answer. The callee's span of that part becomes its child.
pub fn inject_answer_parent(span: &OpenSpan, metadata: &mut MetadataMap) {
    if let Some(value) = span.traceparent().and_then(|text| text.parse().ok()) {
        metadata.insert(ANSWER_PARENT, value);
    }
}
/// `None` when the caller named none.
pub fn extract_answer_parent(metadata: &MetadataMap) -> Option<Context> {
    let text = metadata.get(ANSWER_PARENT)?.to_str().ok()?;
    let context = context_of_traceparent(text);
    context.span().span_context().is_valid().then_some(context)
}
/// The caller's context. It is empty when the call has none, or a malformed one.
pub fn extract(metadata: &MetadataMap) -> Context {
    let texts = metadata.as_ref().iter();
    let texts = texts.filter_map(|(name, value)| Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned())));
    TraceContextPropagator::new().extract(&texts.collect::<HashMap<String, String>>())
}
/// `traceparent` of a context, to be carried in plain data. `None` without a trace.
pub fn traceparent(context: &Context) -> Option<String> {
    headers_of(context).remove("traceparent")
}
pub fn context_of_traceparent(traceparent: &str) -> Context {
    let headers = HashMap::from([("traceparent".to_owned(), traceparent.to_owned())]);
    TraceContextPropagator::new().extract(&headers)
}

fn headers_of(context: &Context) -> HashMap<String, String> {
    let mut headers = HashMap::new();
    TraceContextPropagator::new().inject_context(context, &mut headers);
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_trace_context_survives_metadata_and_text() {
        let context = context_of_traceparent(PARENT);
        assert_eq!(traceparent(&context).as_deref(), Some(PARENT));
        let mut metadata = MetadataMap::new();
        inject_context(&context, &mut metadata);
        assert_eq!(metadata.get("traceparent").unwrap().to_str().unwrap(), PARENT);
        assert_eq!(traceparent(&extract(&metadata)).as_deref(), Some(PARENT));
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
