//! What the output has to be: each way to say it reaches the request, and what is no grammar is the client's mistake.

use serde_json::{Value, json};
use serving_core::ids::TokenId;
use serving_core::request::{OutputConstraint, OutputGrammar};

use super::client::{assert_refused, post};
use super::harness::{MODEL, Server};

async fn constraint(fields: Value) -> OutputConstraint {
    let server = Server::saying("x").await;
    let answer = ask(&server, fields).await;
    assert_eq!(answer.0, 200, "{}", answer.1);
    (*server.request().constraint).clone()
}

async fn ask(server: &Server, fields: Value) -> (u16, Value) {
    let mut body = json!({"model": MODEL, "prompt": "hi"});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let answer = post(server.address, "/v1/completions", &body).await;
    (answer.status, answer.json())
}

fn schema(text: &str) -> Option<OutputGrammar> {
    Some(OutputGrammar::JsonSchema(text.into()))
}

#[tokio::test]
async fn each_way_to_name_a_grammar_reaches_the_request() {
    let object = json!({"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}});
    // As the client wrote it, with its order of properties.
    let text = object.to_string();
    let wrapped = json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": object}});
    for fields in [
        json!({"response_format": wrapped}),
        json!({"structured_outputs": {"json": object}}),
        json!({"guided_json": object}),
        json!({"guided_json": text}),
    ] {
        assert_eq!(constraint(fields).await.grammar, schema(&text));
    }
    for fields in [
        json!({"response_format": {"type": "json_object"}}),
        json!({"structured_outputs": {"json_object": true}}),
    ] {
        assert_eq!(constraint(fields).await.grammar, schema(r#"{"type":"object"}"#));
    }
    for fields in [
        json!({"structured_outputs": {"regex": "a+"}}),
        json!({"guided_regex": "a+"}),
    ] {
        assert_eq!(
            constraint(fields).await.grammar,
            Some(OutputGrammar::Regex("a+".into()))
        );
    }
    for fields in [
        json!({"structured_outputs": {"choice": ["a \"b\"", "c"]}}),
        json!({"guided_choice": ["a \"b\"", "c"]}),
    ] {
        let lark = r#"start: "a \"b\"" | "c""#;
        assert_eq!(constraint(fields).await.grammar, Some(OutputGrammar::Lark(lark.into())));
    }
    let rules = "start: \"x\" /[0-9]/";
    for fields in [
        json!({"structured_outputs": {"grammar": rules}}),
        json!({"guided_grammar": rules}),
    ] {
        assert_eq!(
            constraint(fields).await.grammar,
            Some(OutputGrammar::Lark(rules.into()))
        );
    }
    assert!(constraint(json!({"response_format": {"type": "text"}})).await.is_none());
}

#[tokio::test]
async fn allowed_tokens_and_bad_words_reach_the_request_as_tokens() {
    let given = constraint(json!({"allowed_token_ids": [3, 97], "bad_words": ["ab", "c"]})).await;
    assert_eq!(given.allowed_tokens, [TokenId(3), TokenId(97)]);
    // The tokenizer of these tests has a token for each byte, so a word after a space is another number of tokens.
    assert_eq!(given.bad_words, [vec![TokenId(97), TokenId(98)], vec![TokenId(99)]]);
    assert_eq!(given.grammar, None);
}

#[tokio::test]
async fn what_is_no_constraint_is_refused_by_name() {
    let server = Server::saying("x").await;
    let many: Vec<String> = (0..129).map(|number| number.to_string()).collect();
    let large = json!({"type": "object", "description": "x".repeat(150_000)});
    for (fields, param, about) in [
        (
            json!({"response_format": {"type": "xml"}}),
            "response_format.type",
            "json_schema",
        ),
        (json!({"response_format": {}}), "response_format.type", "json_schema"),
        (json!({"response_format": "json"}), "response_format", "object"),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema.schema",
            "missing",
        ),
        (json!({"guided_json": {"type": "no such type"}}), "guided_json", "type"),
        (json!({"guided_json": [1]}), "guided_json", "object"),
        (json!({"guided_json": "{"}), "guided_json", ""),
        (json!({"guided_json": large}), "guided_json", "131072 bytes"),
        (json!({"guided_regex": "("}), "guided_regex", ""),
        (json!({"guided_grammar": "start: missing"}), "guided_grammar", "missing"),
        (json!({"guided_choice": []}), "guided_choice", ""),
        (
            json!({"structured_outputs": {"structural_tag": "x"}}),
            "structured_outputs.structural_tag",
            "not supported",
        ),
        (
            json!({"guided_regex": "a", "guided_choice": ["a"]}),
            "guided_choice",
            "guided_regex",
        ),
        (json!({"guided_regex": "a", "ignore_eos": true}), "ignore_eos", "ends"),
        (json!({"guided_regex": "a", "min_tokens": 2}), "min_tokens", "ends"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids", "empty"),
        (
            json!({"allowed_token_ids": [97], "bad_words": ["a"]}),
            "allowed_token_ids",
            "rule all out",
        ),
        (
            json!({"allowed_token_ids": [97], "guided_regex": "b"}),
            "guided_regex",
            "rule all out",
        ),
        (json!({"guided_regex": "a".repeat(9_000)}), "guided_regex", "8192 bytes"),
        (json!({"allowed_token_ids": [259]}), "allowed_token_ids", "0 to 258"),
        (json!({"bad_words": [""]}), "bad_words", "1 to 128"),
        (json!({"bad_words": ["x".repeat(129)]}), "bad_words", "1 to 128"),
        (json!({"bad_words": many}), "bad_words", "128"),
    ] {
        let answer = ask(&server, fields.clone()).await;
        assert_refused(&answer, (&fields, param, about));
    }
    assert_eq!(server.submitted(), 0);
}
