//! The launcher against stand-in processes: what it does when they start, die, hang and drain.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use cli::local_cluster::{LocalCluster, LocalClusterError, LocalClusterOptions};
use tokio::io::AsyncReadExt;

/// Generous: Python starts in a tenth of a second, on a loaded machine in ten.
const WITHIN: Duration = Duration::from_secs(60);

fn fake_options(topology: &str, environment: &[(&str, &str)]) -> LocalClusterOptions {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/fake_baton.py");
    let topology = topology.parse().expect("a topology");
    let mut options = LocalClusterOptions::new(fake, topology, PathBuf::from("model.gguf"));
    options.environment = environment
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect();
    options.start_within = WITHIN;
    options
}

fn is_running(pid: u32) -> bool {
    // A killed process that nobody has reaped yet is a zombie: gone.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

async fn wait_until_gone(pids: &[u32]) {
    let gone = async {
        while pids.iter().any(|pid| is_running(*pid)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(WITHIN, gone).await.expect("every process is gone");
}

#[tokio::test]
async fn a_cluster_starts_coordinator_first_and_drains_it_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let log_name = log.to_string_lossy().into_owned();
    let options = fake_options("2p1d", &[("FAKE_LOG", &log_name)]);
    let cluster = LocalCluster::start(options).await.expect("it starts");
    let names: Vec<String> = cluster.processes().into_iter().map(|process| process.name).collect();
    assert_eq!(names, ["coordinator", "prefill-0", "prefill-1", "decode-0"]);
    assert_eq!(
        cluster.base_url(),
        format!("http://{}", cluster.node_addresses()["coordinator"])
    );
    let pids: Vec<u32> = cluster.processes().iter().map(|process| process.pid).collect();
    assert_eq!(cluster.stop(WITHIN).await, Vec::<String>::new());
    assert!(pids.iter().all(|pid| !is_running(*pid)));
    let log = std::fs::read_to_string(log).expect("the log");
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(
        (lines.len(), lines[0], lines[4]),
        (8, "start coordinator", "drain coordinator"),
        "{lines:?}"
    );
}

#[tokio::test]
async fn a_node_that_dies_at_start_is_named_with_its_status_and_last_lines_and_nothing_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut options = fake_options("1p1d", &[("FAKE_DIE", "decode-0")]);
    options.log_dir = Some(folder.path().to_owned());
    let error = LocalCluster::start(options).await.expect_err("decode-0 dies");
    let LocalClusterError::Exited(exit) = &error else {
        panic!("{error}")
    };
    assert_eq!(exit.name, "decode-0");
    assert_eq!(exit.last_lines, ["first complaint", "the model file is broken"]);
    let text = error.to_string();
    assert!(
        text.contains("exit status: 7") && text.contains("the model file is broken"),
        "{text}"
    );
    wait_until_gone(&[exit.pid]).await;
    let log = std::fs::read_to_string(folder.path().join("decode-0.log")).expect("its log file");
    assert!(log.contains("first complaint"));
}

#[tokio::test]
async fn a_node_that_never_gets_ready_is_named() {
    let mut options = fake_options("1p1d", &[("FAKE_SILENT", "prefill-0")]);
    options.start_within = Duration::from_secs(3);
    let error = LocalCluster::start(options).await.expect_err("prefill-0 is silent");
    assert!(matches!(error, LocalClusterError::NotReady { .. }), "{error}");
    assert!(error.to_string().contains("prefill-0"), "{error}");
}

#[tokio::test]
async fn a_cluster_with_a_node_or_a_link_missing_is_not_ready() {
    for (ready, missing) in [("2,2,3", "3 of 4 links"), ("2,1,2", "3 of 4 nodes")] {
        let mut options = fake_options("2p2d", &[("FAKE_READY", ready)]);
        options.start_within = Duration::from_secs(3);
        let error = LocalCluster::start(options).await.expect_err("it is not whole");
        assert!(error.to_string().contains(missing), "{error}");
    }
}

#[tokio::test]
async fn a_node_that_is_drained_while_the_cluster_starts_is_not_waited_for() {
    let environment = [("FAKE_LEAVE", "prefill-0"), ("FAKE_READY", "1,2,2")];
    let mut cluster = LocalCluster::start(fake_options("2p2d", &environment))
        .await
        .expect("it starts");
    let exit = tokio::time::timeout(WITHIN, cluster.next_exit())
        .await
        .expect("the exit is told afterwards");
    assert_eq!((exit.name.as_str(), exit.has_left()), ("prefill-0", true));
    cluster.stop(WITHIN).await;
}

#[tokio::test]
async fn a_role_that_is_changed_while_the_cluster_starts_changes_what_is_waited_for() {
    let cluster = LocalCluster::start(fake_options("2p2d", &[("FAKE_READY", "3,1,3")]))
        .await
        .expect("it starts");
    cluster.stop(WITHIN).await;
}

#[tokio::test]
async fn a_killed_node_is_reported_by_signal_and_can_be_started_again() {
    let mut cluster = LocalCluster::start(fake_options("2c", &[])).await.expect("it starts");
    let before = cluster.processes()[1].pid;
    cluster.kill_node("decode-0").await.expect("it is there");
    let exit = tokio::time::timeout(WITHIN, cluster.next_exit())
        .await
        .expect("the exit is seen");
    assert_eq!(exit.name, "decode-0");
    assert!(exit.to_string().contains("signal: 9"), "{exit}");
    cluster.restart_node("decode-0").await.expect("it starts again");
    assert_ne!(cluster.processes()[1].pid, before);
    let error = cluster.kill_node("decode-7").await.expect_err("there is none");
    assert!(error.to_string().contains("decode-0, decode-1"), "{error}");
    cluster.stop(WITHIN).await;
}

#[tokio::test]
async fn a_stubborn_node_is_killed_after_the_grace() {
    let cluster = LocalCluster::start(fake_options("1p1d", &[("FAKE_STUBBORN", "decode-0")]))
        .await
        .expect("it starts");
    let killed = cluster.stop(Duration::from_secs(2)).await;
    assert_eq!(killed, ["decode-0"]);
    assert!(cluster.processes().iter().all(|process| !is_running(process.pid)));
}

#[tokio::test]
async fn dropping_a_cluster_leaves_nothing() {
    let cluster = LocalCluster::start(fake_options("1p1d", &[])).await.expect("it starts");
    let pids: Vec<u32> = cluster.processes().iter().map(|process| process.pid).collect();
    drop(cluster);
    wait_until_gone(&pids).await;
}

#[tokio::test]
async fn nodes_drain_by_themselves_when_the_launcher_is_killed() {
    let cluster = LocalCluster::start(fake_options("1p1d", &[])).await.expect("it starts");
    let pids: Vec<u32> = cluster.processes().iter().map(|process| process.pid).collect();
    // What a SIGKILL of the launcher does to them: their stdin ends, nothing else.
    for name in cluster.node_addresses().keys() {
        cluster.drain_node(name).expect("it is there");
    }
    wait_until_gone(&pids).await;
}

#[tokio::test]
async fn the_binary_says_what_is_wrong_and_exits_as_documented() {
    let cases: [(&[&str], i32, &str); 8] = [
        (&["up", "--topology", "3x"], 2, "1p1d"),
        (&["up", "--topology", "0p1d"], 2, "prefill"),
        (&["up", "--listen", "nowhere"], 2, "HOST:PORT"),
        (
            &["up", "--listen", "127.0.0.1:0", "--model", "/no/such/model.gguf"],
            2,
            "/no/such/model.gguf",
        ),
        (&["up", "--listen", "127.0.0.1:0", "--kernel", "abacus"], 2, "abacus"),
        (
            &["up", "--listen", "127.0.0.1:0", "--transports", "pigeon"],
            2,
            "pigeon",
        ),
        (&["chat", "--url", "http://127.0.0.1:1", "hello"], 4, "baton up"),
        (&["no-such-verb"], 2, "no-such-verb"),
    ];
    for (arguments, status, said) in cases {
        let (code, stderr) = baton(arguments).await;
        assert_eq!(code, Some(status), "{arguments:?}: {stderr}");
        assert!(stderr.contains(said), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("started as"), "no process was started: {stderr}");
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = listener.local_addr().expect("its address").to_string();
    let (code, stderr) = baton(&["up", "--listen", &taken]).await;
    assert_eq!(code, Some(1));
    assert!(stderr.contains("in use") && stderr.contains("--listen"), "{stderr}");
}

async fn baton(arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the binary starts");
    let mut stderr = String::new();
    let mut pipe = child.stderr.take().expect("a pipe");
    pipe.read_to_string(&mut stderr).await.expect("text");
    let status = tokio::time::timeout(WITHIN, child.wait())
        .await
        .expect("it ends")
        .expect("it was waited for");
    (status.code(), stderr)
}
