//! Everything a client can get wrong is a 400 that names the field, and nothing reaches the control loop.

use serde_json::{Value, json};

use super::client::{Answer, post, post_with, request, send};
use super::harness::{BODY_BYTES_MAX, MAX_MODEL_TOKENS, MODEL, Server};

async fn raw(server: &Server, body: &[u8]) -> Answer {
    send(server.address, &request("POST", "/v1/completions", &[], body)).await
}

fn assert_error(answer: &Answer, status: u16, param: Value, about: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    let error = &answer.json()["error"];
    assert_eq!(error["param"], param, "{error}");
    assert!(
        error["message"].as_str().unwrap().contains(about),
        "{error} does not say {about:?}"
    );
    for key in ["message", "type", "param", "code"] {
        assert!(error.get(key).is_some(), "{key} is missing in {error}");
    }
    assert!(!answer.header("x-request-id").is_empty());
}

#[tokio::test]
async fn bodies_that_are_no_json_object() {
    let server = Server::saying("x").await;
    let deep = format!("{{\"prompt\": {}", "[".repeat(10_000));
    for (body, about) in [
        (&b""[..], "empty"),
        (b"{\"model\": ", "valid JSON"),
        (b"not json", "valid JSON"),
        (b"[1]", "must be a JSON object: invalid type: sequence"),
        (b"\"text\"", "must be a JSON object"),
        (b"{\"model\": \"tiny\", \"prompt\": \"\xff\xfe\"}", "UTF-8"),
        (b"{\"prompt\": \"\\ud800\"}", "valid JSON"),
        (b"{\"temperature\": NaN}", "valid JSON"),
        (b"{\"temperature\": 1e999}", "valid JSON"),
        (b"{\"temperature\": Infinity}", "valid JSON"),
        (deep.as_bytes(), "valid JSON"),
    ] {
        assert_error(&raw(&server, body).await, 400, Value::Null, about);
    }
    let huge = b"{\"model\": \"tiny\", \"prompt\": \"hi\", \"max_tokens\": 99999999999999999999999999}";
    assert_error(&raw(&server, huge).await, 400, json!("max_tokens"), "whole number");
    assert_eq!(server.submitted(), 0);
}

#[tokio::test]
async fn each_wrong_field_is_named() {
    let server = Server::saying("x").await;
    let many_stops: Vec<String> = (0..17).map(|i| i.to_string()).collect();
    let many_biases: Value = (0..1025)
        .map(|i| (i.to_string(), json!(1)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let cases = [
        ("model", json!(3), "string"),
        ("prompt", json!(""), "empty"),
        ("prompt", json!([]), "empty"),
        ("prompt", json!([[]]), "empty"),
        ("prompt", json!(["a", ""]), "empty"),
        ("prompt", json!(null), "missing"),
        ("prompt", json!(5), "list"),
        ("prompt", json!({"a": 1}), "list"),
        ("prompt", json!([1, -1]), "-1"),
        ("prompt", json!([259]), "0 to 258"),
        ("prompt", json!([1e20]), "token id"),
        ("prompt", json!([1.5]), "1.5"),
        ("prompt", json!([1, "a"]), "token id"),
        ("prompt", json!(["a", 1]), "prompt[1]"),
        ("prompt", json!([[1, 2], [3, 1e30]]), "prompt[1][1]"),
        ("prompt", json!(vec!["a"; 129]), "129"),
        ("max_tokens", json!(-1), "-1"),
        ("max_tokens", json!(0), "at least 1"),
        ("max_tokens", json!("ten"), "ten"),
        ("max_tokens", json!(1.5), "1.5"),
        ("max_tokens", json!(1e20), "whole number"),
        ("temperature", json!(-0.1), "-0.1"),
        ("temperature", json!(2.1), "2.1"),
        ("temperature", json!("hot"), "hot"),
        ("temperature", json!(true), "true"),
        ("top_p", json!(1.01), "0 to 1"),
        ("top_p", json!(-1), "0 to 1"),
        ("top_k", json!(-2), "-2"),
        ("top_k", json!(2.5), "2.5"),
        ("min_p", json!(2), "0 to 1"),
        ("n", json!(0), "1 to 16"),
        ("n", json!(17), "1 to 16"),
        ("n", json!(1e18), "1 to 16"),
        ("stop", json!(5), "list of strings"),
        ("stop", json!(["a", 5]), "stop[1]"),
        ("stop", json!(""), "1 to 256"),
        ("stop", json!("x".repeat(257)), "1 to 256"),
        ("stop", json!(many_stops), "17"),
        ("seed", json!("abc"), "64 bits"),
        ("seed", json!(1.5), "64 bits"),
        ("seed", json!(1e40), "64 bits"),
        ("stream", json!("yes"), "true or false"),
        ("logprobs", json!(21), "0 to 20"),
        ("logprobs", json!(-1), "0 to 20"),
        ("logprobs", json!(true), "0 to 20"),
        ("prompt_logprobs", json!(21), "0 to 20"),
        ("priority", json!(0.5), "whole number"),
        ("echo", json!(1), "true or false"),
        ("presence_penalty", json!(2.5), "-2 to 2"),
        ("frequency_penalty", json!(-3), "-2 to 2"),
        ("repetition_penalty", json!(0), "at least 0.01"),
        ("repetition_penalty", json!(2e-38), "at least 0.01"),
        ("repetition_penalty", json!(-1), "0 to 10"),
        ("logit_bias", json!([1]), "object"),
        ("logit_bias", json!({"x": 1}), "token ids"),
        ("logit_bias", json!({"-1": 1}), "token ids"),
        ("logit_bias", json!({"259": 1}), "token ids"),
        ("logit_bias", json!({"1": 101}), "-100 to 100"),
        ("logit_bias", json!({"1": "a"}), "-100 to 100"),
        ("logit_bias", json!({"7": 1, "07": 2}), "twice"),
        ("logit_bias", many_biases, "1025"),
        ("user", json!(1), "string"),
        ("user", json!("u".repeat(129)), "128"),
        ("ignore_eos", json!("no"), "true or false"),
        ("min_tokens", json!(-1), "-1"),
        ("min_tokens", json!(11), "exceed"),
        ("stop_token_ids", json!([259]), "stop_token_ids[0]"),
        ("stop_token_ids", json!(7), "list"),
        ("return_token_ids", json!(1), "true or false"),
        ("include_metrics", json!(1), "true or false"),
        ("return_kv_hashes", json!("x"), "true or false"),
        ("best_of", json!(2), "best_of"),
        ("messages", json!([]), "/v1/chat/completions"),
        ("max_completion_tokens", json!(5), "/v1/chat/completions"),
        ("top_logprobs", json!(5), "/v1/chat/completions"),
    ];
    for (name, value, about) in cases {
        let mut body = json!({"model": MODEL, "prompt": "hi", "max_tokens": 10});
        body[name] = value.clone();
        let answer = post(server.address, "/v1/completions", &body).await;
        assert_error(&answer, 400, json!(name), about);
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    }
    assert_eq!(server.submitted(), 0);
    assert!(
        server
            .metrics
            .ended
            .lock()
            .unwrap()
            .iter()
            .all(|ended| ended.outcome == "invalid_request")
    );
}

#[tokio::test]
async fn names_that_are_not_built_are_refused_by_name() {
    let server = Server::saying("x").await;
    // With a value that would change the answer.
    let fields = json!({
        "include_stop_str_in_output": true, "skip_special_tokens": false, "spaces_between_special_tokens": false,
        "request_id": "a", "stream_interval": 2, "session_id": "a",
        "use_beam_search": true, "length_penalty": 1.5, "early_stopping": true, "no_repeat_ngram_size": 2, "typical_p": 0.5,
        "logits_processors": ["x"], "functions": [{}],
        "function_call": {"name": "f"}, "audio": {}, "web_search_options": {}, "chat_template": "x",
        "chat_template_kwargs": {}, "documents": [{}], "json_schema": "{}", "regex": "a", "ebnf": "a", "grammar": "a",
        "suffix": "x", "best_of": 2,
    });
    for (name, value) in fields.as_object().unwrap() {
        let mut body = json!({"model": MODEL, "prompt": "hi"});
        body[name] = value.clone();
        let answer = post(server.address, "/v1/completions", &body).await;
        assert_error(&answer, 400, json!(name), "not supported");
        assert_eq!(answer.json()["error"]["code"], "unsupported_parameter");
        // Null is the same as not sent.
        body[name] = Value::Null;
        assert_eq!(post(server.address, "/v1/completions", &body).await.status, 200);
    }
    let unknown = json!({"model": MODEL, "prompt": "hi", "store": true, "anything": [1]});
    assert_eq!(post(server.address, "/v1/completions", &unknown).await.status, 200);
}

#[tokio::test]
async fn values_that_ask_for_what_happens_anyway_are_accepted() {
    let server = Server::saying("x").await;
    let fields = json!({
        "include_stop_str_in_output": false, "skip_special_tokens": true, "spaces_between_special_tokens": true,
        "stream_interval": 1, "use_beam_search": false, "length_penalty": 1.0, "early_stopping": false,
        "no_repeat_ngram_size": 0, "typical_p": 1, "logits_processors": [], "bad_words": [], "tools": [],
        "tool_choice": "auto", "functions": [], "function_call": "none", "documents": [], "grammar": "", "suffix": "",
        "best_of": 1, "response_format": {"type": "text"}, "add_special_tokens": true, "add_generation_prompt": true,
        "continue_final_message": false, "stream_options": {"include_usage": true},
    });
    for (name, value) in fields.as_object().unwrap() {
        let mut body = json!({"model": MODEL, "prompt": "hi"});
        body[name] = value.clone();
        let answer = post(server.address, "/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{name}: {}", answer.text());
    }
}

#[tokio::test]
async fn wrong_messages_are_named() {
    let server = Server::saying("x").await;
    let cases = [
        (json!(null), "messages", "at least one"),
        (json!([]), "messages", "at least one"),
        (json!("hi"), "messages", "list"),
        (json!([5]), "messages", "object"),
        (json!([{"content": "x"}]), "messages[0].role", "missing"),
        (
            json!([{"role": "wizard", "content": "x"}]),
            "messages[0].role",
            "wizard",
        ),
        (json!([{"role": 1, "content": "x"}]), "messages[0].role", "string"),
        (json!([{"role": "user"}]), "messages[0].content", "missing"),
        (
            json!([{"role": "user", "content": 7}]),
            "messages[0].content",
            "text parts",
        ),
        (
            json!([{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[0].content[0]",
            "text only",
        ),
        (
            json!([{"role": "user", "content": "a", "tool_calls": [{}]}]),
            "messages[0].tool_calls",
            "not supported",
        ),
        (
            json!([{"role": "user", "content": "a", "name": "me"}]),
            "messages[0].name",
            "not supported",
        ),
        (
            json!([{"role": "assistant", "content": "a", "tool_calls": [1]}]),
            "messages[0].tool_calls[0]",
            "object",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
            "messages[0].tool_calls",
            "function.name",
        ),
        (json!([{"role": "tool"}]), "messages[0].content", "missing"),
    ];
    for (messages, param, about) in cases {
        let body = json!({"model": MODEL, "messages": messages});
        let answer = post(server.address, "/v1/chat/completions", &body).await;
        assert_error(&answer, 400, json!(param), about);
    }
    for (name, value, about) in [
        ("prompt", json!("x"), "/v1/completions"),
        ("echo", json!(true), "/v1/completions"),
        ("logprobs", json!(3), "true or false"),
        ("top_logprobs", json!(3), "logprobs"),
        ("max_completion_tokens", json!(0), "at least 1"),
    ] {
        let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
        body[name] = value;
        let answer = post(server.address, "/v1/chat/completions", &body).await;
        assert_error(&answer, 400, json!(name), about);
    }
}

#[tokio::test]
async fn models() {
    let server = Server::saying("x").await;
    let answer = post(server.address, "/v1/completions", &json!({"prompt": "hi"})).await;
    assert_eq!(answer.json()["model"], MODEL, "there is only one model to mean");
    let answer = post(
        server.address,
        "/v1/completions",
        &json!({"model": "gpt-9", "prompt": "hi"}),
    )
    .await;
    assert_error(&answer, 404, json!("model"), "tiny, org/alias");
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
    let answer = post(
        server.address,
        "/v1/completions",
        &json!({"model": "org/alias", "prompt": "hi"}),
    )
    .await;
    assert_eq!(answer.json()["model"], MODEL, "answers have the first name");
}

#[tokio::test]
async fn prompts_that_do_not_fit_name_limit_and_count() {
    let server = Server::saying("x").await;
    let long = "x".repeat(MAX_MODEL_TOKENS as usize);
    let longer = "x".repeat(5000);
    for (fields, param, count) in [
        (json!({"prompt": long}), "prompt", "512"),
        (json!({"prompt": longer}), "prompt", "at least"),
        (json!({"prompt": "hi", "max_tokens": 511}), "max_tokens", "513"),
        (
            json!({"prompt": "hi", "max_tokens": 4294967295u32}),
            "max_tokens",
            "4294967297",
        ),
        (json!({"prompt": vec![5; 600], "max_tokens": 1}), "max_tokens", "600"),
        (json!({"prompt": ["ok", long], "max_tokens": 1}), "max_tokens", "513"),
    ] {
        let mut body = fields;
        body["model"] = json!(MODEL);
        let answer = post(server.address, "/v1/completions", &body).await;
        assert_error(&answer, 400, json!(param), count);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(
            message.starts_with("This model's maximum context length is 512 tokens."),
            "{message}"
        );
        assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    }
    let chat = json!({"model": MODEL, "messages": [{"role": "user", "content": long}]});
    let answer = post(server.address, "/v1/chat/completions", &chat).await;
    assert_error(&answer, 400, json!("messages"), "512");
    assert_eq!(server.submitted(), 0);
    // The default budget shrinks to what is left.
    let body = json!({"model": MODEL, "prompt": "x".repeat(507)});
    assert_eq!(post(server.address, "/v1/completions", &body).await.status, 200);
    assert_eq!(server.request().stop.max_tokens, 5);
}

#[tokio::test]
async fn bad_headers() {
    let server = Server::saying("x").await;
    let body = json!({"model": MODEL, "prompt": "hi"});
    for (name, value) in [
        ("x-lane", "fast"),
        ("x-request-timeout-ms", "0"),
        ("x-request-timeout-ms", "-5"),
        ("x-request-timeout-ms", "3600001"),
        ("x-request-timeout-ms", "soon"),
    ] {
        let answer = post_with(server.address, "/v1/completions", &body, &[(name, value)]).await;
        assert_error(&answer, 400, json!(name), name);
    }
    // A label that could not be sent back is replaced, not refused.
    let long = "i".repeat(200);
    let answer = post_with(server.address, "/v1/completions", &body, &[("x-request-id", &long)]).await;
    assert_eq!((answer.status, answer.header("x-request-id").len()), (200, 32));
}

#[tokio::test]
async fn fifty_megabytes_are_too_large_and_the_answer_arrives() {
    let server = Server::saying("x").await;
    let body = vec![b'x'; 50 << 20];
    let answer = raw(&server, &body).await;
    assert_error(&answer, 413, Value::Null, &BODY_BYTES_MAX.to_string());
    assert_eq!(answer.json()["error"]["code"], "request_too_large");
    assert_eq!(
        post(
            server.address,
            "/v1/completions",
            &json!({"model": MODEL, "prompt": "hi"})
        )
        .await
        .status,
        200
    );
}

#[tokio::test]
async fn tokenize_and_detokenize_refuse_too() {
    let server = Server::saying("x").await;
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [-1]}), "tokens"),
        ("/detokenize", json!({"tokens": [259]}), "tokens"),
        ("/detokenize", json!({"tokens": "abc"}), "tokens"),
    ] {
        assert_error(&post(server.address, path, &body).await, 400, json!(param), "`");
    }
}
