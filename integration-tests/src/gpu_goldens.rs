//! The GPU engine on the false CUDA driver beside a reference's probabilities: what the test and the example of this name share.
//!
//! `BATON_FALSE_CUDA` names the folder that `scripts/false-cuda` makes; `scripts/test` sets it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use cli::local_cluster::LocalClusterOptions;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::MODEL;
use crate::cluster::{TestCluster, baton_executable};
use crate::false_gpu;
use crate::goldens::{self, Golden, Measured};

/// Weights of 135 million values are converted and copied first.
const START_WITHIN: Duration = Duration::from_secs(900);
/// The weights as bf16, KV and buffers.
const DEVICE_BYTES: &str = "2000000000";

/// What a node on the false driver computes.
#[derive(Clone, Debug)]
pub struct GpuNode {
    pub model: PathBuf,
    /// `fast`: the false cuBLASLt computes the products. `invariant`: the own kernels do.
    pub gpu_numerics: &'static str,
    /// Where compiled kernels are kept. `None`: where the user's are.
    pub kernel_cache: Option<PathBuf>,
}

/// One node on the false driver, and how far its answers are from the reference's.
#[derive(Debug)]
pub struct GpuCluster {
    cluster: TestCluster,
    /// Without a time limit: a long prompt takes minutes.
    client: reqwest::Client,
    /// Where the driver writes what it found.
    reports: TempDir,
    measured: Measured,
}

impl GpuNode {
    fn options(self, reports: &Path) -> Result<LocalClusterOptions> {
        let mut options = one_node(self.model)?;
        options.start_within = START_WITHIN;
        options.settings.devices = vec!["cuda:0".parse()?];
        options.settings.gpu_numerics = Some(self.gpu_numerics.to_owned());
        options.settings.max_num_batched_tokens = Some(128);
        options.settings.max_num_seqs = Some(2);
        let variables = false_gpu::variables(reports, self.kernel_cache.as_deref())?;
        options.environment.extend(variables);
        let memory = ("FALSE_CUDA_MEMORY_BYTES".to_owned(), DEVICE_BYTES.to_owned());
        options.environment.push(memory);
        Ok(options)
    }
}

impl GpuCluster {
    /// # Errors
    /// There is no false driver, or the node does not start.
    pub async fn start(node: GpuNode) -> Result<Self> {
        let reports = tempfile::tempdir()?;
        let cluster = TestCluster::start_with(node.options(reports.path())?).await?;
        Ok(Self {
            cluster,
            client: reqwest::Client::new(),
            reports,
            measured: Measured::default(),
        })
    }

    /// Compares every output of the row by prefill: prompt and outputs are one prompt.
    ///
    /// # Errors
    /// The node does not answer.
    pub async fn prefill(&mut self, row: &Golden) -> Result<()> {
        let base_url = self.cluster.cluster.base_url();
        goldens::teacher_force(&self.client, base_url, row, &mut self.measured).await
    }

    /// Compares the row's first `count` outputs by decode: the prompt comes by prefill, then each output is a step of one row.
    ///
    /// # Errors
    /// The node does not answer.
    pub async fn decode(&mut self, row: &Golden, count: usize) -> Result<()> {
        let steps = greedy(&self.cluster, &row.prompt_token_ids, count).await?;
        let outputs = row.output_token_ids.iter().zip(&row.logprob).zip(&row.margin);
        for (step, ((token, logprob), margin)) in steps.iter().zip(outputs) {
            self.measured.tokens += 1;
            if step.token != *token {
                // What follows is another text.
                self.measured.flips.push(*margin);
                break;
            }
            self.measured.same_prefix += 1;
            self.measured.differences.push((step.logprob - logprob).abs());
        }
        Ok(())
    }

    /// Ends the node.
    ///
    /// # Errors
    /// A difference is above the thresholds of bf16, nothing was compared, or the driver found something wrong.
    pub async fn finish(mut self) -> Result<()> {
        self.cluster.stop().await?;
        false_gpu::check(self.reports.path())?;
        ensure!(!self.measured.differences.is_empty(), "nothing was compared");
        self.measured.check(&goldens::BF16).map_err(|error| anyhow!(error))
    }
}

/// A row for a model without golden outputs: greedy tokens of the CPU engine in exact arithmetic.
///
/// # Errors
/// The node does not start or does not answer.
pub async fn reference(model: &Path, prompt: &[u32], count: usize) -> Result<Golden> {
    let mut options = one_node(model.to_owned())?;
    options.settings.numerics = Some(goldens::EXACT.numerics.to_owned());
    let cluster = TestCluster::start_with(options).await?;
    let steps = greedy(&cluster, prompt, count).await?;
    cluster.stop().await?;
    Ok(Golden {
        id: "reference".to_owned(),
        prompt: None,
        messages: None,
        prompt_token_ids: prompt.to_vec(),
        output_token_ids: steps.iter().map(|step| step.token).collect(),
        margin: steps.iter().map(|step| step.margin).collect(),
        logprob: steps.iter().map(|step| step.logprob).collect(),
    })
}

/// A cluster of one node, with little KV: the false driver keeps account of each byte.
fn one_node(model: PathBuf) -> Result<LocalClusterOptions> {
    let mut options = LocalClusterOptions::new(baton_executable()?, "1c".parse()?, model);
    options.settings.served_model_name = vec![MODEL.to_owned()];
    options.settings.kv_cache_memory = Some("8MiB".to_owned());
    Ok(options)
}

/// A token that a node has drawn, and how far the second best one was behind it.
struct GreedyStep {
    token: u32,
    logprob: f64,
    margin: f64,
}

async fn greedy(cluster: &TestCluster, prompt: &[u32], count: usize) -> Result<Vec<GreedyStep>> {
    let body = json!({
        "model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": true, "logprobs": 2,
        "return_token_ids": true,
    });
    let answer = cluster.post("/v1/completions", &body).await?;
    let choice = &answer["choices"][0];
    let step = |at: usize| -> Option<GreedyStep> {
        let logprob = choice["logprobs"]["token_logprobs"][at].as_f64()?;
        let best_two = choice["logprobs"]["top_logprobs"][at].as_object()?;
        let second = best_two.values().filter_map(Value::as_f64).fold(logprob, f64::min);
        Some(GreedyStep {
            token: u32::try_from(choice["token_ids"][at].as_u64()?).ok()?,
            logprob,
            margin: logprob - second,
        })
    };
    let steps = (0..count).map(|at| step(at).with_context(|| format!("no token {at} of {count}: {answer}")));
    steps.collect()
}
