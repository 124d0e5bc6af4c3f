//! Which cluster is meant, the order of its lines, and what is printed of them.

use std::path::PathBuf;

use super::*;
use crate::up::run_folder::RunFacts;

fn run(name: &str, url: Option<&str>, is_running: bool) -> SeenRun {
    SeenRun {
        folder: PathBuf::from(name),
        facts: RunFacts {
            pid: 1,
            started_unix_ms: 0,
            url: url.map(str::to_owned),
            logs: PathBuf::from(name),
        },
        is_running,
    }
}

#[test]
fn the_cluster_that_runs_is_meant_or_the_one_at_the_url_or_the_one_that_failed_last() {
    let (here, there) = (Some("http://127.0.0.1:8000"), Some("http://127.0.0.1:8001"));
    let name = |runs: Vec<SeenRun>, url| {
        let run = chosen(runs, url).map(|run| run.folder.display().to_string());
        run.map_err(|error| (crate::exit::of(&error), error.to_string()))
    };
    let failed = || run("failed", here, false);
    let one = || run("one", here, true);
    let two = || run("two", there, true);
    assert_eq!(name(vec![failed(), one()], None).as_deref(), Ok("one"));
    assert_eq!(
        name(vec![failed(), run("older", None, false)], None).as_deref(),
        Ok("failed")
    );
    assert_eq!(
        name(vec![one(), two()], Some("http://localhost:8001/v1/")).as_deref(),
        Ok("two")
    );
    let (exit, words) = name(vec![one(), two()], None).expect_err("which?");
    assert!(
        exit == Exit::Usage && words.contains("http://127.0.0.1:8001"),
        "{words}"
    );
    let (exit, words) = name(vec![one()], there).expect_err("another machine");
    assert!(exit == Exit::Failure && words.contains("BATON_ENDPOINT"), "{words}");
    let (exit, words) = name(Vec::new(), None).expect_err("nothing");
    assert!(exit == Exit::Failure && words.contains("baton up"), "{words}");
}

#[test]
fn a_process_that_is_not_there_is_a_mistake_of_usage_and_an_empty_list_is_said() {
    let nothing_yet = run("/no/such/folder", None, true);
    let error = tails(&nothing_yet, Some("decode-0"), &[]).expect_err("there is no log");
    assert_eq!(crate::exit::of(&error), Exit::Usage);
    assert!(!error.to_string().trim_end().ends_with(':'), "{error}");
    assert!(tails(&nothing_yet, None, &[]).expect("all of none").is_empty());
}

#[test]
fn lines_of_several_processes_are_in_the_order_of_time_and_a_panic_stays_together() {
    let event = |process: &str, second: u8| {
        let line = format!(r#"{{"timestamp":"2026-11-21T14:03:{second:02}Z","level":"INFO","message":"m{second}"}}"#);
        (process.to_owned(), line)
    };
    let plain = |process: &str, line: &str| (process.to_owned(), line.to_owned());
    let mut lines = vec![
        event("a", 1),
        event("a", 5),
        plain("a", "thread panicked"),
        plain("a", "note"),
        plain("b", "first words"),
        event("b", 3),
        event("b", 6),
    ];
    in_order_of_time(&mut lines);
    let order = [
        plain("b", "first words"),
        event("a", 1),
        event("b", 3),
        event("a", 5),
        plain("a", "thread panicked"),
        plain("a", "note"),
        event("b", 6),
    ];
    assert_eq!(lines, order);
}

#[test]
fn every_line_becomes_one_object_with_its_process() {
    let event = r#"{"timestamp":"t","level":"WARN","message":"m"}"#;
    let expected = serde_json::json!({"process": "decode-0", "timestamp": "t", "level": "WARN", "message": "m"});
    assert_eq!(json("decode-0", event), expected);
    let expected = serde_json::json!({"process": "decode-0", "line": "thread 'main' panicked"});
    assert_eq!(json("decode-0", "thread 'main' panicked"), expected);
}

#[tokio::test]
async fn a_cluster_that_has_failed_is_shown_once_even_with_follow() {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("1-0");
    std::fs::create_dir(&folder).expect("made");
    let facts = RunFacts {
        pid: 1,
        started_unix_ms: 7,
        url: None,
        logs: folder.clone(),
    };
    std::fs::write(
        folder.join("cluster.json"),
        serde_json::to_vec(&facts).expect("plain data"),
    )
    .expect("written");
    for (name, line) in [("coordinator", "one\n"), ("decode-0", "two\nthree\n")] {
        std::fs::write(folder.join(format!("{name}.log")), line).expect("written");
    }
    let shown = async |process: Option<&str>| {
        let args = LogsArgs {
            process: process.map(str::to_owned),
            follow: true,
            lines: 1,
            url: None,
            json: false,
        };
        let mut shown = String::new();
        let ended = logs(&args, (parent.path(), Terminal::plain()), |text| {
            shown.push_str(text);
            Ok(())
        })
        .await;
        (shown, ended)
    };
    let (text, ended) = shown(None).await;
    assert_eq!(ended.expect("read"), Exit::Ok);
    assert_eq!(text, "coordinator | one\n   decode-0 | three\n");
    assert_eq!(shown(Some("decode-0")).await.0, "three\n");
    let (_, ended) = shown(Some("decode-7")).await;
    let error = ended.expect_err("no such process");
    assert!(error.to_string().contains("coordinator, decode-0"), "{error}");
    assert_eq!(crate::exit::of(&error), Exit::Usage);
}
