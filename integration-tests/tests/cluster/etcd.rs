//! Membership over a real etcd (`$BATON_ETCD`): everybody finds everybody, a namesake takes over, an etcd
//! that hangs costs nothing. What embedded membership can do too is in `membership.rs`.

use std::process::Stdio;
use std::time::Duration;

use cli::local_cluster::{LocalCluster, LocalMembership};
use integration_tests::MODEL;
use integration_tests::cluster::{TestCluster, baton_executable, options};
use integration_tests::wait::wait_until;
use serde_json::{Value, json};
use tokio::process::Command;

const FOUND_WITHIN: Duration = Duration::from_secs(30);

async fn cluster(topology: &str, coordinator_count: u32) -> TestCluster {
    let mut options = options(topology).expect("options");
    options.membership = LocalMembership::StartEtcd;
    options.coordinator_count = coordinator_count;
    TestCluster::start_with(options).await.expect("a cluster with etcd")
}

async fn says_paris(cluster: &TestCluster, url: &str) -> Result<(), String> {
    let body = json!({ "model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "include_metrics": true });
    let sent = cluster
        .http
        .post(format!("{url}/v1/completions"))
        .json(&body)
        .send()
        .await;
    let answer: Value = sent
        .map_err(|e| e.to_string())?
        .json()
        .await
        .map_err(|e| e.to_string())?;
    let is_right = answer["choices"][0]["text"]
        .as_str()
        .is_some_and(|text| text.contains("Paris"));
    if is_right { Ok(()) } else { Err(answer.to_string()) }
}

fn etcd_address(cluster: &LocalCluster) -> String {
    format!("etcd://{}/local", cluster.etcd().expect("an etcd").address)
}

async fn membership(cluster: &TestCluster, url: &str) -> Value {
    cluster.cluster_page(url).await.expect("a page")["membership"].clone()
}

/// The page on membership once etcd has told this coordinator of both nodes of `1p1d` and of these coordinators. A node serves
/// before that.
async fn all_registered(cluster: &TestCluster, url: &str, coordinators: &[&str]) -> Value {
    let expected = (json!(["decode-0", "prefill-0"]), json!(coordinators));
    let seen = wait_until("all to be registered", FOUND_WITHIN, || async {
        let seen = membership(cluster, url).await;
        let is_all = (seen["nodes"].clone(), seen["coordinators"].clone()) == expected && seen["registered"] == true;
        if is_all { Ok(seen) } else { Err(seen.to_string()) }
    });
    seen.await.expect("registered")
}

#[tokio::test(flavor = "multi_thread")]
async fn everybody_is_registered_and_a_restarted_coordinator_is_found_at_its_new_address() {
    let mut cluster = cluster("1p1d", 2).await;
    let urls = cluster.cluster.base_urls().to_vec();
    for url in &urls {
        let seen = all_registered(&cluster, url, &["coordinator-0", "coordinator-1"]).await;
        assert_eq!(
            (&seen["kind"], &seen["is_stale"]),
            (&json!("etcd"), &json!(false)),
            "{seen}"
        );
        says_paris(&cluster, url).await.expect("an answer");
    }
    cluster
        .cluster
        .restart_node("coordinator-1")
        .await
        .expect("started again");
    let again = cluster.cluster.base_urls()[1].clone();
    assert_ne!(again, urls[1], "at another port");
    // Nodes learn of it from etcd and join it.
    wait_until("the nodes to find it", FOUND_WITHIN, || says_paris(&cluster, &again))
        .await
        .expect("an answer");
    says_paris(&cluster, &urls[0]).await.expect("the other one went on");
    cluster.stop().await.expect("drains");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_etcd_costs_no_request_and_nobody_is_evicted() {
    let cluster = cluster("1p1d", 1).await;
    let url = cluster.cluster.base_url().to_owned();
    all_registered(&cluster, &url, &["coordinator"]).await;
    let pid = cluster.cluster.etcd().expect("an etcd").pid.to_string();
    Command::new("kill")
        .args(["-STOP", &pid])
        .status()
        .await
        .expect("paused");
    let is_stale = || async {
        says_paris(&cluster, &url).await?;
        let seen = membership(&cluster, &url).await;
        if seen["is_stale"] == true && seen["trouble"].is_string() {
            Ok(seen)
        } else {
            Err(seen.to_string())
        }
    };
    let seen = wait_until("the view to be called stale", FOUND_WITHIN, is_stale)
        .await
        .expect("stale");
    assert_eq!(seen["nodes"], json!(["decode-0", "prefill-0"]), "the last view stays");
    let metrics = cluster.metrics().await.expect("metrics");
    assert_eq!(metrics.sum("baton_membership_view_stale", &[]), Some(1.0));
    Command::new("kill")
        .args(["-CONT", &pid])
        .status()
        .await
        .expect("resumed");
    let is_back = || async {
        says_paris(&cluster, &url).await?;
        let seen = membership(&cluster, &url).await;
        if seen["is_stale"] == false && seen["registered"] == true {
            Ok(())
        } else {
            Err(seen.to_string())
        }
    };
    wait_until("etcd to be back", FOUND_WITHIN, is_back)
        .await
        .expect("back");
    assert_eq!(
        membership(&cluster, &url).await["nodes"],
        json!(["decode-0", "prefill-0"])
    );
    cluster.stop().await.expect("drains");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namesake_that_starts_later_takes_over_and_the_older_one_says_why_it_left() {
    let cluster = cluster("1p2d", 1).await;
    let url = cluster.cluster.base_url().to_owned();
    let model = integration_tests::cluster::model_path().expect("the model");
    let mut later = Command::new(baton_executable().expect("baton"))
        .args([
            "serve-decode",
            "--exit-with-stdin",
            "--name=decode-1",
            "--listen=127.0.0.1:0",
        ])
        .arg(format!("--coordinators={}", etcd_address(&cluster.cluster)))
        .arg("--model")
        .arg(model)
        .args(["--served-model-name", MODEL])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("started");
    let exit = cluster
        .cluster
        .wait_for_exit("decode-1", FOUND_WITHIN)
        .await
        .expect("the older one leaves");
    assert_eq!(exit.status.code(), Some(1));
    let words = exit.last_lines.join("\n");
    assert!(words.contains("started later is called decode-1"), "{words}");
    let epoch = |page: &Value| {
        let nodes = page["nodes"].as_array().cloned().unwrap_or_default();
        let node = nodes
            .into_iter()
            .find(|node| node["name"] == "decode-1" && node["state"] == "ready");
        node.map(|node| node["epoch"].clone())
    };
    let joined = wait_until("the later one to serve", FOUND_WITHIN, || async {
        let page = cluster.cluster_page(&url).await.map_err(|error| error.to_string())?;
        epoch(&page).ok_or_else(|| page.to_string())
    });
    joined.await.expect("it joined");
    says_paris(&cluster, &url).await.expect("an answer");
    drop(later.stdin.take());
    let status = tokio::time::timeout(FOUND_WITHIN, later.wait())
        .await
        .expect("it drains")
        .expect("a status");
    assert!(status.success(), "{status}");
    cluster.stop().await.expect("drains");
}
