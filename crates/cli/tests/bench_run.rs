//! `baton bench run` as a shell sees it, against a server with scripted delays.

#![forbid(unsafe_code)]

use std::process::Output;
use std::sync::Arc;
use std::time::Duration;

use cli::bench::load::scripted_server::{End, Script, ScriptedServer};
use serde_json::Value;
use workload::record::{Outcome, Run};

const ENDS_WITHIN: Duration = Duration::from_secs(60);

async fn bench(url: &str, flags: &str) -> Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_baton"));
    command
        .args(["bench", "run", "--base-url", url])
        .args(flags.split_whitespace());
    let output = tokio::time::timeout(ENDS_WITHIN, command.kill_on_drop(true).output()).await;
    output.expect("it ends").expect("it starts")
}

async fn scripted() -> ScriptedServer {
    let script = |id: &str, _: u64| Script {
        status: if id.ends_with("-3") { 429 } else { 200 },
        first: Duration::from_millis(4),
        gap: Duration::from_millis(2),
        end: End::Whole,
    };
    let address = "127.0.0.1:0".parse().expect("an address");
    ScriptedServer::start(address, Arc::new(script), None)
        .await
        .expect("a free port")
}

#[tokio::test]
async fn results_have_the_keys_that_other_tools_read() {
    let server = scripted().await;
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let flags = format!(
        "--num-prompts 8 --request-rate 100 --random-input-len 30 --random-output-len 6 --random-range-ratio 0.5 --num-warmups 1 \
         --goodput ttft:5000 tpot:500 --metadata gpu=none --save-result --save-detailed --result-dir {} --result-filename r.json \
         --run-json {} --csv {}",
        folder.path().display(),
        at("run.json").display(),
        at("run.csv").display()
    );
    let output = bench(&server.url(), &flags).await;
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    for word in [
        "time to first token",
        "open loop",
        "goodput",
        "client lag",
        "CPU of client",
    ] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    let result: Value = serde_json::from_slice(&std::fs::read(at("r.json")).expect("the result")).expect("JSON");
    let keys = "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration \
        completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput \
        total_token_throughput input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors \
        max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms p99_tpot_ms p99_itl_ms \
        p99_e2el_ms gpu";
    for key in keys.split_whitespace() {
        assert!(result.get(key).is_some(), "{key}");
    }
    assert_eq!((&result["completed"], &result["failed"]), (&7.into(), &1.into()));
    let lengths = result["input_lens"].as_array().expect("a list");
    assert!(
        lengths
            .iter()
            .all(|length| (15..=45).contains(&length.as_u64().unwrap_or(0))),
        "{lengths:?}"
    );
    let run: Run = serde_json::from_slice(&std::fs::read(at("run.json")).expect("the run")).expect("a run");
    assert_eq!(run.records.len(), 8);
    assert_eq!(run.records[3].outcome, Outcome::Refused { status: 429 });
    for fact in [
        "cores",
        "kernel",
        "load_average",
        "model",
        "trace_hash",
        "client_command",
        "gpus",
        "seed",
    ] {
        assert!(run.environment.contains_key(fact), "{fact}");
    }
    let csv = std::fs::read_to_string(at("run.csv")).expect("the table");
    let header = "request_id,prompt_tokens,output_tokens,ttft_ms,total_ms,";
    assert!(csv.starts_with(header) && csv.lines().count() == 9, "{csv}");
}

#[tokio::test]
async fn a_file_that_cannot_be_written_takes_nothing_with_it() {
    let server = scripted().await;
    let folder = tempfile::tempdir().expect("a folder");
    let csv = folder.path().join("run.csv");
    // A folder has the name of the file.
    let run_json = folder.path().join("run.json");
    std::fs::create_dir(&run_json).expect("made");
    let flags = format!(
        "--num-prompts 2 --random-output-len 3 --run-json {} --csv {}",
        run_json.display(),
        csv.display()
    );
    let output = bench(&server.url(), &flags).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("time to first token"), "{shown}");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains("cannot write") && words.contains("run.json"), "{words}");
    let lines = std::fs::read_to_string(csv).expect("the table");
    assert_eq!(lines.lines().count(), 3, "{lines}");
}

/// What was measured would be lost.
#[tokio::test]
async fn a_file_without_a_folder_is_refused_before_the_run() {
    let server = scripted().await;
    let folder = tempfile::tempdir().expect("a folder");
    for flag in ["--run-json", "--csv"] {
        let file = folder.path().join("no/such/folder/file");
        let flags = format!("--num-prompts 2 --random-output-len 3 {flag} {}", file.display());
        let output = bench(&server.url(), &flags).await;
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(words.contains(flag) && words.contains("no/such/folder"), "{words}");
    }
}

#[tokio::test]
async fn loops_scenarios_and_mistakes_are_told_apart() {
    let server = scripted().await;
    let url = server.url();
    let loop_of = async |flags: &str| -> (Value, Value) {
        let output = bench(&url, &format!("--num-prompts 3 --random-output-len 3 --json {flags}")).await;
        let result: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{flags}: {output:?}"));
        (result["loop"].clone(), result["max_concurrency"].clone())
    };
    assert_eq!(loop_of("--max-concurrency 2").await, ("closed".into(), 2.into()));
    assert_eq!(
        loop_of("--max-concurrency 2 --request-rate 500").await,
        ("open".into(), 2.into())
    );
    assert_eq!(loop_of("--scenario single-stream").await, ("closed".into(), 1.into()));
    assert_eq!(
        loop_of("--backend openai-chat --request-rate inf").await,
        ("open".into(), Value::Null)
    );
    for (flags, code) in [
        ("--users 2 --request-rate 4", 2),
        ("--scenario server", 2),
        ("--dataset-name trace", 2),
        ("--goodput ttft", 2),
        ("--random-range-ratio 1.5", 2),
        ("--cache warm", 2),
    ] {
        let output = bench(&url, flags).await;
        assert_eq!(output.status.code(), Some(code), "{flags}: {output:?}");
    }
    let output = bench("http://127.0.0.1:1", "--num-prompts 1").await;
    assert_eq!(output.status.code(), Some(4), "{output:?}");
}
