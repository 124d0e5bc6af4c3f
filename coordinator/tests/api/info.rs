//! What clients of other servers ask: the tokenizer, the load, the server.

use serde_json::json;

use super::client::{PATIENCE, get, post};
use super::common;
use super::harness::{MODEL, Server, until};
use super::script::{Script, Step, placed};

#[tokio::test]
async fn a_client_without_a_tokenizer_gets_what_it_needs_of_it() {
    let server = Server::saying("x").await;
    let info = get(server.address, "/tokenizer_info").await.json();
    let wanted = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<start>", "eos_token": "<end>", "pad_token": null,
        "unk_token": null, "add_bos_token": false, "chat_template": "{{ messages }}", "model_max_length": 512,
    });
    assert_eq!(info, wanted);
}

#[tokio::test]
async fn the_load_is_the_number_of_requests_that_have_not_ended() {
    let (gate, opened) = tokio::sync::oneshot::channel();
    let opened = std::sync::Mutex::new(Some(opened));
    let server = Server::start(move |_| {
        let waits = opened.lock().unwrap().take().map(Step::Wait);
        Script::Play(std::iter::once(placed()).chain(waits).collect())
    })
    .await;
    let idle = get(server.address, "/load").await.json();
    assert_eq!(
        idle,
        json!({"server_load": 0, "waiting": {"interactive": 0, "batch": 0}})
    );
    let address = server.address;
    let body = json!({"model": MODEL, "prompt": "hi"});
    let request = tokio::spawn(async move { post(address, "/v1/completions", &body).await });
    until(|| (server.submitted() > 0).then_some(())).await;
    assert_eq!(get(server.address, "/load").await.json()["server_load"], 1);
    gate.send(()).expect("the script waits");
    // The script ends without an answer.
    assert_eq!(request.await.expect("no panic").status, 500);
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while get(server.address, "/load").await.json()["server_load"] != 0 {
        assert!(tokio::time::Instant::now() < deadline, "it has ended");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_says_what_it_is_and_where_nothing() {
    let cluster = common::coordinator(&[]).await;
    let script = common::decode(|_, _| async {});
    let node = common::decode_node(&cluster, "decode-0", script).await;
    common::until_up(&cluster, "decode", 1).await;
    let server = Server::in_front_of(&cluster).await;
    let info = get(server.address, "/server_info").await;
    let text = info.text();
    let info = info.json();
    assert_eq!(
        (&info["model"], &info["served_model_names"], &info["max_model_len"]),
        (&json!("own-name-of-tiny"), &json!([MODEL, "org/alias"]), &json!(512))
    );
    assert!(info["version"].is_string() && info["git"].is_string());
    assert_eq!(info["limits"]["choices_max"], 16);
    let shown = &info["nodes"][0];
    assert_eq!(
        (
            &shown["name"],
            &shown["role"],
            &shown["transports"],
            &shown["kv_blocks"]["cached"]
        ),
        (&json!("decode-0"), &json!("decode"), &json!(["grpc"]), &json!(56))
    );
    assert!(!text.contains(&node.record.address), "{text}");
    let old_name = get(server.address, "/get_server_info").await.json();
    assert_eq!(old_name["internal_states"], json!([{}]));
    cluster.stop().await;
}
