//! The stand-in gives the same tokens however it is fed, and other tokens when one byte of KV is wrong.

use super::*;
use serving_core::ids::TokenId;

use crate::kv_geometry::BLOCK_TOKENS;
use crate::{KvDtype, LogitsWanted};

fn engine() -> StandInEngine {
    StandInEngine::new(config()).unwrap()
}

fn config() -> StandInConfig {
    StandInConfig {
        geometry: KvGeometry {
            layer_count: 2,
            kv_head_count: 2,
            head_dim: 6,
            block_tokens: BLOCK_TOKENS,
            dtype: KvDtype::F16,
        },
        vocab_size: 1_000,
        context_length: 200,
        block_count: 32,
        kv_backing: Default::default(),
        limits: EngineLimits {
            max_batch_tokens: 128,
            max_sequences: 4,
        },
        nanoseconds_per_token: 0,
        nanoseconds_per_step: 0,
        seed: 5,
    }
}

fn prompt(length: u32) -> Vec<TokenId> {
    (0..length).map(|i| TokenId(i * 37 % 1_000)).collect()
}

fn blocks(ids: std::ops::Range<u32>) -> Vec<BlockId> {
    ids.map(BlockId).collect()
}

/// Feeds `tokens` in chunks and returns the logits of the last row.
fn run(engine: &mut StandInEngine, tokens: &[TokenId], table: &[BlockId], chunk: usize) -> Vec<f32> {
    let mut last = Vec::new();
    let mut first_position = 0;
    for tokens in tokens.chunks(chunk) {
        let rows = SequenceRows {
            tokens,
            first_position,
            block_table: table,
            logits: LogitsWanted::Last,
        };
        engine
            .step(&[rows], &mut |_: usize, _: u32, logits: &mut [f32]| {
                last = logits.to_vec()
            })
            .unwrap();
        first_position += tokens.len() as u32;
    }
    last
}

#[test]
fn chunks_and_batch_mates_do_not_change_the_logits() {
    let tokens = prompt(70);
    let expected = run(&mut engine(), &tokens, &blocks(0..5), 70);
    for chunk in [1, 7, 16, 33] {
        assert_eq!(
            run(&mut engine(), &tokens, &blocks(10..15), chunk),
            expected,
            "chunks of {chunk}"
        );
    }
    let mut engine = engine();
    let (table, mate_table, mate) = (blocks(0..5), blocks(5..10), prompt(20));
    let rows = |tokens, table| SequenceRows {
        tokens,
        first_position: 0,
        block_table: table,
        logits: LogitsWanted::Last,
    };
    let mut seen = Vec::new();
    engine
        .step(
            &[rows(&mate, &mate_table), rows(&tokens, &table)],
            &mut |s: usize, p: u32, l: &mut [f32]| {
                seen.push((s, p, l.to_vec()));
            },
        )
        .unwrap();
    assert_eq!((seen[0].0, seen[0].1), (0, 19));
    assert_eq!((seen[1].0, seen[1].1), (1, 69));
    assert_eq!(seen[1].2, expected);
}

#[test]
fn all_rows_equal_the_rows_one_by_one() {
    let tokens = prompt(20);
    let table = blocks(0..2);
    let mut all = Vec::new();
    let rows = SequenceRows {
        tokens: &tokens,
        first_position: 0,
        block_table: &table,
        logits: LogitsWanted::All,
    };
    engine()
        .step(&[rows], &mut |_: usize, p: u32, l: &mut [f32]| {
            all.push((p, l.to_vec()))
        })
        .unwrap();
    assert_eq!(all.len(), 20);
    for (position, logits) in all {
        assert_eq!(logits, run(&mut engine(), &tokens[..=position as usize], &table, 3));
    }
}

#[test]
fn moving_the_blocks_to_another_engine_changes_nothing() {
    let tokens = prompt(40);
    let (mut one, mut two) = (engine(), engine());
    run(&mut one, &tokens, &blocks(0..3), 16);
    let mut bytes = vec![0; config().geometry.block_bytes()];
    for block in 0..3 {
        one.kv.export_block(BlockId(block), &mut bytes).unwrap();
        two.kv.import_block(BlockId(20 - block), &bytes).unwrap();
    }
    let next = |engine: &mut StandInEngine, table: &[BlockId]| {
        let rows = SequenceRows {
            tokens: &[TokenId(9)],
            first_position: 40,
            block_table: table,
            logits: LogitsWanted::Last,
        };
        let mut last = Vec::new();
        engine
            .step(&[rows], &mut |_: usize, _: u32, l: &mut [f32]| last = l.to_vec())
            .unwrap();
        last
    };
    assert_eq!(
        next(&mut one, &blocks(0..3)),
        next(&mut two, &[BlockId(20), BlockId(19), BlockId(18)])
    );
}

#[test]
fn one_wrong_byte_anywhere_changes_the_next_logits() {
    let tokens = prompt(40);
    let table = blocks(0..3);
    let block_bytes = config().geometry.block_bytes();
    let row_bytes = config().geometry.row_bytes();
    let next = |damage: Option<(u32, usize)>| {
        let mut engine = engine();
        run(&mut engine, &tokens, &table, 40);
        if let Some((block, at)) = damage {
            let layers = 0..config().geometry.layer_count;
            engine
                .kv
                .write_layers(BlockId(block), layers, |bytes| bytes[at] ^= 1)
                .unwrap();
        }
        let rows = SequenceRows {
            tokens: &[TokenId(9)],
            first_position: 40,
            block_table: &table,
            logits: LogitsWanted::Last,
        };
        let mut last = Vec::new();
        engine
            .step(&[rows], &mut |_: usize, _: u32, l: &mut [f32]| last = l.to_vec())
            .unwrap();
        last
    };
    let right = next(None);
    for block in 0..2 {
        for at in (0..block_bytes).step_by(101) {
            assert_ne!(next(Some((block, at))), right, "block {block}, byte {at}");
        }
    }
    assert_ne!(
        next(Some((2, 7 * row_bytes))),
        right,
        "position 39, the last valid row of the last block"
    );
    assert_eq!(next(Some((2, 12 * row_bytes))), right, "a row that is not valid yet");
}

#[test]
fn another_token_or_seed_changes_everything_after() {
    let mut tokens = prompt(40);
    let expected = run(&mut engine(), &tokens, &blocks(0..3), 40);
    let mut other = StandInEngine::new(StandInConfig { seed: 6, ..config() }).unwrap();
    assert_ne!(run(&mut other, &tokens, &blocks(0..3), 40), expected);
    tokens[0] = TokenId(999);
    assert_ne!(run(&mut engine(), &tokens, &blocks(0..3), 40), expected);
}

#[test]
fn broken_batches_are_typed_errors() {
    let mut engine = engine();
    let table = blocks(0..2);
    let tokens = prompt(129);
    let rows = |tokens, first_position, block_table| SequenceRows {
        tokens,
        first_position,
        block_table,
        logits: LogitsWanted::None,
    };
    let mut step = |batch: &[SequenceRows<'_>]| engine.step(batch, &mut |_: usize, _: u32, _: &mut [f32]| {});
    assert!(matches!(
        step(&[rows(&tokens, 0, &table)]),
        Err(EngineError::BatchTooLarge { tokens: 129, .. })
    ));
    let one = rows(&tokens[..1], 0, &table);
    assert!(matches!(
        step(&[one; 5]),
        Err(EngineError::BatchTooLarge { sequences: 5, .. })
    ));
    assert!(matches!(
        step(&[rows(&[], 0, &table)]),
        Err(EngineError::EmptySequence { sequence: 0 })
    ));
    let foreign = [TokenId(1_000)];
    assert!(matches!(
        step(&[rows(&foreign, 0, &table)]),
        Err(EngineError::TokenOutOfVocabulary { .. })
    ));
    assert!(matches!(
        step(&[rows(&tokens[..33], 0, &table)]),
        Err(EngineError::BlockTableTooShort { .. })
    ));
    for first in [200, u32::MAX] {
        assert!(matches!(
            step(&[rows(&tokens[..1], first, &table)]),
            Err(EngineError::BeyondContext { .. })
        ));
    }
    let missing = [BlockId(32)];
    assert!(matches!(
        step(&[rows(&tokens[..1], 0, &missing)]),
        Err(EngineError::KvAccess(KvAccessError::NoSuchBlock { .. }))
    ));
    assert!(matches!(
        step(&[one, one]),
        Err(EngineError::KvAccess(KvAccessError::Busy { .. }))
    ));
    assert!(step(&[one]).is_ok(), "refused batches leave no claim behind");
    assert!(step(&[]).is_ok(), "an empty batch is no work");
}

#[test]
fn a_step_takes_its_modelled_time() {
    let mut engine = StandInEngine::new(StandInConfig {
        nanoseconds_per_step: 2_000_000,
        nanoseconds_per_token: 100_000,
        ..config()
    })
    .unwrap();
    let started = Instant::now();
    run(&mut engine, &prompt(30), &blocks(0..2), 30);
    assert!(started.elapsed() >= Duration::from_millis(5));
}
