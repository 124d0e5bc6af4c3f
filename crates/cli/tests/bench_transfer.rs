//! `baton bench transfer` as a person runs it, small: every way moves every byte. No times: they belong to benchmarks.

#![forbid(unsafe_code)]

use std::process::Command;

const WAYS: [&str; 7] = [
    "two-process memcpy",
    "shm direct, checksums off",
    "shm direct",
    "shm staged",
    "grpc",
    "grpc with TLS",
    "one TCP stream",
];

#[test]
fn every_way_moves_every_byte_between_two_processes() {
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["bench", "transfer", "--rounds=2", "--blocks=4", "--json"])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let bytes = 4 * 30 * 12_288;
    assert_eq!(report["bytes"], bytes);
    let rows = report["rows"].as_array().expect("rows");
    let names: Vec<&str> = rows.iter().filter_map(|row| row["way"].as_str()).collect();
    assert_eq!(names, WAYS);
    for row in rows {
        // Two that count and the first one; what arrived was compared with what was sent.
        assert_eq!(row["bytes_moved"], 3 * bytes, "{row}");
        assert_eq!(row["rounds"], 2, "{row}");
        assert!(
            row["milliseconds_median"].as_f64().is_some_and(|took| took > 0.0),
            "{row}"
        );
    }
    assert!(report["tcp_yardstick"].is_string());
}
