//! Philox4x32-10, a counter-based generator. The draw for an output index needs no state, so a retried or migrated request
//! continues the same random stream. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

use serving_core::ids::{ChoiceIndex, OutputIndex};

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// Four random words for one counter under one key.
pub(crate) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        let (high, low) = ((|x: u64| (x >> 32) as u32), (|x: u64| x as u32));
        counter = [
            high(b) ^ counter[1] ^ key[0],
            low(b),
            high(a) ^ counter[3] ^ key[1],
            low(a),
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// Seed of one of a request's sequences: a SplitMix64 hash of (seed, choice).
fn choice_seed(seed: u64, choice: ChoiceIndex) -> u64 {
    let mut z = seed.wrapping_add((u64::from(choice.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The 64 random bits that choose the output token at `index`.
pub(crate) fn draw(seed: u64, choice: ChoiceIndex, index: OutputIndex) -> u64 {
    let key = choice_seed(seed, choice);
    let words = philox([index.0, 0, 0, 0], [key as u32, (key >> 32) as u32]);
    u64::from(words[0]) | u64::from(words[1]) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the generator (Random123, `kat_vectors`).
    #[test]
    fn known_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn streams_of_choices_and_seeds_differ() {
        let first = |seed, choice| draw(seed, ChoiceIndex(choice), OutputIndex(0));
        assert_ne!(first(1, 0), first(1, 1));
        assert_ne!(first(1, 0), first(2, 0));
        assert_eq!(first(1, 0), first(1, 0));
    }
}
