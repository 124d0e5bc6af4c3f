//! `baton bench engine --limits` as a person runs it, on a tiny model: each kind of work that fits stands beside its limit. No times: they
//! belong to benchmarks.

#![forbid(unsafe_code)]

use std::process::Command;

use model_files::test_kit::golden_models;
use serde_json::Value;

#[test]
fn every_speed_stands_beside_its_limit_and_what_does_not_fit_is_left_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("tiny.gguf");
    let golden = golden_models().into_iter().next().expect("a tiny model");
    golden.builder.write(&model).expect("room for a tiny model");
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args([
            "bench",
            "engine",
            "--limits",
            "--json",
            "--threads=2",
            "--repeats=2",
            "--model",
        ])
        .arg(&model)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let positive = |value: &Value| value.as_f64().is_some_and(|value| value.is_finite() && value > 0.0);
    for peak in ["int8_ops_per_second", "f32_ops_per_second", "read_bytes_per_second"] {
        assert!(positive(&report["peaks"][peak]), "{report}");
    }
    let rows = report["rows"].as_array().expect("rows");
    let what: Vec<&str> = rows.iter().filter_map(|row| row["what"].as_str()).collect();
    // The context is 256.
    for (wanted, is_there) in [
        ("prompt of 128", true),
        ("prompt of 512", false),
        ("1 stream at 1", true),
        ("1 stream at 512", false),
        ("32 streams at 128", true),
    ] {
        assert_eq!(what.contains(&wanted), is_there, "{wanted}: {what:?}");
    }
    for row in rows {
        assert_eq!(row["n"], 2, "{row}");
        let columns = [
            "tokens_per_second",
            "lower_quartile",
            "limit_tokens_per_second",
            "share_of_limit",
        ];
        assert!(columns.iter().all(|column| positive(&row[column])), "{row}");
    }
}
