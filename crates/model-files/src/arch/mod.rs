//! Model architectures as facts: each family is one file of this folder and one line of [`SUPPORTED`].
//!
//! All families here share the rest: RMS norms before attention and before the feed-forward part, causal attention over
//! all positions, a SiLU-gated unit, heads of size hidden / heads, no RoPE scaling. A file that asks for anything else is
//! refused by [`crate::config`]. A family that needs it adds a fact here and the code that reads this fact.

mod llama;

/// Every architecture that this build runs.
pub const SUPPORTED: &[&Architecture] = &[&llama::FACTS];

/// What the loader and the forward pass must know about a family of models.
#[derive(Debug, PartialEq, Eq)]
pub struct Architecture {
    /// `general.architecture` of the file. GGUF puts it in front of the family's metadata keys, too.
    pub name: &'static str,
    /// The metadata key of the epsilon of RMS norms, without the name in front.
    pub epsilon_key: &'static str,
    pub rope: RopePairs,
    pub token_embedding: &'static str,
    pub output_norm: &'static str,
    /// A file without this tensor has a tied head: the embedding is the output matrix, too.
    pub output: &'static str,
    pub layer: LayerTensors,
}

/// Names of a layer's tensors, without `blk.N.` in front.
#[derive(Debug, PartialEq, Eq)]
pub struct LayerTensors {
    pub attention_norm: &'static str,
    pub query: Linear,
    pub key: Linear,
    pub value: Linear,
    pub attention_output: Linear,
    pub ffn_norm: &'static str,
    pub ffn_gate: &'static str,
    pub ffn_up: &'static str,
    pub ffn_down: &'static str,
}

/// A matrix, and the bias that is added to its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    pub weight: &'static str,
    pub bias: Option<&'static str>,
}

/// Which two numbers of a head RoPE turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// `(2i, 2i + 1)`: llama.cpp's "norm".
    Neighbours,
    /// `(i, i + head size / 2)`: llama.cpp's "neox".
    Halves,
}

impl Architecture {
    /// The architecture of a file by its name there.
    pub fn named(name: &str) -> Option<&'static Architecture> {
        SUPPORTED.iter().copied().find(|known| known.name == name)
    }

    /// The names of all architectures, for people.
    pub fn names() -> String {
        let names: Vec<&str> = SUPPORTED.iter().map(|known| known.name).collect();
        names.join(", ")
    }

    /// The full name of a metadata key.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }
}

/// The full name of a layer's tensor.
pub fn in_layer(layer: usize, tensor: &str) -> String {
    format!("blk.{layer}.{tensor}")
}
