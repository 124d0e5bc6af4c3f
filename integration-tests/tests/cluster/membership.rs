//! What holds for embedded membership and for etcd alike (`$BATON_ETCD`): a drain, a restart, a change of role.

use std::cell::Cell;
use std::time::Duration;

use cli::local_cluster::{LocalMembership, NodeExit};
use integration_tests::cluster::{TestCluster, baton_executable, options};
use integration_tests::wait::wait_until;
use serde_json::{Value, json};
use tokio::process::Command;

const WITHIN: Duration = Duration::from_secs(30);
const AT_REST_WITHIN: Duration = Duration::from_secs(5);

/// Each of these over both.
macro_rules! over_both {
    ($($test:ident),+ $(,)?) => {
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(super::LocalMembership::Embedded).await;
            })+
        }
        mod etcd {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(super::LocalMembership::StartEtcd).await;
            })+
        }
    };
}

over_both!(
    a_drained_node_leaves_with_exit_status_0,
    a_killed_node_and_a_killed_coordinator_come_back,
    a_node_changes_its_role_under_load,
);

async fn cluster(topology: &str, membership: LocalMembership) -> TestCluster {
    let mut options = options(topology).expect("options");
    options.membership = membership;
    TestCluster::start_with(options).await.expect("a cluster")
}

/// A `baton` verb: its exit status and what it says to people.
async fn baton(arguments: &[&str]) -> (Option<i32>, String) {
    let ran = Command::new(baton_executable().expect("baton"))
        .args(arguments)
        .output();
    let output = ran.await.expect("it ran");
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

fn body(turn: u64) -> Value {
    let ids: Vec<u64> = (0..90).map(|i| 1_000 + (i * 7 + turn % 4 * 131) % 20_000).collect();
    json!({
        "model": "smollm2-135m", "prompt": ids, "max_tokens": 24, "ignore_eos": true,
        "temperature": if turn.is_multiple_of(2) { 0.0 } else { 0.8 }, "seed": 7, "return_token_ids": true, "include_metrics": true
    })
}

/// The answer to one of four requests, which have the same tokens each time.
async fn answer(cluster: &TestCluster, turn: u64) -> Result<Value, String> {
    let sent = cluster
        .http
        .post(format!("{}/v1/completions", cluster.cluster.base_url()));
    let answer = sent.json(&body(turn)).send().await.map_err(|error| error.to_string())?;
    let status = answer.status();
    let text = answer.text().await.map_err(|error| error.to_string())?;
    match status.is_success() {
        true => serde_json::from_str(&text).map_err(|error| error.to_string()),
        false => Err(format!("{status}: {text}")),
    }
}

fn tokens(answer: &Value) -> Value {
    answer["choices"][0]["token_ids"].clone()
}

async fn node(cluster: &TestCluster, name: &str) -> Result<Value, String> {
    let page = cluster.cluster_page(cluster.cluster.base_url()).await;
    let page = page.map_err(|error| format!("{error:#}"))?;
    let nodes = page["nodes"].as_array().cloned().unwrap_or_default();
    let found = nodes.into_iter().find(|node| node["name"] == name);
    found.ok_or_else(|| page.to_string())
}

async fn node_is(cluster: &TestCluster, name: &str, key: &str, wanted: &str) -> Value {
    let look = || async {
        let node = node(cluster, name).await?;
        if node[key] == wanted {
            Ok(node)
        } else {
            Err(node.to_string())
        }
    };
    let what = format!("{name} to have {key} {wanted}");
    wait_until(&what, WITHIN, look).await.expect("in time")
}

/// The process of `name` ends by itself, with exit status 0.
async fn ended_well(cluster: &TestCluster, name: &str) -> NodeExit {
    let exit = cluster.cluster.wait_for_exit(name, WITHIN).await.expect("it left");
    assert_eq!(exit.status.code(), Some(0), "{exit}");
    exit
}

async fn a_drained_node_leaves_with_exit_status_0(membership: LocalMembership) {
    let cluster = cluster("1p2d", membership).await;
    let url = cluster.cluster.base_url().to_owned();
    let (status, words) = baton(&["drain", "decode-1", "--url", &url]).await;
    assert!(status == Some(0) && words.contains("decode-1 has left"), "{words}");
    let exit = ended_well(&cluster, "decode-1").await;
    assert!(exit.has_left());
    node_is(&cluster, "decode-1", "state", "left").await;
    let is_gone = || async {
        let page = cluster.cluster_page(&url).await.map_err(|error| error.to_string())?;
        let registered = &page["membership"]["nodes"];
        match page["membership"]["kind"] == "embedded" || *registered == json!(["decode-0", "prefill-0"]) {
            true => Ok(()),
            false => Err(page.to_string()),
        }
    };
    wait_until("its entry to go", WITHIN, is_gone).await.expect("gone");
    answer(&cluster, 0).await.expect("the other one serves");
    let (status, words) = baton(&["drain", "decode-1", "--url", &url]).await;
    assert!(status == Some(1) && words.contains("gone (left)"), "{words}");
    let (status, words) = baton(&["drain", "decode-7", "--url", &url]).await;
    assert!(status == Some(1) && words.contains("decode-0"), "{words}");
    cluster.stop().await.expect("drains");
}

async fn a_killed_node_and_a_killed_coordinator_come_back(membership: LocalMembership) {
    let mut cluster = cluster("1p1d", membership).await;
    let expected = tokens(&answer(&cluster, 1).await.expect("an answer"));
    let before = node_is(&cluster, "decode-0", "state", "ready").await["epoch"].clone();
    for name in ["decode-0", "coordinator"] {
        cluster.cluster.kill_node(name).await.expect("killed");
        cluster.cluster.restart_node(name).await.expect("started again");
        let serves = || async { answer(&cluster, 1).await.map(|answer| tokens(&answer)) };
        let again = wait_until(&format!("{name} to be back"), WITHIN, serves).await;
        assert_eq!(again.expect("an answer"), expected);
    }
    let after = node_is(&cluster, "decode-0", "state", "ready").await["epoch"].clone();
    assert_ne!(before, after, "another life");
    cluster.stop().await.expect("drains");
}

async fn a_node_changes_its_role_under_load(membership: LocalMembership) {
    let cluster = cluster("2p1d", membership).await;
    let url = cluster.cluster.base_url().to_owned();
    let mut expected = Vec::new();
    for turn in 0..4 {
        expected.push(tokens(&answer(&cluster, turn).await.expect("an answer")));
    }
    let pids = |cluster: &TestCluster| -> Vec<u32> { cluster.cluster.processes().iter().map(|p| p.pid).collect() };
    let pids_before = pids(&cluster);
    let address_before = node(&cluster, "prefill-1").await.expect("a node")["address"].clone();
    let is_over = Cell::new(false);
    let client = async |client: u64| {
        let mut answered = 0;
        while !is_over.get() {
            let turn = client + answered;
            let answer = answer(&cluster, turn).await.expect("no request fails");
            assert_eq!(tokens(&answer), expected[turn as usize % 4], "{answer}");
            answered += 1;
        }
        answered
    };
    let operator = async {
        let decode = |role| ["role", "prefill-1", role, "--url", url.as_str()];
        let (status, words) = baton(&decode("decode")).await;
        assert!(
            status == Some(0) && words.contains("prefill-1 is a decode node"),
            "{words}"
        );
        assert!(baton(&decode("decode")).await.1.contains("already"));
        // The pools have changed sides: what was the only decode node prefills, and its KV goes the other way.
        let (status, words) = baton(&["role", "decode-0", "prefill", "--url", &url]).await;
        assert_eq!(status, Some(0), "{words}");
        let handed_over = || async {
            let answer = answer(&cluster, 0).await?;
            match answer["metrics"]["decode_node"] == "prefill-1" && answer["metrics"]["prefill_node"].is_string() {
                true => Ok(()),
                false => Err(answer.to_string()),
            }
        };
        wait_until("a handoff to prefill-1", WITHIN, handed_over)
            .await
            .expect("handed over");
        let (status, words) = baton(&decode("prefill")).await;
        assert!(status == Some(1) && words.contains("only node that decodes"), "{words}");
        let (status, words) = baton(&["role", "prefill-0", "colocated", "--url", &url]).await;
        assert_eq!(status, Some(0), "{words}");
        is_over.set(true);
    };
    let (first, second, ()) = tokio::join!(client(0), client(1), operator);
    assert!(first > 2 && second > 2, "{first} and {second} answers");
    for (name, role) in [
        ("prefill-0", "co-located"),
        ("prefill-1", "decode"),
        ("decode-0", "prefill"),
    ] {
        node_is(&cluster, name, "role", role).await;
    }
    assert_eq!(pids(&cluster), pids_before, "no process was started anew");
    let address = node(&cluster, "prefill-1").await.expect("a node")["address"].clone();
    assert_eq!(address, address_before, "it kept its port");
    cluster.assert_blocks_at_rest(AT_REST_WITHIN).await.expect("at rest");
    cluster.stop().await.expect("drains");
}

#[tokio::test(flavor = "multi_thread")]
async fn to_leave_for_good_overrides_a_change_of_role() {
    let cluster = cluster("1p2d", LocalMembership::Embedded).await;
    let url = cluster.cluster.base_url().to_owned();
    let mut long = body(0);
    long["max_tokens"] = json!(600);
    let answered = |sent: reqwest::Result<reqwest::Response>| sent.is_ok_and(|answer| answer.status().is_success());
    let stream = || cluster.http.post(format!("{url}/v1/completions")).json(&long).send();
    let operator = async {
        let is_busy = || async {
            let node = node(&cluster, "decode-1").await?;
            if node["running"].as_u64() > Some(0) {
                Ok(())
            } else {
                Err(node.to_string())
            }
        };
        wait_until("a stream on decode-1", WITHIN, is_busy).await.expect("busy");
        let (status, words) = baton(&["role", "decode-1", "prefill", "--wait", "0", "--url", &url]).await;
        assert!(status == Some(0) && words.contains("is draining"), "{words}");
        let (status, words) = baton(&["role", "decode-1", "colocated", "--url", &url]).await;
        assert!(status == Some(1) && words.contains("draining already"), "{words}");
        let (status, words) = baton(&["drain", "decode-1", "--url", &url]).await;
        assert!(status == Some(0) && words.contains("decode-1 has left"), "{words}");
    };
    // One on each decode node.
    let (first, second, ()) = tokio::join!(stream(), stream(), operator);
    assert!(
        answered(first) && answered(second),
        "what ran there ended, or went on elsewhere"
    );
    ended_well(&cluster, "decode-1").await;
    cluster.stop().await.expect("drains");
}
