//! Requests made to fill the coordinator's memory: each is refused before the work, and others go on meanwhile.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::client::{Answer, PATIENCE, get, parse, post, request, send};
use super::harness::{BODY_BYTES_MAX, CONNECTIONS_MAX, MAX_MODEL_TOKENS, MODEL, Server};

fn refused(answer: &Answer, code: &str) {
    let error = &answer.json()["error"];
    assert_eq!((answer.status, error["code"].as_str()), (400, Some(code)), "{error}");
}

#[tokio::test]
async fn a_text_beyond_the_context_is_not_tokenized() {
    let server = Server::saying("x").await;
    for tokens in [32_769, 100_000] {
        let answer = post(server.address, "/tokenize", &json!({"prompt": "7".repeat(tokens)})).await;
        refused(&answer, "context_length_exceeded");
    }
    let text = "7".repeat(MAX_MODEL_TOKENS as usize * 4 + 1);
    let body = json!({"model": MODEL, "prompt": text});
    refused(
        &post(server.address, "/v1/completions", &body).await,
        "context_length_exceeded",
    );
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": text}]});
    refused(
        &post(server.address, "/v1/chat/completions", &body).await,
        "context_length_exceeded",
    );
}

#[tokio::test]
async fn a_list_of_zeros_is_read_no_further_than_its_limit() {
    let server = Server::saying("x").await;
    for prompt in [json!(vec![0; 100_000]), json!([vec![0; 100_000]])] {
        let body = json!({"model": MODEL, "prompt": prompt});
        refused(
            &post(server.address, "/v1/completions", &body).await,
            "context_length_exceeded",
        );
    }
    // The first element that is wrong or too many ends the reading.
    for (stop, element) in [
        (json!(vec![0; 100_000]), "stop[0]"),
        (json!(vec!["x"; 50_000]), "length 17"),
    ] {
        let body = json!({"model": MODEL, "prompt": "hi", "stop": stop});
        let answer = post(server.address, "/v1/completions", &body).await;
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (400, &Value::Null));
        assert!(answer.text().contains(element), "{}", answer.text());
    }
    let tokens = json!({"tokens": vec![0; 100_000]});
    let answer = post(server.address, "/detokenize", &tokens).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("tokens"))
    );
    assert!(answer.text().contains("65536"), "{}", answer.text());
}

#[tokio::test]
async fn json_of_tools_and_calls_has_a_limited_number_of_values() {
    let server = Server::saying("x").await;
    // 34,000 values in 68 KB. As a tree they take 6 MB.
    let many = format!("{{\"a\":[{}0]}}", "[0],".repeat(17_000));
    let parameters: Value = serde_json::from_str(&many).expect("JSON");
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": many}});
    let user = json!({"role": "user", "content": "hi"});
    let caller = json!({"role": "assistant", "content": "", "tool_calls": [call]});
    for (body, param) in [
        (
            json!({"messages": [user], "tools": [tool]}),
            "tools[0].function.parameters",
        ),
        (json!({"messages": [user, caller]}), "messages"),
    ] {
        let answer = post(server.address, "/tokenize", &body).await;
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, &error["param"], &error["code"]),
            (400, &json!(param), &Value::Null),
            "{error}"
        );
    }
}

#[tokio::test]
async fn large_bodies_share_a_budget_and_small_ones_need_none() {
    let server = Server::saying("x").await;
    let whole = request("POST", "/tokenize", &[], &vec![b' '; BODY_BYTES_MAX - 10]);
    // All of it but the end: it holds its bytes for as long as it is being read.
    let mut unfinished = TcpStream::connect(server.address).await.expect("connects");
    unfinished.write_all(&whole[..whole.len() - 1]).await.expect("is read");
    let full = answered(&server, &whole, 503).await;
    assert_eq!(full.json()["error"]["code"], "request_memory_full");
    assert_eq!(full.header("retry-after"), "1");
    assert_eq!(get(server.address, "/health").await.status, 200);
    let small = post(server.address, "/tokenize", &json!({"prompt": "hi"})).await;
    assert_eq!(small.json()["count"], 2);
    // Its announced length is enough: nothing of the body has to come. One refused client is waited for, so that it sees its
    // answer; the others are answered at once.
    let end = whole
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .expect("a head");
    let head = &whole[..end + 4];
    let three = [(); 3].map(|()| Box::pin(send(server.address, head)));
    let (first, ..) = futures::future::select_all(three).await;
    assert_eq!(
        (first.status, &first.json()["error"]["code"]),
        (503, &full.json()["error"]["code"])
    );
    drop(unfinished);
    answered(&server, &whole, 400).await;
}

#[tokio::test]
async fn idle_sockets_of_one_address_cost_others_nothing_and_probes_are_answered() {
    let server = Server::saying("x").await;
    let mut idle = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        idle.push(TcpStream::connect(server.address).await.expect("connects"));
    }
    let models = request("GET", "/v1/models", &[], b"");
    let full = answered(&server, &models, 503).await;
    assert_eq!(full.json()["error"]["code"], "too_many_connections");
    assert_eq!(full.header("retry-after"), "1");
    assert_eq!(get(server.address, "/health").await.status, 200);
    let elsewhere = TcpSocket::new_v4().expect("a socket");
    elsewhere
        .bind("127.0.0.2:0".parse().expect("an address"))
        .expect("another loopback address");
    let mut other = elsewhere.connect(server.address).await.expect("connects");
    other.write_all(&models).await.expect("is read");
    let mut answer = Vec::new();
    other.read_to_end(&mut answer).await.expect("an answer");
    assert_eq!(parse(&answer).status, 200, "another address has its places");
    drop(idle);
    answered(&server, &models, 200).await;
}

/// Sends the request until its answer has this status: what another connection holds changes a moment after it is written.
async fn answered(server: &Server, request: &[u8], status: u16) -> Answer {
    let asking = async {
        loop {
            let answer = send(server.address, request).await;
            if answer.status == status {
                return answer;
            }
        }
    };
    let asked = tokio::time::timeout(PATIENCE, asking).await;
    asked.unwrap_or_else(|_| panic!("no answer had the status {status}"))
}
