//! The rules about a frame on which both ends must agree: its size, and how a block is cut into frames.

use std::ops::Range;

use proto::messages::KV_FRAME_BYTES_MAX;

/// KV bytes in one frame of a stream, unless a single layer is larger. It is below the size from which the allocator maps
/// and unmaps each buffer (128 KiB, which iperf3 writes at a time), and small enough to land without a change of threads.
pub(crate) const FRAME_DATA_BYTES_MAX: usize = 120 << 10;
// The largest layer of a frame has the rest, so header and growth never matter.
const _: () = assert!(FRAME_DATA_BYTES_MAX < KV_FRAME_BYTES_MAX / 2);

/// Layer ranges of one block, each at most `data_bytes_max` unless a single layer is larger.
pub(crate) fn layer_ranges(
    layer_count: u32,
    layer_bytes: usize,
    data_bytes_max: usize,
) -> impl Iterator<Item = Range<u32>> {
    let fitting = data_bytes_max / layer_bytes.max(1);
    let per_frame = u32::try_from(fitting).unwrap_or(u32::MAX).max(1);
    (0..layer_count)
        .step_by(per_frame as usize)
        .map(move |begin| begin..begin.saturating_add(per_frame).min(layer_count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::checksum;

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "one range is what is meant")]
    fn a_small_block_is_one_frame_and_a_large_one_is_cut_at_layers() {
        let layer_ranges = |count, bytes| layer_ranges(count, bytes, 4 << 20);
        assert_eq!(layer_ranges(30, 12_288).collect::<Vec<_>>(), [0..30]);
        let mib = 1 << 20;
        assert_eq!(layer_ranges(10, mib).collect::<Vec<_>>(), [0..4, 4..8, 8..10]);
        assert_eq!(layer_ranges(2, 100 * mib).collect::<Vec<_>>(), [0..1, 1..2]);
        assert_eq!(layer_ranges(0, 1).count(), 0);
        assert_eq!(layer_ranges(3, 0).collect::<Vec<_>>(), [0..3]);
    }

    /// Old and new nodes must agree, so the wire fixes the definition and not the crate.
    #[test]
    fn the_checksum_is_xxh3() {
        assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
        let long: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        assert_eq!(checksum(&long), xxhash_rust::xxh3::xxh3_64(&long));
    }

    #[test]
    fn every_single_bit_flip_changes_the_checksum() {
        let mut data = vec![0x5au8; 64];
        let good = checksum(&data);
        for bit in 0..data.len() * 8 {
            data[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(checksum(&data), good, "bit {bit}");
            data[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
