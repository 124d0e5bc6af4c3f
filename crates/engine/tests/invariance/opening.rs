//! What opens, with which weights, and what is refused.

use super::*;

#[test]
fn a_block_that_is_not_whole_tiles_is_refused() {
    let model = TinyModel::default();
    for block_tokens in [0, 8, 24, 272] {
        let options = CpuEngineOptions {
            block_tokens,
            ..options(Numerics::Exact, 1, KernelChoice::Portable)
        };
        let refused = tiny(&model, options).unwrap_err().to_string();
        assert!(refused.contains("multiple of 16"), "{refused}");
    }
}

#[test]
fn models_and_options_that_cannot_run_are_typed_errors() {
    let base = TinyModel::default();
    let int8 = || options(Numerics::Int8Blocks, 1, KernelChoice::Auto);
    let short_rows = TinyModel {
        matrix_kind: GgmlType::F16,
        ffn_size: 48,
        ..base.clone()
    };
    for numerics in [Numerics::Int8Blocks, Numerics::Exact] {
        let refused = tiny(&short_rows, options(numerics, 1, KernelChoice::Auto));
        assert!(
            matches!(refused, Err(EngineError::UnsupportedTensor { tensor, .. }) if tensor == "blk.0.ffn_down.weight")
        );
    }
    let odd = TinyModel {
        head_dim: 8,
        head_count: 8,
        ..base.clone()
    };
    assert!(matches!(
        tiny(&odd, int8()),
        Err(EngineError::UnsupportedHeadDim { head_dim: 8 })
    ));
    let no_threads = options(Numerics::Int8Blocks, 0, KernelChoice::Auto);
    assert!(matches!(
        tiny(&base, no_threads),
        Err(EngineError::BadThreadCount { threads: 0, .. })
    ));
    let limits = EngineLimits {
        max_batch_tokens: 0,
        max_sequences: 1,
    };
    let bad = CpuEngineOptions { limits, ..int8() };
    assert!(matches!(tiny(&base, bad), Err(EngineError::BadLimits { .. })));
    let no_blocks = CpuEngineOptions {
        kv_size: KvSize::Blocks(0),
        ..int8()
    };
    assert!(matches!(tiny(&base, no_blocks), Err(EngineError::KvMemory(_))));

    let mut reports = Vec::new();
    let mut record = |progress| reports.push(progress);
    let watched = CpuEngineOptions {
        progress: Some(&mut record),
        ..int8()
    };
    let engine = tiny(&base, watched).unwrap();
    assert_eq!(engine.model().numerics_id, "cpu-int8-blocks/3");
    assert_eq!(engine.model().vocab_size as usize, TINY_VOCAB_SIZE);
    assert!(reports.windows(2).all(|pair| pair[0].done_bytes < pair[1].done_bytes));
    let last = reports.last().unwrap();
    assert_eq!(last.done_bytes, last.total_bytes);
}

/// The engine, and whether it packed any matrix itself.
fn open_with(kept: &KeptWeights, model: &TinyModel, numerics: Numerics) -> (CpuEngine, bool) {
    let mut matrices = 0;
    let mut count = |_| matrices += 1;
    let options = CpuEngineOptions {
        progress: Some(&mut count),
        ..options(numerics, 2, KernelChoice::Auto)
    };
    let engine = open_cpu_engine_with(kept, &file_of(&model.build()), options).unwrap();
    (engine, matrices > 0)
}

#[test]
fn engines_with_shared_weights_compute_the_same_and_other_weights_stay_private() {
    let memory = WeightsFile::create().unwrap();
    let model = TinyModel::default();
    let path = memory.path();
    let open = |kept: &KeptWeights, numerics| open_with(kept, &model, numerics);
    let shared = || KeptWeights::default().shared_at(Some(&path));
    let (mut private, _) = open(&KeptWeights::default(), Numerics::Int8Blocks);
    let (mut packer, packs) = open(&shared(), Numerics::Int8Blocks);
    assert!(packs);
    let user = shared();
    let (mut other, packs) = open(&user, Numerics::Int8Blocks);
    assert!(!packs, "the second engine maps what the first one packed");
    assert!(user.take_not_shared().is_none());
    let tokens: Vec<TokenId> = (0..40).map(|i| TokenId(i * 7 % 250)).collect();
    let table: Vec<BlockId> = (0..8).map(BlockId).collect();
    let logits = [&mut private, &mut packer, &mut other].map(|engine| {
        let mut all = Vec::new();
        let rows = SequenceRows {
            tokens: &tokens,
            first_position: 0,
            block_table: &table,
            logits: LogitsWanted::All,
        };
        let mut sink = |_: usize, _: u32, row: &mut [f32]| all.extend(row.iter().map(|value| value.to_bits()));
        engine.step(&[rows], &mut sink).unwrap();
        all
    });
    assert!(!logits[0].is_empty());
    assert_eq!(logits[0], logits[1]);
    assert_eq!(logits[0], logits[2]);

    let exact = shared();
    let (_, packs) = open(&exact, Numerics::Exact);
    assert!(packs, "these are other bytes");
    assert!(matches!(exact.take_not_shared(), Some(NotShared::OtherWeights)));
}

#[test]
fn kept_weights_serve_the_next_engine_of_the_same_file_and_numerics_alone() {
    let kept = KeptWeights::default();
    let packs = |model: &TinyModel, numerics| open_with(&kept, model, numerics).1;
    let (one, other) = (
        TinyModel::default(),
        TinyModel {
            seed: 99,
            ..TinyModel::default()
        },
    );
    assert!(packs(&one, Numerics::Int8Blocks));
    assert!(!packs(&one, Numerics::Int8Blocks), "the second engine has them");
    assert!(packs(&one, Numerics::Exact), "packed otherwise");
    assert!(packs(&other, Numerics::Exact), "other numbers");
    assert!(packs(&one, Numerics::Exact), "the last ones alone are kept");
}
