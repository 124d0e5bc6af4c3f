//! Prefill and decode speed of the CPU engine on one model file.
//!
//! `cargo run --release -p engine --example speed -- MODEL.gguf [threads] [kernel] [private|shared]`. Prints medians of wall time and of the
//! process's CPU time, because on a busy machine only the latter says what the code costs. `benchmarks/engine/beside-llama-cpp` reads it.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on must stop")]

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use engine::{
    BLOCK_TOKENS, CpuEngineOptions, EngineLimits, HostEngine, KeptWeights, KernelChoice, KvSize, LogitsWanted,
    Numerics, SequenceRows, WeightsFile, open_cpu_engine_with,
};
use model_files::model::Model;
use serving_core::ids::{BlockId, TokenId};

fn cpu_time() -> Duration {
    // SAFETY: the call only fills the struct it is given.
    let time = unsafe {
        let mut time = std::mem::zeroed::<libc::timespec>();
        libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time);
        time
    };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn measure(name: &str, tokens: usize, repeats: usize, mut work: impl FnMut()) {
    work();
    let (mut walls, mut cpus) = (Vec::new(), Vec::new());
    for _ in 0..repeats {
        let (wall, cpu) = (Instant::now(), cpu_time());
        work();
        walls.push(wall.elapsed());
        cpus.push(cpu_time() - cpu);
    }
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2].as_secs_f64()
    };
    let (wall, cpu) = (median(walls), median(cpus));
    let rate = |seconds: f64| tokens as f64 / seconds;
    println!(
        "{name:33} wall {:8.2} ms ({:7.0} tok/s), cpu {:8.2} ms ({:7.0} tok/s a core)",
        wall * 1e3,
        rate(wall),
        cpu * 1e3,
        rate(cpu)
    );
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("first argument: the GGUF file")?;
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let kernel = match arguments.next().as_deref() {
        None | Some("auto") => KernelChoice::Auto,
        Some("portable") => KernelChoice::Portable,
        Some("avx2") => KernelChoice::Avx2,
        Some("avx-vnni") => KernelChoice::AvxVnni,
        Some("avx512") => KernelChoice::Avx512Vnni,
        Some("neon") => KernelChoice::NeonDotprod,
        Some(other) => bail!("unknown kernel {other}: auto, portable, avx2, avx-vnni, avx512 or neon"),
    };
    // As the nodes of one `baton up` have their weights.
    let memory = match arguments.next().as_deref() {
        None | Some("private") => None,
        Some("shared") => Some(WeightsFile::create()?),
        Some(other) => bail!("{other} is neither private nor shared"),
    };
    let shared_at = memory.as_ref().map(WeightsFile::path);
    let kept = KeptWeights::default().shared_at(shared_at.as_deref());
    let file = Model::open(path.as_ref())?;
    let options = CpuEngineOptions {
        numerics: Numerics::Int8Blocks,
        threads,
        kernel,
        limits: EngineLimits {
            max_batch_tokens: 512,
            max_sequences: 16,
        },
        block_tokens: BLOCK_TOKENS,
        kv_size: KvSize::Blocks(1_024),
        kv_backing: Default::default(),
        progress: None,
    };
    let started = Instant::now();
    let mut engine = open_cpu_engine_with(&kept, &file, options)?;
    println!(
        "loaded in {:.2} s, kernel {}, {threads} threads",
        started.elapsed().as_secs_f64(),
        engine.kernel_name()
    );

    let table: Vec<BlockId> = (0..160).map(BlockId).collect();
    let tokens: Vec<TokenId> = (0..2_048).map(|i| TokenId(i * 7 % 40_000 + 100)).collect();
    let mut step = |batch: &[SequenceRows<'_>]| engine.step(batch, &mut |_: usize, _: u32, _: &mut [f32]| {}).unwrap();
    let rows = |range: std::ops::Range<usize>, logits| SequenceRows {
        tokens: &tokens[range.clone()],
        first_position: range.start as u32,
        block_table: &table,
        logits,
    };
    for length in [128, 512, 2_048] {
        let chunks = length / 512;
        measure(&format!("prefill {length}, chunks of 512"), length, 3, || {
            if chunks == 0 {
                step(&[rows(0..length, LogitsWanted::Last)]);
            }
            for chunk in 0..chunks {
                let wanted = if chunk + 1 == chunks {
                    LogitsWanted::Last
                } else {
                    LogitsWanted::None
                };
                step(&[rows(chunk * 512..(chunk + 1) * 512, wanted)]);
            }
        });
    }
    for depth in [0usize, 512, 2_000] {
        measure(&format!("decode at depth {depth}, 16 steps"), 16, 5, || {
            for at in depth..depth + 16 {
                step(&[rows(at..at + 1, LogitsWanted::Last)]);
            }
        });
    }
    let tables: Vec<Vec<BlockId>> = (0..8)
        .map(|s| (160 + s * 40..200 + s * 40).map(BlockId).collect())
        .collect();
    // Memory that nobody wrote is one page of zeros, which stays in the cache.
    for table in &tables {
        for at in (0..512).step_by(256) {
            step(&[SequenceRows {
                block_table: table,
                ..rows(at..at + 256, LogitsWanted::None)
            }]);
        }
    }
    for at in [128usize, 512] {
        measure(&format!("decode, 8 streams at {at}, 8 steps"), 64, 3, || {
            for at in at..at + 8 {
                let batch: Vec<_> = tables
                    .iter()
                    .map(|t| SequenceRows {
                        block_table: t,
                        ..rows(at..at + 1, LogitsWanted::Last)
                    })
                    .collect();
                step(&batch);
            }
        });
    }
    Ok(())
}
