//! The real model along a few schedules.

use super::*;

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
