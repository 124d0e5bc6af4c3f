//! `/openapi.json`: the API as a document for programs. The text is kept by hand; tests compare it with the fields and the routes.

use axum::Json;
use serde_json::Value;

const DOCUMENT: &str = include_str!("openapi.json");

pub async fn document() -> Json<Value> {
    // The text is part of the program, and a test reads it.
    let mut document: Value = serde_json::from_str(DOCUMENT).unwrap_or_default();
    document["info"]["version"] = Value::from(env!("CARGO_PKG_VERSION"));
    Json(document)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::request::{Endpoint, GenerateFields};
    use super::super::responses::ResponseFields;
    use super::*;

    /// Fields that are taken only with the value that changes nothing, so the document leaves them out.
    const HARMLESS: &[&str] = &[
        "audio",
        "background",
        "best_of",
        "chat_template",
        "chat_template_kwargs",
        "conversation",
        "documents",
        "early_stopping",
        "ebnf",
        "function_call",
        "functions",
        "grammar",
        "include_stop_str_in_output",
        "json_schema",
        "length_penalty",
        "logits_processors",
        "max_tool_calls",
        "n",
        "no_repeat_ngram_size",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "regex",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
        "stream_options",
        "suffix",
        "top_logprobs",
        "truncation",
        "typical_p",
        "use_beam_search",
        "web_search_options",
    ];

    /// Fields of chats and completions that a response refuses.
    const NOT_OF_RESPONSES: &[&str] = &[
        "add_generation_prompt",
        "add_special_tokens",
        "continue_final_message",
        "echo",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "prompt_logprobs",
        "response_format",
        "return_kv_hashes",
        "return_token_ids",
        "truncate_prompt_tokens",
    ];

    fn schema_fields(document: &Value, schema: &Value, fields: &mut BTreeSet<String>) {
        if let Some(name) = schema["$ref"].as_str() {
            let target = document
                .pointer(&name[1..])
                .unwrap_or_else(|| panic!("{name} is missing"));
            schema_fields(document, target, fields);
        }
        for part in schema["allOf"].as_array().into_iter().flatten() {
            schema_fields(document, part, fields);
        }
        fields.extend(
            schema["properties"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, _)| name.clone()),
        );
    }

    fn documented(names: &[&str]) -> BTreeSet<String> {
        let document: Value = serde_json::from_str(DOCUMENT).expect("JSON");
        let mut fields = BTreeSet::new();
        for name in names {
            schema_fields(&document, &document["components"]["schemas"][name], &mut fields);
        }
        fields
    }

    /// Each known field is documented or harmless, and the document has no other.
    fn compare(known: &[&str], names: &[&str], left_out: &[&str]) {
        let (documented, known) = (
            documented(names),
            BTreeSet::from_iter(known.iter().map(ToString::to_string)),
        );
        let invented: Vec<_> = documented.difference(&known).collect();
        assert!(
            invented.is_empty(),
            "{names:?} names fields that the server does not know: {invented:?}"
        );
        let missing: Vec<_> = known
            .difference(&documented)
            .filter(|name| !HARMLESS.contains(&name.as_str()) && !left_out.contains(&name.as_str()))
            .collect();
        assert!(missing.is_empty(), "{names:?} lacks {missing:?}");
    }

    #[test]
    fn the_document_has_the_fields_of_the_server() {
        compare(GenerateFields::FIELD_NAMES, &["CompletionRequest", "ChatRequest"], &[]);
        compare(ResponseFields::FIELD_NAMES, &["ResponseRequest"], NOT_OF_RESPONSES);
        for endpoint in [Endpoint::Completions, Endpoint::Chat] {
            assert!(documented(&["CompletionRequest", "ChatRequest"]).contains(endpoint.prompt_field()));
        }
    }

    #[test]
    fn every_reference_of_the_document_leads_somewhere() {
        fn follow(document: &Value, at: &Value) {
            match at {
                Value::Object(map) => {
                    if let Some(name) = map.get("$ref").and_then(Value::as_str) {
                        assert!(document.pointer(&name[1..]).is_some(), "{name} is missing");
                    }
                    map.values().for_each(|value| follow(document, value));
                }
                Value::Array(list) => list.iter().for_each(|value| follow(document, value)),
                _ => {}
            }
        }
        let document = serde_json::from_str(DOCUMENT).expect("JSON");
        follow(&document, &document);
    }
}
