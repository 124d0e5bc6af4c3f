//! Tools in a chat: what reaches the model, and what comes back as calls.

use serde_json::{Value, json};
use serving_core::request::OutputGrammar;

use super::client::{assert_refused, post};
use super::harness::{MODEL, Server};

fn tools() -> Value {
    let place = json!({"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]});
    json!([
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": place, "strict": true}},
        {"type": "function", "function": {"name": "clock"}},
    ])
}

async fn ask(server: &Server, fields: Value) -> (u16, Value) {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools()});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let answer = post(server.address, "/v1/chat/completions", &body).await;
    if body["stream"] == true && answer.status == 200 {
        return (200, Value::from(answer.events()));
    }
    (answer.status, answer.json())
}

const CALLS: &str = r#"Ok. <tool_call>{"name": "weather", "arguments": {"place": "Rome"}}</tool_call>
<tool_call>{"name": "clock", "arguments": {}}</tool_call>"#;

#[tokio::test]
async fn calls_of_the_model_become_tool_calls() {
    let server = Server::saying(CALLS).await;
    let (_, body) = ask(&server, json!({})).await;
    assert_eq!(server.prompt_text(), "(weather)(clock)[user]hi[assistant]");
    let choice = &body["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("Ok. "))
    );
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(
        calls[0]["function"],
        json!({"name": "weather", "arguments": "{\"place\":\"Rome\"}"})
    );
    assert_eq!(
        (&calls[1]["function"]["name"], &calls[1]["type"]),
        (&json!("clock"), &json!("function"))
    );
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_") && calls[0]["id"] != calls[1]["id"]);
    assert!(calls[0].get("index").is_none());
    // Without tools the same text is a text.
    let (_, body) = ask(&server, json!({"tool_choice": "none"})).await;
    assert_eq!(server.prompt_text(), "[user]hi[assistant]");
    assert_eq!(
        body["choices"][0]["message"],
        json!({"role": "assistant", "content": CALLS})
    );
}

#[tokio::test]
async fn a_stream_has_each_call_once_and_an_event_for_each_token() {
    let server = Server::saying(CALLS).await;
    let (_, events) = ask(&server, json!({"stream": true})).await;
    let chunks: Vec<&Value> = events
        .as_array()
        .unwrap()
        .iter()
        .filter(|event| event["choices"].is_array())
        .collect();
    assert_eq!(
        chunks.len(),
        CALLS.len() + 1,
        "a byte is a token here, and the end is one"
    );
    let content: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(content, "Ok. ");
    let calls: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    let shown: Vec<_> = calls
        .iter()
        .map(|call| (call["index"].as_u64(), call["function"]["name"].as_str()))
        .collect();
    assert_eq!(shown, [(Some(0), Some("weather")), (Some(1), Some("clock"))]);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn a_named_function_is_forced_and_its_arguments_are_the_answer() {
    let server = Server::saying(r#"{"place": "Rome"}"#).await;
    let named = json!({"type": "function", "function": {"name": "weather"}});
    let (_, body) = ask(&server, json!({"tool_choice": named})).await;
    let Some(OutputGrammar::JsonSchema(schema)) = server.request().constraint.grammar.clone() else {
        panic!("no schema: {:?}", server.request().constraint);
    };
    assert!(
        schema.starts_with(r#"{"type":"object","properties":{"place""#),
        "{schema}"
    );
    let choice = &body["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("stop"), &Value::Null)
    );
    assert_eq!(
        choice["message"]["tool_calls"][0]["function"]["arguments"],
        r#"{"place": "Rome"}"#
    );
    let (_, events) = ask(&server, json!({"tool_choice": named, "stream": true})).await;
    let parts: Vec<&Value> = events
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    let arguments: String = parts
        .iter()
        .filter_map(|part| part["function"]["arguments"].as_str())
        .collect();
    assert_eq!(arguments, r#"{"place": "Rome"}"#);
    let names: Vec<&str> = parts
        .iter()
        .filter_map(|part| part["function"]["name"].as_str())
        .collect();
    assert_eq!(
        (names, parts.iter().filter(|part| part["id"].is_string()).count()),
        (vec!["weather"], 1)
    );
}

#[tokio::test]
async fn a_required_call_is_one_of_the_tools() {
    let server = Server::saying(r#"[{"name": "clock", "arguments": {}}]"#).await;
    let (_, body) = ask(
        &server,
        json!({"tool_choice": "required", "parallel_tool_calls": false}),
    )
    .await;
    let Some(OutputGrammar::JsonSchema(schema)) = server.request().constraint.grammar.clone() else {
        panic!("no schema: {:?}", server.request().constraint);
    };
    assert!(
        schema.contains("\"maxItems\":1") && schema.contains("\"const\":\"clock\""),
        "{schema}"
    );
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(
        choice["message"]["tool_calls"][0]["function"],
        json!({"name": "clock", "arguments": "{}"})
    );
}

#[tokio::test]
async fn calls_and_results_go_back_to_the_model() {
    let server = Server::saying("x").await;
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{\"zone\": 1}"}});
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "noon"}], "tool_call_id": "call_1", "name": "clock"},
    ]);
    let (status, body) = ask(&server, json!({"messages": messages})).await;
    assert_eq!(status, 200, "{body}");
    let prompt = server.prompt_text();
    assert!(
        prompt.contains(r#""arguments":{"zone":1}"#) && prompt.ends_with("[tool]noon[assistant]"),
        "{prompt}"
    );
}

#[tokio::test]
async fn wrong_tools_are_named() {
    let server = Server::saying("x").await;
    let deep = (0..200).fold(json!(0), |inner, _| json!([inner]));
    for (fields, param, about) in [
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice", "tools"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"enum": deep}}}]}),
            "tools[0].function.parameters",
            "schema",
        ),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice",
            "not one of",
        ),
        (json!({"tool_choice": "maybe"}), "tool_choice", "required"),
        (json!({"tool_choice": 5}), "tool_choice", "required"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type", "function"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            "tools[0].function.name",
            "letters",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}),
            "tools[0].function.parameters",
            "schema",
        ),
        (
            json!({"tool_choice": "required", "guided_regex": "a"}),
            "guided_regex",
            "tool_choice",
        ),
    ] {
        let answer = ask(&server, fields.clone()).await;
        assert_refused(&answer, (&fields, param, about));
    }
    let completion = json!({"model": MODEL, "prompt": "hi", "tools": tools()});
    let answer = post(server.address, "/v1/completions", &completion).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("tools"))
    );
    assert_eq!(server.submitted(), 0);
}
