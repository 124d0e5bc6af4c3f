//! Nodes on the false CUDA driver: whole processes that compute and hand over on GPUs, as far as a machine without one shows it.
//!
//! `BATON_FALSE_CUDA` names the folder that `scripts/false-cuda` makes; `scripts/test` sets it.

mod faults;
mod goldens;

use std::path::{Path, PathBuf};
use std::process::Output;

use cli::local_cluster::LocalClusterOptions;
use integration_tests::cluster::{TestCluster, baton_executable};
use integration_tests::token_exact::{Answer, Baseline, Case, compare, run};
use integration_tests::waterfall::{complete, unattributed_ms, whole};
use integration_tests::{MODEL, false_gpu};
use model_files::test_kit::TinyModel;
use serde_json::json;

const BLOCK_TOKENS: usize = 16;
const OUTPUT_TOKENS: u32 = 6;

/// Kernels that these tests have compiled.
const COMPILED: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/compiled-kernels");

/// Two layers with heads of 64 values, for which there are kernels.
fn write_model(path: &Path) -> std::io::Result<()> {
    let model = TinyModel {
        head_dim: 64,
        ..TinyModel::default()
    };
    model.build().write(path)
}

/// One shorter than a block, one of several chunks, greedy and sampled.
fn cases() -> Vec<Case> {
    let case = |length: u32, temperature| Case {
        prompt: (0..length)
            .map(|index| (7 * index * index + 31 * index + length) % 259)
            .collect(),
        output_tokens: OUTPUT_TOKENS,
        temperature,
        top_p: 1.0,
        seed: u64::from(length),
        is_constrained: temperature > 0.0,
    };
    vec![case(5, 0.0), case(70, 0.0), case(70, 0.8)]
}

fn options(topology: &str, model: PathBuf, reports: &Path) -> LocalClusterOptions {
    let executable = baton_executable().expect("baton");
    let mut options = LocalClusterOptions::new(executable, topology.parse().expect("a topology"), model);
    options.settings.kv_cache_memory = Some("1MiB".to_owned());
    options.settings.max_num_batched_tokens = Some(32);
    options.settings.max_num_seqs = Some(4);
    options.settings.served_model_name = vec![MODEL.to_owned()];
    options.settings.devices = vec!["cuda:0".parse().expect("a device")];
    let variables = false_gpu::variables(reports, Some(Path::new(COMPILED)));
    options.environment.extend(variables.expect("the false driver"));
    options
}

/// The answers, and how many prompts came by a handoff over this transport. The driver of no node found anything wrong.
async fn answers(topology: &str, model: &Path, transport: &str) -> (Vec<Answer>, f64) {
    let reports = tempfile::tempdir().expect("a folder");
    let mut options = options(topology, model.into(), reports.path());
    for node in ["prefill-0", "decode-0"] {
        let flags = vec![format!("--transports={transport}").into()];
        options.flags_by_name.insert(node.to_owned(), flags);
    }
    let cluster = TestCluster::start_with(options).await.expect("it starts");
    let answers = run(cluster.cluster.base_url(), &cases()).await.expect("answers");
    let metrics = cluster.metrics().await.expect("metrics");
    let by_transport = [("outcome", "committed"), ("transport", transport)];
    let handoffs = metrics.sum("baton_handoffs_total", &by_transport);
    if topology == "1p1d" {
        assert_pushed_while_computing(&cluster).await;
    }
    cluster.stop().await.expect("stop");
    if let Err(error) = false_gpu::check(reports.path()) {
        panic!("{topology} by {transport}: {error:#}");
    }
    (answers, handoffs.unwrap_or(0.0))
}

/// A prompt of several chunks: `baton trace` shows that its first blocks left while later chunks were computed, and the stages
/// explain the whole time to the first token.
async fn assert_pushed_while_computing(cluster: &TestCluster) {
    let prompt: Vec<u32> = (0..100).map(|index| (5 * index * index + 3) % 259).collect();
    let id = complete(cluster, "overlap", json!({ "prompt": prompt, "max_tokens": 2 }));
    let id = id.await.expect("an answer");
    let trace = whole(cluster, &id).await.expect("a whole trace");
    let (left, said) = unattributed_ms(&trace["request"]).expect("stages");
    assert!(
        (left - said).abs() < 0.02,
        "the stages leave {left} ms, the record says {said}"
    );
    let mut command = tokio::process::Command::new(baton_executable().expect("baton"));
    command.args(["trace", &id, "--url", cluster.cluster.base_url()]);
    let shown = said_by(&command.output().await.expect("baton trace"));
    assert!(shown.contains("while prefill.forward did"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_on_gpus_give_the_tokens_and_the_kv_of_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("tiny.gguf");
    write_model(&model).expect("room for a tiny model");
    let (one_node, none) = answers("1c", &model, "grpc").await;
    assert!(
        one_node
            .iter()
            .all(|answer| answer.tokens.len() == OUTPUT_TOKENS as usize)
    );
    for transport in ["cuda-ipc", "nccl", "grpc", "shm"] {
        let (two_pools, handoffs) = answers("1p1d", &model, transport).await;
        assert_eq!((none, handoffs), (0.0, cases().len() as f64), "{transport}: handoffs");
        let baseline = Baseline {
            tokens: &one_node,
            kv_hashes: &one_node,
            block_tokens: BLOCK_TOKENS,
        };
        let differences = compare(&cases(), baseline, &two_pools);
        assert!(differences.is_exact(), "{transport}: {differences:?}");
    }
}

fn said_by(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// `baton up` with these flags, until it ends by itself.
async fn up(flags: &[&str], variables: &[(&str, &str)]) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("tiny.gguf");
    write_model(&model).expect("room for a tiny model");
    let mut command = tokio::process::Command::new(baton_executable().expect("baton"));
    command
        .args(["up", "--listen", "127.0.0.1:0", "--model"])
        .arg(&model)
        .args(flags);
    command
        .envs(variables.iter().copied())
        .env("BATON_CUDA_PATH", false_gpu::folder().expect("the false driver"));
    let ended = tokio::time::timeout(std::time::Duration::from_secs(60), command.kill_on_drop(true).output());
    ended.await.expect("it ends").expect("it starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_cannot_be_used_ends_the_start_with_its_reason() {
    let output = up(&["--devices", "cuda:0"], &[("FALSE_CUDA_DEVICES", "0")]).await;
    assert!(
        said_by(&output).contains("the driver sees no GPU"),
        "{}",
        said_by(&output)
    );
    assert_eq!(output.status.code(), Some(1), "{}", said_by(&output));
    let output = up(&["--devices", "cuda:0"], &[("FALSE_CUDA_MEMORY_BYTES", "100000")]).await;
    assert!(said_by(&output).contains("does not fit"), "{}", said_by(&output));
    let output = up(&["--devices", "cuda:0,cuda:1,cuda:2"], &[]).await;
    assert!(
        said_by(&output).contains("one for all, or one for each"),
        "{}",
        said_by(&output)
    );
    assert_eq!(output.status.code(), Some(2), "{}", said_by(&output));
    let output = up(&["--devices", "gpu"], &[]).await;
    assert_eq!(output.status.code(), Some(2), "{}", said_by(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_gpu_ends_its_node_and_its_requests_go_on_elsewhere() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("tiny.gguf");
    write_model(&model).expect("room for a tiny model");
    let mut options = options("2c", model, folder.path());
    // So that requests are spread over both nodes, whichever has seen their prompts.
    options.settings.prefix_cache = Some(false);
    let lost = folder.path().join("lost-%p").display().to_string();
    options.environment.push(("FALSE_CUDA_LOST".to_owned(), lost));
    let cluster = TestCluster::start_with(options).await.expect("it starts");
    let memory = cluster.node_metrics("decode-0").await.expect("metrics");
    for kind in ["weights", "buffers", "kv", "free"] {
        let bytes = memory.sum("baton_device_memory_bytes", &[("kind", kind)]);
        assert!(bytes > Some(0.0), "{kind}: {bytes:?}");
    }
    let expected = run(cluster.cluster.base_url(), &cases()).await.expect("answers");
    let processes = cluster.cluster.processes();
    let node = processes.iter().find(|process| process.name == "decode-0");
    let file = format!("lost-{}", node.expect("the node").pid);
    std::fs::write(folder.path().join(file), "").expect("room for a file");
    let ended = || async {
        let answers = run(cluster.cluster.base_url(), &cases()).await;
        assert_eq!(answers.expect("answers of the other node"), expected);
        let within = std::time::Duration::from_secs(1);
        cluster.cluster.wait_for_exit("decode-0", within).await
    };
    let within = std::time::Duration::from_secs(60);
    let exit = integration_tests::wait::wait_until("its node to end", within, ended).await;
    let exit = exit.expect("it ends");
    assert_eq!(exit.status.code(), Some(1), "{exit}");
    cluster.stop().await.expect("stop");
}
