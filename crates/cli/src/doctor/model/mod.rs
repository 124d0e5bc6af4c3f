//! A model's tokens on the GPU beside those of the CPU engine's exact numbers. Not run on hardware.

mod judge;
mod tokens;

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use cuda_engine::{CudaEngine, CudaEngineError, CudaOptions, KvRoom, Mode, ProductChoice, open_cuda_engine};
use engine::{
    CpuEngine, CpuEngineOptions, EngineLimits, KernelChoice, KvBacking, KvDtype, KvGeometry, KvSize, MemoryRoom,
    Numerics, OnHost, open_cpu_engine, weights_bytes,
};
use model_files::config::ModelConfig;
use model_files::model::Model;
use serving_core::ids::TokenId;

use self::judge::{Judged, Reference};
use super::part::{Line, Part, run_apart, tell};
use super::step::{Row, StepReport};

/// The CPU computes 200 tokens with numbers in f32: seconds for a small model, many minutes for one of 8 billion weights.
const LIMIT: Duration = Duration::from_secs(1_800);
/// Less than two blocks of KV, and more than a step takes.
const PROMPTS: [u32; 2] = [24, 70];
const OUTPUT_TOKENS: u32 = 8;
/// The longer prompt has two chunks.
const LIMITS: EngineLimits = EngineLimits {
    max_batch_tokens: 64,
    max_sequences: 1,
};
const BLOCK_TOKENS: u32 = 16;
/// Twice what the longer prompt and its outputs need.
const KV_BLOCKS: u32 = 16;
/// More threads do not help with so few rows.
const THREADS_MAX: usize = 64;
const NO_MODEL: &str = "name a model with --model";

pub(super) fn check(model: Option<&Path>, device: u32) -> StepReport {
    let Some(model) = model else {
        return StepReport::not_run(Row::Model, NO_MODEL);
    };
    let command = Part::Model.command(device).map(|mut command| {
        command.arg("--model").arg(model);
        command
    });
    run_apart(command, LIMIT).step(Row::Model)
}

/// Compares in this process and prints what was found.
///
/// # Errors
/// The GPU or the engine on it has failed.
pub(super) fn run_here(path: &Path, ordinal: u32) -> anyhow::Result<()> {
    let file = Model::open(path).with_context(|| format!("{} is no model", path.display()))?;
    let mut gpu = match open_gpu(&file, ordinal) {
        Ok(gpu) => gpu,
        Err(error) if is_refusal(&error) => return tell(&Line::NotRun(error.to_string())),
        Err(error) => return Err(error).context("the engine on the GPU"),
    };
    let prompts = PROMPTS.map(|length| prompt(length, file.config().vocab_size));
    let references = {
        let mut cpu = match open_cpu(&file) {
            Ok(cpu) => cpu,
            Err(why) => return tell(&Line::NotRun(why)),
        };
        let made = prompts.iter().map(|prompt| reference(&mut cpu, prompt));
        made.collect::<anyhow::Result<Vec<Reference>>>()
            .context("the engine on the CPU")?
    };
    let mut judged = Judged::default();
    for (prompt, reference) in prompts.iter().zip(&references) {
        let forced = tokens::forced(&mut gpu, prompt, &reference.outputs).context("the engine on the GPU")?;
        let free =
            tokens::greedy(&mut gpu, (prompt.as_slice(), OUTPUT_TOKENS), None).context("the engine on the GPU")?;
        let free: Vec<TokenId> = free.into_iter().map(|(token, _)| token).collect();
        judged.add(reference, &forced, &free);
    }
    tell(&Line::Check(judged.forced()))?;
    tell(&Line::Check(judged.free()))
}

/// Fixed ids, other ones for each length.
fn prompt(length: u32, vocab: usize) -> Vec<TokenId> {
    let vocab = u32::try_from(vocab).unwrap_or(u32::MAX).max(1);
    let id = |at: u32| (7 * at * at + 31 * at + length) % vocab;
    (0..length).map(|at| TokenId(id(at))).collect()
}

/// The numerics that a node has if nobody asks for others.
fn open_gpu(file: &Model, ordinal: u32) -> Result<CudaEngine, CudaEngineError> {
    let kv_bytes = KV_BLOCKS as usize * geometry(file.config()).block_bytes();
    let options = CudaOptions {
        ordinal,
        mode: Mode::Invariant,
        products: ProductChoice::Own,
        limits: LIMITS,
        block_tokens: BLOCK_TOKENS,
        kv: KvRoom::Bytes(kv_bytes as u64),
        step_limit: None,
        fits: None,
        progress: None,
    };
    open_cuda_engine(file, options)
}

fn geometry(config: &ModelConfig) -> KvGeometry {
    KvGeometry {
        layer_count: config.layer_count as u32,
        kv_head_count: config.kv_head_count as u32,
        head_dim: config.head_dim as u32,
        block_tokens: BLOCK_TOKENS,
        dtype: KvDtype::Bf16,
    }
}

/// The engine does not take the model. That says nothing of the GPU.
fn is_refusal(error: &CudaEngineError) -> bool {
    matches!(
        error,
        CudaEngineError::Shape(_) | CudaEngineError::Model(_) | CudaEngineError::File(_) | CudaEngineError::Memory(_)
    )
}

/// Or why there is nothing to compare with.
fn open_cpu(file: &Model) -> Result<OnHost<CpuEngine>, String> {
    const MIB: u64 = 1 << 20;
    let needed = weights_bytes(file, Numerics::Exact).map_err(|error| error.to_string())?;
    if let Some(room) = MemoryRoom::of_this_process()
        && needed > room.free
    {
        let (needed, free) = (needed / MIB, room.free / MIB);
        return Err(format!(
            "the CPU needs {needed} MiB for the weights as f32, {} {free} MiB free: take a smaller model of this family",
            room.of
        ));
    }
    let options = CpuEngineOptions {
        numerics: Numerics::Exact,
        threads: std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(THREADS_MAX),
        kernel: KernelChoice::Auto,
        limits: LIMITS,
        block_tokens: BLOCK_TOKENS,
        kv_size: KvSize::Blocks(KV_BLOCKS),
        kv_backing: KvBacking::Private,
        progress: None,
    };
    let engine = open_cpu_engine(file, options).map_err(|error| format!("the CPU engine does not take it: {error}"))?;
    OnHost::new(engine).map_err(|error| error.to_string())
}

fn reference(cpu: &mut OnHost<CpuEngine>, prompt: &[TokenId]) -> anyhow::Result<Reference> {
    let drawn = tokens::greedy(cpu, (prompt, OUTPUT_TOKENS), Some(2))?;
    let mut reference = Reference::default();
    for (token, logprobs) in drawn {
        let logprobs = logprobs.context("a token came without its log-probability")?;
        let [(_, best), (_, second)] = logprobs.top[..] else {
            anyhow::bail!("a token came without the two best ones");
        };
        reference.outputs.push(token);
        reference.logprobs.push(f64::from(logprobs.logprob));
        reference.margins.push(f64::from(best) - f64::from(second));
    }
    Ok(reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_their_lengths_and_tokens_of_the_vocabulary() {
        for length in PROMPTS {
            let tokens = prompt(length, 259);
            assert_eq!(tokens.len(), length as usize);
            assert!(tokens.iter().all(|token| token.0 < 259));
        }
        assert_ne!(prompt(24, 259), prompt(70, 259)[..24]);
    }
}
