//! The fixed table of test shapes, for the tests on the false driver, for `doctor --gpu` and for the gate. The first shape of a
//! list is the one that the gate runs.
//!
//! Each shape is here for a reason: ends of blocks and tiles, a length of one, splits that a row does not have, logits of
//! +-200 (an initial maximum of 0 is wrong only far below zero), prefixes, odd groups of heads.

use super::calls::Output;

/// Rows and columns of the kernels that work row by row.
pub(crate) const ROWS: [(u32, u32); 4] = [(3, 576), (1, 8), (2, 2_056), (5, 1_024)];

#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductShape {
    pub rows: u32,
    pub columns: u32,
    pub depth: u32,
    pub output: Output,
    pub has_bias: bool,
}

const fn product((rows, columns, depth): (u32, u32, u32), output: Output, has_bias: bool) -> ProductShape {
    ProductShape {
        rows,
        columns,
        depth,
        output,
        has_bias,
    }
}

pub(crate) const PRODUCTS: [ProductShape; 9] = [
    product((17, 192, 200), Output::Bf16, true),
    product((17, 192, 200), Output::F32, false),
    product((17, 192, 200), Output::AddF32, true),
    // One row, one chunk; less than a stage; exactly one; one more chunk than three.
    product((1, 2, 8), Output::F32, false),
    product((1, 64, 64), Output::Bf16, false),
    product((16, 34, 200), Output::AddF32, false),
    // A vocabulary may be odd.
    product((3, 49, 72), Output::F32, true),
    // Exactly a tile, and one more row and two more columns than one.
    product((64, 128, 128), Output::Bf16, false),
    product((65, 130, 136), Output::F32, false),
];

/// How large the scores of attention are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScoreSize {
    Ordinary,
    /// About +200 for even heads, -200 for odd ones.
    Large,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionCase {
    pub head_dim: usize,
    pub group: usize,
    pub kv_heads: usize,
    pub block_tokens: u32,
    pub window: Option<u32>,
    pub softcap: Option<f32>,
    pub scores: ScoreSize,
    /// Tokens before the rows, and rows, of each sequence.
    pub sequences: &'static [(u32, u32)],
}

const PLAIN: AttentionCase = AttentionCase {
    head_dim: 64,
    group: 3,
    kv_heads: 2,
    block_tokens: 16,
    window: None,
    softcap: None,
    scores: ScoreSize::Ordinary,
    sequences: &[],
};

/// Chunks of prompts.
pub(crate) const PREFILL: [AttentionCase; 5] = [
    AttentionCase {
        sequences: &[(0, 70), (40, 3)],
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(0, 1), (63, 1), (64, 64), (15, 2)],
        group: 1,
        kv_heads: 3,
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(30, 35)],
        scores: ScoreSize::Large,
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(100, 20), (0, 66)],
        window: Some(33),
        softcap: Some(50.0),
        group: 2,
        kv_heads: 1,
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(17, 48)],
        head_dim: 128,
        group: 4,
        kv_heads: 1,
        block_tokens: 32,
        ..PLAIN
    },
];

/// Single rows. A length of 257 has a split with one token, and makes the others' second splits empty.
pub(crate) const DECODE: [AttentionCase; 6] = [
    AttentionCase {
        sequences: &[(0, 1), (76, 1), (256, 1)],
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(15, 1), (16, 1), (255, 1)],
        group: 7,
        kv_heads: 1,
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(63, 1), (299, 1)],
        scores: ScoreSize::Large,
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(520, 1), (5, 1)],
        window: Some(100),
        softcap: Some(50.0),
        group: 1,
        kv_heads: 3,
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(40, 1), (256, 1)],
        head_dim: 128,
        group: 4,
        kv_heads: 2,
        block_tokens: 64,
        ..PLAIN
    },
    AttentionCase {
        sequences: &[(90, 1)],
        head_dim: 128,
        group: 8,
        kv_heads: 1,
        ..PLAIN
    },
];

/// RoPE and the way into the pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeCase {
    pub attention: AttentionCase,
    pub pairs: usize,
    pub is_halves: bool,
    pub has_norms: bool,
}

pub(crate) const ROPES: [RopeCase; 3] = [
    RopeCase {
        attention: AttentionCase {
            sequences: &[(0, 3), (15, 2)],
            ..PLAIN
        },
        pairs: 32,
        is_halves: false,
        has_norms: false,
    },
    RopeCase {
        attention: AttentionCase {
            sequences: &[(31, 2)],
            head_dim: 128,
            group: 2,
            kv_heads: 1,
            block_tokens: 32,
            ..PLAIN
        },
        pairs: 64,
        is_halves: true,
        has_norms: true,
    },
    // Only a part of a head turns.
    RopeCase {
        attention: AttentionCase {
            sequences: &[(300, 1)],
            group: 1,
            kv_heads: 1,
            ..PLAIN
        },
        pairs: 12,
        is_halves: true,
        has_norms: false,
    },
];

/// Positions whose angles are checked.
pub(crate) const POSITIONS: [u32; 7] = [0, 1, 17, 4_095, 4_096, 131_071, 1_000_000];

/// Sizes of vocabularies: less than a turn of the threads, and more than one.
pub(crate) const VOCABULARIES: [u32; 2] = [1_003, 300];
