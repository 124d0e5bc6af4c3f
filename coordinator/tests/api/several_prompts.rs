//! The record of a completions request with several prompts: whose nodes and stages it shows, and all of them one by one.

use std::sync::Mutex;
use std::time::Duration;

use coordinator::request_handle::{ClientEvent, Placement, RequestSummary};
use serde_json::{Value, json};
use serving_core::ids::{Attempt, NodeName};
use serving_core::request::{Request, RequestError};
use serving_core::stage::{Stage, StageTimings};
use tokio::sync::oneshot;

use super::client::{get, post_with};
use super::harness::{MODEL, Server};
use super::script::{Script, Step, say};

/// Of the prompt "b", which is the faster one.
const FORWARD: Duration = Duration::from_micros(1250);

fn is_b(request: &Request) -> bool {
    request.prompt[0].0 == u32::from(b'b')
}

fn placed_on(index: u32) -> Step {
    Step::Event(ClientEvent::Placed(Placement {
        attempt: Attempt(0),
        prefill_node: Some(NodeName::new(&format!("prefill-{index}"))),
        decode_node: Some(NodeName::new(&format!("decode-{index}"))),
        route_reason: "least-loaded".to_owned(),
        local_prefill: None,
        queued_for: Duration::from_millis(7),
    }))
}

/// As `say` has it, on nodes of its own and with its own stages.
fn said_on(index: u32, request: &Request) -> Vec<Step> {
    let mut steps = say(request, |_| "x".to_owned());
    steps[0] = placed_on(index);
    let forward = FORWARD * (2 - index);
    let summary = RequestSummary {
        timings: StageTimings(vec![(Stage::Queue, Duration::ZERO), (Stage::PrefillForward, forward)]),
        cached_tokens: 1,
        kv_bytes: 100,
        transport: Some("grpc".to_owned()),
        attempts: 1,
        ..RequestSummary::default()
    };
    steps.pop();
    steps.push(Step::Event(ClientEvent::Done(Box::new(summary))));
    steps
}

async fn record(server: &Server, is_wanted: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..1000 {
        let answer = get(server.address, "/admin/requests/two").await;
        if answer.status == 200 && is_wanted(&answer.json()) {
            return answer.json();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the record never looked as wanted");
}

#[tokio::test]
async fn the_record_speaks_of_the_prompt_whose_token_came_first_and_lists_both() {
    let (release, gate) = oneshot::channel();
    let gate = Mutex::new(Some(gate));
    let server = Server::start(move |request| {
        if is_b(request) {
            return Script::Play(said_on(1, request));
        }
        let mut steps = said_on(0, request);
        steps.extend(gate.lock().unwrap().take().map(Step::Wait));
        // After the placement, before the token.
        steps[1..].rotate_right(1);
        Script::Play(steps)
    })
    .await;
    let body = json!({"model": MODEL, "prompt": ["a", "b"], "max_tokens": 1, "n": 2, "stream": true});
    let headers = [("x-request-id", "two")];
    let client = post_with(server.address, "/v1/completions", &body, &headers);
    let look = async {
        let running = record(&server, |r| r["ttft_ms"].is_number()).await;
        assert_eq!(
            (&running["state"], &running["prefill_node"]),
            (&json!("streaming"), &json!("prefill-1"))
        );
        release.send(()).expect("the slow prompt waits");
    };
    let (answer, ()) = tokio::join!(client, look);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let ended = record(&server, |r| r["state"] == "ended").await;
    assert_eq!(
        (&ended["prefill_node"], &ended["decode_node"]),
        (&json!("prefill-1"), &json!("decode-1"))
    );
    let forward = |of: &Value| {
        let stages = of["stages"].as_array().expect("stages").clone();
        let found = stages
            .into_iter()
            .find(|stage| stage["stage"] == "prefill_forward")
            .expect("a forward pass");
        (found["ms"].clone(), found["process"].clone())
    };
    assert_eq!(forward(&ended), (json!(1.25), json!("prefill-1")));
    // Counts are of both.
    assert_eq!(
        (&ended["cached_tokens"], &ended["kv_bytes"], &ended["output_tokens"]),
        (&json!(2), &json!(200), &json!(4))
    );
    let prompts = ended["prompts"].as_array().expect("prompts");
    assert_eq!(prompts.len(), 2);
    assert_eq!(
        (&prompts[0]["choices"], &prompts[1]["choices"]),
        (&json!([0, 1]), &json!([2, 3]))
    );
    assert_eq!(forward(&prompts[0]), (json!(2.5), json!("prefill-0")));
    assert_eq!(forward(&prompts[1]), (json!(1.25), json!("prefill-1")));
    assert_eq!(
        (&prompts[0]["output_tokens"], &prompts[0]["kv_bytes"]),
        (&json!(2), &json!(100))
    );
}

#[tokio::test]
async fn the_prompt_that_failed_is_the_one_that_is_told() {
    let server = Server::start(move |request| {
        if !is_b(request) {
            return Script::Play(vec![placed_on(0), Step::Hang]);
        }
        let summary = RequestSummary {
            attempts: 2,
            failed_legs: vec!["decode:decode-1:transfer".to_owned()],
            ..RequestSummary::default()
        };
        let broke_off = Step::Event(ClientEvent::BrokeOff(Box::new(summary)));
        let failed = Step::Event(ClientEvent::Failed(RequestError::Internal("for the test".to_owned())));
        Script::Play(vec![placed_on(1), broke_off, failed])
    })
    .await;
    let body = json!({"model": MODEL, "prompt": ["a", "b"], "max_tokens": 1});
    let answer = post_with(server.address, "/v1/completions", &body, &[("x-request-id", "two")]).await;
    assert_eq!(answer.status, 500, "{}", answer.text());
    let ended = record(&server, |r| r["state"] == "ended").await;
    assert_eq!(
        (&ended["decode_node"], &ended["attempts"]),
        (&json!("decode-1"), &json!(2))
    );
    assert_eq!(ended["failed_legs"], json!(["decode:decode-1:transfer"]));
}

#[tokio::test]
async fn one_prompt_has_no_list() {
    let server = Server::start(move |request| Script::Play(said_on(0, request))).await;
    let body = json!({"model": MODEL, "prompt": "a", "max_tokens": 1});
    post_with(server.address, "/v1/completions", &body, &[("x-request-id", "two")]).await;
    let ended = record(&server, |r| r["state"] == "ended").await;
    assert_eq!(
        (&ended["prompts"], &ended["prefill_node"]),
        (&json!([]), &json!("prefill-0"))
    );
}
