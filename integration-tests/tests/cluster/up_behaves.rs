//! `baton up` as a person meets it: ready with a line to try, gone without a trace, and clear about what it dislikes.

use std::collections::BTreeSet;
use std::process::{Output, Stdio};
use std::time::Duration;

use integration_tests::cluster::{baton_executable, lock_machine, model_path};
use integration_tests::wait::wait_until;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

/// Loading the model twice on two busy cores takes seconds; a minute means that it hangs.
const READY_WITHIN: Duration = Duration::from_secs(60);
const GONE_WITHIN: Duration = Duration::from_secs(20);

struct Up {
    child: Child,
    /// The one line of `--json`.
    ready: Value,
    /// Its URL is in use until then, and the machine with it.
    _machine: std::fs::File,
}

impl Up {
    async fn start(arguments: &[&str]) -> Up {
        let machine = lock_machine().await.expect("the machine");
        let mut child = Command::new(baton_executable().expect("baton"))
            .args(["up", "--listen", "127.0.0.1:0", "--json"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("start baton up");
        let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
        let line = tokio::time::timeout(READY_WITHIN, lines.next_line()).await;
        let line = line
            .expect("ready in time")
            .expect("stdout")
            .expect("a line when ready");
        Up {
            child,
            ready: serde_json::from_str(&line).expect("JSON"),
            _machine: machine,
        }
    }

    fn pid(&self) -> u32 {
        self.child.id().expect("running")
    }

    async fn ends(&mut self) -> std::process::ExitStatus {
        tokio::time::timeout(GONE_WITHIN, self.child.wait())
            .await
            .expect("ends in time")
            .expect("status")
    }
}

/// Processes whose parent is `pid`, by reading /proc.
fn children(pid: u32) -> BTreeSet<u32> {
    let stat = |p: u32| std::fs::read_to_string(format!("/proc/{p}/stat")).ok();
    let parent = |text: String| text.rsplit(')').next()?.split_whitespace().nth(1)?.parse::<u32>().ok();
    std::fs::read_dir("/proc")
        .expect("/proc")
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|p| stat(*p).and_then(parent) == Some(pid))
        .collect()
}

async fn signal(name: &str, pid: u32) {
    let status = Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status()
        .await
        .expect("kill");
    assert!(status.success());
}

async fn all_gone(pids: &BTreeSet<u32>) {
    let is_alive = |p: &&u32| std::fs::read_to_string(format!("/proc/{p}/stat")).is_ok_and(|s| !s.contains(") Z "));
    wait_until("every node to be gone", GONE_WITHIN, || {
        let left: Vec<u32> = pids.iter().filter(is_alive).copied().collect();
        std::future::ready(if left.is_empty() { Ok(()) } else { Err(left) })
    })
    .await
    .expect("no process is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_printed_curl_line_answers_paris() {
    let _machine = lock_machine().await.expect("the machine");
    let mut up = Command::new(baton_executable().expect("baton"))
        .args(["up", "--listen", "127.0.0.1:0", "--quiet"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("start baton up");
    let mut lines = BufReader::new(up.stdout.take().expect("stdout")).lines();
    let curl = loop {
        let line = tokio::time::timeout(READY_WITHIN, lines.next_line())
            .await
            .expect("ready in time");
        let line = line.expect("stdout").expect("a curl line before the end");
        if line.trim_start().starts_with("curl ") {
            break line;
        }
    };
    assert_eq!(
        children(up.id().expect("running")).len(),
        3,
        "coordinator, one prefill node, one decode node"
    );
    let output = Command::new("sh")
        .args(["-c", &curl])
        .output()
        .await
        .expect("sh and curl");
    let text = String::from_utf8_lossy(&output.stdout);
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let answer: String = events
        .filter_map(|event| serde_json::from_str::<Value>(event).ok())
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert!(answer.contains("Paris"), "{text}");
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupt_drains_and_leaves_no_process() {
    let mut up = Up::start(&["--engine", "stand-in", "--topology", "2p2d"]).await;
    let nodes = children(up.pid());
    assert_eq!(nodes.len(), 5);
    signal("INT", up.pid()).await;
    assert_eq!(up.ends().await.code(), Some(130));
    all_gone(&nodes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_do_not_outlive_a_killed_up() {
    let mut up = Up::start(&["--engine", "stand-in"]).await;
    let nodes = children(up.pid());
    signal("KILL", up.pid()).await;
    up.ends().await;
    all_gone(&nodes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_node_is_reported_by_name_and_the_rest_is_stopped() {
    let mut up = Up::start(&["--engine", "stand-in"]).await;
    let nodes = children(up.pid());
    let processes = up.ready["processes"].as_array().expect("processes");
    let decode = processes.iter().find(|p| p["role"] == "decode").expect("a decode node");
    let name = decode["name"].as_str().expect("name").to_owned();
    signal(
        "KILL",
        u32::try_from(decode["pid"].as_u64().expect("pid")).expect("pid"),
    )
    .await;
    let mut errors = String::new();
    let mut stderr = up.child.stderr.take().expect("stderr");
    tokio::time::timeout(GONE_WITHIN, stderr.read_to_string(&mut errors))
        .await
        .expect("in time")
        .expect("stderr");
    assert_eq!(up.ends().await.code(), Some(1), "{errors}");
    let said = errors
        .lines()
        .any(|line| line.starts_with("{\"error\":") && line.contains("died"));
    assert!(said && errors.contains(&format!("{name} ")), "{errors}");
    all_gone(&nodes).await;
}

async fn refused(arguments: &[&str]) -> Output {
    let mut command = Command::new(baton_executable().expect("baton"));
    let run = command.args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    tokio::time::timeout(READY_WITHIN, run)
        .await
        .expect("ends by itself")
        .expect("output")
}

fn assert_says(output: &Output, code: i32, words: &[&str]) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    for word in words {
        assert!(errors.contains(word), "{word:?} is missing in: {errors}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("address").to_string();
    assert_says(
        &refused(&["up", "--listen", &address]).await,
        1,
        &[&address, "--listen"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_words_are_usage_errors() {
    assert_says(&refused(&["up", "--topology", "0p1d"]).await, 2, &["topology"]);
    assert_says(
        &refused(&["up", "--threads-per-node=-1"]).await,
        2,
        &["threads-per-node"],
    );
    assert_says(&refused(&["up", "--no-such-flag"]).await, 2, &["no-such-flag"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_model_file_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("tempdir");
    let whole = std::fs::read(model_path().expect("the model")).expect("readable");
    let truncated = dir.path().join("truncated.gguf");
    std::fs::write(&truncated, &whole[..whole.len() / 2]).expect("write");
    let path = truncated.to_str().expect("utf-8");
    assert_says(
        &refused(&["up", "--listen", "127.0.0.1:0", "--model", path]).await,
        1,
        &["truncated"],
    );
    let garbage = dir.path().join("garbage.gguf");
    std::fs::write(&garbage, b"this is not a model").expect("write");
    let path = garbage.to_str().expect("utf-8");
    assert_says(
        &refused(&["up", "--listen", "127.0.0.1:0", "--model", path]).await,
        1,
        &["garbage.gguf"],
    );
    assert_says(
        &refused(&["up", "--model", "/nonexistent/model.gguf"]).await,
        2,
        &["/nonexistent/model.gguf"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_slo_file_is_refused_with_its_line_before_anything_starts() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("slo.toml");
    std::fs::write(&file, "\nobjective = 99.5\n").expect("write");
    let path = file.to_str().expect("utf-8");
    let arguments = ["up", "--listen", "127.0.0.1:0", "--slo-config", path];
    assert_says(&refused(&arguments).await, 2, &[path, "line 2", "objective"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_not_there_ends_the_start_at_once_and_is_named() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = port.local_addr().expect("address").to_string();
    drop(port);
    let membership = format!("etcd://{address}/c");
    let arguments = [
        "up",
        "--listen",
        "127.0.0.1:0",
        "--engine",
        "stand-in",
        "--membership",
        membership.as_str(),
    ];
    let words = [membership.as_str(), "--membership embedded"];
    assert_says(&refused(&arguments).await, 1, &words);
}

/// Each line of a process's log until one is what is wanted.
async fn says(arguments: &[&str], is_wanted: impl Fn(&str) -> bool) {
    let mut child = Command::new(baton_executable().expect("baton"))
        .args(arguments)
        .args(["--exit-with-stdin", "--name=alone", "--listen=127.0.0.1:0", "--model"])
        .arg(model_path().expect("the model"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("started");
    let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines();
    let wanted = async {
        while let Some(line) = lines.next_line().await.expect("stderr") {
            if is_wanted(&line) {
                return;
            }
        }
        panic!("{arguments:?} ended without the word");
    };
    tokio::time::timeout(READY_WITHIN, wanted).await.expect("in time");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_started_alone_says_that_its_etcd_does_not_answer() {
    // It takes connections and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let etcd = format!("etcd://{}/c", silent.local_addr().expect("address"));
    let tells = |line: &str| line.contains(&etcd) && line.contains("waited_s");
    let at = etcd.as_str();
    let coordinator = [
        "serve-coordinator",
        "--control-listen",
        "127.0.0.1:0",
        "--membership",
        at,
    ];
    says(&coordinator, tells).await;
    let node = ["serve-decode", "--engine", "stand-in", "--coordinators", at];
    says(&node, tells).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_logs_of_a_running_cluster_are_found_by_its_url_and_go_with_a_good_end() {
    let mut up = Up::start(&["--engine", "stand-in"]).await;
    let url = up.ready["url"].as_str().expect("a URL").to_owned();
    let asked = ["logs", "--json", "decode-0", "--url", url.as_str()];
    let output = refused(&asked).await;
    assert_says(&output, 0, &[]);
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let first: Value = serde_json::from_str(lines.lines().next().expect("a node says something")).expect("JSON");
    assert_eq!(first["process"], "decode-0", "{lines}");
    let unknown = refused(&["logs", "decode-7", "--url", &url]).await;
    assert_says(&unknown, 2, &["coordinator, decode-0, prefill-0"]);
    signal("INT", up.pid()).await;
    assert_eq!(up.ends().await.code(), Some(130));
    assert_says(&refused(&asked).await, 1, &[&url]);
}
