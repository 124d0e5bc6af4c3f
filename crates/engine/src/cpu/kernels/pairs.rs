//! Products of many rows with two panels at a time.
//!
//! With one panel, every product needs its own load of four bytes of a row, and the loads take as long as the products. Two panels share
//! them. The panels are unpacked once for all rows, a few blocks at a time, so that they stay in the first cache. The order of all sums is that of
//! the other kernels.

use super::{InputRows, LANES, Lanes};

/// Blocks that are unpacked together: those of two panels take 22 KB.
pub(crate) const PAIR_BLOCKS: usize = 16;

/// A block of a panel with 8-bit weights.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
pub(crate) struct UnpackedBlock {
    /// Byte `4 * row + t` of vector i is column `4i + t`, as an unsigned number.
    pub weights: [WeightVector; 8],
    pub scales: Lanes,
    /// Q8_0 has none.
    pub minima: Lanes,
    /// The sum of the 32 weights without their minimum.
    pub weight_sums: Lanes,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct WeightVector(pub [u8; 4 * LANES]);

impl Default for WeightVector {
    fn default() -> Self {
        Self([0; 4 * LANES])
    }
}

/// How the panels of a format are multiplied in pairs.
#[derive(Clone, Copy)]
pub(crate) struct PairKernel {
    pub block_bytes: usize,
    /// `(blocks of a panel, as many unpacked blocks)`.
    pub unpack: fn(&[u8], &mut [UnpackedBlock]),
    pub add: AddPair,
}

/// Adds the products with some blocks. Both sums have an entry for each row.
pub(crate) type AddPair = fn(PairCall<'_>, [&mut [Lanes]; 2]);

#[cfg_attr(target_arch = "aarch64", expect(dead_code, reason = "no kernel of it takes pairs"))]
pub(crate) struct PairCall<'a> {
    pub panels: [&'a [UnpackedBlock]; 2],
    pub input: &'a InputRows<'a>,
    /// Where these blocks begin in the rows. Block 0 begins new sums.
    pub first_block: usize,
    /// The panels that follow these two. The kernel asks for as much of both as it can while it computes.
    pub ahead: [&'a [u8]; 2],
}

impl PairKernel {
    /// Computes the sums of two panels for as many rows of the input as `sums` have. `ahead` are the panels that this thread takes next. `scratch`
    /// has room for [`PAIR_BLOCKS`] blocks of both.
    pub(crate) fn dot(
        &self,
        (panels, ahead): ([&[u8]; 2], [&[u8]; 2]),
        input: &InputRows<'_>,
        scratch: &mut [UnpackedBlock],
        [first, second]: [&mut [Lanes]; 2],
    ) {
        let unpacked = scratch.split_at_mut(PAIR_BLOCKS);
        let bytes = PAIR_BLOCKS * self.block_bytes;
        let chunks = panels[0].chunks(bytes).zip(panels[1].chunks(bytes));
        for (index, packed) in chunks.enumerate() {
            let blocks = packed.0.len() / self.block_bytes;
            (self.unpack)(packed.0, &mut unpacked.0[..blocks]);
            (self.unpack)(packed.1, &mut unpacked.1[..blocks]);
            let call = PairCall {
                panels: [&unpacked.0[..blocks], &unpacked.1[..blocks]],
                input,
                first_block: index * PAIR_BLOCKS,
                ahead: if index == 0 { ahead } else { Default::default() },
            };
            (self.add)(call, [first, second]);
        }
    }
}
