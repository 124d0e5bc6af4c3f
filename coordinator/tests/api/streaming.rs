//! Framing: one event per token, nothing else unless asked for; text held back until it is certain.

use coordinator::request_handle::ClientEvent;
use serde_json::{Value, json};
use serving_core::ids::TokenId;
use serving_core::request::RequestError;
use serving_core::stage::Stage;
use tokio::sync::oneshot;

use super::client::{Answer, post};
use super::harness::{MODEL, Server};
use super::script::{Script, Step, done, known, placed, say, token};

async fn stream(server: &Server, path: &str, fields: Value) -> Answer {
    let mut body = match path {
        "/v1/completions" => json!({"model": MODEL, "prompt": "hi", "max_tokens": 100, "stream": true}),
        _ => json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": true}),
    };
    for (name, value) in fields.as_object().expect("fields") {
        body[name] = value.clone();
    }
    let answer = post(server.address, path, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

fn texts(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str())
        .collect()
}

#[tokio::test]
async fn one_event_per_token_and_done() {
    let server = Server::saying("abc").await;
    let answer = stream(&server, "/v1/completions", json!({})).await;
    assert_eq!(answer.header("content-type"), "text/event-stream; charset=utf-8");
    assert_eq!(answer.header("cache-control"), "no-cache");
    assert_eq!(answer.header("x-accel-buffering"), "no");
    assert_eq!(answer.header("x-queue-ms"), "7");
    let events = answer.events();
    // Three letters, the end token with its empty text, [DONE]; no usage, no comment.
    assert_eq!(events.len(), 5);
    assert_eq!(texts(&events), ["a", "b", "c", ""]);
    assert_eq!(events[4], "[DONE]");
    let reasons: Vec<&Value> = events[..4]
        .iter()
        .map(|event| &event["choices"][0]["finish_reason"])
        .collect();
    assert_eq!(reasons, [&Value::Null, &Value::Null, &Value::Null, &json!("stop")]);
    for event in &events[..4] {
        for stable in ["id", "object", "created", "model", "system_fingerprint"] {
            assert_eq!(event[stable], events[0][stable]);
        }
        assert!(event.get("usage").is_none());
    }
    let ended = server.ended().await;
    assert_eq!((ended.outcome.as_str(), ended.output_tokens), ("ok", 4));
    assert!(ended.ttft.is_some_and(|ttft| ttft <= ended.e2e));
    assert_eq!(*server.metrics.gaps.lock().unwrap(), 3);
    for stage in ["parse", "tokenize", "queue", "egress"] {
        assert!(ended.stages.0.iter().any(|(s, _)| s.name() == stage), "{stage}");
    }
}

#[tokio::test]
async fn the_first_chat_event_has_role_and_content() {
    let server = Server::saying("ab").await;
    let events = stream(&server, "/v1/chat/completions", json!({})).await.events();
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert_eq!(
        events[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": "a"})
    );
    assert_eq!(events[1]["choices"][0]["delta"], json!({"content": "b"}));
    assert_eq!(events[2]["choices"][0]["delta"], json!({"content": ""}));
    assert_eq!(events[2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(events.len(), 4);
}

#[tokio::test]
async fn usage_comes_last_and_only_when_asked_for() {
    let server = Server::saying("ab").await;
    let options = json!({"stream_options": {"include_usage": true}});
    let events = stream(&server, "/v1/chat/completions", options).await.events();
    let last = &events[events.len() - 2];
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"],
        json!({"prompt_tokens": 19, "completion_tokens": 3, "total_tokens": 22, "prompt_tokens_details": {"cached_tokens": 3}})
    );
    let options = json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = stream(&server, "/v1/completions", options).await.events();
    let counts: Vec<&Value> = events[..4]
        .iter()
        .map(|event| &event["usage"]["completion_tokens"])
        .collect();
    assert_eq!(counts, [&json!(1), &json!(2), &json!(3), &json!(3)]);
}

#[tokio::test]
async fn metrics_and_hashes_ride_on_the_last_chunk() {
    let server = Server::saying("ab").await;
    let events = stream(
        &server,
        "/v1/completions",
        json!({"include_metrics": true, "return_kv_hashes": true}),
    )
    .await;
    let events = events.events();
    let last = &events[events.len() - 2];
    assert_eq!(last["choices"], json!([]));
    assert!(last.get("usage").is_none());
    assert_eq!(last["metrics"]["output_tokens"], 3);
    assert!(last["metrics"]["stages_ttft_ms"]["egress"].is_number(), "{last}");
    assert_eq!(last["kv_hashes"][0], "00000000000000ab");
}

#[tokio::test]
async fn half_characters_are_held_back() {
    let server = Server::saying("a€🦀").await;
    let events = stream(&server, "/v1/completions", json!({"return_token_ids": true}))
        .await
        .events();
    assert_eq!(texts(&events), ["a", "", "", "€", "", "", "", "🦀", ""]);
    let ids: Vec<&Value> = events[..9]
        .iter()
        .map(|event| &event["choices"][0]["token_ids"])
        .collect();
    assert_eq!((ids[1], ids[8]), (&json!([0xe2]), &json!([256])));
    // The prompt's ids come once.
    assert_eq!(events[0]["choices"][0]["prompt_token_ids"], json!([104, 105]));
    assert!(events[1]["choices"][0].get("prompt_token_ids").is_none());
}

#[tokio::test]
async fn a_character_cut_by_the_budget_becomes_a_replacement_at_the_end() {
    let server = Server::saying("a€").await;
    let events = stream(&server, "/v1/completions", json!({"max_tokens": 3}))
        .await
        .events();
    assert_eq!(texts(&events), ["a", "", "\u{FFFD}"]);
    assert_eq!(events[2]["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_possible_stop_is_held_and_given_out_when_it_was_none() {
    let server = Server::saying("xENyEND never").await;
    let events = stream(&server, "/v1/completions", json!({"stop": "END"}))
        .await
        .events();
    assert_eq!(texts(&events), ["x", "", "", "ENy", "", "", ""]);
    let last = &events[events.len() - 2];
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(
        server.ended().await.output_tokens,
        7,
        "the tokens of the stop string were delivered"
    );
}

#[tokio::test]
async fn choices_are_told_apart() {
    let server = Server::start(|request| Script::Play(say(request, |choice| format!("{choice}")))).await;
    let events = stream(&server, "/v1/chat/completions", json!({"n": 3})).await.events();
    for index in 0..3 {
        let own: Vec<&Value> = events
            .iter()
            .map(|event| &event["choices"][0])
            .filter(|choice| choice["index"] == json!(index))
            .collect();
        assert_eq!(
            own[0]["delta"],
            json!({"role": "assistant", "content": index.to_string()})
        );
        assert_eq!(own[1]["finish_reason"], "stop");
        assert_eq!(own.len(), 2);
    }
}

#[tokio::test]
async fn several_prompts_stream_side_by_side() {
    let server = Server::saying("ab").await;
    let fields = json!({"prompt": ["p", "q"], "stream_options": {"include_usage": true}});
    let events = stream(&server, "/v1/completions", fields).await.events();
    for index in 0..2 {
        let text: String = events
            .iter()
            .map(|event| &event["choices"][0])
            .filter(|choice| choice["index"] == json!(index))
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(text, "ab");
    }
    assert_eq!(events[events.len() - 2]["usage"]["completion_tokens"], 6);
}

#[tokio::test]
async fn logprobs_come_with_their_token() {
    let server = Server::saying("é").await;
    let events = stream(&server, "/v1/completions", json!({"logprobs": 1, "echo": true}))
        .await
        .events();
    assert_eq!(events[0]["choices"][0]["text"], "hi");
    assert_eq!(
        events[0]["choices"][0]["logprobs"]["tokens"],
        json!(["h", "i", "bytes:\\xc3"])
    );
    assert_eq!(events[1]["choices"][0]["logprobs"]["tokens"], json!(["bytes:\\xa9"]));
    assert_eq!(events[1]["choices"][0]["text"], "é");
    assert_eq!(events[2]["choices"][0]["logprobs"]["text_offset"], json!([3]));
    let chat = json!({"logprobs": true, "top_logprobs": 1});
    let events = stream(&server, "/v1/chat/completions", chat).await.events();
    assert_eq!(
        events[1]["choices"][0]["logprobs"]["content"][0]["bytes"],
        json!([0xa9])
    );
}

#[tokio::test]
async fn echo_without_tokens_is_one_event() {
    let server = Server::saying("never").await;
    let events = stream(&server, "/v1/completions", json!({"echo": true, "max_tokens": 0}))
        .await
        .events();
    assert_eq!(events.len(), 2);
    assert_eq!(events[0]["choices"][0]["text"], "hi");
    assert_eq!(events[0]["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_an_event_then_done() {
    let server = Server::start(|request| {
        let failure = RequestError::DecodeNodeFailed {
            node: "decode-0".into(),
            detail: "gone".into(),
        };
        let first = token(request, (0, 0), TokenId(97), None);
        Script::Play(vec![placed(), first, Step::Event(ClientEvent::Failed(failure))])
    })
    .await;
    let events = stream(
        &server,
        "/v1/completions",
        json!({"stream_options": {"include_usage": true}}),
    )
    .await
    .events();
    assert_eq!(events.len(), 3);
    assert_eq!(events[1]["error"]["code"], "node_failed");
    assert!(events[1]["error"]["message"].as_str().unwrap().contains("decode-0"));
    assert_eq!(events[2], "[DONE]");
    assert_eq!(server.ended().await.outcome, "decode_node_failed");
}

#[tokio::test]
async fn a_loop_that_dies_ends_the_stream_with_an_error() {
    let server = Server::start(|request| Script::Play(vec![placed(), token(request, (0, 0), TokenId(97), None)])).await;
    let events = stream(&server, "/v1/completions", json!({})).await.events();
    assert_eq!(events[1]["error"]["code"], "internal_error");
    assert_eq!(events[2], "[DONE]");
}

/// Says "ab"; the nodes' last reports come when the sender is used.
async fn with_late_reports() -> (Server, oneshot::Sender<()>) {
    let (report, reported) = oneshot::channel();
    let reported = std::sync::Mutex::new(Some(reported));
    let server = Server::start(move |request| {
        let mut steps = say(request, |_| "ab".to_owned());
        steps.pop();
        steps.insert(1, known());
        let gate = reported.lock().unwrap().take().expect("one request");
        steps.extend([known(), Step::Wait(gate), done()]);
        Script::Play(steps)
    });
    (server.await, report)
}

#[tokio::test]
async fn an_answer_ends_with_its_last_token_and_its_record_with_the_nodes_last_reports() {
    for is_streaming in [true, false] {
        let (server, report) = with_late_reports().await;
        let fields =
            json!({"stream": is_streaming, "stream_options": is_streaming.then(|| json!({"include_usage": true}))});
        // Nobody has reported yet, and the answer is whole.
        let answer = stream(&server, "/v1/completions", fields).await;
        let usage = match is_streaming {
            true => answer.events()[3]["usage"].clone(),
            false => answer.json()["usage"].clone(),
        };
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 3, "{usage}");
        assert!(
            server.metrics.ended.lock().unwrap().is_empty(),
            "its record is not whole"
        );
        report.send(()).expect("the request is still held");
        let ended = server.ended().await;
        assert_eq!((ended.outcome.as_str(), ended.output_tokens), ("ok", 3));
        assert!(ended.stages.get(Stage::Decode).is_some(), "{:?}", ended.stages);
        assert!(ended.last_token_to_end.is_some_and(|took| took <= ended.e2e));
    }
}

#[tokio::test]
async fn an_answer_that_tells_of_the_nodes_reports_waits_for_them() {
    let (server, report) = with_late_reports().await;
    let fields = json!({"include_metrics": true});
    let (answer, ()) = tokio::join!(stream(&server, "/v1/completions", fields), async {
        super::harness::until(|| (*server.metrics.gaps.lock().unwrap() == 2).then_some(())).await;
        report.send(()).expect("the request is held");
    });
    let metrics = &answer.events()[3]["metrics"];
    assert_eq!(metrics["kv_bytes"], 4096, "{metrics}");
    assert!(metrics["decode_ms"].is_number(), "{metrics}");
}
