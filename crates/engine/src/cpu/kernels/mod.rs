//! The inner loops, once per instruction set, all giving the same bits (`crate::numerics` defines them).
//!
//! A weight matrix is cut into **panels** of 16 output rows ([`super::panels`] describes the bytes). A dot kernel
//! multiplies one panel with up to [`MAX_ROWS`] rows of input, so that each weight is unpacked once for all of them. More rows
//! take two panels at a time ([`pairs`]). The 16 outputs sit in the 16 lanes of a vector, and a lane's sum runs over the blocks in order on every machine.

pub(crate) mod attend;
mod avx2;
mod avx512;
mod avx_vnni;
pub(crate) mod lanes;
mod neon;
pub(crate) mod pairs;
mod portable;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod rows;
pub(crate) mod vector;

use self::pairs::PairKernel;
use crate::EngineError;
use crate::cpu::KernelChoice;

/// Output rows of a panel: the f32 lanes of one AVX-512 register.
pub(crate) const LANES: usize = 16;
/// Input rows of one kernel call: 8 accumulators and 8 unpacked weight vectors fit the 32 registers.
pub(crate) const MAX_ROWS: usize = 8;
/// Values of one quantisation block, of the file's formats and of the inputs alike.
pub(crate) const BLOCK: usize = 32;
/// Bytes of one block of a panel: 16 x 32 4-bit weights, then 16 scales and 16 minima in f16.
pub(crate) const Q4_1_PANEL_BLOCK: usize = 256 + 32 + 32;
/// 16 x 32 8-bit weights (plus 128), then 16 scales in f16.
pub(crate) const Q8_0_PANEL_BLOCK: usize = 512 + 32;
/// Added to 8-bit weights in memory, because VNNI multiplies unsigned with signed bytes.
pub(crate) const Q8_OFFSET: i32 = 128;

/// One vector of outputs.
pub(crate) type Lanes = [f32; LANES];
/// Results of a dot kernel: 16 outputs for each input row.
pub(crate) type Outputs = [Lanes; MAX_ROWS];

/// Input rows for a dot kernel, all starting at the first row of the call. `Exact` has `values` alone, `Int8Blocks` all others.
#[derive(Clone, Copy)]
pub(crate) struct InputRows<'a> {
    /// `[row][column]`.
    pub values: &'a [f32],
    /// `[row][column]`, -127..=127. A value is about `middle + scale * quant`.
    pub quants: &'a [i8],
    /// `[row][block]`.
    pub marks: &'a [BlockMarks],
    pub columns: usize,
}

/// What is known of 32 quantised inputs. It lies together, because a tile writes it for one block of many rows.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub(crate) struct BlockMarks {
    /// (largest - smallest) / 254.
    pub scale: f32,
    /// Halfway between the largest and the smallest.
    pub middle: f32,
    /// The sum of the 32 values that the quants stand for.
    pub total: f32,
    /// The sum of the quants.
    pub sum: i32,
}

impl InputRows<'_> {
    /// Panics unless the 8-bit parts cover `rows` rows: the kernels read through pointers. Returns the blocks of a row.
    #[inline(always)]
    fn check_quantised(&self, rows: usize) -> usize {
        let blocks = self.columns / BLOCK;
        assert!(self.columns.is_multiple_of(BLOCK));
        assert!(self.quants.len() >= rows * self.columns);
        assert!(self.marks.len() >= rows * blocks);
        blocks
    }
}

/// `(panel, input, rows, outputs)`: computes the first `rows` entries of `outputs`.
pub(crate) type DotKernel = fn(&[u8], &InputRows<'_>, usize, &mut Outputs);

/// [`attend::attend_partition`] for an instruction set.
pub(crate) type AttendPartition =
    unsafe fn(&attend::AttendCall<'_>, usize, &mut attend::AttendScratch<'_>, &mut attend::PartialSums<'_>);

/// Every loop that has a version per instruction set.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    pub name: &'static str,
    pub dot_q4_1: DotKernel,
    pub dot_q8_0: DotKernel,
    pub dot_f32: DotKernel,
    /// For many rows, where the instruction set gains by it.
    pub pair_q4_1: Option<PairKernel>,
    pub pair_q8_0: Option<PairKernel>,
    /// `(x, weight, epsilon, out)`.
    pub rms_norm: fn(&[f32], &[f32], f32, &mut [f32]),
    pub quantise: fn(&[f32], lanes::QuantisedRow<'_>),
    /// `(halves, out)`: a block of each of several rows.
    pub quantise_blocks: fn([&[Lanes]; 2], &mut [lanes::QuantisedBlock]),
    /// `gate[i] = silu(gate[i]) * up[i]`.
    pub gate_silu: fn(&mut [Lanes], &[Lanes]),
    /// The same with GELU.
    pub gate_gelu: fn(&mut [Lanes], &[Lanes]),
    /// `values[i] = cap * tanh(values[i] / cap)`.
    pub softcap: fn(&mut Lanes, f32),
    pub attend_partition: AttendPartition,
    /// `(sums, later)`: adds the sums of a later partition.
    pub add_partition: fn(&mut attend::PartialSums<'_>, &attend::PartialSums<'_>),
}

/// Compiles the lane code of `lanes` for one instruction set: same source, same bits, wider registers.
macro_rules! lane_kernels {
    ($features:tt, $vector:ty) => {
        use crate::cpu::kernels::attend::{self, AttendCall, AttendScratch, PartialSums};
        use crate::cpu::kernels::lanes;

        pub(super) fn dot_f32(panel: &[u8], input: &InputRows<'_>, rows: usize, out: &mut Outputs) {
            #[target_feature(enable = $features)]
            fn inner(panel: &[u8], input: &InputRows<'_>, rows: usize, out: &mut Outputs) {
                lanes::dot_f32::<$vector>(panel, input, rows, out);
            }
            // SAFETY: these kernels are chosen only after `detect` has found the features.
            unsafe { inner(panel, input, rows, out) }
        }
        pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn inner(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
                lanes::rms_norm::<$vector>(x, weight, epsilon, out);
            }
            // SAFETY: as above.
            unsafe { inner(x, weight, epsilon, out) }
        }
        pub(super) fn quantise(x: &[f32], out: lanes::QuantisedRow<'_>) {
            #[target_feature(enable = $features)]
            fn inner(x: &[f32], out: lanes::QuantisedRow<'_>) {
                lanes::quantise::<$vector>(x, out);
            }
            // SAFETY: as above.
            unsafe { inner(x, out) }
        }
        pub(super) fn quantise_blocks(halves: [&[Lanes]; 2], out: &mut [lanes::QuantisedBlock]) {
            #[target_feature(enable = $features)]
            fn inner(halves: [&[Lanes]; 2], out: &mut [lanes::QuantisedBlock]) {
                lanes::quantise_blocks::<$vector>(halves, out);
            }
            // SAFETY: as above.
            unsafe { inner(halves, out) }
        }
        pub(super) fn gate_silu(gate: &mut [Lanes], up: &[Lanes]) {
            #[target_feature(enable = $features)]
            fn inner(gate: &mut [Lanes], up: &[Lanes]) {
                lanes::gate_silu::<$vector>(gate, up);
            }
            // SAFETY: as above.
            unsafe { inner(gate, up) }
        }
        pub(super) fn gate_gelu(gate: &mut [Lanes], up: &[Lanes]) {
            #[target_feature(enable = $features)]
            fn inner(gate: &mut [Lanes], up: &[Lanes]) {
                lanes::gate_gelu::<$vector>(gate, up);
            }
            // SAFETY: as above.
            unsafe { inner(gate, up) }
        }
        pub(super) fn softcap(values: &mut Lanes, cap: f32) {
            #[target_feature(enable = $features)]
            fn inner(values: &mut Lanes, cap: f32) {
                lanes::softcap::<$vector>(values, cap);
            }
            // SAFETY: as above.
            unsafe { inner(values, cap) }
        }
        /// # Safety
        /// That of `attend::attend_partition`.
        pub(super) unsafe fn attend_partition(
            call: &AttendCall<'_>,
            partition: usize,
            scratch: &mut AttendScratch<'_>,
            out: &mut PartialSums<'_>,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn inner(
                call: &AttendCall<'_>,
                partition: usize,
                scratch: &mut AttendScratch<'_>,
                out: &mut PartialSums<'_>,
            ) {
                // SAFETY: the caller's promise.
                unsafe { attend::attend_partition::<$vector>(call, partition, scratch, out) }
            }
            // SAFETY: the features as above, the rest is the caller's promise.
            unsafe { inner(call, partition, scratch, out) }
        }
        pub(super) fn add_partition(sums: &mut PartialSums<'_>, later: &PartialSums<'_>) {
            #[target_feature(enable = $features)]
            fn inner(sums: &mut PartialSums<'_>, later: &PartialSums<'_>) {
                attend::add_partition::<$vector>(sums, later);
            }
            // SAFETY: as above.
            unsafe { inner(sums, later) }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use lane_kernels;

/// Kernels of another architecture than this one.
fn absent() -> Option<Kernels> {
    None
}

/// The kernels of a choice.
///
/// # Errors
/// [`EngineError::KernelUnsupported`] when this CPU lacks what the choice needs.
pub(crate) fn choose(choice: KernelChoice) -> Result<Kernels, EngineError> {
    match choice {
        KernelChoice::Auto => Ok(avx512::detect()
            .or_else(avx_vnni::detect)
            .or_else(avx2::detect)
            .or_else(neon::detect)
            .unwrap_or(portable::KERNELS)),
        KernelChoice::Portable => Ok(portable::KERNELS),
        KernelChoice::Avx2 => avx2::detect().ok_or(EngineError::KernelUnsupported {
            kernel: "avx2",
            needs: avx2::NEEDS,
        }),
        KernelChoice::AvxVnni => avx_vnni::detect().ok_or(EngineError::KernelUnsupported {
            kernel: "avx-vnni",
            needs: avx_vnni::NEEDS,
        }),
        KernelChoice::Avx512Vnni => avx512::detect().ok_or(EngineError::KernelUnsupported {
            kernel: "avx512-vnni",
            needs: avx512::NEEDS,
        }),
        KernelChoice::NeonDotprod => neon::detect().ok_or(EngineError::KernelUnsupported {
            kernel: "neon-dotprod",
            needs: neon::NEEDS,
        }),
    }
}

#[cfg(test)]
mod tests;
