//! A coordinator keeps a flight record through the death of a node, and `baton replay` decides every event of it again.

use std::path::Path;
use std::process::Output;

use anyhow::{Context, ensure};
use futures::future::join_all;
use integration_tests::MODEL;
use integration_tests::cluster::{TestCluster, baton_executable, options};
use integration_tests::waterfall::prompt;
use serde_json::{Value, json};
use tokio::process::Command;

const AT_ONCE: usize = 6;

/// Each prompt has this word, so that it would be found in a record that keeps text.
const SECRET: &str = "xylophone";

async fn requests(cluster: &TestCluster, turn: usize) {
    let sent = (0..AT_ONCE).map(|i| {
        let text = format!("{SECRET} {}", prompt(20 + 30 * i, turn * AT_ONCE + i));
        let body = json!({ "model": MODEL, "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": true });
        async move { cluster.post("/v1/completions", &body).await }
    });
    // An answer that the death of its node broke is part of the record, too.
    let _ = join_all(sent).await;
}

async fn replay(record: &Path, more: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new(baton_executable()?);
    let output = command.arg("replay").arg(record).args(more).kill_on_drop(true).output();
    Ok(output.await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_through_the_death_of_a_node_replays_with_every_action_equal() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let record = folder.path().join("flight.record");
    let mut options = options("1p2d")?;
    options.settings.engine = Some("stand-in".to_owned());
    options.settings.flight_record = Some(record.display().to_string().parse().map_err(anyhow::Error::msg)?);
    let mut cluster = TestCluster::start_with(options).await?;
    requests(&cluster, 0).await;
    let ((), killed) = tokio::join!(requests(&cluster, 1), cluster.cluster.kill_node("decode-0"));
    killed?;
    requests(&cluster, 2).await;
    cluster.cluster.restart_node("decode-0").await?;
    requests(&cluster, 3).await;
    cluster.stop().await?;

    let output = replay(&record, &["--json"]).await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    let page: Value = serde_json::from_slice(&output.stdout)?;
    let replay = &page["replay"];
    let events = replay["events"].as_u64().context("no count")?;
    ensure!(replay["equal_events"] == events && page["is_equal"] == true, "{page:#}");
    ensure!(events > 200 && replay["faults"].as_u64() > Some(0), "{page:#}");
    let ending = &replay["ending"]["marked"];
    ensure!(ending["reason"] == "stopped" && ending["lost_events"] == 0, "{page:#}");
    let bytes = std::fs::read(&record)?;
    let has_text = bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes());
    ensure!(!has_text, "the record has a prompt's text");

    let output = self::replay(&record, &["--until", "0.1", "--show", "3"]).await?;
    ensure!(output.status.success(), "{:?}", output.status);

    // One changed byte is noticed.
    let mut damaged = bytes;
    let last = damaged.len() - 40;
    damaged[last] ^= 1;
    std::fs::write(&record, damaged)?;
    let output = self::replay(&record, &[]).await?;
    ensure!(output.status.code() == Some(1), "{:?}", output.status);
    Ok(())
}
