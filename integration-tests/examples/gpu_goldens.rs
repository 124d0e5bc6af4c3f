//! The real model on the false CUDA driver beside the reference's probabilities, teacher-forced. By hand: the driver interprets
//! each instruction and takes 5 GB of memory for its bookkeeping.
//!
//! `BATON_FALSE_CUDA=target/false-cuda cargo run --release -p integration-tests --example gpu_goldens -- [LONGEST]`
//! Rows of up to LONGEST tokens with their outputs (default 80) are compared. Products of matrices are the false cuBLASLt's.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use integration_tests::cluster::{TestCluster, options};
use integration_tests::goldens::{self, Measured};

/// Weights of 135 million values are converted and copied first.
const START_WITHIN: Duration = Duration::from_secs(900);
/// The weights as bf16, KV and buffers.
const DEVICE_BYTES: &str = "2000000000";

#[tokio::main]
async fn main() -> Result<()> {
    let longest: usize = std::env::args().nth(1).map_or(Ok(80), |word| word.parse())?;
    let folder =
        std::env::var("BATON_FALSE_CUDA").context("BATON_FALSE_CUDA names the folder that scripts/false-cuda makes")?;
    let mut options = options("1c")?;
    options.start_within = START_WITHIN;
    options.settings.devices = vec!["cuda:0".parse()?];
    options.settings.gpu_numerics = Some("fast".to_owned());
    options.settings.kv_cache_memory = Some("8MiB".to_owned());
    options.settings.max_num_batched_tokens = Some(128);
    options.settings.max_num_seqs = Some(2);
    options.environment.push(("BATON_CUDA_PATH".to_owned(), folder));
    options
        .environment
        .push(("FALSE_CUDA_MEMORY_BYTES".to_owned(), DEVICE_BYTES.to_owned()));
    let begun = Instant::now();
    let cluster = TestCluster::start_with(options).await?;
    println!("ready after {:.0} s", begun.elapsed().as_secs_f64());
    let client = reqwest::Client::new();
    let mut measured = Measured::default();
    let mut rows = 0;
    for row in goldens::load()? {
        if row.prompt_token_ids.len() + row.output_token_ids.len() > longest {
            continue;
        }
        let begun = Instant::now();
        goldens::teacher_force(&client, cluster.cluster.base_url(), &row, &mut measured).await?;
        println!("{}: {:.0} s", row.id, begun.elapsed().as_secs_f64());
        rows += 1;
    }
    cluster.stop().await?;
    println!("{rows} rows");
    measured.check(&goldens::BF16).map_err(|error| anyhow!(error))
}
