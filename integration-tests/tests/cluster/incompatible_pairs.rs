//! T15: a prefill node that would compute another KV never sends a byte of it; the other pairs do not notice. Whoever looks is
//! told in which facts it differs, with both values.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use integration_tests::cluster::{TestCluster, baton_executable, model_path, options};
use integration_tests::wait::wait_until;
use integration_tests::{MODEL, scrape::Scrape};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};

const REQUESTS: usize = 6;
const NOTICED_WITHIN: Duration = Duration::from_secs(60);

/// A second prefill node, started by hand, that differs in one thing.
struct Stranger {
    child: Child,
    address: String,
}

impl Stranger {
    async fn join(control_address: &str, model: &Path, flags: &[&str]) -> Result<Self> {
        let mut child = Command::new(baton_executable()?)
            .args([
                "serve-prefill",
                "--name=stranger",
                "--listen=127.0.0.1:0",
                "--threads=1",
            ])
            .arg(format!("--coordinators={control_address}"))
            .arg(format!("--served-model-name={MODEL}"))
            .arg("--model")
            .arg(model)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut said = BufReader::new(child.stdout.take().context("stdout")?).lines();
        // Its progress comes before its address.
        let address = loop {
            let line = tokio::time::timeout(NOTICED_WITHIN, said.next_line()).await??;
            let line = line.context("it ended without saying its address")?;
            let line: serde_json::Value = serde_json::from_str(&line).context("no announcement")?;
            if let Some(address) = line["address"].as_str() {
                break address.to_owned();
            }
        };
        Ok(Self { child, address })
    }

    /// Ends it; what it had to say.
    async fn leave(mut self) -> Result<String> {
        let pid = self.child.id().context("it has gone by itself")?.to_string();
        Command::new("kill").args(["-TERM", &pid]).status().await?;
        let mut stderr = String::new();
        let mut pipe = self.child.stderr.take().context("stderr")?;
        tokio::time::timeout(NOTICED_WITHIN, pipe.read_to_string(&mut stderr)).await??;
        self.child.wait().await?;
        Ok(stderr)
    }
}

/// A copy of the model with one byte changed at `at(file)`.
fn changed_model(folder: &Path, name: &str, at: impl Fn(&[u8]) -> usize) -> PathBuf {
    let mut bytes = std::fs::read(model_path().expect("the model")).expect("readable");
    let at = at(&bytes);
    bytes[at] ^= 1;
    let path = folder.join(name);
    std::fs::write(&path, bytes).expect("room for a copy");
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_that_differs_never_sends_a_byte_and_the_others_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    // The last bytes of the file are weights; the word is a special token of the vocabulary, in the metadata at its
    // front: no merge needs it, so the tokenizer still loads.
    let weights = changed_model(folder.path(), "weights.gguf", |bytes| bytes.len() - 1_000);
    let tokenizer = changed_model(folder.path(), "tokenizer.gguf", |bytes| {
        let word = b"<gh_stars>";
        let at = bytes.windows(word.len()).position(|window| window == word);
        1 + at.expect("a special token of the vocabulary")
    });
    let model = model_path().expect("the model");
    let mut options = options("1p1d").expect("options");
    options.log_dir = Some(folder.path().to_owned());
    let cluster = TestCluster::start_with(options).await.expect("cluster");
    let exact = "numerics_id is cpu-exact-f32/2 on stranger and cpu-int8-blocks/3 on decode-0";
    let differences: [(&str, &Path, &[&str]); 4] = [
        (
            "block_tokens is 32 on stranger and 16 on decode-0",
            &model,
            &["--block-size=32"],
        ),
        (exact, &model, &["--numerics=exact"]),
        ("weights_sha256 is", &weights, &[]),
        ("tokenizer_sha256 is", &tokenizer, &[]),
    ];
    for (difference, model, flags) in differences {
        let stranger = Stranger::join(cluster.cluster.control_address(), model, flags).await;
        let stranger = stranger.unwrap_or_else(|error| panic!("{difference}: {error:#}"));
        never_used(&cluster, stranger, difference)
            .await
            .unwrap_or_else(|error| panic!("{difference}: {error:#}"));
    }
    cluster.stop().await.expect("stop");
    let logs = [
        ("decode-0.log", "block_tokens is 16 on decode-0 and 32 on stranger"),
        ("coordinator.log", "block_tokens is 32 on stranger and 16 on decode-0"),
    ];
    for (file, difference) in logs {
        let log = std::fs::read_to_string(folder.path().join(file)).expect(file);
        assert!(log.contains(difference), "{file} does not say that {difference}: {log}");
    }
}

/// `difference` is the field in which it differs, with the values where they are known.
async fn never_used(cluster: &TestCluster, stranger: Stranger, difference: &str) -> Result<()> {
    let labels = [("prefill_node", "stranger"), ("reason", "incompatible")];
    wait_until(
        "the coordinator to know the pair as incompatible",
        NOTICED_WITHIN,
        || async {
            let metrics = cluster.metrics().await.map_err(|error| error.to_string())?;
            match metrics.sum("baton_pair_up", &labels) {
                Some(0.0) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        },
    )
    .await?;
    let page = cluster.cluster_page(cluster.cluster.base_url()).await?;
    let pairs = page["pairs"].as_array().context("pairs")?;
    let pair = pairs
        .iter()
        .find(|pair| pair["prefill"] == "stranger")
        .context("its pair")?;
    let because = pair["unusable_because"].as_str().unwrap_or_default();
    ensure!(because.contains(difference), "/admin/cluster does not say why: {pair}");
    let before = handoffs(cluster).await?;
    for i in 0..REQUESTS {
        let body = json!({ "model": MODEL, "prompt": format!("Count from {i} to one hundred, slowly:"), "max_tokens": 4, "ignore_eos": true, "include_metrics": true });
        let answer = cluster.post("/v1/completions", &body).await?;
        let node = answer["metrics"]["prefill_node"].as_str();
        ensure!(
            node == Some("prefill-0"),
            "the prompt was computed by {node:?}: {answer}"
        );
    }
    // The end of a handoff is counted when the decode node has told of it, which may be after the answer.
    wait_until("a handoff for each request", NOTICED_WITHIN, || async {
        let counted = handoffs(cluster).await.map_err(|error| error.to_string())?;
        match counted - before {
            handed_over if handed_over == REQUESTS as f64 => Ok(()),
            other => Err(format!("{other} handoffs for {REQUESTS} requests")),
        }
    })
    .await?;
    let own = cluster
        .http
        .get(format!("http://{}/metrics", stranger.address))
        .send()
        .await?;
    let own = Scrape::parse(&own.text().await?)?;
    let sent = own.sum("baton_kv_transfer_bytes_count", &[]).unwrap_or(0.0);
    ensure!(sent == 0.0, "it made {sent} transfers");
    let said = stranger.leave().await?;
    ensure!(said.contains(difference), "its log does not say why: {said}");
    Ok(())
}

async fn handoffs(cluster: &TestCluster) -> Result<f64> {
    let metrics = cluster.metrics().await?;
    Ok(metrics
        .sum("baton_handoffs_total", &[("outcome", "committed")])
        .unwrap_or(0.0))
}
