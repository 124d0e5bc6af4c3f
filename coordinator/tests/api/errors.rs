//! What policy and breakage look like from outside: status, type, code, and when to come back.

use std::time::Duration;

use coordinator::request_handle::{ClientEvent, Readiness, Rejected};
use serde_json::json;
use serving_core::node::NodeRole;
use serving_core::request::{QueueLimit, RejectReason, RequestError};

use super::client::{Answer, get, post};
use super::harness::{MODEL, Server};
use super::script::{Script, Step, placed};

async fn ask(server: &Server) -> Answer {
    post(
        server.address,
        "/v1/completions",
        &json!({"model": MODEL, "prompt": "hi", "stream": true}),
    )
    .await
}

#[tokio::test]
async fn rejections() {
    let retry = Some(Duration::from_millis(1500));
    let too_large = RejectReason::TooLargeForPool {
        role: NodeRole::Decode,
        needed_blocks: 9,
        pool_blocks: 4,
    };
    let too_long = RejectReason::PromptTooLong {
        role: NodeRole::Decode,
        prompt_tokens: 100,
        longest_tokens: 64,
    };
    let too_many = RejectReason::TooManyChoices { choices: 3, most: 2 };
    for (reason, retry_after, status, code) in [
        (RejectReason::QueueFull, retry, 429, "queue_full"),
        (
            RejectReason::QueueTimeout {
                limit: QueueLimit::QueueWait,
                waited_ms: 5,
            },
            retry,
            429,
            "queue_timeout",
        ),
        (RejectReason::NotReady, retry, 503, "not_ready"),
        (RejectReason::NodeAway, retry, 503, "node_away"),
        (RejectReason::Draining, retry, 503, "draining"),
        (too_large, None, 400, "context_length_exceeded"),
        (too_long, None, 400, "context_length_exceeded"),
        (too_many, None, 400, "too_many_choices"),
    ] {
        let rejected = Rejected {
            reason: reason.clone(),
            missing: None,
            retry_after,
        };
        let server = Server::start(move |_| Script::Reject(rejected.clone())).await;
        let answer = ask(&server).await;
        assert_eq!(
            (answer.status, answer.json()["error"]["code"].as_str()),
            (status, Some(code))
        );
        if retry_after.is_some() {
            assert_eq!(
                (answer.header("retry-after"), answer.header("retry-after-ms")),
                ("2", "1500")
            );
            assert_eq!(answer.header("x-should-retry"), "true");
        } else {
            assert!(!answer.headers.contains_key("retry-after"));
        }
        assert_eq!(server.ended().await.outcome, reason.name());
    }
}

#[tokio::test]
async fn a_full_queue_for_ever_is_not_to_be_retried() {
    let rejected = Rejected {
        reason: RejectReason::QueueFull,
        missing: None,
        retry_after: None,
    };
    let server = Server::start(move |_| Script::Reject(rejected.clone())).await;
    assert_eq!(ask(&server).await.header("x-should-retry"), "false");
}

#[tokio::test]
async fn what_a_cluster_lacks_is_in_the_error() {
    let missing = "no pair fits: block_tokens is 32 on p and 16 on d";
    let rejected = Rejected {
        reason: RejectReason::NotReady,
        missing: Some(missing.to_owned()),
        retry_after: None,
    };
    let server = Server::start(move |_| Script::Reject(rejected.clone())).await;
    let answer = ask(&server).await.json();
    let message = answer["error"]["message"].as_str().expect("a message");
    assert!(message.contains(missing), "{message}");
}

#[tokio::test]
async fn failures_before_the_first_token_have_a_status() {
    let node = || "node-1".to_owned();
    for (error, status, code, retry) in [
        (
            RequestError::DeadlineExceeded {
                stage: "queue".into(),
                waited_ms: 5,
            },
            504,
            "timeout",
            "false",
        ),
        (
            RequestError::NoPlaceAgain { waited_ms: 5 },
            504,
            "no_place_again",
            "true",
        ),
        (RequestError::NoRoom { waited_ms: 5 }, 429, "no_room", "true"),
        (
            RequestError::PrefillNodeFailed {
                node: node(),
                detail: "x".into(),
            },
            502,
            "node_failed",
            "true",
        ),
        (
            RequestError::DecodeNodeFailed {
                node: node(),
                detail: "x".into(),
            },
            502,
            "node_failed",
            "true",
        ),
        (
            RequestError::TransferFailed {
                from: node(),
                to: node(),
                reason: "r".into(),
            },
            502,
            "kv_transfer_failed",
            "true",
        ),
        (
            RequestError::EngineFailed {
                node: node(),
                detail: "x".into(),
            },
            500,
            "engine_failed",
            "true",
        ),
        (RequestError::Internal("x".into()), 500, "internal_error", "true"),
    ] {
        let name = error.name();
        let server =
            Server::start(move |_| Script::Play(vec![placed(), Step::Event(ClientEvent::Failed(error.clone()))])).await;
        let answer = ask(&server).await;
        assert_eq!(
            (answer.status, answer.json()["error"]["code"].as_str()),
            (status, Some(code)),
            "{name}"
        );
        assert_eq!(answer.header("x-should-retry"), retry, "{name}");
        assert_eq!(server.ended().await.outcome, name);
    }
}

#[tokio::test]
async fn constraints_that_leave_no_token_are_the_requests_mistake() {
    let failed = || Step::Event(ClientEvent::Failed(RequestError::RuledOut));
    let server = Server::start(move |_| Script::Play(vec![placed(), failed()])).await;
    let answer = ask(&server).await;
    let error = &answer.json()["error"];
    assert_eq!(
        (answer.status, error["code"].as_str()),
        (400, Some("every_token_ruled_out"))
    );
    assert_eq!(error["type"], "invalid_request_error");
    assert_eq!(server.ended().await.outcome, "ruled_out");
}

#[tokio::test]
async fn readiness_says_what_is_missing() {
    let server = Server::saying("x").await;
    let answer = get(server.address, "/ready").await;
    assert_eq!((answer.status, answer.json()["usable_pairs"].as_u64()), (200, Some(1)));
    server.set_readiness(Readiness::NotReady("no decode node has joined".into()));
    let answer = get(server.address, "/ready").await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, "1"));
    assert!(answer.text().contains("no decode node has joined"));
    assert_eq!(get(server.address, "/health").await.status, 200);
    server.set_readiness(Readiness::Draining);
    assert_eq!(get(server.address, "/ready").await.json()["error"]["code"], "draining");
}

#[tokio::test]
async fn a_panic_is_a_500_and_the_process_lives() {
    let server = Server::saying("x").await;
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "panic"}]});
    let answer = post(server.address, "/v1/chat/completions", &body).await;
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (500, Some("internal_error"))
    );
    assert!(!answer.header("x-request-id").is_empty());
    assert_eq!(*server.metrics.panics.lock().unwrap(), 1);
    assert_eq!(server.ended().await.outcome, "internal");
    assert_eq!(ask(&server).await.status, 200);
}
