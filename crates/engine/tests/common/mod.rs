//! What the whole-model tests share: the real model, the golden cases, feeding an engine.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

use std::path::PathBuf;

use engine::{
    BLOCK_TOKENS, CpuEngine, CpuEngineOptions, EngineLimits, HostEngine, KernelChoice, KvSize, LogitsWanted, Numerics,
    SequenceRows, open_cpu_engine,
};
use model_files::model::Model;
use model_files::test_kit::{GgufBuilder, model_path};
use serde::Deserialize;
use serving_core::ids::{BlockId, TokenId};

/// Rows of the longest golden case, rounded up.
pub const MAX_ROWS: u32 = 2_048;

#[derive(Clone, Copy)]
pub struct Setup {
    pub numerics: Numerics,
    pub threads: usize,
    pub kernel: KernelChoice,
}

pub fn setup(numerics: Numerics) -> Setup {
    Setup {
        numerics,
        // `scripts/test` gives these tests the time that others leave. Two threads that wait for each other would then wait most of it.
        threads: 1,
        kernel: KernelChoice::Auto,
    }
}

pub fn open(setup: Setup) -> CpuEngine {
    open_file(&Model::open(&model_path()).unwrap(), setup)
}

pub fn open_file(file: &Model, setup: Setup) -> CpuEngine {
    let options = CpuEngineOptions {
        numerics: setup.numerics,
        threads: setup.threads,
        kernel: setup.kernel,
        limits: EngineLimits {
            max_batch_tokens: MAX_ROWS,
            max_sequences: 64,
        },
        block_tokens: BLOCK_TOKENS,
        kv_size: KvSize::Blocks(320),
        kv_backing: Default::default(),
        progress: None,
    };
    open_cpu_engine(file, options).unwrap()
}

/// A built model, opened. Its file is gone, its content stays mapped.
pub fn file_of(builder: &GgufBuilder) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    builder.write(&path).unwrap();
    Model::open(&path).unwrap()
}

#[derive(Deserialize)]
pub struct Golden {
    /// The tiny model, in golden files of several.
    pub model: Option<String>,
    pub id: String,
    pub prompt_token_ids: Vec<u32>,
    pub output_token_ids: Vec<u32>,
    pub margin: Vec<f32>,
    pub logprob: Vec<f32>,
    /// All logits of the last step, in golden files of tiny models.
    #[serde(default)]
    pub last_logits: Vec<f32>,
}

impl Golden {
    /// The prompt and all outputs but the last: the rows whose logits predict the outputs are the last ones.
    pub fn forced(&self) -> Vec<TokenId> {
        let outputs = &self.output_token_ids[..self.output_token_ids.len() - 1];
        self.prompt_token_ids
            .iter()
            .chain(outputs)
            .map(|id| TokenId(*id))
            .collect()
    }
}

pub fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../integration-tests/data/golden")
        .join(name)
}

pub fn goldens() -> Vec<Golden> {
    let text = std::fs::read_to_string(data("smollm2-135m-q4_1.jsonl")).unwrap();
    let cases: Vec<Golden> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(cases.len(), 16);
    cases
}

/// Block ids `first..` for `tokens` tokens.
pub fn table(first: u32, tokens: usize) -> Vec<BlockId> {
    (first..first + tokens.div_ceil(16) as u32).map(BlockId).collect()
}

/// Feeds one sequence in chunks; `see(position, logits)` gets the wanted rows.
pub fn feed(
    engine: &mut dyn HostEngine,
    (tokens, first_position, table): (&[TokenId], u32, &[BlockId]),
    (chunk, logits): (usize, LogitsWanted),
    mut see: impl FnMut(u32, &mut [f32]),
) {
    let mut position = first_position;
    for tokens in tokens.chunks(chunk) {
        let rows = SequenceRows {
            tokens,
            first_position: position,
            block_table: table,
            logits,
        };
        engine
            .step(&[rows], &mut |_: usize, at: u32, row: &mut [f32]| see(at, row))
            .unwrap();
        position += tokens.len() as u32;
    }
}

pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}
