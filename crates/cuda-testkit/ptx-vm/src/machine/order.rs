//! The order of blocks, warps and lanes, from a seed.

/// The longest time that a warp runs on its own, in warp operations.
const ROUNDS_MAX: u64 = 8;

#[derive(Debug)]
pub(super) struct Order {
    /// `None`: everything in the order of its number.
    state: Option<u64>,
}

impl Order {
    pub(super) fn of_seed(seed: u64) -> Self {
        Self {
            state: (seed != 0).then_some(seed),
        }
    }

    /// SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    fn next(&mut self) -> Option<u64> {
        let state = self.state?.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.state = Some(state);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(z ^ (z >> 31))
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let Some(random) = self.next() else {
                return;
            };
            items.swap(last, (random % (last as u64 + 1)) as usize);
        }
    }

    /// For how many warp operations a warp runs before another one does.
    pub(super) fn rounds(&mut self) -> u64 {
        self.next().map_or(u64::MAX, |random| 1 + random % ROUNDS_MAX)
    }
}
