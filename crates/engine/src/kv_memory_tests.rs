//! Layout, claims and hashes of the KV memory.

use proptest::prelude::*;

use super::*;
use crate::kv_claims::StepClaim;
use crate::{BLOCK_TOKENS, KvDtype};
use crate::{LogitsWanted, SequenceRows};

fn geometry() -> KvGeometry {
    KvGeometry {
        layer_count: 3,
        kv_head_count: 2,
        head_dim: 4,
        block_tokens: BLOCK_TOKENS,
        dtype: KvDtype::F16,
    }
}

fn memory(blocks: u32) -> KvMemory {
    KvMemory::new(geometry(), blocks).unwrap()
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

#[test]
fn sizes_follow_from_the_layout() {
    let smollm2 = KvGeometry {
        layer_count: 30,
        kv_head_count: 3,
        head_dim: 64,
        block_tokens: 16,
        dtype: KvDtype::F16,
    };
    assert_eq!(smollm2.token_bytes(), 23_040);
    assert_eq!(smollm2.block_bytes(), 23_040 * 16);
    assert_eq!(smollm2.layer_bytes() * 30, smollm2.block_bytes());
    assert_eq!(
        (smollm2.blocks_for(0), smollm2.blocks_for(16), smollm2.blocks_for(17)),
        (0, 1, 2)
    );
}

#[test]
fn bad_geometry_and_sizes_are_errors() {
    let zero = KvGeometry {
        head_dim: 0,
        ..geometry()
    };
    assert_eq!(KvMemory::new(zero, 1).unwrap_err(), KvMemoryError::BadGeometry(zero));
    let absurd = KvGeometry {
        head_dim: u32::MAX,
        layer_count: u32::MAX,
        kv_head_count: u32::MAX,
        ..geometry()
    };
    assert_eq!(
        KvMemory::new(absurd, 1).unwrap_err(),
        KvMemoryError::BadGeometry(absurd)
    );
    assert_eq!(KvMemory::new(geometry(), 0).unwrap_err(), KvMemoryError::NoBlocks);
    let huge = KvGeometry {
        head_dim: 1 << 20,
        layer_count: 1 << 10,
        ..geometry()
    };
    assert!(matches!(
        KvMemory::new(huge, u32::MAX),
        Err(KvMemoryError::OutOfMemory { .. })
    ));
}

#[test]
fn what_is_imported_is_exported() {
    let kv = memory(3);
    let bytes = pattern(geometry().block_bytes(), 7);
    kv.import_block(BlockId(1), &bytes).unwrap();
    let mut out = vec![0; bytes.len()];
    kv.export_block(BlockId(1), &mut out).unwrap();
    assert_eq!(out, bytes);
    kv.export_block(BlockId(0), &mut out).unwrap();
    assert!(out.iter().all(|byte| *byte == 0), "the neighbour is untouched");

    let layer = geometry().layer_bytes();
    let mut middle = vec![0; layer];
    kv.export_layers(BlockId(1), 1..2, &mut middle).unwrap();
    assert_eq!(middle, bytes[layer..2 * layer]);
    kv.import_layers(BlockId(2), 0..1, &middle).unwrap();
    kv.export_layers(BlockId(2), 0..1, &mut out[..layer]).unwrap();
    assert_eq!(out[..layer], middle);

    kv.copy_block(BlockId(1), BlockId(0)).unwrap();
    kv.export_block(BlockId(0), &mut out).unwrap();
    assert_eq!(out, bytes);
}

#[test]
fn bad_addresses_and_lengths_are_errors() {
    let kv = memory(2);
    let mut block = vec![0; geometry().block_bytes()];
    let no_such_block = KvAccessError::NoSuchBlock {
        block: BlockId(2),
        block_count: 2,
    };
    assert_eq!(kv.export_block(BlockId(2), &mut block).unwrap_err(), no_such_block);
    assert_eq!(kv.import_block(BlockId(2), &block).unwrap_err(), no_such_block);
    let expected = block.len();
    assert_eq!(
        kv.import_block(BlockId(0), &block[1..]).unwrap_err(),
        KvAccessError::WrongLength {
            expected,
            got: expected - 1
        }
    );
    let layers = kv.geometry().layer_bytes();
    #[allow(clippy::reversed_empty_ranges)]
    for bad in [0..4, 3..5, 2..1, u32::MAX..u32::MAX] {
        let result = kv.export_layers(BlockId(0), bad.clone(), &mut block[..bad.len().min(3) * layers]);
        assert!(result.is_err(), "{bad:?}");
    }
    assert!(matches!(
        kv.block_hash(BlockId(0), 17),
        Err(KvAccessError::TooManyTokens { .. })
    ));
    assert_eq!(
        kv.copy_block(BlockId(0), BlockId(0)).unwrap_err(),
        KvAccessError::Busy { block: BlockId(0) }
    );
}

#[test]
fn readers_share_and_writers_do_not() {
    let kv = memory(2);
    let block = BlockId(0);
    let bytes = pattern(geometry().block_bytes(), 1);
    kv.read_layers(block, 0..3, |_| {
        assert!(kv.block_hash(block, 16).is_ok(), "a second reader is welcome");
        assert_eq!(
            kv.import_block(block, &bytes).unwrap_err(),
            KvAccessError::Busy { block }
        );
        assert!(kv.import_block(BlockId(1), &bytes).is_ok(), "claims are per block");
    })
    .unwrap();
    kv.write_layers(block, 0..3, |_| {
        assert_eq!(kv.block_hash(block, 16).unwrap_err(), KvAccessError::Busy { block });
        assert_eq!(
            kv.import_block(block, &bytes).unwrap_err(),
            KvAccessError::Busy { block }
        );
    })
    .unwrap();
    assert!(kv.import_block(block, &bytes).is_ok(), "both claims are gone");
}

#[test]
fn a_step_claims_its_blocks_and_gives_them_back() {
    let kv = std::sync::Arc::new(memory(4));
    let bytes = pattern(geometry().block_bytes(), 1);
    let tokens = [serving_core::ids::TokenId(0); 2];
    let table = [BlockId(0), BlockId(1), BlockId(2)];
    // Positions 17 and 18: reads block 0, writes block 1, and has block 2 for later.
    let rows = SequenceRows {
        tokens: &tokens,
        first_position: 17,
        block_table: &table,
        logits: LogitsWanted::None,
    };
    let batch = [rows];
    let mut claim = StepClaim::new(kv.clone());
    claim.take(&batch).unwrap();
    assert!(
        kv.block_hash(BlockId(0), 16).is_ok(),
        "read by the step: may be exported meanwhile"
    );
    assert!(kv.import_block(BlockId(0), &bytes).is_err());
    assert!(kv.block_hash(BlockId(1), 16).is_err(), "written by the step");
    assert!(kv.import_block(BlockId(2), &bytes).is_ok(), "not reached by the step");
    claim.release();
    for block in 0..4 {
        assert!(kv.import_block(BlockId(block), &bytes).is_ok());
    }

    let shares_the_written_block = [rows, rows];
    assert_eq!(
        claim.take(&shares_the_written_block).err(),
        Some(KvAccessError::Busy { block: BlockId(1) })
    );
    for block in 0..4 {
        assert!(
            kv.import_block(BlockId(block), &bytes).is_ok(),
            "a failed claim leaves nothing behind"
        );
    }
}

#[test]
fn concurrent_use_never_mixes_two_imports() {
    let kv = memory(1);
    std::thread::scope(|scope| {
        for value in [1u8, 2] {
            let kv = &kv;
            scope.spawn(move || {
                let bytes = vec![value; geometry().block_bytes()];
                let mut done = 0;
                while done < 2_000 {
                    done += u32::from(kv.import_block(BlockId(0), &bytes).is_ok());
                }
            });
        }
        let mut out = vec![0; geometry().block_bytes()];
        let mut seen = 0;
        while seen < 2_000 {
            if kv.export_block(BlockId(0), &mut out).is_ok() {
                assert!(out.iter().all(|byte| *byte == out[0]), "a torn block was read");
                seen += 1;
            }
        }
    });
}

#[test]
fn a_prompts_hashes_end_with_its_last_token() {
    let kv = memory(3);
    let blocks: Vec<BlockId> = (0..3).map(BlockId).collect();
    for block in &blocks {
        kv.import_block(*block, &pattern(geometry().block_bytes(), block.0 as u8))
            .unwrap();
    }
    // Blocks of 16: 20 tokens are a whole one and four rows of the next; what was generated behind them has none.
    let hashes = kv.prompt_hashes(&blocks, 20).unwrap();
    let expected = [kv.block_hash(blocks[0], 16), kv.block_hash(blocks[1], 4)].map(Result::unwrap);
    assert_eq!(hashes, expected);
    assert_eq!(kv.prompt_hashes(&blocks, 32).unwrap().len(), 2);
    assert_eq!(kv.prompt_hashes(&blocks, 0).unwrap(), Vec::<u64>::new());
}

proptest! {
    #[test]
    fn the_hash_covers_exactly_the_valid_rows(valid in 0u32..=16, at in 0usize..768) {
        let kv = memory(1);
        let geometry = geometry();
        let mut bytes = pattern(geometry.block_bytes(), 3);
        let at = at % bytes.len();
        kv.import_block(BlockId(0), &bytes).unwrap();
        let before = kv.block_hash(BlockId(0), valid).unwrap();
        bytes[at] ^= 0x10;
        kv.import_block(BlockId(0), &bytes).unwrap();
        let token = (at % geometry.head_bytes()) / geometry.row_bytes();
        let after = kv.block_hash(BlockId(0), valid).unwrap();
        prop_assert_eq!(before != after, token < valid as usize);
    }
}

#[test]
fn shareable_memory_is_the_blocks_and_nothing_more_behind_a_descriptor_of_fixed_size() {
    use std::io::Read as _;
    assert!(memory(2).descriptor().is_none(), "private memory has none");
    let memory = KvMemory::backed(geometry(), 2, KvBacking::Shareable).unwrap();
    let bytes = geometry().block_bytes();
    let block: Vec<u8> = (0..bytes).map(|at| at as u8).collect();
    memory.import_block(BlockId(1), &block).unwrap();
    let mut file = std::fs::File::from(memory.descriptor().unwrap().try_clone_to_owned().unwrap());
    let mut seen = Vec::new();
    file.read_to_end(&mut seen).unwrap();
    assert_eq!(seen.len(), 2 * bytes);
    assert!(seen[..bytes].iter().all(|byte| *byte == 0));
    assert_eq!(seen[bytes..], block);
    assert!(file.set_len(0).is_err(), "it can shrink");
    assert!(file.set_len(1 << 30).is_err(), "it can grow");
}

#[test]
fn a_block_is_claimed_while_it_is_lent_and_for_good_when_a_device_keeps_it() {
    let kv = memory(2);
    let mut bytes = vec![0; geometry().block_bytes()];
    let busy = KvAccessError::Busy { block: BlockId(0) };
    let offset = kv.lend_to_reader(BlockId(0), 1..2, |offset| {
        assert_eq!(
            kv.import_block(BlockId(0), &vec![0; geometry().block_bytes()]),
            Err(busy.clone())
        );
        (offset, LentBytes::Back)
    });
    assert_eq!(offset, Ok(geometry().layer_bytes()));
    kv.import_block(BlockId(0), &bytes).expect("free again");
    kv.lend_to_writer(BlockId(0), 0..3, |_| ((), LentBytes::Kept)).unwrap();
    assert_eq!(kv.export_block(BlockId(0), &mut bytes), Err(busy));
    kv.export_block(BlockId(1), &mut bytes)
        .expect("the other block is nobody's");
    assert!(kv.lend_to_reader(BlockId(0), 2..4, |_| ((), LentBytes::Back)).is_err());
    assert!(kv.device_pool().is_none(), "it is on the host");
}
