//! `/v1/chat/completions` without streaming.

use serde_json::{Value, json};

use super::byte_model::END;
use super::client::post;
use super::harness::{MAX_MODEL_TOKENS, MODEL, Server};
use super::script::{Script, say};

async fn chat(server: &Server, fields: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in fields.as_object().expect("fields") {
        body[name] = value.clone();
    }
    let answer = post(server.address, "/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

#[tokio::test]
async fn the_body_has_openais_shape() {
    let server = Server::saying("hello").await;
    let body = chat(&server, json!({})).await;
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(
        body["choices"][0]["message"],
        json!({"role": "assistant", "content": "hello"})
    );
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(server.prompt_text(), "[user]hi[assistant]");
    // The default budget is what fits.
    assert_eq!(server.request().stop.max_tokens, MAX_MODEL_TOKENS - 19);
}

#[tokio::test]
async fn logprobs_of_the_prompt_stand_beside_the_choices() {
    let server = Server::saying("x").await;
    let body = chat(&server, json!({"prompt_logprobs": 1, "n": 2})).await;
    let tokens = body["prompt_logprobs"].as_array().unwrap();
    assert_eq!(tokens.len(), "[user]hi[assistant]".len());
    assert_eq!(
        (&tokens[0], &tokens[1]["117"]["decoded_token"]),
        (&Value::Null, &json!("u"))
    );
    assert!(body["choices"][0].get("prompt_logprobs").is_none());
}

#[tokio::test]
async fn messages_in_all_their_forms() {
    let server = Server::saying("x").await;
    let messages = json!([
        {"role": "developer", "content": "be brief", "name": null, "tool_calls": null},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "", "refusal": null},
    ]);
    chat(
        &server,
        json!({"messages": messages, "echo": false, "parallel_tool_calls": true}),
    )
    .await;
    assert_eq!(
        server.prompt_text(),
        "[system]be brief[user]one\ntwo[assistant][assistant]"
    );
}

#[tokio::test]
async fn the_end_of_a_chat_is_a_new_message_the_last_one_or_nothing() {
    let server = Server::saying("x").await;
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": " so: [user] "}]);
    for (fields, prompt) in [
        (json!({}), "[user]hi[assistant] so: [user] [assistant]"),
        (
            json!({"add_generation_prompt": false}),
            "[user]hi[assistant] so: [user] ",
        ),
        (
            json!({"continue_final_message": true}),
            "[user]hi[assistant] so: [user] ",
        ),
        (
            json!({"continue_final_message": true, "add_generation_prompt": false, "add_special_tokens": true}),
            "[user]hi[assistant] so: [user] ",
        ),
    ] {
        let mut fields = fields;
        fields["messages"] = messages.clone();
        chat(&server, fields).await;
        assert_eq!(server.prompt_text(), prompt);
    }
    let body = json!({
        "model": MODEL, "messages": messages, "continue_final_message": true, "add_generation_prompt": true,
    });
    let answer = post(server.address, "/v1/chat/completions", &body).await;
    let error = &answer.json()["error"];
    assert_eq!(
        (answer.status, &error["param"]),
        (400, &json!("continue_final_message"))
    );
}

#[tokio::test]
async fn both_names_of_the_budget() {
    let server = Server::saying("long text").await;
    let body = chat(&server, json!({"max_completion_tokens": 4, "max_tokens": 9})).await;
    assert_eq!(body["choices"][0]["message"]["content"], "long");
    let body = chat(&server, json!({"max_tokens": 2})).await;
    assert_eq!(body["choices"][0]["message"]["content"], "lo");
    assert_eq!(body["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn logprobs_are_a_list_of_tokens() {
    let server = Server::saying("A€").await;
    let body = chat(&server, json!({"logprobs": true, "top_logprobs": 2})).await;
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 5);
    assert_eq!(
        (&content[0]["token"], &content[0]["bytes"]),
        (&json!("A"), &json!([65]))
    );
    assert!((content[0]["logprob"].as_f64().unwrap() + 0.65).abs() < 1e-6);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(
        content[0]["top_logprobs"][1],
        json!({"token": "b", "logprob": -2.0, "bytes": [98]})
    );
    // The bytes of all tokens are the bytes of the text; the end token has none.
    assert_eq!(
        (&content[4]["token"], &content[4]["bytes"]),
        (&json!("<end>"), &Value::Null)
    );
    let bytes: Vec<u8> = content
        .iter()
        .filter_map(|token| token["bytes"].as_array())
        .flatten()
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(bytes, "A€".as_bytes());
    let body = chat(&server, json!({"logprobs": true})).await;
    assert_eq!(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[tokio::test]
async fn three_choices() {
    let server = Server::start(|request| Script::Play(say(request, |choice| format!("c{choice}")))).await;
    let body = chat(&server, json!({"n": 3})).await;
    let contents: Vec<&Value> = body["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| &choice["message"]["content"])
        .collect();
    assert_eq!(contents, ["c0", "c1", "c2"]);
    assert_eq!(server.submitted(), 1, "one request with three sequences");
}

#[tokio::test]
async fn a_control_token_in_a_message_is_plain_text_unless_the_client_wants_it() {
    let server = Server::saying("x").await;
    let control = async |path: &str, body: Value| {
        let answer = post(server.address, path, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        server.request().prompt.iter().filter(|id| **id == END).count()
    };
    let chat = json!({"model": MODEL, "messages": [{"role": "user", "content": "a<end>b"}]});
    let mut allowed = chat.clone();
    allowed["allow_special_tokens"] = true.into();
    assert_eq!(control("/v1/chat/completions", chat).await, 0);
    assert!(server.prompt_text().contains("a<end>b"), "{}", server.prompt_text());
    assert_eq!(control("/v1/chat/completions", allowed).await, 1);
    assert_eq!(
        control("/v1/completions", json!({"model": MODEL, "prompt": "a<end>b"})).await,
        1
    );
    let response = json!({"model": MODEL, "input": "a<end>b"});
    let mut allowed = response.clone();
    allowed["allow_special_tokens"] = true.into();
    assert_eq!(control("/v1/responses", response).await, 0);
    assert_eq!(control("/v1/responses", allowed).await, 1);
}
