//! Products of many rows with two panels at a time.
//!
//! With one panel, every product needs its own load of four bytes of a row, and the loads take as long as the products. Two panels share
//! them. The panels are unpacked once for all rows, a few blocks at a time, so that they stay in the first cache. The order of all sums is that of
//! the other kernels.

use super::{InputRows, LANES, Lanes};

/// Blocks that are unpacked together: those of two panels take 20 KB.
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

pub(crate) struct PairCall<'a> {
    pub panels: [&'a [UnpackedBlock]; 2],
    pub input: &'a InputRows<'a>,
    /// Where these blocks begin in the rows. Block 0 begins new sums.
    pub first_block: usize,
    /// Memory that is unpacked next. The kernel asks for it while it computes.
    pub ahead: &'a [u8],
}

impl PairKernel {
    /// Computes the sums of two panels for as many rows of the input as `sums` have. `ahead` is what this thread reads next. `scratch` has
    /// room for [`PAIR_BLOCKS`] blocks of both.
    pub(crate) fn dot(
        &self,
        (panels, ahead): ([&[u8]; 2], &[u8]),
        input: &InputRows<'_>,
        scratch: &mut [UnpackedBlock],
        [first, second]: [&mut [Lanes]; 2],
    ) {
        let (of_first, of_second) = scratch.split_at_mut(PAIR_BLOCKS);
        let bytes = PAIR_BLOCKS * self.block_bytes;
        let chunks = panels[0].chunks(bytes).zip(panels[1].chunks(bytes));
        for (index, (of_panel, of_next)) in chunks.enumerate() {
            let blocks = of_panel.len() / self.block_bytes;
            (self.unpack)(of_panel, &mut of_first[..blocks]);
            (self.unpack)(of_next, &mut of_second[..blocks]);
            let call = PairCall {
                panels: [&of_first[..blocks], &of_second[..blocks]],
                input,
                first_block: index * PAIR_BLOCKS,
                // The rest of these panels follows at once, and needs no such request: it is read in order.
                ahead: if index == 0 { ahead } else { &[] },
            };
            (self.add)(call, [first, second]);
        }
    }
}
