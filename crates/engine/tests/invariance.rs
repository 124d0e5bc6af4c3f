//! A sequence's KV bytes and logits depend on its own tokens only: not on chunks, phase, batch mates, block ids,
//! threads or instruction set. Checked on the real model along a few schedules, on tiny ones along random schedules.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

mod common;

use std::collections::BTreeMap;

use common::{Setup, feed, file_of, goldens, open, setup, table};
use engine::{
    BLOCK_TOKENS, CpuEngine, CpuEngineOptions, EngineError, EngineLimits, HostEngine, KeptWeights, KernelChoice,
    KvSize, LogitsWanted, NotShared, Numerics, SequenceRows, WeightsFile, open_cpu_engine, open_cpu_engine_with,
};
use model_files::arch::Architecture;
use model_files::gguf::{GgmlType, MetadataValue};
use model_files::model::Model;
use model_files::test_kit::{TINY_VOCAB_SIZE, TinyModel, golden_models};
use proptest::prelude::*;
use serving_core::ids::{BlockId, TokenId};

/// Bits of the logits at each position, and the hash of each block.
#[derive(PartialEq, Debug)]
struct Trace {
    logits: BTreeMap<u32, Vec<u32>>,
    blocks: Vec<u64>,
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn block_hashes(engine: &dyn HostEngine, table: &[BlockId], tokens: usize) -> Vec<u64> {
    let valid = |index: usize| (tokens - index * 16).min(16) as u32;
    table
        .iter()
        .enumerate()
        .map(|(i, block)| engine.kv().block_hash(*block, valid(i)).unwrap())
        .collect()
}

fn trace(engine: &mut dyn HostEngine, tokens: &[TokenId], first_block: u32, chunk: usize) -> Trace {
    let table = table(first_block, tokens.len());
    let mut logits = BTreeMap::new();
    feed(
        engine,
        (tokens, 0, &table),
        (chunk, LogitsWanted::All),
        |position, row| {
            logits.insert(position, bits(row));
        },
    );
    Trace {
        logits,
        blocks: block_hashes(engine, &table, tokens.len()),
    }
}

fn prose(length: usize) -> Vec<TokenId> {
    let cases = goldens();
    let case = cases.iter().find(|case| case.id == "long-prose-200").unwrap();
    case.prompt_token_ids[..length].iter().map(|id| TokenId(*id)).collect()
}

#[test]
fn chunks_threads_and_phase_do_not_change_the_real_model() {
    let tokens = prose(120);
    let mut reference = open(Setup {
        threads: 1,
        ..setup(Numerics::Int8Blocks)
    });
    let expected = trace(&mut reference, &tokens, 0, 512);
    assert_eq!(expected.logits.len(), tokens.len());
    for chunk in [7, 16, 64] {
        assert!(
            trace(&mut reference, &tokens, 40, chunk) == expected,
            "chunks of {chunk}"
        );
    }
    for threads in [2, 3] {
        let mut engine = open(Setup {
            threads,
            ..setup(Numerics::Int8Blocks)
        });
        assert!(trace(&mut engine, &tokens, 7, 50) == expected, "{threads} threads");
        assert!(
            trace(&mut engine, &tokens, 100, 1) == expected,
            "decode steps on {threads} threads"
        );
    }
}

/// Two attention tiles, or four, in one block: the same rows in other places.
#[test]
fn the_block_size_does_not_change_the_real_model() {
    let tokens = prose(150);
    let logits = |block_tokens: u32| {
        let file = Model::open(&model_files::test_kit::model_path()).unwrap();
        let options = CpuEngineOptions {
            block_tokens,
            ..options(Numerics::Int8Blocks, 2, KernelChoice::Auto)
        };
        let mut engine = open_cpu_engine(&file, options).unwrap();
        let blocks = (tokens.len() as u32).div_ceil(block_tokens);
        // Out of order, so that a wrong stride shows.
        let table: Vec<BlockId> = (0..blocks).rev().map(|block| BlockId(2 * block)).collect();
        let mut logits = BTreeMap::new();
        for (sent, chunk) in [(0..70, 30), (70..150, 1)] {
            feed(
                &mut engine,
                (&tokens[sent.clone()], sent.start as u32, &table),
                (chunk, LogitsWanted::All),
                |position, row| {
                    logits.insert(position, bits(row));
                },
            );
        }
        assert_eq!(logits.len(), tokens.len());
        logits
    };
    let expected = logits(16);
    for block_tokens in [32, 48, 64] {
        assert!(logits(block_tokens) == expected, "blocks of {block_tokens}");
    }
}

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
fn instruction_sets_do_not_change_the_real_model() {
    let tokens = prose(20);
    let mut reference = open(Setup {
        kernel: KernelChoice::Portable,
        ..setup(Numerics::Int8Blocks)
    });
    let expected = trace(&mut reference, &tokens, 0, 512);
    for kernel in [
        KernelChoice::Avx2,
        KernelChoice::AvxVnni,
        KernelChoice::Avx512Vnni,
        KernelChoice::NeonDotprod,
        KernelChoice::Auto,
    ] {
        let file = Model::open(&model_files::test_kit::model_path()).unwrap();
        match open_cpu_engine(&file, options(Numerics::Int8Blocks, 2, kernel)) {
            Ok(mut engine) => assert!(
                trace(&mut engine, &tokens, 0, 16) == expected,
                "{}",
                engine.kernel_name()
            ),
            Err(error @ EngineError::KernelUnsupported { .. }) => println!("not compared: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn blocks_that_move_to_another_engine_continue_with_the_same_bits() {
    let tokens = prose(60);
    let (mut prefill, mut decode) = (
        open(setup(Numerics::Int8Blocks)),
        open(Setup {
            threads: 1,
            ..setup(Numerics::Int8Blocks)
        }),
    );
    let expected = trace(&mut prefill, &tokens, 0, 64);
    let moved = [BlockId(9), BlockId(3), BlockId(30), BlockId(4)];
    let mut bytes = vec![0; prefill.kv().geometry().block_bytes()];
    for (from, to) in table(0, 50).iter().zip(moved) {
        prefill.kv().export_block(*from, &mut bytes).unwrap();
        decode.kv().import_block(to, &bytes).unwrap();
    }
    feed(
        &mut decode,
        (&tokens[50..], 50, &moved),
        (1, LogitsWanted::Last),
        |position, row| {
            assert_eq!(bits(row), expected.logits[&position], "position {position}");
        },
    );
    assert_eq!(block_hashes(&decode, &moved, 60), expected.blocks);
}

fn options(numerics: Numerics, threads: usize, kernel: KernelChoice) -> CpuEngineOptions<'static> {
    CpuEngineOptions {
        numerics,
        threads,
        kernel,
        limits: EngineLimits {
            max_batch_tokens: 96,
            max_sequences: 8,
        },
        block_tokens: BLOCK_TOKENS,
        kv_size: KvSize::Blocks(128),
        kv_backing: Default::default(),
        progress: None,
    }
}

fn tiny(model: &TinyModel, options: CpuEngineOptions<'_>) -> Result<CpuEngine, EngineError> {
    open_cpu_engine(&file_of(&model.build()), options)
}

/// Chunks, decode steps, threads and instruction sets, for every family, every number type and both numerics.
#[test]
fn nothing_else_changes_the_bits_of_any_family() {
    let tokens: Vec<TokenId> = (0..75u32).map(|i| TokenId((11 * i * i + 5 * i) % 259)).collect();
    for model in golden_models() {
        let file = file_of(&model.builder);
        for numerics in [Numerics::Int8Blocks, Numerics::Exact] {
            let run = |threads, kernel, chunk| match open_cpu_engine(&file, options(numerics, threads, kernel)) {
                Ok(mut engine) => Some(trace(&mut engine, &tokens, 3, chunk)),
                Err(EngineError::KernelUnsupported { .. }) => None,
                Err(error) => panic!("{error}"),
            };
            let expected = run(1, KernelChoice::Portable, 96).unwrap();
            for (threads, kernel, chunk) in [
                (2, KernelChoice::Auto, 1),
                (3, KernelChoice::Auto, 7),
                (2, KernelChoice::Auto, 40),
                (3, KernelChoice::Auto, 75),
                (2, KernelChoice::Avx2, 29),
            ] {
                if let Some(got) = run(threads, kernel, chunk) {
                    assert!(
                        got == expected,
                        "{} {} {kernel:?} chunks of {chunk}",
                        model.file,
                        model.name
                    );
                }
            }
        }
    }
}

/// 201 rows: more than a tile has, and a rest that is no whole group.
#[test]
fn more_rows_than_a_tile_has_do_not_change_the_bits() {
    let tokens: Vec<TokenId> = (0..201u32).map(|i| TokenId((11 * i * i + 5 * i) % 259)).collect();
    for matrix_kind in [GgmlType::Q4_1, GgmlType::Q8_0] {
        let model = TinyModel {
            context_length: 256,
            matrix_kind,
            ..TinyModel::default()
        };
        let run = |kernel, threads, chunk| {
            let options = CpuEngineOptions {
                limits: EngineLimits {
                    max_batch_tokens: 256,
                    max_sequences: 8,
                },
                ..options(Numerics::Int8Blocks, threads, kernel)
            };
            trace(&mut tiny(&model, options).unwrap(), &tokens, 3, chunk)
        };
        let expected = run(KernelChoice::Portable, 1, 8);
        for threads in [1, 3] {
            assert!(
                run(KernelChoice::Auto, threads, 201) == expected,
                "{matrix_kind:?}, {threads} threads"
            );
        }
    }
}

/// One of the shapes that the real model does not have.
fn tiny_model(choice: usize) -> (TinyModel, Numerics) {
    let base = TinyModel {
        context_length: 256,
        ..TinyModel::default()
    };
    match choice {
        0 => (
            TinyModel {
                matrix_kind: GgmlType::Q8_0,
                ..base
            },
            Numerics::Int8Blocks,
        ),
        1 => (
            TinyModel {
                matrix_kind: GgmlType::Q4_1,
                head_count: 6,
                kv_head_count: 3,
                head_dim: 32,
                ..base
            },
            Numerics::Int8Blocks,
        ),
        2 => (
            TinyModel {
                matrix_kind: GgmlType::F16,
                kv_head_count: 4,
                tied_embeddings: false,
                ..base
            },
            Numerics::Exact,
        ),
        3 => (
            TinyModel {
                matrix_kind: GgmlType::Q8_0,
                head_count: 7,
                kv_head_count: 1,
                head_dim: 32,
                ..base
            },
            Numerics::Int8Blocks,
        ),
        4 => (
            TinyModel {
                architecture: Architecture::named("gemma3").unwrap(),
                matrix_kind: GgmlType::Q4_1,
                head_dim: 80,
                kv_head_count: 1,
                ..base
            },
            Numerics::Exact,
        ),
        _ => (
            TinyModel {
                matrix_kind: GgmlType::Q8_0,
                tied_embeddings: false,
                head_dim: 48,
                ..base
            },
            Numerics::Int8Blocks,
        ),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Some sequences, run together in steps of random shares, against each of them alone in one chunk.
    #[test]
    fn random_schedules_give_the_bits_of_each_sequence_alone(
        choice in 0usize..6,
        kernel in prop::sample::select(vec![KernelChoice::Portable, KernelChoice::Auto, KernelChoice::Avx2]),
        threads in 1usize..4,
        lengths in prop::collection::vec(1usize..90, 1..5),
        shares in prop::collection::vec(prop::collection::vec(0usize..24, 5), 1..12),
        seed: u32,
    ) {
        let (model, numerics) = tiny_model(choice);
        let mut alone = tiny(&model, options(numerics, 1, KernelChoice::Portable)).unwrap();
        let Ok(mut together) = tiny(&model, options(numerics, threads, kernel)) else { return Ok(()) };
        let sequences: Vec<Vec<TokenId>> = lengths.iter().enumerate().map(|(s, length)| {
            let token = |i: usize| (seed as usize).wrapping_add(i * 31 + s * 7 + i * i) % TINY_VOCAB_SIZE;
            (0..*length).map(|i| TokenId(token(i) as u32)).collect()
        }).collect();
        // Block ids of the sequences interleave.
        let tables: Vec<Vec<BlockId>> = (0..sequences.len() as u32)
            .map(|s| (0..6).map(|i| BlockId((i * 5 + s) * 3 % 96)).collect())
            .collect();
        let mut done = vec![0; sequences.len()];
        let mut seen = vec![BTreeMap::new(); sequences.len()];
        let mut round = 0;
        while done.iter().zip(&lengths).any(|(done, length)| done < length) {
            let shares = &shares[round % shares.len()];
            round += 1;
            let mut members = Vec::new();
            let mut batch = Vec::new();
            for (s, tokens) in sequences.iter().enumerate() {
                // Every fifth round gives everybody one row, so that the loop ends.
                let share = if round % 5 == 0 { 1 } else { shares[s] }.min(tokens.len() - done[s]);
                if share > 0 {
                    members.push(s);
                    batch.push(SequenceRows {
                        tokens: &tokens[done[s]..done[s] + share],
                        first_position: done[s] as u32,
                        block_table: &tables[s],
                        logits: if share % 2 == 0 { LogitsWanted::All } else { LogitsWanted::Last },
                    });
                    done[s] += share;
                }
            }
            together.step(&batch, &mut |s: usize, position: u32, row: &mut [f32]| {
                seen[members[s]].insert(position, bits(row));
            }).unwrap();
        }
        for (s, tokens) in sequences.iter().enumerate() {
            let expected = trace(&mut alone, tokens, 0, 96);
            prop_assert!(!seen[s].is_empty());
            for (position, logits) in &seen[s] {
                prop_assert_eq!(logits.len(), TINY_VOCAB_SIZE);
                prop_assert!(logits == &expected.logits[position], "sequence {} position {}", s, position);
            }
            let used = tokens.len().div_ceil(16);
            prop_assert_eq!(block_hashes(&together, &tables[s][..used], tokens.len()), expected.blocks);
        }
    }
}

/// Contexts of one to four partitions, with and without windows. While only these few rows are computed, threads share the partitions of each.
#[test]
fn partitions_that_threads_share_do_not_change_the_bits() {
    let long = |model| TinyModel {
        context_length: 900,
        ..model
    };
    let window = |tokens: u32| {
        let model = long(TinyModel::default()).build();
        model.metadata("llama.attention.sliding_window", MetadataValue::U32(tokens))
    };
    let choices = (0..6).map(|choice| {
        let (model, numerics) = tiny_model(choice);
        (format!("choice {choice}"), long(model).build(), numerics)
    });
    // Contexts are not split in layers with the first. With the second, some rows see nothing of their first partition any more.
    let windows = [24, 513].map(|tokens| (format!("window of {tokens}"), window(tokens), Numerics::Int8Blocks));
    for (name, model, numerics) in choices.chain(windows) {
        let file = file_of(&model);
        // The last has no slots for its third context.
        for lengths in [[790, 256 + 4, 40], [512 + 4, 300, 256], [790, 520, 300]] {
            decode_together(&name, &file, numerics, lengths);
        }
    }
}

/// Nine tokens of three sequences, together and one by one, against each of them alone in chunks.
fn decode_together(name: &str, file: &Model, numerics: Numerics, lengths: [usize; 3]) {
    const DECODED: usize = 9;
    let open = |threads| open_cpu_engine(file, options(numerics, threads, KernelChoice::Auto)).unwrap();
    let token = |s: usize, i: usize| TokenId(((s + 3) * i * i + 31 * i) as u32 % TINY_VOCAB_SIZE as u32);
    let sequences = [0, 1, 2].map(|s| (0..lengths[s]).map(|i| token(s, i)).collect::<Vec<_>>());
    let blocks = lengths.map(|length| length.div_ceil(16) as u32);
    let tables = [0, 1, 2].map(|s| table(blocks[..s].iter().sum(), lengths[s]));
    let mut alone = open(1);
    let expected = [0, 1, 2].map(|s| trace(&mut alone, &sequences[s], 0, 96));
    for threads in [2, 3] {
        let mut shared = open(threads);
        for s in 0..3 {
            let before = &sequences[s][..lengths[s] - DECODED];
            feed(
                &mut shared,
                (before, 0, &tables[s]),
                (77, LogitsWanted::None),
                |_, _| {},
            );
        }
        for left in (1..=DECODED).rev() {
            let rows = [0, 1, 2].map(|s| SequenceRows {
                tokens: &sequences[s][lengths[s] - left..][..1],
                first_position: (lengths[s] - left) as u32,
                block_table: &tables[s],
                logits: LogitsWanted::Last,
            });
            let mut see = |s: usize, position: u32, row: &mut [f32]| {
                let is_equal = bits(row) == expected[s].logits[&position];
                assert!(is_equal, "{name}, {threads} threads, sequence {s}, position {position}");
            };
            // A row alone makes other tasks than three rows together.
            if left % 3 == 0 {
                for s in 0..3 {
                    let see = &mut |_: usize, position: u32, row: &mut [f32]| see(s, position, row);
                    shared.step(&rows[s..=s], see).unwrap();
                }
            } else {
                shared.step(&rows, &mut see).unwrap();
            }
        }
        for s in 0..3 {
            assert_eq!(
                block_hashes(&shared, &tables[s], lengths[s]),
                expected[s].blocks,
                "{name}"
            );
        }
    }
}

#[test]
fn one_wrong_bit_of_kv_changes_the_logits() {
    let tokens = prose(40);
    let mut engine = open(setup(Numerics::Int8Blocks));
    let table = table(0, 48);
    let next = |engine: &mut CpuEngine| {
        let mut out = Vec::new();
        feed(
            engine,
            (&[TokenId(100)], 40, &table),
            (1, LogitsWanted::Last),
            |_, row| out = bits(row),
        );
        out
    };
    feed(&mut engine, (&tokens, 0, &table), (64, LogitsWanted::None), |_, _| {});
    let right = next(&mut engine);
    assert_eq!(next(&mut engine), right, "the same step twice is the same");
    engine
        .kv()
        .write_layers(BlockId(1), 3..4, |bytes| bytes[1] ^= 0x10)
        .unwrap();
    assert_ne!(next(&mut engine), right);
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
    assert_eq!(engine.model().numerics_id, "cpu-int8-blocks/2");
    assert_eq!(engine.model().vocab_size as usize, TINY_VOCAB_SIZE);
    assert!(reports.windows(2).all(|pair| pair[0].done_bytes < pair[1].done_bytes));
    let last = reports.last().unwrap();
    assert_eq!(last.done_bytes, last.total_bytes);
}

#[test]
fn engines_with_shared_weights_compute_the_same_and_other_weights_stay_private() {
    let memory = WeightsFile::create().unwrap();
    let model = TinyModel::default();
    let path = memory.path();
    let open = |kept: &KeptWeights, numerics| {
        let mut matrices = 0;
        let mut count = |_| matrices += 1;
        let options = CpuEngineOptions {
            progress: Some(&mut count),
            ..options(numerics, 2, KernelChoice::Auto)
        };
        let engine = open_cpu_engine_with(kept, &file_of(&model.build()), options).unwrap();
        (engine, matrices > 0)
    };
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
    let packs = |model: &TinyModel, numerics| {
        let mut matrices = 0;
        let mut count = |_| matrices += 1;
        let options = CpuEngineOptions {
            progress: Some(&mut count),
            ..options(numerics, 1, KernelChoice::Auto)
        };
        open_cpu_engine_with(&kept, &file_of(&model.build()), options).unwrap();
        matrices > 0
    };
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
