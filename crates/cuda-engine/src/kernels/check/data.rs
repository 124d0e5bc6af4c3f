//! Numbers for the checks: random ones from a seed, and their bytes as a device reads them.

use half::bf16;

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, end: u32) -> u32 {
        (self.bits() % u64::from(end.max(1))) as u32
    }

    /// Nearly normal, with a variance of one: four uniform numbers have a third of it.
    pub(super) fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4)
            .map(|_| (self.bits() >> 11) as f64 / (1u64 << 53) as f64 - 0.5)
            .sum();
        (sum * 3f64.sqrt()) as f32
    }

    pub(super) fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    /// Numbers that bf16 has.
    pub(super) fn bf16s(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| bf16::from_f32(self.normal()).to_f32()).collect()
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u32 + 1) as usize;
            items.swap(last, other);
        }
    }
}

pub(super) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

pub(super) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(super) fn f64_bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(super) fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| bf16::from_f32(*value).to_le_bytes())
        .collect()
}

pub(super) fn u32_bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(super) fn u64_bytes(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(super) fn f32_values(bytes: &[u8]) -> Vec<f64> {
    let (chunks, _) = bytes.as_chunks::<4>();
    chunks
        .iter()
        .map(|chunk| f64::from(f32::from_le_bytes(*chunk)))
        .collect()
}

pub(super) fn bf16_values(bytes: &[u8]) -> Vec<f64> {
    let (chunks, _) = bytes.as_chunks::<2>();
    chunks
        .iter()
        .map(|chunk| bf16::from_le_bytes(*chunk).to_f64())
        .collect()
}

/// Bytes as numbers, for a comparison that allows no difference.
pub(super) fn exact_values(bytes: &[u8]) -> Vec<f64> {
    bytes.iter().copied().map(f64::from).collect()
}
