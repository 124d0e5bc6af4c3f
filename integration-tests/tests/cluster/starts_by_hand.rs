//! The three binaries with the files of `deploy/local/`, started in any order, find each other.

use std::process::Stdio;
use std::time::Duration;

use integration_tests::cluster::{baton_executable, lock_machine, model_path};
use integration_tests::wait::wait_until;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

const FOUND_WITHIN: Duration = Duration::from_secs(60);
const PROCESSES: [(&str, &str); 3] = [
    ("baton-coordinator", "coordinator.toml"),
    ("baton-prefill-node", "prefill.toml"),
    ("baton-decode-node", "decode.toml"),
];

/// The shipped file with its fixed ports; only the model's path is given by flag, as deploy/README.md says.
fn start(program: &str, file: &str) -> Child {
    let files = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/local");
    Command::new(baton_executable().expect("baton").with_file_name(program))
        .arg("--config")
        .arg(format!("{files}/{file}"))
        .arg("--model")
        .arg(model_path().expect("the model"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect(program)
}

async fn answers() -> Result<(), String> {
    let models = reqwest::get("http://127.0.0.1:8000/v1/models")
        .await
        .map_err(|e| e.to_string())?;
    let models: Value = models.json().await.map_err(|e| e.to_string())?;
    let model = models["data"][0]["id"].as_str().ok_or_else(|| models.to_string())?;
    let body = json!({ "model": model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "include_metrics": true });
    let sent = reqwest::Client::new()
        .post("http://127.0.0.1:8000/v1/completions")
        .json(&body)
        .send()
        .await;
    let answer = sent
        .map_err(|e| e.to_string())?
        .json::<Value>()
        .await
        .map_err(|e| e.to_string())?;
    let says_paris = answer["choices"][0]["text"]
        .as_str()
        .is_some_and(|text| text.contains("Paris"));
    let was_handed_over = answer["metrics"]["prefill_node"].is_string();
    if says_paris && was_handed_over {
        Ok(())
    } else {
        Err(answer.to_string())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_order_of_starting_leads_to_an_answer() {
    let _machine = lock_machine().await.expect("the machine");
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut running = Vec::new();
        for i in order {
            let (program, file) = PROCESSES[i];
            running.push(start(program, file));
        }
        let found = wait_until("the processes to find each other", FOUND_WITHIN, answers).await;
        found.unwrap_or_else(|error| panic!("order {order:?}: {error:#}"));
        for mut child in running {
            let pid = child.id().expect("still running").to_string();
            Command::new("kill").args(["-TERM", &pid]).status().await.expect("kill");
            let status = tokio::time::timeout(FOUND_WITHIN, child.wait())
                .await
                .expect("drains")
                .expect("status");
            assert!(status.success(), "{status}");
        }
    }
}
