//! The nodes of one `baton up` have one copy of the weights in memory, and their answers are those of nodes with copies of their own.

use integration_tests::MODEL;
use integration_tests::cluster::{TestCluster, baton_executable, model_path, options};
use serde_json::json;

/// How a process maps shared weights: protection and inode of each mapping.
fn mappings(pid: u32) -> Vec<(String, String)> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process runs");
    let ours = maps.lines().filter(|line| line.contains("memfd:baton-weights"));
    let fields = ours.map(|line| {
        let mut fields = line.split_whitespace();
        let protection = fields.nth(1).unwrap_or_default().to_owned();
        (protection, fields.nth(2).unwrap_or_default().to_owned())
    });
    fields.collect()
}

/// The answer of a 1p1d cluster, and how its nodes map the weights.
async fn answer_of(environment: &[(&str, &str)]) -> (String, Vec<Vec<(String, String)>>) {
    let mut options = options("1p1d").expect("options");
    options.settings.kv_cache_memory = Some("64MiB".to_owned());
    let own = environment
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    options.environment.extend(own);
    let cluster = TestCluster::start_with(options).await.expect("a cluster");
    let body = json!({
        "model": MODEL, "prompt": "The weights of a model are", "max_tokens": 16, "temperature": 0, "ignore_eos": true,
    });
    let answer = cluster.post("/v1/completions", &body).await.expect("an answer");
    let processes = cluster.cluster.processes();
    let nodes = processes.iter().filter(|process| process.role != "coordinator");
    let mapped = nodes.map(|node| mappings(node.pid)).collect();
    cluster.stop().await.expect("a clean stop");
    (
        answer["choices"][0]["text"].as_str().expect("a text").to_owned(),
        mapped,
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_one_start_map_the_same_weights_read_only_and_answer_as_with_their_own() {
    let (shared, mapped) = answer_of(&[]).await;
    assert_eq!(mapped.len(), 2);
    assert_eq!(mapped[0].len(), 1, "{mapped:?}");
    assert_eq!(mapped[0][0].0, "r--s");
    assert_eq!(mapped[0], mapped[1], "one file for both");
    let (own, mapped) = answer_of(&[("BATON_SHARED_WEIGHTS", "")]).await;
    assert_eq!(mapped, [vec![], vec![]]);
    assert_eq!(shared, own);
}

#[test]
fn what_no_machine_has_memory_for_is_refused_with_figures_before_anything_is_loaded() {
    let model = model_path().expect("the model");
    for verb in ["up", "serve-prefill", "serve-decode"] {
        // 4 TiB of KV.
        let output = std::process::Command::new(baton_executable().expect("the binary"))
            .args([verb, "--listen=127.0.0.1:0", "--kv-cache-memory=4TiB", "--model"])
            .arg(&model)
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{verb}: {said}");
        for part in ["MB for weights", "GB for KV", "GB free", "--kv-cache-memory"] {
            assert!(said.contains(part), "{verb}: {part} in {said}");
        }
        assert!(!said.contains("started as"), "{verb}: {said}");
    }
}
