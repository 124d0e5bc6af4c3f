//! `baton bench matrix` against a server with scripted delays: the folder that it writes, its cache modes and its exit status.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cli::bench::load::scripted_server::{End, Script, ScriptedServer};

/// Generous: the whole takes a second.
const WITHIN: Duration = Duration::from_secs(60);

async fn server() -> ScriptedServer {
    mortal(u64::MAX).await
}

/// A server that answers so many requests.
async fn mortal(answers: u64) -> ScriptedServer {
    let script = move |_: &str, number: u64| Script {
        status: if number < answers { 200 } else { 500 },
        first: Duration::from_millis(1),
        gap: Duration::ZERO,
        end: End::Whole,
    };
    let address = "127.0.0.1:0".parse().expect("an address");
    ScriptedServer::start(address, Arc::new(script), None)
        .await
        .expect("a free port")
}

async fn matrix(server: &ScriptedServer, folder: &Path, more: &[&str]) -> (Option<i32>, String) {
    let (url, out) = (server.url(), folder.join("matrix"));
    let out = out.to_str().expect("a path");
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_baton"))
        .args([
            "bench",
            "matrix",
            "--url",
            &url,
            "--rows",
            "A,B",
            "--num-prompts",
            "3",
            "--out",
            out,
        ])
        .args(more)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(WITHIN, output)
        .await
        .expect("it ends")
        .expect("it starts");
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// For each row, whether the client was late in it, as it may be on a busy machine: a contract is not judged there.
fn late_rows(folder: &Path) -> Vec<bool> {
    let files = std::fs::read_dir(folder.join("matrix")).expect("the folder");
    let paths = files.map(|entry| entry.expect("an entry").path());
    let rows = paths.filter(|path| path.extension().is_some_and(|ending| ending == "json"));
    rows.map(|path| {
        let row: serde_json::Value = serde_json::from_slice(&std::fs::read(path).expect("a row")).expect("JSON");
        row["point"]["summary"]["lag"]["is_valid"] == false
    })
    .collect()
}

#[tokio::test]
async fn a_server_that_dies_takes_no_row_with_it() {
    let folder = tempfile::tempdir().expect("a folder");
    // Four before the row and three in it.
    let server = mortal(7).await;
    let (code, words) = matrix(&server, folder.path(), &["--context", "128"]).await;
    assert_eq!(code, Some(1), "{words}");
    assert!(words.contains("row A warm could not be measured"), "{words}");
    let is_there = |row: &str| folder.path().join("matrix").join(row).is_file();
    assert!(is_there("row-A-cold.json") && is_there("interpretation.md") && !is_there("row-A-warm.json"));
}

/// Each row and cache has one file. The rows of `matrix` are A and B.
#[tokio::test]
async fn a_row_or_a_cache_that_is_named_twice_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server().await;
    for twice in [["--rows", "a"], ["--cache", "cold,cold"]] {
        let (code, words) = matrix(&server, folder.path(), &twice).await;
        assert_eq!(code, Some(2), "{twice:?}: {words}");
        assert!(!folder.path().join("matrix").exists(), "{twice:?}: {words}");
    }
}

/// The rows of `matrix` are A and B, which have users and no rate.
#[tokio::test]
async fn a_rate_that_no_row_has_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server().await;
    let (code, words) = matrix(&server, folder.path(), &["--context", "128", "--rate", "4"]).await;
    assert_eq!(code, Some(2), "{words}");
    assert!(!folder.path().join("matrix").exists(), "{words}");
}

#[tokio::test]
async fn a_matrix_is_a_folder_that_explains_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let contract = folder.path().join("contract.toml");
    std::fs::write(&contract, "e2e_ms_p99_max = 60000\n").expect("a file");
    let server = server().await;
    let contract = contract.to_str().expect("a path");
    let flags = [
        "--context",
        "128",
        "--contract",
        contract,
        "--hypothesis",
        "B is slower",
    ];
    let (status, stderr) = matrix(&server, folder.path(), &flags).await;
    let is_late = late_rows(folder.path()).contains(&true);
    assert_eq!(status, Some(if is_late { 5 } else { 0 }), "{stderr}");
    let out = folder.path().join("matrix");
    let mut files: Vec<String> = std::fs::read_dir(&out)
        .expect("the folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    files.sort();
    let rows = [
        "row-A-cold.json",
        "row-A-warm.json",
        "row-B-cold.json",
        "row-B-warm.json",
    ];
    assert_eq!(
        files,
        [&["hardware.md", "interpretation.md"][..], &rows, &["server-flags.md"]].concat()
    );
    let read = |name: &str| std::fs::read_to_string(out.join(name)).expect(name);
    for part in [
        "B is slower",
        "PrefillBound",
        "e2e_ms_p99_max",
        "Next step: Stop",
        "B: long prompt",
    ] {
        assert!(read("interpretation.md").contains(part), "{part}");
    }
    assert!(read("server-flags.md").contains("scripted") && read("hardware.md").contains("cpu_model"));
    let row: serde_json::Value = serde_json::from_str(&read("row-B-warm.json")).expect("JSON");
    assert_eq!(row["run"]["records"].as_array().map(Vec::len), Some(3));
    assert_eq!(row["point"]["summary"]["counts"]["completed"], 3);

    // The prompts of a warm row were sent before, in the order of the row. Those of a cold row were not.
    let seen = server.seen();
    let prompts = |row: &str| -> Vec<&serde_json::Value> {
        let records: serde_json::Value = serde_json::from_str(&read(row)).expect("JSON");
        let records = records["run"]["records"].as_array().expect("records").clone();
        records
            .iter()
            .map(|record| &seen[record["id"].as_str().expect("an id")].body["prompt"])
            .collect()
    };
    let times = |prompt: &serde_json::Value| seen.values().filter(|seen| seen.body["prompt"] == *prompt).count();
    assert!(prompts("row-A-warm.json").into_iter().all(|prompt| times(prompt) == 2));
    assert!(prompts("row-A-cold.json").into_iter().all(|prompt| times(prompt) == 1));

    // The run of a row is what `slowest` reads.
    let file = out.join("row-A-cold.json");
    let slowest = std::process::Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["bench", "slowest", "2", "--json", "--run"])
        .arg(&file)
        .output()
        .expect("it starts");
    let slowest: serde_json::Value = serde_json::from_slice(&slowest.stdout).expect("JSON");
    assert_eq!(slowest.as_array().map(Vec::len), Some(2));
}

#[tokio::test]
async fn a_contract_that_no_server_meets_is_exit_status_3_and_a_server_that_tells_no_context_is_2() {
    let folder = tempfile::tempdir().expect("a folder");
    let contract = folder.path().join("contract.toml");
    std::fs::write(&contract, "e2e_ms_p99_max = 0.0001\n").expect("a file");
    let server = server().await;
    let contract = contract.to_str().expect("a path");
    let (status, stderr) = matrix(&server, folder.path(), &["--context", "128", "--contract", contract]).await;
    let is_late = !late_rows(folder.path()).contains(&false);
    assert_eq!(status, Some(if is_late { 5 } else { 3 }), "{stderr}");
    let (status, stderr) = matrix(&server, folder.path(), &[]).await;
    assert_eq!(status, Some(2), "{stderr}");
    assert!(stderr.contains("--context"), "{stderr}");
}
