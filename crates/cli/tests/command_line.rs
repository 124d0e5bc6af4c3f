//! The whole binary as a shell sees it: help of the processes' verbs, failures in JSON, the checks of this machine.

#![forbid(unsafe_code)]

use std::process::{Command, Output};

use model_files::test_kit::TinyModel;
use serde_json::{Value, json};

/// Without what this machine's user has configured.
fn baton(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    for variable in [
        "BATON_ENDPOINT",
        "BATON_MEMBERSHIP",
        "BATON_COORDINATORS",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    ] {
        command.env_remove(variable);
    }
    command.args(arguments).output().expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_verbs_of_the_processes_are_listed_and_say_what_each_process_is() {
    let help = text(&baton(&["--help"]).stdout);
    for (verb, about, flag) in [
        ("serve-coordinator", "the HTTP API", "--control-listen"),
        ("serve-prefill", "prefill node", "--last-chunk-tokens"),
        ("serve-decode", "decode node", "--reservation-ms-max"),
    ] {
        assert!(help.contains(verb), "{verb} is not in\n{help}");
        let output = baton(&[verb, "--help"]);
        let said = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        for part in [about, "Most important:", "Usage:", flag] {
            assert!(said.contains(part), "{part} is not in\n{said}");
        }
    }
    assert!(!help.contains("complete-live"), "hidden verbs stay hidden");
}

#[test]
fn a_failure_is_json_where_the_result_would_have_been() {
    let nobody = "http://127.0.0.1:1";
    for words in [
        &["status", "--json"][..],
        &["nodes", "-o", "json"],
        &["trace", "last", "--json"],
        &["chat", "--json", "hello"],
    ] {
        let output = baton(&[words, &["--url", nobody]].concat());
        assert_eq!(output.status.code(), Some(4), "{words:?}: {output:?}");
        let said: Value = serde_json::from_slice(&output.stderr).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        assert_eq!(said["error"]["exit_status"], json!(4), "{words:?}");
        assert!(
            said["error"]["message"]
                .as_str()
                .is_some_and(|message| message.contains(nobody)),
            "{said}"
        );
        assert_eq!(text(&output.stdout), "");
    }
    let plain = baton(&["status", "--url", nobody]);
    assert!(text(&plain.stderr).starts_with("error: "), "{plain:?}");
}

/// The default model is not in the empty cache, and without Python it could not be fetched.
#[test]
fn a_plan_of_a_comparison_fetches_no_model() {
    let cache = tempfile::tempdir().expect("a folder");
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["compare", "--untuned", "--plan-only"])
        .env("BATON_CACHE_DIR", cache.path())
        .env("BATON_PYTHON", "/no/such/python")
        .env_remove("BATON_TRACES")
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said = text(&output.stderr);
    assert!(said.contains("smollm2-135m"), "{said}");
    let kept = std::fs::read_dir(cache.path()).expect("the folder").count();
    assert_eq!(kept, 0, "{said}");
}

/// As `baton certs init .. | head -1` with a reader that is gone before the first line.
#[test]
fn certificates_are_made_whoever_reads_their_names() {
    let folder = tempfile::tempdir().expect("a folder");
    let certs = folder.path().join("certs");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    let words = ["--cluster", "demo", "coordinator/c-0", "prefill/p-0", "decode/d-0"];
    command.args(["certs", "init"]).arg(&certs).args(words).stdout(writer);
    let output = command.output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    for name in ["ca", "c-0", "p-0", "d-0"] {
        let file = certs.join(format!("{name}.crt"));
        assert!(file.is_file(), "{} is missing: {output:?}", file.display());
    }
}

#[test]
fn doctor_looks_at_everything_and_its_exit_status_is_its_verdict() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tiny.gguf");
    TinyModel::default()
        .build()
        .write(&path)
        .expect("room for a tiny model");
    let path = path.to_str().expect("a plain path");
    let output = baton(&["doctor", "--json", "--model", path, "--listen", "127.0.0.1:0"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let is_ok = report["is_ok"].as_bool().expect("a verdict");
    assert_eq!(output.status.code(), Some(if is_ok { 0 } else { 1 }), "{report}");
    let checks = report["checks"].as_array().expect("checks");
    for group in ["machine", "model", "ports", "etcd", "collector"] {
        assert!(
            checks.iter().any(|check| check["group"] == group),
            "{group} is not in {report}"
        );
    }
    for check in checks {
        let is_told = check["to_do"].is_string();
        assert_eq!(
            is_told,
            check["verdict"] == "warn" || check["verdict"] == "fail",
            "{check}"
        );
    }
    let output = baton(&["doctor", "--model", "/no/such/model.gguf", "--listen", "127.0.0.1:0"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("FAIL  file") && said.contains("do: "), "{said}");
}
