//! `/v1/responses`: what reaches the model, the items of the answer, and the events of a stream.

use serde_json::{Value, json};
use serving_core::request::{OutputGrammar, RequestError};

use super::client::{assert_refused, post, request, send};
use super::harness::{MODEL, Server};
use super::script::{Script, Step, say};
use coordinator::request_handle::ClientEvent;

const PATH: &str = "/v1/responses";

fn tools() -> Value {
    let place = json!({"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]});
    json!([{"type": "function", "name": "weather", "parameters": place, "strict": true}])
}

async fn ask(server: &Server, fields: Value) -> (u16, Value) {
    let mut body = json!({"model": MODEL, "input": "hi"});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let answer = post(server.address, PATH, &body).await;
    (answer.status, answer.json())
}

/// The events of a stream. Each has its kind in a line of its own and in its data, and a number one above the last.
async fn stream(server: &Server, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    let answer = post(server.address, PATH, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let text = answer.text();
    let events: Vec<Value> = text
        .split_terminator("\n\n")
        .map(|frame| {
            let (kind, data) = frame.split_once('\n').expect("two lines");
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
            assert_eq!(kind.strip_prefix("event: "), data["type"].as_str());
            data
        })
        .collect();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    events
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_text_becomes_a_chat_and_its_answer_a_message() {
    let server = Server::saying("hello").await;
    let (status, body) = ask(
        &server,
        json!({"instructions": "Be short.", "temperature": 0.5, "metadata": {"a": "b"}}),
    )
    .await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(server.prompt_text(), "[system]Be short.[user]hi[assistant]");
    assert!((server.request().sampling.temperature - 0.5).abs() < f32::EPSILON);
    assert_eq!(
        (&body["object"], &body["status"], &body["store"], &body["error"]),
        (&json!("response"), &json!("completed"), &json!(false), &Value::Null)
    );
    assert!(body["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!(
        (&body["instructions"], &body["metadata"], &body["tools"]),
        (&json!("Be short."), &json!({"a": "b"}), &json!([]))
    );
    let item = &body["output"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(item["content"][0]["text"], "hello");
    let usage = &body["usage"];
    assert_eq!(
        (&usage["output_tokens"], &usage["input_tokens_details"]["cached_tokens"]),
        (&json!(6), &json!(3))
    );
    assert_eq!(
        usage["total_tokens"],
        usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap()
    );
}

#[tokio::test]
async fn an_answer_that_its_budget_cuts_is_incomplete() {
    let server = Server::saying("hello").await;
    let (_, body) = ask(&server, json!({"max_output_tokens": 2})).await;
    assert_eq!(
        (&body["status"], &body["incomplete_details"], &body["max_output_tokens"]),
        (&json!("incomplete"), &json!({"reason": "max_output_tokens"}), &json!(2))
    );
    assert_eq!(body["output"][0]["status"], "incomplete");
    let events = stream(&server, json!({"input": "hi", "max_output_tokens": 2})).await;
    assert_eq!(kinds(&events).last(), Some(&"response.incomplete"));
}

#[tokio::test]
async fn a_conversation_with_calls_becomes_messages() {
    let server = Server::saying("fine").await;
    let input = json!([
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{\"place\":\"Rome\"}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]);
    let (status, body) = ask(&server, json!({"input": input, "tools": tools()})).await;
    assert_eq!(status, 200, "{body}");
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}});
    let calls = json!([call("c1", json!({"place": "Rome"})), call("c2", json!({}))]);
    let wanted = format!("(weather)[system]Use tools.[user]weather?[assistant]I look.{calls}[tool]sun[assistant]");
    assert_eq!(server.prompt_text(), wanted);
}

#[tokio::test]
async fn a_stream_has_an_event_for_each_token_and_ends_with_the_response() {
    let server = Server::saying("abc").await;
    let events = stream(&server, json!({"input": "hi", "include_metrics": true})).await;
    let delta = "response.output_text.delta";
    assert_eq!(
        kinds(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            delta,
            delta,
            delta,
            delta,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ],
        "three bytes and the end"
    );
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(text, "abc");
    let item = &events[2]["item"]["id"];
    for event in events.iter().filter(|event| event.get("item_id").is_some()) {
        assert_eq!((&event["item_id"], &event["output_index"]), (item, &json!(0)));
    }
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"][0]["content"][0]["text"], "abc");
    assert_eq!(
        (&last["output"][0]["id"], &last["usage"]["output_tokens"]),
        (item, &json!(4))
    );
    assert!(last["metrics"]["e2e_ms"].is_number());
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["id"], last["id"]);
}

const CALL: &str = r#"Ok. <tool_call>{"name": "weather", "arguments": {"place": "Rome"}}</tool_call>"#;

#[tokio::test]
async fn calls_are_items_of_their_own() {
    let server = Server::saying(CALL).await;
    let (_, body) = ask(&server, json!({"tools": tools()})).await;
    let [message, call] = &body["output"].as_array().unwrap()[..] else {
        panic!("two items: {body}");
    };
    assert_eq!(message["content"][0]["text"], "Ok. ");
    assert_eq!(
        (&call["type"], &call["name"], &call["arguments"]),
        (
            &json!("function_call"),
            &json!("weather"),
            &json!("{\"place\":\"Rome\"}")
        )
    );
    assert_eq!(body["tools"], tools(), "as it was written");
    let events = stream(&server, json!({"input": "hi", "tools": tools()})).await;
    let done: Vec<&Value> = events
        .iter()
        .filter(|event| event["type"] == "response.output_item.done")
        .collect();
    assert_eq!(
        (&done[0]["output_index"], &done[1]["output_index"]),
        (&json!(0), &json!(1))
    );
    assert_eq!(done[1]["item"]["name"], "weather");
    let arguments: String = events
        .iter()
        .filter(|event| event["type"] == "response.function_call_arguments.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(arguments, "{\"place\":\"Rome\"}");
}

#[tokio::test]
async fn a_named_function_and_a_schema_are_forced() {
    let server = Server::saying(r#"{"place": "Rome"}"#).await;
    let named = json!({"type": "function", "name": "weather"});
    let (status, body) = ask(&server, json!({"tools": tools(), "tool_choice": named})).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["output"][0]["arguments"], r#"{"place": "Rome"}"#);
    assert!(server.request().constraint.grammar.is_some());
    let events = stream(&server, json!({"input": "hi", "tools": tools(), "tool_choice": named})).await;
    let parts = kinds(&events)
        .iter()
        .filter(|kind| **kind == "response.function_call_arguments.delta")
        .count();
    assert!(parts > 10, "the arguments come token by token, not in {parts} parts");
    let schema = json!({"type": "object", "properties": {"place": {"type": "string"}}});
    let format = json!({"type": "json_schema", "name": "place", "schema": schema, "strict": true});
    let (_, body) = ask(&server, json!({"text": {"format": format}})).await;
    assert_eq!(body["text"]["format"]["name"], "place");
    let Some(OutputGrammar::JsonSchema(text)) = server.request().constraint.grammar.clone() else {
        panic!("no schema: {:?}", server.request().constraint);
    };
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), schema);
    ask(&server, json!({"guided_regex": "[0-9]+"})).await;
    assert_eq!(
        server.request().constraint.grammar,
        Some(OutputGrammar::Regex("[0-9]+".into())),
        "as in a chat"
    );
}

#[tokio::test]
async fn a_stream_that_breaks_off_says_so_in_its_last_event() {
    for (error, code) in [
        (RequestError::Internal("it broke".to_owned()), "server_error"),
        (RequestError::RuledOut, "invalid_prompt"),
        (RequestError::NoRoom { waited_ms: 5 }, "rate_limit_exceeded"),
    ] {
        let words = error.to_string();
        let server = Server::start(move |request| {
            let mut steps = say(request, |_| "abcdef".to_owned());
            steps.truncate(3);
            steps.push(Step::Event(ClientEvent::Failed(error.clone())));
            Script::Play(steps)
        })
        .await;
        let events = stream(&server, json!({"input": "hi"})).await;
        let last = events.last().unwrap();
        assert_eq!(
            (&last["type"], &last["response"]["status"]),
            (&json!("response.failed"), &json!("failed"))
        );
        let told = &last["response"]["error"];
        assert_eq!(told["code"], code);
        assert!(told["message"].as_str().unwrap().contains(&words), "{told}");
        assert_eq!(last["response"]["output"][0]["content"][0]["text"], "ab");
    }
}

#[tokio::test]
async fn what_is_not_supported_is_refused_by_its_name() {
    let server = Server::saying("x").await;
    for (fields, param, about) in [
        (json!({"input": null}), "input", "missing"),
        (json!({"input": ""}), "input", "empty"),
        (json!({"input": []}), "input", "empty"),
        (
            json!({"previous_response_id": "resp_1"}),
            "previous_response_id",
            "not supported",
        ),
        (json!({"background": true}), "background", "not supported"),
        (json!({"truncation": "auto"}), "truncation", "not supported"),
        (json!({"reasoning": {"effort": "low"}}), "reasoning", "not supported"),
        (json!({"max_tokens": 5}), "max_tokens", "not supported"),
        (
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
            "not supported",
        ),
        (
            json!({"input": [{"role": "tool", "content": "x"}]}),
            "input[0].role",
            "function_call_output",
        ),
        (
            json!({"include": ["message.output_text.logprobs"]}),
            "include",
            "not supported",
        ),
        (json!({"max_output_tokens": 0}), "max_output_tokens", "at least 1"),
        (
            json!({"max_output_tokens": 10_000}),
            "max_output_tokens",
            "maximum context length",
        ),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type", "function"),
        (
            json!({"tools": [{"type": "function", "name": "a b"}]}),
            "tools[0].name",
            "letters",
        ),
        (
            json!({"tool_choice": {"type": "file_search", "name": "x"}}),
            "tool_choice",
            "must be",
        ),
        (
            json!({"text": {"format": {"type": "json_schema"}}}),
            "text.format.schema",
            "missing",
        ),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity", "not supported"),
        (
            json!({"input": [{"type": "item_reference", "id": "msg_1"}]}),
            "input[0].type",
            "stores nothing",
        ),
        (
            json!({"input": [{"type": "reasoning", "summary": []}]}),
            "input[0].type",
            "must be",
        ),
        (json!({"input": [{"role": "user"}]}), "input[0].content", "missing"),
        (
            json!({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}),
            "input[0].arguments",
            "missing",
        ),
        (
            json!({"input": [{"type": "function_call_output", "output": "x"}]}),
            "input[0].call_id",
            "missing",
        ),
    ] {
        assert_refused(&ask(&server, fields.clone()).await, (&fields, param, about));
    }
    let (status, body) = ask(
        &server,
        json!({"store": true, "truncation": "disabled", "service_tier": "auto", "background": false,
               "include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": false}}),
    )
    .await;
    assert_eq!(status, 200, "these ask for what happens anyway: {body}");
}

#[tokio::test]
async fn what_a_client_wrote_over_several_lines_breaks_no_event() {
    let server = Server::saying("ok").await;
    let body = json!({"input": "hi", "stream": true, "metadata": {"a": "b\nc"}, "tools": tools()});
    let body = serde_json::to_string_pretty(&body).unwrap().replace('{', "{\n\n\r\n");
    let answer = send(server.address, &request("POST", PATH, &[], body.as_bytes())).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    for frame in answer.text().split_terminator("\n\n") {
        let (_, data) = frame.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON in one line");
        if let Some(response) = data.get("response") {
            assert_eq!(
                (&response["metadata"]["a"], &response["tools"]),
                (&json!("b\nc"), &tools())
            );
        }
    }
}

#[tokio::test]
async fn what_an_answer_repeats_has_a_limit() {
    let server = Server::saying("x").await;
    let long = "y".repeat(140 << 10);
    let fields = json!({"metadata": {"a": long}});
    assert_refused(&ask(&server, fields.clone()).await, (&fields, "metadata", "repeats"));
    let fields = json!({"tools": [{"type": "function", "name": "f", "unknown": long}], "tool_choice": "none"});
    assert_refused(&ask(&server, fields.clone()).await, (&fields, "tools", "repeats"));
}

#[tokio::test]
async fn text_and_calls_keep_their_order_whole_and_streamed() {
    const SAID: &str = "A \n<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>\n<tool_call>{\"name\": \"weather\", \
                        \"arguments\": {}}</tool_call> B";
    let server = Server::saying(SAID).await;
    let kinds_of = |items: &Value| -> Vec<String> {
        let items = items.as_array().unwrap().iter();
        items.map(|item| item["type"].as_str().unwrap().to_owned()).collect()
    };
    let wanted = ["message", "function_call", "function_call", "message"];
    let (_, body) = ask(&server, json!({"tools": tools()})).await;
    assert_eq!(kinds_of(&body["output"]), wanted, "{body}");
    let events = stream(&server, json!({"input": "hi", "tools": tools()})).await;
    let streamed = &events.last().unwrap()["response"]["output"];
    assert_eq!(kinds_of(streamed), wanted);
    for (one, other) in body["output"]
        .as_array()
        .unwrap()
        .iter()
        .zip(streamed.as_array().unwrap())
    {
        assert_eq!((&one["content"], &one["name"]), (&other["content"], &other["name"]));
    }
    // Sent back, the text after the calls goes before them, so that their results follow them.
    let mut input = vec![json!({"role": "user", "content": "q"})];
    input.extend(body["output"].as_array().unwrap().iter().cloned());
    let call_id = body["output"][1]["call_id"].clone();
    input.push(json!({"type": "function_call_output", "call_id": call_id, "output": "sun"}));
    let (status, answer) = ask(&server, json!({"input": input})).await;
    assert_eq!(status, 200, "{answer}");
    let prompt = server.prompt_text();
    assert!(prompt.starts_with("[user]q[assistant]A \n B[{"), "{prompt}");
    assert!(prompt.ends_with("[tool]sun[assistant]"), "{prompt}");
}
