//! The names of a span's attributes, for the viewer that reads them: always OpenTelemetry's own, and vLLM's and
//! OpenInference's if `--otel-flavor` asks for them.

use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::trace::SpanData;
use serde::Serialize;

/// The convention that a reader of spans expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OtelFlavor {
    /// The OpenTelemetry conventions for generative AI.
    Otel,
    /// What vLLM's `llm_request` span has: `gen_ai.latency.*` and its own spelling of the token counts.
    Vllm,
    /// Arize Phoenix and others: <https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md>.
    Openinference,
}

/// To be flattened into a process's configuration.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
pub struct OtelConfig {
    /// Naming conventions of span attributes
    #[arg(long, value_enum, value_delimiter = ',', default_value = "otel,vllm")]
    pub otel_flavor: Vec<OtelFlavor>,
}

/// A span with this attribute is the root of a generation request.
const OPERATION: &str = "gen_ai.operation.name";

/// Names that only vLLM has.
fn is_vllms(key: &str) -> bool {
    key.starts_with("gen_ai.latency.")
        || matches!(
            key,
            "gen_ai.usage.prompt_tokens" | "gen_ai.usage.completion_tokens" | "gen_ai.request.id" | "gen_ai.request.n"
        )
}

/// Renames nothing. It removes the names that were not asked for, and adds the same values under the names that were.
pub(super) fn dress(span: &mut SpanData, flavors: &[OtelFlavor]) {
    if flavors.contains(&OtelFlavor::Openinference) {
        let said = openinference(&span.attributes);
        span.attributes.extend(said);
    }
    if !flavors.contains(&OtelFlavor::Vllm) {
        span.attributes.retain(|pair| !is_vllms(pair.key.as_str()));
    }
}

fn openinference(attributes: &[KeyValue]) -> Vec<KeyValue> {
    let get = |key: &str| {
        attributes
            .iter()
            .find(|pair| pair.key.as_str() == key)
            .map(|pair| &pair.value)
    };
    let kind = |kind: &'static str| KeyValue::new("openinference.span.kind", kind);
    if get(OPERATION).is_none() {
        return vec![kind("CHAIN")];
    }
    let mut said = vec![kind("LLM"), KeyValue::new("llm.provider", "baton")];
    // Messages are there only where content is traced.
    for (what, from) in [("input", "gen_ai.input.messages"), ("output", "gen_ai.output.messages")] {
        if let Some(messages) = get(from) {
            said.push(KeyValue::new(format!("{what}.value"), messages.clone()));
            said.push(KeyValue::new(format!("{what}.mime_type"), "application/json"));
        }
    }
    for (key, from) in [
        ("user.id", "enduser.id"),
        ("llm.model_name", "gen_ai.response.model"),
        ("llm.token_count.prompt", "gen_ai.usage.input_tokens"),
        ("llm.token_count.completion", "gen_ai.usage.output_tokens"),
        (
            "llm.token_count.prompt_details.cache_read",
            "gen_ai.usage.cache_read.input_tokens",
        ),
    ] {
        said.extend(get(from).map(|value| KeyValue::new(key, value.clone())));
    }
    if let (Some(Value::I64(input)), Some(Value::I64(output))) =
        (get("gen_ai.usage.input_tokens"), get("gen_ai.usage.output_tokens"))
    {
        said.push(KeyValue::new("llm.token_count.total", input + output));
    }
    let parameters: serde_json::Map<String, serde_json::Value> =
        ["max_tokens", "temperature", "top_p", "top_k", "seed", "stream"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), json(get(&format!("gen_ai.request.{name}"))?))))
            .collect();
    let parameters = serde_json::Value::from(parameters).to_string();
    said.push(KeyValue::new("llm.invocation_parameters", parameters));
    said
}

fn json(value: &Value) -> serde_json::Value {
    match value {
        Value::Bool(value) => (*value).into(),
        Value::I64(value) => (*value).into(),
        Value::F64(value) => (*value).into(),
        Value::String(value) => value.as_str().into(),
        other => other.to_string().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::store::tests::span;
    use super::*;

    fn root() -> SpanData {
        let mut root = span(1, 1);
        root.attributes = vec![
            KeyValue::new(OPERATION, "chat"),
            KeyValue::new("gen_ai.request.max_tokens", 64),
            KeyValue::new("gen_ai.request.temperature", 0.5),
            KeyValue::new("gen_ai.request.id", "r"),
            KeyValue::new("gen_ai.response.model", "smol"),
            KeyValue::new("gen_ai.usage.input_tokens", 30),
            KeyValue::new("gen_ai.usage.output_tokens", 12),
            KeyValue::new("gen_ai.usage.prompt_tokens", 30),
            KeyValue::new("gen_ai.latency.e2e", 0.25),
            KeyValue::new("gen_ai.input.messages", "[]"),
            KeyValue::new("enduser.id", "u"),
        ];
        root
    }

    fn said(mut span: SpanData, flavors: &[OtelFlavor]) -> Vec<(String, String)> {
        dress(&mut span, flavors);
        let pair = |pair: KeyValue| (pair.key.to_string(), pair.value.to_string());
        span.attributes.into_iter().map(pair).collect()
    }

    #[test]
    fn phoenix_finds_its_own_names_beside_the_others() {
        let all = [OtelFlavor::Otel, OtelFlavor::Vllm, OtelFlavor::Openinference];
        let said = said(root(), &all);
        for (key, value) in [
            ("openinference.span.kind", "LLM"),
            ("llm.model_name", "smol"),
            ("llm.token_count.prompt", "30"),
            ("llm.token_count.completion", "12"),
            ("llm.token_count.total", "42"),
            ("input.value", "[]"),
            ("input.mime_type", "application/json"),
            ("user.id", "u"),
            ("llm.invocation_parameters", r#"{"max_tokens":64,"temperature":0.5}"#),
            ("gen_ai.usage.input_tokens", "30"),
            ("gen_ai.latency.e2e", "0.25"),
        ] {
            assert!(
                said.contains(&(key.to_owned(), value.to_owned())),
                "{key} {value}: {said:?}"
            );
        }
    }

    #[test]
    fn every_other_span_is_a_link_of_the_chain() {
        let said = said(span(1, 2), &[OtelFlavor::Openinference]);
        assert_eq!(said, [("openinference.span.kind".to_owned(), "CHAIN".to_owned())]);
    }

    #[test]
    fn what_is_not_wished_is_not_there() {
        let said = said(root(), &[OtelFlavor::Otel]);
        let keys: Vec<&str> = said.iter().map(|(key, _)| key.as_str()).collect();
        assert!(keys.contains(&"gen_ai.usage.input_tokens"));
        assert!(
            !keys
                .iter()
                .any(|key| is_vllms(key) || key.starts_with("llm.") || key.starts_with("openinference"))
        );
    }
}
