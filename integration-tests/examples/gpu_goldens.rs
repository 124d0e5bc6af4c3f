//! The real model on the false CUDA driver beside the reference's probabilities, teacher-forced. By hand: the driver interprets
//! each instruction and takes 5 GB of memory for its bookkeeping. `integration-tests/tests/cluster/gpu/goldens.rs` runs one layer.
//!
//! `BATON_FALSE_CUDA=target/false-cuda cargo run --release -p integration-tests --example gpu_goldens -- [LONGEST]`
//! Rows of up to LONGEST tokens with their outputs (default 80) are compared. Products of matrices are the false cuBLASLt's.

#![forbid(unsafe_code)]

use std::time::Instant;

use anyhow::Result;
use integration_tests::cluster::model_path;
use integration_tests::goldens;
use integration_tests::gpu_goldens::{GpuCluster, GpuNode};

/// One short case also by decode: the reference's margin is above the threshold at each of these steps.
const BY_DECODE: &str = "short-capital";
const DECODED_TOKENS: usize = 8;

#[tokio::main]
async fn main() -> Result<()> {
    let longest: usize = std::env::args().nth(1).map_or(Ok(80), |word| word.parse())?;
    let node = GpuNode {
        model: model_path()?,
        gpu_numerics: "fast",
        kernel_cache: None,
    };
    let begun = Instant::now();
    let mut gpu = GpuCluster::start(node).await?;
    println!("ready after {:.0} s", begun.elapsed().as_secs_f64());
    let mut rows = 0;
    for row in goldens::load()? {
        if row.prompt_token_ids.len() + row.output_token_ids.len() > longest {
            continue;
        }
        let begun = Instant::now();
        gpu.prefill(&row).await?;
        if row.id == BY_DECODE {
            gpu.decode(&row, DECODED_TOKENS).await?;
        }
        println!("{}: {:.0} s", row.id, begun.elapsed().as_secs_f64());
        rows += 1;
    }
    println!("{rows} rows");
    gpu.finish().await
}
