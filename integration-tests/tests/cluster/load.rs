//! `baton bench run` against a real cluster: warm prefixes are found, and the coordinator's records and CPU come with the run.

use integration_tests::cluster::{TestCluster, baton_executable, options};
use serde_json::Value;
use tokio::process::Command;

#[tokio::test(flavor = "multi_thread")]
async fn a_run_tells_where_each_request_ran_and_what_was_cached() {
    let mut options = options("1p1d").expect("options");
    options.settings.engine = Some("stand-in".to_owned());
    let cluster = TestCluster::start_with(options).await.expect("a cluster");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.json");
    let flags = "--dataset-name prefix_repetition --prefix-repetition-num-prefixes 2 --prefix-repetition-output-len 8 --cache warm \
        --num-prompts 12 --request-rate 20";
    let output = Command::new(baton_executable().expect("baton"))
        .args(["bench", "run", "--base-url", cluster.cluster.base_url()])
        .args(flags.split_whitespace())
        .arg("--run-json")
        .arg(&path)
        .output()
        .await
        .expect("it ran");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let run: Value = serde_json::from_slice(&std::fs::read(path).expect("the run")).expect("JSON");
    let records = run["records"].as_array().expect("records");
    assert_eq!(records.len(), 12);
    for record in records {
        assert_eq!(record["outcome"], "completed", "{record}");
        assert_eq!(
            (&record["prompt_tokens"], &record["output_tokens"]),
            (&512.into(), &8.into())
        );
        assert_eq!(record["tokens"].as_array().map(Vec::len), Some(8));
        // Sixteen blocks of the prefix; the last one may have to be computed again.
        assert!(record["cached_tokens"].as_u64() >= Some(240), "{record}");
        let server = &record["server"];
        assert!(
            server["decode_node"].is_string() && server["stages"][0].is_array(),
            "{record}"
        );
    }
    for process in ["coordinator", "prefill-0", "decode-0"] {
        assert!(run["server"][process].is_object(), "{process}: {}", run["server"]);
    }
}
