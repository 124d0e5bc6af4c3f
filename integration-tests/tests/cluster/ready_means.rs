//! Ready means what it says: a drain that would end service needs `--force`, and who asks is told when requests run unsplit.

use std::time::Duration;

use integration_tests::MODEL;
use integration_tests::cluster::{TestCluster, baton_executable, options};
use integration_tests::wait::wait_until;
use serde_json::{Value, json};
use tokio::process::Command;

const WITHIN: Duration = Duration::from_secs(30);

/// A `baton` verb: its exit status, and what it says on stdout and stderr.
async fn baton(arguments: &[&str]) -> (Option<i32>, String) {
    let ran = Command::new(baton_executable().expect("baton"))
        .args(arguments)
        .output();
    let output = ran.await.expect("it ran");
    let words = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&words).into_owned())
}

/// Status and JSON of an answer.
async fn asked(request: reqwest::RequestBuilder) -> (u16, Value) {
    let answer = request.send().await.expect("an answer");
    (answer.status().as_u16(), answer.json().await.expect("JSON"))
}

async fn is_answered(cluster: &TestCluster) {
    let body = json!({"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4});
    cluster.post("/v1/completions", &body).await.expect("an answer");
}

/// Two coordinators over one prefill and two decode nodes; for the second one unsplit is not ready.
async fn two_views() -> TestCluster {
    let mut options = options("1p2d").expect("options");
    options.settings.engine = Some("stand-in".to_owned());
    options.coordinator_count = 2;
    let strict = vec!["--unsplit-counts-as=not-ready".into()];
    options.flags_by_name.insert("coordinator-1".to_owned(), strict);
    TestCluster::start_with(options).await.expect("a cluster")
}

/// What `/ready` says once it says so with this status.
async fn ready_is(cluster: &TestCluster, url: &str, status: u16) -> Value {
    let look = || async {
        match asked(cluster.http.get(format!("{url}/ready"))).await {
            (now, page) if now == status => Ok(page),
            (now, page) => Err(format!("{now}: {page}")),
        }
    };
    wait_until(&format!("/ready to be {status}"), WITHIN, look)
        .await
        .expect("in time")
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_ends_service_or_the_split_unseen() {
    let cluster = two_views().await;
    let urls = cluster.cluster.base_urls().to_vec();
    let url = urls[0].as_str();
    let split = ready_is(&cluster, url, 200).await;
    assert_eq!(split["unsplit_because"], Value::Null, "{split}");
    assert_eq!(split["suspected_nodes"], json!([]), "{split}");

    // Of two drains at the same moment the second one finds nobody left.
    let drain = |name: &str| asked(cluster.http.post(format!("{url}/admin/nodes/{name}/drain")));
    let (first, second) = tokio::join!(drain("decode-0"), drain("decode-1"));
    let mut both = [first.0, second.0];
    both.sort_unstable();
    assert_eq!(both, [202, 409], "{first:?} {second:?}");
    let (last, refusal) = match first.0 {
        409 => ("decode-0", first.1),
        _ => ("decode-1", second.1),
    };
    assert_eq!(refusal["error"]["code"], "last_decode_node", "{refusal}");
    for verb in [
        vec!["drain", last],
        vec!["role", last, "prefill"],
        vec!["role", last, "colocated"],
    ] {
        let (status, words) = baton(&[&verb[..], &["--url", url]].concat()).await;
        assert!(status == Some(1) && words.contains("--force"), "{verb:?}: {words}");
    }
    is_answered(&cluster).await;

    // Nobody decodes unsplit by choice here: it is said, and for the strict one it is not ready. Both go on answering.
    let (status, words) = baton(&["drain", "prefill-0", "--url", url]).await;
    assert_eq!(status, Some(0), "{words}");
    let unsplit = ready_is(&cluster, url, 200).await;
    assert_eq!(unsplit["prefill_nodes"], 0, "{unsplit}");
    assert!(unsplit["unsplit_because"].is_string(), "{unsplit}");
    let strict = ready_is(&cluster, &urls[1], 503).await;
    assert_eq!(strict["error"]["code"], "not_ready", "{strict}");
    let (status, words) = baton(&["status", "--url", url]).await;
    assert!(status == Some(0) && words.contains("unsplit"), "{words}");
    let (status, words) = baton(&["status", "--url", &urls[1]]).await;
    assert!(status == Some(1) && words.contains("unsplit"), "{words}");
    is_answered(&cluster).await;

    let (status, words) = baton(&["drain", last, "--force", "--url", url]).await;
    assert!(status == Some(0) && words.contains("has left"), "{words}");
    ready_is(&cluster, url, 503).await;
    cluster.stop().await.expect("drains");
}
