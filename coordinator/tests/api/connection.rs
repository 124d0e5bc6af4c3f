//! Clients that leave, stall or break off, and a server that stops.

use std::time::Duration;

use coordinator::api::{BindError, bind};
use serde_json::json;
use serving_core::ids::TokenId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::byte_model::PANICS;
use super::client::{PATIENCE, get, parse, request};
use super::harness::{MODEL, Server, until};
use super::script::{Script, Step, done, placed, token};

fn body(is_streaming: bool) -> Vec<u8> {
    let body = json!({"model": MODEL, "prompt": "hi", "stream": is_streaming});
    request("POST", "/v1/completions", &[], body.to_string().as_bytes())
}

/// Sends two tokens and then nothing, until the edge lets go.
async fn endless() -> Server {
    Server::start(|request| {
        let tokens = (0..2).map(|index| token(request, (0, index), TokenId(97), None));
        Script::Play([placed()].into_iter().chain(tokens).chain([Step::Hang]).collect())
    })
    .await
}

async fn read_until(stream: &mut TcpStream, text: &str) {
    let mut seen = String::new();
    let mut buffer = [0u8; 1024];
    while !seen.contains(text) {
        let n = tokio::time::timeout(PATIENCE, stream.read(&mut buffer))
            .await
            .expect("it answers")
            .unwrap();
        assert!(n > 0, "closed early: {seen}");
        seen += &String::from_utf8_lossy(&buffer[..n]);
    }
}

/// The nodes are told to stop, and nobody judges what the client did.
async fn cancelled(server: &Server) {
    broken_off(server, ("cancelled", None)).await;
}

/// The nodes are told to stop; how the request ended, and what it counts as.
async fn broken_off(server: &Server, (outcome, breached): (&str, Option<&'static str>)) {
    let asked = server.request().id;
    until(|| server.heard.lock().unwrap().cancelled.contains(&asked).then_some(())).await;
    let ended = server.ended().await;
    assert_eq!(ended.outcome, outcome);
    assert_eq!(ended.breached, breached.map(|breach| vec![breach]));
}

#[tokio::test]
async fn leaving_an_answer_in_one_piece_counts_the_tokens_that_came() {
    let server = endless().await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let asked = json!({"model": MODEL, "prompt": "hi"}).to_string();
    let headers = [("x-request-id", "left")];
    stream
        .write_all(&request("POST", "/v1/completions", &headers, asked.as_bytes()))
        .await
        .unwrap();
    let both = async {
        while get(server.address, "/admin/requests/left").await.json()["output_tokens"] != 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, both).await.expect("both tokens come");
    drop(stream);
    cancelled(&server).await;
    assert_eq!(server.ended().await.output_tokens, 2);
}

#[tokio::test]
async fn leaving_a_stream_cancels() {
    let server = endless().await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(&body(true)).await.unwrap();
    let mut seen = String::new();
    let mut buffer = [0u8; 1024];
    while seen.matches("data: ").count() < 2 {
        let n = tokio::time::timeout(PATIENCE, stream.read(&mut buffer))
            .await
            .expect("tokens come at once")
            .unwrap();
        assert!(n > 0, "closed early: {seen}");
        seen += &String::from_utf8_lossy(&buffer[..n]);
    }
    assert!(server.heard.lock().unwrap().cancelled.is_empty());
    drop(stream);
    cancelled(&server).await;
    assert_eq!(server.ended().await.output_tokens, 2);
}

#[tokio::test]
async fn leaving_before_the_answer_cancels() {
    for is_streaming in [false, true] {
        let server = Server::start(|_| Script::Play(vec![placed(), Step::Hang])).await;
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&body(is_streaming)).await.unwrap();
        until(|| (server.submitted() == 1).then_some(())).await;
        drop(stream);
        cancelled(&server).await;
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_submits_nothing() {
    let server = endless().await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let whole = body(true);
    stream.write_all(&whole[..whole.len() - 5]).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
        .await
        .expect("the server closes");
    // hyper may close without a word: there is nobody to answer properly.
    if !answer.is_empty() {
        assert_eq!(parse(&answer).status, 400);
    }
    assert_eq!(server.submitted(), 0);
    assert_eq!(get(server.address, "/health").await.status, 200);
}

#[tokio::test]
async fn garbage_and_huge_headers_are_refused_and_the_server_lives() {
    let server = endless().await;
    let huge = format!("GET /health HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(200_000));
    for bytes in [b"\x16\x03\x01\x02\x00 not http\r\n\r\n".to_vec(), huge.into_bytes()] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let _ = stream.write_all(&bytes).await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
            .await
            .expect("the server closes");
        if !answer.is_empty() {
            assert!((400..500).contains(&parse(&answer).status));
        }
    }
    assert_eq!(get(server.address, "/health").await.status, 200);
}

#[tokio::test]
async fn a_kept_alive_connection_serves_again() {
    let server = Server::saying("x").await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    for _ in 0..2 {
        stream
            .write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            .await
            .unwrap();
        read_until(&mut stream, "{\"status\":\"ok\"}").await;
    }
}

#[tokio::test]
async fn ttft_counts_from_the_first_byte_of_the_request() {
    let server = Server::saying("x").await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let whole = body(false);
    let (head, rest) = whole.split_at(whole.len() - 5);
    stream.write_all(head).await.unwrap();
    // A busy server reads the first part late.
    let pause = Duration::from_millis(600);
    tokio::time::sleep(pause).await;
    stream.write_all(rest).await.unwrap();
    let ended = server.ended().await;
    assert!(ended.ttft.is_some_and(|ttft| ttft >= pause / 2), "{ended:?}");
}

#[tokio::test]
async fn stopping_lets_a_request_finish() {
    let (go, gate) = tokio::sync::oneshot::channel();
    let gate = std::sync::Mutex::new(Some(gate));
    let mut server = Server::start(move |request| {
        let wait = Step::Wait(gate.lock().unwrap().take().expect("one request"));
        let end = Some(serving_core::request::FinishReason::Length);
        Script::Play(vec![placed(), wait, token(request, (0, 0), TokenId(97), end), done()])
    })
    .await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(&body(false)).await.unwrap();
    until(|| (server.submitted() == 1).then_some(())).await;
    server.stop();
    go.send(()).unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
        .await
        .expect("answers")
        .unwrap();
    assert_eq!(parse(&answer).status, 200);
    tokio::time::timeout(PATIENCE, &mut server.served)
        .await
        .expect("the server ends")
        .unwrap();
    assert!(
        TcpStream::connect(server.address).await.is_err(),
        "nobody listens any more"
    );
}

#[tokio::test]
async fn stopping_cuts_what_does_not_finish_and_does_not_blame_the_client() {
    let silent = Server::start(|_| Script::Play(vec![placed(), Step::Hang])).await;
    let cases = [(endless().await, true, "incomplete"), (silent, false, "5xx")];
    for (mut server, is_streaming, breached) in cases {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&body(is_streaming)).await.unwrap();
        until(|| (server.submitted() == 1).then_some(())).await;
        server.stop();
        tokio::time::timeout(PATIENCE, &mut server.served)
            .await
            .expect("the hard bound holds")
            .unwrap();
        broken_off(&server, ("draining", Some(breached))).await;
    }
}

#[tokio::test]
async fn a_stream_whose_handler_panics_was_not_left_by_its_client() {
    let (go, gate) = tokio::sync::oneshot::channel();
    let gate = std::sync::Mutex::new(Some(gate));
    let server = Server::start(move |request| {
        let wait = Step::Wait(gate.lock().unwrap().take().expect("one request"));
        let (good, bad) = (TokenId(97), PANICS);
        let tokens = [(0, good), (1, bad)].map(|(index, id)| token(request, (0, index), id, None));
        let [first, second] = tokens;
        Script::Play(vec![placed(), first, wait, second, Step::Hang])
    })
    .await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(&body(true)).await.unwrap();
    read_until(&mut stream, "data: ").await;
    go.send(()).unwrap();
    broken_off(&server, ("internal", Some("incomplete"))).await;
    assert_eq!(*server.metrics.panics.lock().unwrap(), 1);
    assert_eq!(get(server.address, "/health").await.status, 200);
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let first = bind("127.0.0.1:0".parse().unwrap()).await.expect("a free port");
    let address = first.local_addr().unwrap();
    let error = bind(address).await.expect_err("taken");
    assert!(matches!(error, BindError::InUse { port, .. } if port == address.port()));
    let message = error.to_string();
    assert!(
        message.contains(&address.port().to_string()) && message.contains("--listen"),
        "{message}"
    );
}
