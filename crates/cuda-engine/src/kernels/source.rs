//! The sources of the kernels, which are in the binary, and the units that are compiled from them.

use sha2::{Digest, Sha256};

use super::attention_shape::{AttentionShape, GROUP_MAX, HeadDim};

/// What the compiler is told besides the architecture. They are part of a compiled kernel's name in the cache. There is no
/// fast math: a kernel names its approximations itself.
pub(crate) const OPTIONS: [&str; 3] = ["--std=c++17", "-lineinfo", "--ptxas-options=-v"];

/// Headers, for every file.
pub(crate) const HEADERS: [(&str, &str); 3] = [
    ("primitives.cuh", include_str!("../../kernels/primitives.cuh")),
    ("paged.cuh", include_str!("../../kernels/paged.cuh")),
    ("gemm_tile.cuh", include_str!("../../kernels/gemm_tile.cuh")),
];

/// A source: one family of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KernelFile {
    Embedding,
    Norm,
    RopeWrite,
    PrefillAttention,
    DecodeAttention,
    Gemm,
    Gemv,
    Gate,
    Logits,
    Dequantise,
    Blocks,
    Sampling,
}

impl KernelFile {
    pub const ALL: [KernelFile; 12] = [
        KernelFile::Embedding,
        KernelFile::Norm,
        KernelFile::RopeWrite,
        KernelFile::PrefillAttention,
        KernelFile::DecodeAttention,
        KernelFile::Gemm,
        KernelFile::Gemv,
        KernelFile::Gate,
        KernelFile::Logits,
        KernelFile::Dequantise,
        KernelFile::Blocks,
        KernelFile::Sampling,
    ];

    fn parts(self) -> (&'static str, &'static str) {
        match self {
            KernelFile::Embedding => ("embedding.cu", include_str!("../../kernels/embedding.cu")),
            KernelFile::Norm => ("norm.cu", include_str!("../../kernels/norm.cu")),
            KernelFile::RopeWrite => ("rope_write.cu", include_str!("../../kernels/rope_write.cu")),
            KernelFile::PrefillAttention => (
                "prefill_attention.cu",
                include_str!("../../kernels/prefill_attention.cu"),
            ),
            KernelFile::DecodeAttention => ("decode_attention.cu", include_str!("../../kernels/decode_attention.cu")),
            KernelFile::Gemm => ("gemm.cu", include_str!("../../kernels/gemm.cu")),
            KernelFile::Gemv => ("gemv.cu", include_str!("../../kernels/gemv.cu")),
            KernelFile::Gate => ("gate.cu", include_str!("../../kernels/gate.cu")),
            KernelFile::Logits => ("logits.cu", include_str!("../../kernels/logits.cu")),
            KernelFile::Dequantise => ("dequantise.cu", include_str!("../../kernels/dequantise.cu")),
            KernelFile::Blocks => ("blocks.cu", include_str!("../../kernels/blocks.cu")),
            KernelFile::Sampling => ("sampling.cu", include_str!("../../kernels/sampling.cu")),
        }
    }

    /// The name of the file.
    pub fn name(self) -> &'static str {
        self.parts().0
    }

    pub(crate) fn text(self) -> &'static str {
        self.parts().1
    }
}

/// What is compiled at once: a file, and the numbers that it is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    pub(crate) file: KernelFile,
    pub(crate) head_dim: Option<HeadDim>,
    pub(crate) group: Option<u32>,
}

impl Unit {
    /// The unit of a file that serves a shape of attention.
    pub(crate) fn of(file: KernelFile, shape: AttentionShape) -> Self {
        let by_head = matches!(
            file,
            KernelFile::RopeWrite | KernelFile::PrefillAttention | KernelFile::DecodeAttention
        );
        Self {
            file,
            head_dim: by_head.then_some(shape.head_dim),
            group: (file == KernelFile::DecodeAttention).then_some(shape.group),
        }
    }

    /// Every unit, for `baton kernels build` and the check of resources.
    pub fn all() -> Vec<Unit> {
        let mut units = Vec::new();
        for file in KernelFile::ALL {
            for head_dim in HeadDim::ALL {
                units.extend((1..=GROUP_MAX).map(|group| Unit::of(file, AttentionShape { head_dim, group })));
            }
        }
        units.sort_unstable();
        units.dedup();
        units
    }

    /// Definitions for the compiler, as `NAME=VALUE`.
    pub(crate) fn defines(self) -> Vec<String> {
        let head_dim = self.head_dim.map(|head_dim| format!("HEAD_DIM={}", head_dim.values()));
        let group = self.group.map(|group| format!("GROUP={group}"));
        head_dim.into_iter().chain(group).collect()
    }
}

/// `decode_attention.cu[HEAD_DIM=64,GROUP=3]`.
impl std::fmt::Display for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.file.name())?;
        match self.defines() {
            defines if defines.is_empty() => Ok(()),
            defines => write!(f, "[{}]", defines.join(",")),
        }
    }
}

/// Identifies the sources and options: a verdict on the kernels of a GPU holds for these only.
pub fn sources_sha256() -> [u8; 32] {
    let mut hash = Sha256::new();
    let files = KernelFile::ALL.map(|file| (file.name(), file.text()));
    for (name, text) in HEADERS.iter().chain(&files) {
        hash_part(&mut hash, name);
        hash_part(&mut hash, text);
    }
    OPTIONS.iter().for_each(|option| hash_part(&mut hash, option));
    hash.finalize().into()
}

/// With its length, so that no two lists of parts give the same bytes.
pub(crate) fn hash_part(hash: &mut Sha256, part: &str) {
    hash.update((part.len() as u64).to_le_bytes());
    hash.update(part.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_listed_once() {
        let units = Unit::all();
        // Nine plain files, RoPE and prefill for two head sizes, decode for two head sizes and eight groups.
        assert_eq!(units.len(), 9 + 2 + 2 + 16);
        let decode = units.iter().find(|unit| unit.group == Some(3)).unwrap();
        assert_eq!(decode.to_string(), "decode_attention.cu[HEAD_DIM=64,GROUP=3]");
    }

    #[test]
    fn sources_use_no_features_beyond_the_baseline() {
        let files = KernelFile::ALL.map(|file| (file.name(), file.text()));
        for (name, text) in HEADERS.iter().chain(&files) {
            assert!(name.ends_with(".cu") || name.ends_with(".cuh"));
            // Comments may name what the code must not use.
            let code: Vec<&str> = text.lines().filter_map(|line| line.split("//").next()).collect();
            for banned in [
                "wgmma",
                "tcgen05",
                "mbarrier",
                "cp.async.bulk",
                "atomic",
                "atom.",
                "#include <",
            ] {
                assert!(!code.iter().any(|line| line.contains(banned)), "{name}: {banned}");
            }
            let has_instructions = code.iter().any(|line| line.contains("asm"));
            assert!(!has_instructions || *name == "primitives.cuh", "{name}");
        }
    }
}
