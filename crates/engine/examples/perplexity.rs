//! Perplexity of a model on a text, to compare with the figures in `docs/measurements/engine-accuracy.md`.
//!
//! `cargo run --release -p engine --example perplexity -- --numerics int8|exact --chunk 512 [--chunks N]
//! [--model MODEL] [--text FILE] [--threads 2] [--write-tokens FILE]`
//!
//! In a model that wants a begin token, it stands in the place of each chunk's first token.

#![forbid(unsafe_code)]

#[path = "../tests/common/perplexity.rs"]
mod perplexity;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use engine::{BLOCK_TOKENS, CpuEngineOptions, EngineLimits, KernelChoice, KvSize, Numerics, open_cpu_engine};
use model_files::model::Model;
use model_files::test_kit::model_path;
use perplexity::{STEP_ROWS, Score, score_chunk};
use serving_core::ids::TokenId;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut options = BTreeMap::new();
    for pair in arguments.chunks(2) {
        let [name, value] = pair else {
            bail!("{pair:?}: every option has a value")
        };
        options.insert(name.as_str(), value.as_str());
    }
    let number = |name: &str, default: usize| options.get(name).map_or(Ok(default), |value| value.parse());
    let numerics = match options.get("--numerics").copied().unwrap_or("int8") {
        "int8" => Numerics::Int8Blocks,
        "exact" => Numerics::Exact,
        other => bail!("unknown numerics {other}: int8 or exact"),
    };
    let chunk = number("--chunk", 512)?;
    ensure!(chunk >= 4, "a chunk needs at least 4 tokens");
    let golden = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../integration-tests/data/golden/ppl.txt"
    );
    let text_path = options.get("--text").copied().unwrap_or(golden);
    let text = std::fs::read_to_string(text_path).with_context(|| format!("reading {text_path}"))?;
    let file = Model::open(&options.get("--model").map_or_else(model_path, PathBuf::from))?;
    let tokenizer = file.tokenizer()?;
    let tokens = tokenizer.encode(&text, false)?;
    let begin = tokenizer.encode("", true)?;

    let mut engine = open_cpu_engine(
        &file,
        CpuEngineOptions {
            numerics,
            threads: number("--threads", 2)?,
            kernel: KernelChoice::Auto,
            limits: EngineLimits {
                max_batch_tokens: STEP_ROWS as u32,
                max_sequences: 1,
            },
            block_tokens: BLOCK_TOKENS,
            kv_size: KvSize::Blocks(chunk.div_ceil(16) as u32),
            kv_backing: Default::default(),
            progress: None,
        },
    )?;
    let chunks = number("--chunks", usize::MAX)?.min(tokens.len() / chunk);
    ensure!(
        chunks > 0,
        "the text has {} tokens, less than one chunk of {chunk}",
        tokens.len()
    );
    let with_begin = |chunk: &[TokenId]| [&begin, &chunk[begin.len()..]].concat();
    let all: Vec<_> = tokens.chunks_exact(chunk).take(chunks).map(with_begin).collect();
    if let Some(path) = options.get("--write-tokens") {
        let ids: Vec<Vec<u32>> = all
            .iter()
            .map(|chunk| chunk.iter().map(|token| token.0).collect())
            .collect();
        std::fs::write(path, serde_json::to_string(&ids)?).with_context(|| format!("writing {path}"))?;
    }
    let (mut score, started) = (Score::default(), Instant::now());
    for (index, chunk) in all.iter().enumerate() {
        score_chunk(&mut engine, chunk, &mut score)?;
        eprintln!("chunk {}: {:.4}", index + 1, score.perplexity());
    }
    println!(
        "{}: perplexity {:.3} over {chunks} chunks of {chunk} ({} tokens counted), {:.0} s, {}",
        numerics.id(),
        score.perplexity(),
        score.tokens,
        started.elapsed().as_secs_f64(),
        engine.kernel_name()
    );
    Ok(())
}
