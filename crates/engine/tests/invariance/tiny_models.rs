//! Tiny models of all families and number types, and random schedules.

use super::*;

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
