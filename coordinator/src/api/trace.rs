//! The root span of a generation request: its attributes as they become known, and its end.

use std::time::Duration;

use service_runtime::telemetry;
use serving_core::stage::Stage;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::content::Content;
use super::facts::Generation;
use super::request::Endpoint;

/// The root span of one generation request. Its attributes have OpenTelemetry's names and vLLM's; each value is recorded
/// when it is known. Numbers are recorded as `i64`, because an unsigned number would be exported as text.
pub fn root_span(endpoint: Endpoint, request_id: &str) -> Span {
    use tracing::field::Empty;
    tracing::info_span!(
        target: "baton",
        "request",
        otel.name = endpoint.operation(),
        otel.kind = "server",
        otel.status_code = Empty,
        x_request_id = request_id,
        gen_ai.operation.name = endpoint.operation(),
        gen_ai.provider.name = "baton",
        gen_ai.request.id = request_id,
        gen_ai.request.model = Empty,
        gen_ai.request.max_tokens = Empty,
        gen_ai.request.temperature = Empty,
        gen_ai.request.top_p = Empty,
        gen_ai.request.top_k = Empty,
        gen_ai.request.seed = Empty,
        gen_ai.request.stream = Empty,
        gen_ai.request.choice.count = Empty,
        gen_ai.request.n = Empty,
        gen_ai.response.id = Empty,
        gen_ai.response.model = Empty,
        gen_ai.response.time_to_first_chunk = Empty,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
        gen_ai.usage.prompt_tokens = Empty,
        gen_ai.usage.completion_tokens = Empty,
        gen_ai.usage.cache_read.input_tokens = Empty,
        gen_ai.latency.time_in_queue = Empty,
        gen_ai.latency.time_to_first_token = Empty,
        gen_ai.latency.e2e = Empty,
        gen_ai.latency.time_in_model_prefill = Empty,
        gen_ai.latency.time_in_model_decode = Empty,
        gen_ai.latency.time_in_model_inference = Empty,
    )
}

/// A request has been read: the client's name for its user, and, where content is traced, the prompt.
pub fn note_request(g: &mut Generation, user: Option<&str>, content: Option<(String, Content)>) {
    if let Some(user) = user {
        // Its length has been checked.
        g.span.set_attribute("enduser.id", user.to_owned());
    }
    if let Some((messages, content)) = content {
        g.span.set_attribute("gen_ai.input.messages", messages);
        g.content = Some(content);
    }
}

/// The answer, as far as there is one.
fn note_answer(g: &Generation) {
    let Some(content) = &g.content else { return };
    if content.has_answer() {
        g.span
            .set_attribute("gen_ai.output.messages", content.output_messages());
    }
    if content.is_cut() {
        g.span.set_attribute("baton.content.is_cut", true);
    }
}

/// What is known of the request at its end. `error` is what the client was told, if it was told anything.
pub fn finish_root(g: &Generation, (outcome, error): (&'static str, Option<&str>), e2e: Duration) {
    note_answer(g);
    let span = &g.span;
    span.record("gen_ai.usage.input_tokens", i64::from(g.prompt_tokens));
    span.record("gen_ai.usage.output_tokens", i64::from(g.output_tokens));
    span.record("gen_ai.usage.prompt_tokens", i64::from(g.prompt_tokens));
    span.record("gen_ai.usage.completion_tokens", i64::from(g.output_tokens));
    span.record(
        "gen_ai.usage.cache_read.input_tokens",
        i64::from(g.summary.cached_tokens),
    );
    span.record("gen_ai.latency.e2e", e2e.as_secs_f64());
    if let Some(ttft) = g.ttft {
        span.record("gen_ai.latency.time_to_first_token", ttft.as_secs_f64());
        span.record("gen_ai.response.time_to_first_chunk", ttft.as_secs_f64());
    }
    if let Some(placement) = &g.placement {
        span.record("gen_ai.latency.time_in_queue", placement.queued_for.as_secs_f64());
    }
    let stages = g.stages();
    if let Some(prefill) = stages.get(Stage::PrefillForward) {
        span.record("gen_ai.latency.time_in_model_prefill", prefill.as_secs_f64());
    }
    if let Some(decode) = stages.get(Stage::Decode) {
        span.record("gen_ai.latency.time_in_model_decode", decode.as_secs_f64());
    }
    let in_model = [Stage::PrefillForward, Stage::Decode].map(|stage| stages.get(stage));
    if let Some(inference) = in_model.into_iter().flatten().reduce(|a, b| a + b) {
        span.record("gen_ai.latency.time_in_model_inference", inference.as_secs_f64());
    }
    if outcome == "ok" {
        span.record("otel.status_code", "OK");
    } else {
        let words = error.unwrap_or_else(|| words_of(outcome));
        telemetry::set_failed(span, outcome, words.to_owned());
    }
}

/// What the span says where the client was told nothing.
fn words_of(outcome: &str) -> &'static str {
    match outcome {
        "internal" => "the request's handler panicked",
        "draining" => "the drain's time was over before the end of the answer",
        _ => "the client left before the end of its answer",
    }
}

/// Ends the root span now, whatever is recorded in it later. (A span would otherwise end when it was last left, and the
/// handler left it with the answer's first byte.)
pub fn end_span(g: &Generation) {
    g.span.in_scope(|| ());
}
