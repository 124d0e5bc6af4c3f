//! The table of all kernels: file, entry, threads, shared memory, arguments. A test compares it with the sources.

use super::attention_shape::AttentionShape;
use super::source::KernelFile;

/// What a kernel's argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgKind {
    Pointer,
    U32,
    U64,
    F32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arg {
    pub kind: ArgKind,
    /// As in the source.
    pub name: &'static str,
}

/// Threads of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    Fixed(u32),
    /// One for each value of a head.
    HeadDim,
}

/// Dynamic shared memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shared {
    Fixed(u32),
    /// So many bytes for each value of a head.
    ByHeadDim(u32),
    /// `[4 warps][group]` of a head's values and two more, f32.
    Decode,
}

/// Everything that is fixed about a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelFacts {
    pub file: KernelFile,
    pub entry: &'static str,
    pub threads: Threads,
    pub shared: Shared,
    pub args: &'static [Arg],
}

macro_rules! kernels {
    ($($id:ident: $file:ident $entry:ident, $threads:expr, $shared:expr, [$($kind:ident $arg:ident),*];)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(non_camel_case_types, reason = "the names that everybody knows the formats by")]
        pub enum KernelId { $($id),* }

        impl KernelId {
            pub const ALL: &'static [KernelId] = &[$(KernelId::$id),*];

            pub(crate) fn facts(self) -> &'static KernelFacts {
                match self {
                    $(KernelId::$id => const {
                        &KernelFacts {
                            file: KernelFile::$file,
                            entry: stringify!($entry),
                            threads: $threads,
                            shared: $shared,
                            args: &[$(Arg { kind: ArgKind::$kind, name: stringify!($arg) }),*],
                        }
                    },)*
                }
            }
        }
    };
}

/// Three stages of (rows + columns) rows of 128 bytes.
const GEMM_SHARED: Shared = Shared::Fixed(3 * (64 + 128) * 128);
const GEMV_SHARED: Shared = Shared::Fixed(3 * (16 + 32) * 128);
/// A f32 for each of eight warps.
const NORM_SHARED: Shared = Shared::Fixed(8 * 4);
const NONE: Shared = Shared::Fixed(0);

kernels! {
    Embed: Embedding embed, Threads::Fixed(256), NONE, [Pointer tokens, Pointer table, Pointer out, U32 columns, F32 scale];
    RmsNorm: Norm rms_norm, Threads::Fixed(256), NORM_SHARED, [Pointer x, Pointer weight, Pointer out, U32 columns, F32 epsilon];
    AddRmsNorm: Norm add_rms_norm, Threads::Fixed(256), NORM_SHARED,
        [Pointer stream, Pointer branch, Pointer branch_weight, Pointer weight, Pointer out, U32 columns, F32 epsilon];
    RopeAngles: RopeWrite rope_angles, Threads::Fixed(128), NONE,
        [Pointer row_position, Pointer speeds, Pointer angles, U32 pairs, U32 count, F32 magnitude];
    RopeWrite: RopeWrite rope_write, Threads::Fixed(128), Shared::ByHeadDim(4 * 4),
        [Pointer qkv, Pointer query_norm, Pointer key_norm, Pointer angles, Pointer row_sequence, Pointer row_position,
         Pointer queries, Pointer pool, U64 block_bytes, U64 layer_offset, Pointer tables, U32 table_stride, U32 block_shift,
         U32 heads, U32 kv_heads, U32 pairs, U32 halves, F32 epsilon];
    PrefillAttention: PrefillAttention prefill_attention, Threads::Fixed(128), Shared::ByHeadDim(2 * (64 + 2 * 2 * 64)),
        [Pointer queries, Pointer tiles, Pointer out, Pointer pool_start, U64 block_bytes, U64 layer_offset, Pointer tables,
         U32 table_stride, U32 block_shift, U32 heads, U32 kv_heads, U32 window, F32 scale, F32 cap];
    DecodeAttention: DecodeAttention decode_attention, Threads::Fixed(128), Shared::Decode,
        [Pointer queries, Pointer rows, Pointer row_sequence, Pointer row_position, Pointer pool_start, U64 block_bytes,
         U64 layer_offset, Pointer tables, U32 table_stride, U32 block_shift, Pointer part_out, Pointer part_state,
         U32 kv_heads, U32 split_tokens, U32 window, F32 scale, F32 cap];
    DecodeCombine: DecodeAttention decode_combine, Threads::HeadDim, NONE,
        [Pointer part_out, Pointer part_state, Pointer rows, Pointer row_sequence, Pointer row_position, Pointer out,
         U32 splits, U32 split_tokens, U32 window];
    GateSilu: Gate gate_silu, Threads::Fixed(256), NONE, [Pointer gate_up, Pointer out, U32 columns];
    GateGelu: Gate gate_gelu, Threads::Fixed(256), NONE, [Pointer gate_up, Pointer out, U32 columns];
    GemmBf16: Gemm gemm_bf16, Threads::Fixed(128), GEMM_SHARED,
        [Pointer x, Pointer w, Pointer bias, Pointer out, U32 rows, U32 columns, U32 depth];
    GemmF32: Gemm gemm_f32, Threads::Fixed(128), GEMM_SHARED,
        [Pointer x, Pointer w, Pointer bias, Pointer out, U32 rows, U32 columns, U32 depth];
    GemmF32Add: Gemm gemm_f32_add, Threads::Fixed(128), GEMM_SHARED,
        [Pointer x, Pointer w, Pointer bias, Pointer out, U32 rows, U32 columns, U32 depth];
    GemvBf16: Gemv gemv_bf16, Threads::Fixed(128), GEMV_SHARED,
        [Pointer x, Pointer w, Pointer bias, Pointer out, U32 rows, U32 columns, U32 depth];
    GemvF32: Gemv gemv_f32, Threads::Fixed(128), GEMV_SHARED,
        [Pointer x, Pointer w, Pointer bias, Pointer out, U32 rows, U32 columns, U32 depth];
    GemvF32Add: Gemv gemv_f32_add, Threads::Fixed(128), GEMV_SHARED,
        [Pointer x, Pointer w, Pointer bias, Pointer out, U32 rows, U32 columns, U32 depth];
    DequantiseQ4_0: Dequantise dequantise_q4_0, Threads::Fixed(256), NONE, [Pointer in, Pointer out, U64 blocks];
    DequantiseQ4_1: Dequantise dequantise_q4_1, Threads::Fixed(256), NONE, [Pointer in, Pointer out, U64 blocks];
    DequantiseQ5_0: Dequantise dequantise_q5_0, Threads::Fixed(256), NONE, [Pointer in, Pointer out, U64 blocks];
    DequantiseQ8_0: Dequantise dequantise_q8_0, Threads::Fixed(256), NONE, [Pointer in, Pointer out, U64 blocks];
    DequantiseF16: Dequantise dequantise_f16, Threads::Fixed(256), NONE, [Pointer in, Pointer out, U64 values];
    DequantiseF32: Dequantise dequantise_f32, Threads::Fixed(256), NONE, [Pointer in, Pointer out, U64 values];
    CopyBlocks: Blocks copy_blocks, Threads::Fixed(256), NONE, [Pointer pool, Pointer pairs, U64 bytes];
    GatherBlocks: Blocks gather_blocks, Threads::Fixed(256), NONE, [Pointer pool, Pointer offsets, Pointer out, U64 bytes];
    ScatterBlocks: Blocks scatter_blocks, Threads::Fixed(256), NONE, [Pointer pool, Pointer offsets, Pointer in, U64 bytes];
    ZeroBlocks: Blocks zero_blocks, Threads::Fixed(256), NONE, [Pointer pool, Pointer offsets, U64 bytes];
    HashBlocks: Blocks hash_blocks, Threads::Fixed(256), Shared::Fixed(32 * 8 * 8),
        [Pointer pool, Pointer offsets, Pointer valid, Pointer out, U32 slices, U32 slice_bytes, U32 row_bytes];
    PrepareLogits: Sampling prepare_logits, Threads::Fixed(512), Shared::Fixed(16 * 8),
        [Pointer logits, Pointer adjustments, Pointer edits, Pointer status, U32 vocab];
    DrawTokens: Sampling draw_tokens, Threads::Fixed(512), Shared::Fixed((16 * 512 + 16 + 16) * 8),
        [Pointer logits, Pointer status, Pointer draws, Pointer drawn, U32 vocab];
    GatherRows: Logits gather_rows, Threads::Fixed(256), NONE, [Pointer x, Pointer rows, Pointer out, U32 columns];
    CapLogits: Logits cap_logits, Threads::Fixed(256), NONE, [Pointer logits, U64 count, F32 cap];
}

impl KernelId {
    /// The function's name in its file.
    pub fn entry(self) -> &'static str {
        self.facts().entry
    }

    pub fn threads(self, shape: AttentionShape) -> u32 {
        match self.facts().threads {
            Threads::Fixed(threads) => threads,
            Threads::HeadDim => shape.head_dim.values(),
        }
    }

    /// Dynamic shared memory of a block.
    pub fn shared_bytes(self, shape: AttentionShape) -> u32 {
        match self.facts().shared {
            Shared::Fixed(bytes) => bytes,
            Shared::ByHeadDim(bytes) => bytes * shape.head_dim.values(),
            Shared::Decode => 4 * shape.group * (shape.head_dim.values() + 2) * 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::attention_shape::{GROUP_MAX, HeadDim};

    /// The arguments of an entry in a source: name and kind.
    fn signature(text: &str, entry: &str) -> Vec<(ArgKind, String)> {
        let start = text
            .find(&format!(" {entry}("))
            .unwrap_or_else(|| panic!("no entry {entry}"));
        assert!(
            text[..start].trim_end().ends_with(')') && text[..start].rfind("KERNEL").is_some(),
            "{entry} is no kernel with launch bounds"
        );
        let list = &text[start + entry.len() + 2..];
        let list = &list[..list.find(')').unwrap()];
        let kind = |words: &[&str]| match words {
            words if words.iter().any(|word| word.contains('*')) => ArgKind::Pointer,
            ["u32", _] => ArgKind::U32,
            ["u64", _] => ArgKind::U64,
            ["float", _] => ArgKind::F32,
            other => panic!("{entry}: {other:?}"),
        };
        list.split(',')
            .map(|arg| {
                let words: Vec<&str> = arg.split_whitespace().collect();
                (kind(&words), words[words.len() - 1].trim_start_matches('*').to_owned())
            })
            .collect()
    }

    #[test]
    fn the_table_has_the_arguments_of_the_sources() {
        for id in KernelId::ALL {
            let facts = id.facts();
            let expected: Vec<(ArgKind, String)> =
                facts.args.iter().map(|arg| (arg.kind, arg.name.to_owned())).collect();
            assert_eq!(signature(facts.file.text(), facts.entry), expected, "{id:?}");
        }
    }

    #[test]
    fn every_entry_of_a_source_is_in_the_table() {
        for file in KernelFile::ALL {
            let entries = file.text().matches("KERNEL __launch_bounds__").count();
            let listed = KernelId::ALL.iter().filter(|id| id.facts().file == file).count();
            assert_eq!(entries, listed, "{}", file.name());
        }
    }

    #[test]
    fn shared_memory_fits_every_gpu_in_reach() {
        // The smallest of sm_80 to sm_120: 99 KiB for a block of sm_86, 89 and 120 (CUDA C++ programming guide, appendix on
        // compute capabilities).
        for head_dim in HeadDim::ALL {
            for group in 1..=GROUP_MAX {
                for id in KernelId::ALL {
                    assert!(
                        id.shared_bytes(AttentionShape { head_dim, group }) <= 99 << 10,
                        "{id:?}"
                    );
                }
            }
        }
    }
}
