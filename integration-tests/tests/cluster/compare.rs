//! `baton compare` as a user runs it: two arms one after the other, the files, and no verdict where a field is missing.

use std::path::Path;
use std::process::Output;

use integration_tests::cluster::{baton_executable, lock_machine, model_path};
use serde_json::Value;
use tokio::process::Command;

/// Status 5: there is no verdict.
const NO_VERDICT: i32 = 5;

async fn compare(words: &[&str], folder: &Path) -> Output {
    Command::new(baton_executable().expect("baton"))
        .arg("compare")
        .args(words)
        .arg("--model")
        .arg(model_path().expect("a model"))
        .arg("--out")
        .arg(folder)
        .arg("--record")
        .arg(folder.with_extension("adr.md"))
        .kill_on_drop(true)
        .output()
        .await
        .expect("baton compare runs")
}

#[tokio::test(flavor = "multi_thread")]
async fn two_arms_get_the_same_trace_give_the_same_outputs_and_no_verdict_when_nobody_tuned_them() {
    let _machine = lock_machine().await.expect("the machine");
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path().join("report");
    let words = "--engine stand-in --arms co-located,disaggregated --shape short --rates 30 --run-seconds 1 --repeats 1 --untuned";
    let words: Vec<&str> = words.split(' ').collect();
    let output = compare(&words, &folder).await;
    let (shown, said) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(NO_VERDICT), "{shown}{said}");
    assert!(shown.contains("every_arm_tuned"), "{shown}{said}");

    let text = std::fs::read_to_string(folder.join("report.json")).expect("the report");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    let fairness = &report["fairness"];
    assert!(fairness["every_arm_tuned"].is_null() && fairness["order_and_repeats"].is_null());
    for field in [
        "equal_resources",
        "same_edge",
        "same_trace",
        "outputs_equal",
        "one_token_per_event",
        "transfer_share",
        "pool_utilisation",
    ] {
        assert!(fairness[field].is_string(), "{field} in {fairness}");
    }
    let shape = &report["shapes"][0];
    assert_eq!(shape["contrasts"], serde_json::json!([]));
    assert!(shape["verdict"].as_str().expect("words").starts_with("No verdict"));

    let records = |arm: &str| -> Vec<Value> {
        let runs = shape["runs"]
            .as_array()
            .expect("runs")
            .iter()
            .filter(|run| run["arm"] == arm);
        runs.flat_map(|run| run["run"]["records"].as_array().expect("records").clone())
            .collect()
    };
    let (whole, split) = (records("co-located"), records("disaggregated"));
    assert_eq!((whole.len(), split.len()), (30, 30));
    for (one, other) in whole.iter().zip(&split) {
        assert!(one["output_hash"].is_number(), "{one}");
        assert_eq!((&one["id"], &one["output_hash"]), (&other["id"], &other["output_hash"]));
    }
    let measured = split.iter().filter(|record| record["part"] == "measured").count();
    let handoffs = &report["environment"]["handoffs"];
    assert_eq!(handoffs["disaggregated"]["handed_off"], measured, "{handoffs}");
    assert_eq!(handoffs["co-located"]["handed_off"], 0, "{handoffs}");
    let record = std::fs::read_to_string(folder.with_extension("adr.md")).expect("the decision record");
    assert!(record.contains("not tuned"), "{record}");
    for twin in ["report.html", "report.md", "report.csv"] {
        assert!(folder.join(twin).is_file(), "{twin}");
    }
}
