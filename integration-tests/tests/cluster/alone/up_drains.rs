//! How `baton up` ends: SIGTERM lets a running answer finish, a second Ctrl-C does not; neither leaves a process.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, ensure};
use integration_tests::cluster::{ProcessFacts, baton_executable, lock_machine, model_path};
use integration_tests::wait::wait_until;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const READY_WITHIN: Duration = Duration::from_secs(120);
const EXIT_WITHIN: Duration = Duration::from_secs(60);

struct Up {
    child: Child,
    ready: Value,
    stderr: Arc<Mutex<String>>,
    reader: tokio::task::JoinHandle<()>,
}

impl Up {
    async fn start(topology: &str) -> anyhow::Result<Self> {
        let mut child = Command::new(baton_executable()?)
            .args([
                "up",
                "--json",
                "--listen",
                "127.0.0.1:0",
                "--topology",
                topology,
                "--model",
            ])
            .arg(model_path()?)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let stderr = Arc::new(Mutex::new(String::new()));
        let mut said = BufReader::new(child.stderr.take().context("stderr")?).lines();
        let shared = Arc::clone(&stderr);
        let reader = tokio::spawn(async move {
            while let Ok(Some(line)) = said.next_line().await {
                *shared.lock().expect("no holder panics") += &format!("{line}\n");
            }
        });
        let mut lines = BufReader::new(child.stdout.take().context("stdout")?).lines();
        let line = tokio::time::timeout(READY_WITHIN, lines.next_line())
            .await
            .context("not ready in time")??;
        let Some(line) = line else {
            reader.await?;
            anyhow::bail!(
                "up ended before it was ready: {}",
                stderr.lock().expect("no holder panics")
            );
        };
        let ready = serde_json::from_str(&line).context("the ready line is JSON")?;
        Ok(Self {
            child,
            ready,
            stderr,
            reader,
        })
    }

    fn said(&self) -> String {
        self.stderr.lock().expect("no holder panics").clone()
    }

    fn url(&self) -> &str {
        self.ready["url"].as_str().unwrap_or_default()
    }

    fn pids(&self) -> Vec<u32> {
        let rows = self.ready["processes"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        rows.iter()
            .filter_map(|row| row["pid"].as_u64())
            .filter_map(|pid| u32::try_from(pid).ok())
            .collect()
    }

    async fn signal(&self, signal: &str) -> anyhow::Result<()> {
        send_signal(signal, self.child.id().context("up is gone")?).await
    }

    async fn drains(&self) -> anyhow::Result<()> {
        wait_until("the drain has begun", EXIT_WITHIN, || {
            let said = self.said();
            std::future::ready(if said.contains("draining") { Ok(()) } else { Err(said) })
        })
        .await
    }

    /// The exit status and what it said, once it and all its processes are gone.
    async fn ended(mut self) -> anyhow::Result<(Option<i32>, String)> {
        let pids = self.pids();
        let status = tokio::time::timeout(EXIT_WITHIN, self.child.wait())
            .await
            .context("up does not end")??;
        gone(&pids, Duration::from_secs(1)).await?;
        (&mut self.reader).await?;
        Ok((status.code(), self.said()))
    }
}

async fn send_signal(signal: &str, pid: u32) -> anyhow::Result<()> {
    let status = Command::new("kill")
        .args([&format!("-{signal}"), &pid.to_string()])
        .status()
        .await?;
    ensure!(status.success(), "kill -{signal} {pid}: {status}");
    Ok(())
}

async fn gone(pids: &[u32], within: Duration) -> anyhow::Result<()> {
    wait_until("no process left", within, || {
        let left: Vec<&u32> = pids.iter().filter(|pid| ProcessFacts::of(**pid).is_ok()).collect();
        std::future::ready(if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        })
    })
    .await
}

#[tokio::test]
async fn a_terminated_up_finishes_the_running_answer_and_exits_0() -> anyhow::Result<()> {
    let _machine = lock_machine().await?;
    let up = Up::start("1p1d").await?;
    assert_eq!(up.pids().len(), 3, "{}", up.ready);
    let rows = up.ready["processes"].as_array().context("a list of processes")?;
    let mut nodes = rows.iter().filter(|row| row["role"] != "coordinator");
    assert!(nodes.all(|row| row["kv_blocks"].as_u64() > Some(0)), "{}", up.ready);
    let mut answer = stream(&up, 48).await?;
    let first = answer.chunk().await?.context("the answer starts")?;
    up.signal("TERM").await?;
    let mut text = first.to_vec();
    while let Some(piece) = answer.chunk().await.context("the drain must not cut the answer")? {
        text.extend_from_slice(&piece);
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(text.contains("[DONE]") && !text.contains("\"error\""), "{text}");
    let (status, said) = up.ended().await?;
    assert_eq!(status, Some(0), "{said}");
    Ok(())
}

#[tokio::test]
async fn a_second_ctrl_c_stops_at_once() -> anyhow::Result<()> {
    let _machine = lock_machine().await?;
    let up = Up::start("1p1d").await?;
    let mut answer = stream(&up, 2000).await?;
    answer.chunk().await?.context("the answer starts")?;
    let asked = std::time::Instant::now();
    up.signal("INT").await?;
    up.drains().await?;
    up.signal("INT").await?;
    let (status, said) = up.ended().await?;
    assert_eq!(status, Some(130), "{said}");
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "took {:?}: {said}",
        asked.elapsed()
    );
    Ok(())
}

#[tokio::test]
async fn a_process_that_dies_during_the_drain_is_a_failure_and_its_log_stays() -> anyhow::Result<()> {
    let _machine = lock_machine().await?;
    let up = Up::start("1p1d").await?;
    let answer = drain_without_prefill(&up).await?;
    // It ends with its client.
    drop(answer);
    ends_with_logs(up, 1).await
}

#[tokio::test]
async fn a_second_ctrl_c_keeps_the_log_of_a_process_that_had_died() -> anyhow::Result<()> {
    let _machine = lock_machine().await?;
    let up = Up::start("1p1d").await?;
    let _answer = drain_without_prefill(&up).await?;
    up.signal("INT").await?;
    ends_with_logs(up, 130).await
}

/// It ends with this exit status, says how the prefill node died, and keeps the logs.
async fn ends_with_logs(up: Up, wanted: i32) -> anyhow::Result<()> {
    let (status, said) = up.ended().await?;
    assert_eq!(status, Some(wanted), "{said}");
    assert!(said.contains("prefill-0") && said.contains("signal: 9"), "{said}");
    assert!(said.contains("the processes' logs are in"), "{said}");
    Ok(())
}

/// Begins a drain and kills the prefill node. The answer that is returned goes on: it needs this node no longer.
async fn drain_without_prefill(up: &Up) -> anyhow::Result<reqwest::Response> {
    let rows = up.ready["processes"].as_array().context("a list of processes")?;
    let prefill = rows.iter().find(|row| row["role"] == "prefill");
    let pid = prefill.and_then(|row| row["pid"].as_u64()).context("its pid")?;
    let pid = u32::try_from(pid)?;
    let mut answer = stream(up, 2000).await?;
    answer.chunk().await?.context("the answer starts")?;
    up.signal("TERM").await?;
    up.drains().await?;
    send_signal("KILL", pid).await?;
    // `ProcessFacts` end with the process, which is before its parent has heard of it. The folder of the process goes after that.
    let folder = PathBuf::from(format!("/proc/{pid}"));
    wait_until("up has heard of its end", EXIT_WITHIN, || {
        std::future::ready(if folder.exists() {
            Err(folder.display().to_string())
        } else {
            Ok(())
        })
    })
    .await?;
    Ok(answer)
}

/// Starts a streamed answer of exactly `tokens` tokens.
async fn stream(up: &Up, tokens: u32) -> anyhow::Result<reqwest::Response> {
    let body = json!({
        "model": up.ready["model"], "prompt": "Once upon a time", "max_tokens": tokens,
        "temperature": 0, "ignore_eos": true, "stream": true,
    });
    let answer = reqwest::Client::new()
        .post(format!("{}/v1/completions", up.url()))
        .json(&body)
        .send()
        .await?;
    Ok(answer.error_for_status()?)
}
