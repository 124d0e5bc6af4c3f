//! `/v1/completions` without streaming: every field, every form of prompt.

use serde_json::{Value, json};
use serving_core::ids::TokenId;
use serving_core::request::Lane;
use serving_core::stage::Stage;

use super::byte_model::END;
use super::client::{assert_refused, post, post_with};
use super::harness::{MODEL, Server, until};
use super::script::{Script, say};

async fn complete(server: &Server, fields: Value) -> Value {
    let mut body = json!({"model": MODEL, "prompt": "hi", "max_tokens": 100});
    for (name, value) in fields.as_object().expect("fields") {
        body[name] = value.clone();
    }
    let answer = post(server.address, "/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn ids(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| TokenId(byte.into())).collect()
}

#[tokio::test]
async fn a_completion_of_no_length_has_room_for_the_least_that_was_asked_for() {
    let server = Server::saying("x").await;
    for (least, budget) in [(0, 16), (40, 40)] {
        complete(&server, json!({"max_tokens": null, "min_tokens": least})).await;
        let request = server.request();
        assert_eq!((request.stop.min_tokens, request.stop.max_tokens), (least, budget));
    }
}

#[tokio::test]
async fn the_body_has_openais_shape() {
    let server = Server::saying("Paris.").await;
    let answer = post(
        server.address,
        "/v1/completions",
        &json!({"model": MODEL, "prompt": "hi"}),
    )
    .await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-queue-ms"), "7");
    assert!(answer.header("server-timing").contains("tokenize;dur="));
    let body = answer.json();
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(body["object"], "text_completion");
    assert_eq!(body["model"], MODEL);
    assert_eq!(body["system_fingerprint"], "fp-1");
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    let choice = &body["choices"][0];
    assert_eq!((&choice["index"], &choice["text"]), (&json!(0), &json!("Paris.")));
    assert_eq!(
        (&choice["finish_reason"], &choice["logprobs"]),
        (&json!("stop"), &Value::Null)
    );
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}})
    );
    // Not asked for, not there.
    for absent in ["metrics", "kv_hashes", "prompt_token_ids"] {
        assert!(body.get(absent).is_none(), "{absent}");
    }
    let request = server.request();
    assert_eq!(request.prompt.to_vec(), ids("hi"));
    assert_eq!((request.stop.max_tokens, request.choice_count), (16, 1));
    assert_eq!(request.stop.end_tokens, vec![END]);
    assert_eq!(
        (
            request.sampling.temperature,
            request.sampling.top_p,
            request.sampling.top_k
        ),
        (1.0, 1.0, None)
    );
    assert!(!request.report_kv_hashes);
}

#[tokio::test]
async fn every_field_reaches_the_request() {
    let server = Server::saying("x").await;
    let fields = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": -1, "frequency_penalty": 2,
        "repetition_penalty": 1.1, "logit_bias": {"9": 5, "3": -100}, "n": 2, "seed": -7, "ignore_eos": true,
        "min_tokens": 4, "stop_token_ids": [1, 2], "logprobs": 3, "user": "me", "best_of": 1, "stop": null,
        "return_kv_hashes": true, "priority": -3,
    });
    let body = complete(&server, fields).await;
    let request = server.request();
    let s = &request.sampling;
    assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p), (0.5, 0.9, Some(40), 0.05));
    assert_eq!(
        (s.presence_penalty, s.frequency_penalty, s.repetition_penalty),
        (-1.0, 2.0, 1.1)
    );
    assert_eq!(s.logit_bias, vec![(TokenId(3), -100.0), (TokenId(9), 5.0)]);
    assert_eq!((request.choice_count, request.seed), (2, u64::MAX - 6));
    assert_eq!((request.stop.min_tokens, request.stop.end_tokens.len()), (4, 0));
    assert_eq!(request.stop.stop_token_ids, vec![TokenId(1), TokenId(2)]);
    assert_eq!((request.logprobs, request.prompt_logprobs), (Some(3), None));
    assert!(request.report_kv_hashes);
    assert_eq!(request.priority, -3);
    assert_eq!(body["kv_hashes"], json!(["00000000000000ab", "0000000100000000"]));
}

#[tokio::test]
async fn a_prompt_is_cut_to_its_last_tokens_where_the_client_asks_for_it() {
    let server = Server::saying("x").await;
    let long = "x".repeat(700) + "end";
    for (fields, prompt) in [
        (json!({"prompt": "abcdef", "truncate_prompt_tokens": 3}), "def"),
        (json!({"prompt": "abc", "truncate_prompt_tokens": 3}), "abc"),
        (json!({"prompt": [97, 98, 99], "truncate_prompt_tokens": 2}), "bc"),
        (json!({"prompt": long, "truncate_prompt_tokens": 4}), "xend"),
        (
            json!({"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 507}),
            "xxend",
        ),
    ] {
        let body = complete(&server, fields).await;
        assert_eq!(server.prompt_text(), prompt);
        assert_eq!(body["usage"]["prompt_tokens"], prompt.len());
    }
    for (least, budget) in [(0, 16), (40, 40)] {
        let open = json!({"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": null, "min_tokens": least});
        complete(&server, open).await;
        assert_eq!(
            server.request().stop.max_tokens,
            budget,
            "the cut prompt leaves room for it"
        );
    }
    let echoed = json!({"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": true});
    assert_eq!(complete(&server, echoed).await["choices"][0]["text"], "efx");
    let wrong = json!({"model": MODEL, "prompt": "a", "truncate_prompt_tokens": 0});
    let answer = post(server.address, "/v1/completions", &wrong).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("truncate_prompt_tokens"))
    );
}

#[tokio::test]
async fn a_seed_is_drawn_where_none_is_given() {
    let server = Server::saying("x").await;
    complete(&server, json!({})).await;
    let first = server.request().seed;
    complete(&server, json!({})).await;
    assert_ne!(first, server.request().seed);
    complete(&server, json!({"seed": u64::MAX})).await;
    assert_eq!(server.request().seed, u64::MAX);
}

#[tokio::test]
async fn the_four_forms_of_a_prompt() {
    let server = Server::start(|request| {
        let heard = String::from_utf8(request.prompt.iter().map(|id| id.0 as u8).collect()).unwrap();
        Script::Play(say(request, |choice| format!("{heard}{choice}")))
    })
    .await;
    assert_eq!(
        complete(&server, json!({"prompt": "a"})).await["choices"][0]["text"],
        "a0"
    );
    assert_eq!(
        complete(&server, json!({"prompt": [98, 99]})).await["choices"][0]["text"],
        "bc0"
    );
    for prompt in [json!(["a", "b"]), json!([[97], [98]])] {
        let body = complete(&server, json!({"prompt": prompt, "n": 2})).await;
        let texts: Vec<&str> = body["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(texts, ["a0", "a1", "b0", "b1"]);
        let indices: Vec<u64> = body["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["index"].as_u64().unwrap())
            .collect();
        assert_eq!(indices, [0, 1, 2, 3]);
        // The prompt counts once however many choices it has.
        assert_eq!(body["usage"]["prompt_tokens"], 2);
        assert_eq!(body["usage"]["completion_tokens"], 12);
    }
}

#[tokio::test]
async fn length_ends_with_length() {
    let server = Server::saying("long text").await;
    let body = complete(&server, json!({"max_tokens": 4})).await;
    assert_eq!(
        (&body["choices"][0]["text"], &body["choices"][0]["finish_reason"]),
        (&json!("long"), &json!("length"))
    );
}

#[tokio::test]
async fn logprobs_are_four_parallel_lists() {
    let server = Server::saying("é!").await;
    let body = complete(&server, json!({"logprobs": 2, "return_token_ids": true})).await;
    let choice = &body["choices"][0];
    let lists = &choice["logprobs"];
    // é is two tokens: each is shown by its byte, so that they differ.
    assert_eq!(lists["tokens"], json!(["bytes:\\xc3", "bytes:\\xa9", "!", "<end>"]));
    assert_eq!(lists["text_offset"], json!([0, 0, 1, 2]));
    assert_eq!(lists["token_logprobs"].as_array().unwrap().len(), 4);
    // The two best and the chosen one.
    assert_eq!(lists["top_logprobs"][2].as_object().unwrap().len(), 3);
    assert_eq!(lists["top_logprobs"][2]["a"], -1.0);
    assert_eq!(choice["text"], "é!");
    assert_eq!(choice["token_ids"], json!([0xc3, 0xa9, 33, 256]));
    assert_eq!(choice["prompt_token_ids"], json!([104, 105]));
    assert_eq!(body["prompt_token_ids"], json!([104, 105]));
}

#[tokio::test]
async fn echo_puts_the_prompt_first_and_its_logprobs_too() {
    let server = Server::saying("!").await;
    let body = complete(&server, json!({"echo": true, "logprobs": 1})).await;
    assert_eq!(server.request().prompt_logprobs, Some(1));
    let choice = &body["choices"][0];
    assert_eq!(choice["text"], "hi!");
    let lists = &choice["logprobs"];
    assert_eq!(lists["tokens"], json!(["h", "i", "!", "<end>"]));
    assert_eq!(lists["text_offset"], json!([0, 1, 2, 3]));
    assert_eq!(
        (&lists["token_logprobs"][0], &lists["top_logprobs"][0]),
        (&Value::Null, &Value::Null)
    );
    assert!((lists["token_logprobs"][1].as_f64().unwrap() + 1.05).abs() < 1e-6);
    assert_eq!(lists["top_logprobs"][1]["a"], -1.0);
}

fn assert_close(value: &Value, wanted: f64) {
    let found = value.as_f64().unwrap_or(f64::NAN);
    assert!((found - wanted).abs() < 1e-6, "{value} is not {wanted}");
}

#[tokio::test]
async fn logprobs_of_the_prompt_have_vllms_shape() {
    let server = Server::saying("!").await;
    let body = complete(&server, json!({"prompt": ["xab", "y"], "n": 2, "prompt_logprobs": 2})).await;
    assert_eq!(server.request().prompt_logprobs, Some(2));
    let choices = &body["choices"];
    let of_first = &choices[0]["prompt_logprobs"];
    assert_eq!(
        (of_first.as_array().map(Vec::len), &of_first[0]),
        (Some(3), &Value::Null)
    );
    // The harness makes a token's own logprob of its id, and `a`, `b` and so on are the best ones. Here `a` is both.
    assert_eq!(of_first[1].as_object().map(serde_json::Map::len), Some(2));
    let own = &of_first[1]["97"];
    assert_eq!((&own["rank"], &own["decoded_token"]), (&json!(1), &json!("a")));
    assert_close(&own["logprob"], -0.97);
    assert_eq!(of_first[1]["98"]["rank"], 2);
    assert_close(&of_first[1]["98"]["logprob"], -2.0);
    assert_eq!(of_first[2]["98"]["decoded_token"], "b");
    assert_eq!(choices[2]["prompt_logprobs"], json!([null]), "the other prompt");
    for index in [1_usize, 3] {
        assert!(choices[index].get("prompt_logprobs").is_none(), "once for each prompt");
    }
    // The rank of a token that is not among the best is not known.
    let alone = complete(&server, json!({"prompt": "xy", "prompt_logprobs": 0})).await;
    let token = &alone["choices"][0]["prompt_logprobs"][1];
    assert_eq!(token.as_object().map(serde_json::Map::len), Some(1));
    assert_eq!(token["121"].get("rank"), Some(&Value::Null), "{token}");
    // With `echo` each list has as many alternatives as it was asked for.
    let both = complete(&server, json!({"echo": true, "logprobs": 1, "prompt_logprobs": 3})).await;
    let choice = &both["choices"][0];
    let echoed = &choice["logprobs"];
    assert_eq!(
        echoed["top_logprobs"][1],
        json!({"a": -1.0, "i": echoed["token_logprobs"][1]})
    );
    assert_eq!(
        choice["prompt_logprobs"][1].as_object().map(serde_json::Map::len),
        Some(4)
    );
    let streamed = json!({"model": MODEL, "prompt": "hi", "prompt_logprobs": 0, "stream": true});
    let refused = post(server.address, "/v1/completions", &streamed).await;
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("prompt_logprobs"))
    );
}

#[tokio::test]
async fn echo_alone_asks_for_no_token() {
    let server = Server::saying("never said").await;
    let body = complete(
        &server,
        json!({"echo": true, "max_tokens": 0, "logprobs": 0, "prompt": [104, 105]}),
    )
    .await;
    assert_eq!(server.request().stop.max_tokens, 0);
    let choice = &body["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["finish_reason"]),
        (&json!("hi"), &json!("length"))
    );
    assert_eq!(choice["logprobs"]["tokens"], json!(["h", "i"]));
    assert_eq!(body["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn stop_strings_cut_and_close_each_choice() {
    let server = Server::start(|request| {
        Script::Play(say(request, |choice| {
            if choice == 0 { "one STOP two" } else { "no end" }.to_owned()
        }))
    })
    .await;
    let body = complete(&server, json!({"stop": ["STOP", "\n\n"], "n": 2})).await;
    assert_eq!(body["choices"][0]["text"], "one ");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["choices"][0]["stop_reason"], "STOP");
    assert_eq!(body["choices"][1]["text"], "no end");
    // It ended by its end token.
    assert_eq!(body["choices"][1].get("stop_reason"), Some(&Value::Null));
    // Delivered: "one STOP" (8) and "no end" with its end token (7).
    assert_eq!(body["usage"]["completion_tokens"], 15);
    let finished = server.heard.lock().unwrap().finished.clone();
    assert_eq!(finished.len(), 1);
    assert_eq!(finished[0].0.0, 0);
}

#[tokio::test]
async fn a_request_leaves_the_stages_of_the_edge_and_says_how_it_finished() {
    let server = Server::saying("x").await;
    let in_stages = || server.metrics.in_stages.lock().unwrap().clone();
    let wrong = post(
        server.address,
        "/v1/completions",
        &json!({"model": MODEL, "prompt": 1.5}),
    )
    .await;
    assert_eq!(wrong.status, 400);
    assert_eq!(in_stages(), [(Stage::Parse, 0)].into());
    complete(&server, json!({})).await;
    assert_eq!(in_stages(), [(Stage::Parse, 0), (Stage::Tokenize, 0)].into());
    // The last to hold the record ends it, a moment after the answer.
    let finishes = until(|| {
        let ended = server.metrics.ended.lock().unwrap();
        let finishes: Vec<_> = ended.iter().map(|ended| ended.finish).collect();
        (finishes.len() == 2).then_some(finishes)
    });
    let finishes = finishes.await;
    assert_eq!(finishes, [None, Some("stop")]);
}

#[tokio::test]
async fn metrics_are_in_the_body_where_asked_for() {
    let server = Server::saying("abc").await;
    let body = complete(&server, json!({"include_metrics": true})).await;
    let metrics = &body["metrics"];
    assert_eq!(
        (&metrics["queue_ms"], &metrics["kv_transfer_ms"]),
        (&metrics["stages_ttft_ms"]["queue"], &json!(1.5)),
        "one wait has one figure"
    );
    assert_eq!(
        (&metrics["prefill_node"], &metrics["decode_node"]),
        (&json!("prefill-0"), &json!("decode-0"))
    );
    assert_eq!(
        (&metrics["prefill_ms"], &metrics["decode_ms"]),
        (&json!(0.02), &json!(0.03))
    );
    assert_eq!(
        (&metrics["attempts"], &metrics["local_prefill"]),
        (&json!(1), &Value::Null)
    );
    assert!(metrics["ttft_ms"].as_f64().unwrap() > 0.0);
    // vLLM's names of the same: its first token counts from the end of the queue.
    let ms = |name: &str| metrics[name].as_f64().unwrap_or_else(|| panic!("no {name}: {metrics}"));
    assert_eq!(ms("queue_time_ms"), ms("queue_ms"));
    assert!((ms("time_to_first_token_ms") - (ms("ttft_ms") - ms("queue_ms")).max(0.0)).abs() < 0.002);
    assert!((ms("generation_time_ms") - (ms("e2e_ms") - ms("ttft_ms"))).abs() < 0.002);
    assert!(
        (ms("mean_itl_ms")
            - ms("generation_time_ms") / f64::from(body["usage"]["completion_tokens"].as_u64().unwrap() as u32 - 1))
        .abs()
            < 0.002
    );
    for stage in ["parse", "tokenize", "queue", "prefill_forward"] {
        assert!(metrics["stages_ttft_ms"][stage].is_number(), "{stage}: {metrics}");
    }
}

#[tokio::test]
async fn labels_come_from_headers() {
    let server = Server::saying("x").await;
    let headers = [
        ("x-lane", "batch"),
        ("x-request-timeout-ms", "123456"),
        ("x-request-id", "bench-7"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ];
    let body = json!({"model": MODEL, "prompt": "hi"});
    let answer = post_with(server.address, "/v1/completions", &body, &headers).await;
    assert_eq!(answer.header("x-request-id"), "bench-7");
    assert!(
        answer
            .header("traceparent")
            .starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-")
    );
    assert_eq!(
        server.heard.lock().unwrap().traceparents[0].as_deref(),
        Some(answer.header("traceparent"))
    );
    let request = server.request();
    assert_eq!(request.lane, Lane::Batch);
    // It counts from when the head was read.
    let left_ms = request.time_limit.as_millis();
    assert!((100_000..123_456).contains(&left_ms), "{left_ms} ms are left");
    let ended = server.ended().await;
    assert_eq!(
        (ended.model.as_str(), ended.lane, ended.outcome.as_str()),
        (MODEL, Lane::Batch, "ok")
    );
    assert_eq!((ended.prompt_tokens, ended.output_tokens), (2, 2));
}

#[tokio::test]
async fn the_logprobs_of_all_prompts_together_have_a_limit() {
    let server = Server::saying("x").await;
    let prompt = vec![1; 500];
    let body = json!({"prompt": vec![prompt; 120], "max_tokens": 1, "prompt_logprobs": 20});
    let answer = post(server.address, "/v1/completions", &body).await;
    let answer = (answer.status, answer.json());
    assert_refused(&answer, (&json!({}), "prompt_logprobs", "may ask for"));
}
