//! Builders of small GGUF files, sound or broken, and the path of the real model; for tests only.

mod folder;
mod golden_models;
mod random;

use std::path::{Path, PathBuf};

use crate::arch::{Architecture, GateUp, Linear, Projections, SUPPORTED, in_layer};
use crate::gguf::{DEFAULT_ALIGNMENT, GgmlType, MAGIC, MetadataValue};
use crate::tokenizer::char_of_byte;

pub use folder::TinyFolder;
#[cfg(test)]
pub(crate) use folder::{Stored, safetensors};
pub use golden_models::{GoldenModel, golden_models};
pub use random::random_weights_of;
use random::{SplitMix, random_weights};

/// Where the real model is: `$BATON_TEST_MODEL`, else the cache that `baton model pull` fills.
///
/// # Panics
/// When the file is absent: a test that needs the model must fail, not pass without having run.
pub fn model_path() -> PathBuf {
    const IN_CACHE: &str = "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf";
    let from_env = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let cache = from_env("BATON_CACHE_DIR")
        .or_else(|| Some(from_env("XDG_CACHE_HOME")?.join("baton")))
        .or_else(|| Some(from_env("HOME")?.join(".cache/baton")));
    let path = from_env("BATON_TEST_MODEL").or_else(|| Some(cache?.join(IN_CACHE)));
    match path {
        Some(path) if path.is_file() => path,
        other => panic!(
            "the test model is not at {other:?}: run scripts/test, or `baton model pull smollm2-135m`, or set \
             BATON_TEST_MODEL to the GGUF file"
        ),
    }
}

/// Folder of the golden prompts, outputs and prose, inside this repository.
#[cfg(test)]
pub(crate) fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/data/golden")
}

/// The golden cases, one JSON object each; the fields are described in the folder's README.
///
/// # Panics
/// When the file is absent or is not what it was.
#[cfg(test)]
pub(crate) fn golden_cases() -> Vec<serde_json::Value> {
    let path = golden_folder().join("smollm2-135m-q4_1.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(parse).collect()
}

/// One tensor of a [`GgufBuilder`]. `offset` is chosen by the builder unless a test wants a wrong one.
#[derive(Clone, Debug)]
pub struct BuiltTensor {
    pub name: String,
    /// Type number as in the file; see `GgmlType::id`.
    pub type_id: u32,
    pub dims: Vec<u64>,
    pub bytes: Vec<u8>,
    pub offset: Option<u64>,
}

/// Writes GGUF files byte by byte. It checks nothing, because its purpose is broken files.
#[derive(Clone, Debug)]
pub struct GgufBuilder {
    pub version: u32,
    pub metadata: Vec<(String, MetadataValue)>,
    pub tensors: Vec<BuiltTensor>,
    /// Written instead of the true counts when given.
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    pub alignment: u64,
}

impl Default for GgufBuilder {
    fn default() -> Self {
        let (metadata, tensors) = (Vec::new(), Vec::new());
        GgufBuilder {
            version: 3,
            metadata,
            tensors,
            tensor_count: None,
            key_count: None,
            alignment: DEFAULT_ALIGNMENT,
        }
    }
}

impl GgufBuilder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key, or replaces its value when it is already there.
    pub fn metadata(mut self, key: &str, value: MetadataValue) -> Self {
        match self.metadata.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
        self
    }

    #[cfg(test)]
    pub(crate) fn without_metadata(mut self, key: &str) -> Self {
        self.metadata.retain(|(known, _)| known != key);
        self
    }

    /// Adds a tensor, or replaces the one of the same name.
    pub fn tensor(mut self, name: &str, kind: GgmlType, dims: (&[u64], Vec<u8>)) -> Self {
        let (dims, bytes) = (dims.0.to_vec(), dims.1);
        let tensor = BuiltTensor {
            name: name.to_owned(),
            type_id: kind.id(),
            dims,
            bytes,
            offset: None,
        };
        match self.tensors.iter_mut().find(|known| known.name == name) {
            Some(old) => *old = tensor,
            None => self.tensors.push(tensor),
        }
        self
    }

    #[cfg(test)]
    pub(crate) fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// The file's bytes.
    pub fn build(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut out, key);
            out.extend(value_type(value).to_le_bytes());
            put_value(&mut out, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            put_string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(offset).to_le_bytes());
            offset = (offset + tensor.bytes.len() as u64).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            out.resize((out.len() as u64).next_multiple_of(self.alignment) as usize, 0);
            out.extend(&tensor.bytes);
        }
        out
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Those of `std::fs::write`.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.build())
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn value_type(value: &MetadataValue) -> u32 {
    match value {
        MetadataValue::U8(_) => 0,
        MetadataValue::I8(_) => 1,
        MetadataValue::U16(_) => 2,
        MetadataValue::I16(_) => 3,
        MetadataValue::U32(_) => 4,
        MetadataValue::I32(_) => 5,
        MetadataValue::F32(_) => 6,
        MetadataValue::Bool(_) => 7,
        MetadataValue::String(_) => 8,
        MetadataValue::Array(_) => 9,
        MetadataValue::U64(_) => 10,
        MetadataValue::I64(_) => 11,
        MetadataValue::F64(_) => 12,
    }
}

fn put_value(out: &mut Vec<u8>, value: &MetadataValue) {
    match value {
        MetadataValue::U8(v) => out.extend(v.to_le_bytes()),
        MetadataValue::I8(v) => out.extend(v.to_le_bytes()),
        MetadataValue::U16(v) => out.extend(v.to_le_bytes()),
        MetadataValue::I16(v) => out.extend(v.to_le_bytes()),
        MetadataValue::U32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::I32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::F32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::Bool(v) => out.push(u8::from(*v)),
        MetadataValue::String(v) => put_string(out, v),
        MetadataValue::U64(v) => out.extend(v.to_le_bytes()),
        MetadataValue::I64(v) => out.extend(v.to_le_bytes()),
        MetadataValue::F64(v) => out.extend(v.to_le_bytes()),
        MetadataValue::Array(values) => {
            // An empty array is written as one of u8: its element type does not matter.
            out.extend(values.first().map_or(0, value_type).to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put_value(out, value));
        }
    }
}

/// Dimensions of a tiny model with random weights; the default takes well under 1 MB.
#[derive(Clone, Debug)]
pub struct TinyModel {
    pub architecture: &'static Architecture,
    pub seed: u64,
    pub layer_count: usize,
    /// `None`: `head_count * head_dim`.
    pub hidden_size: Option<usize>,
    pub head_count: usize,
    pub kv_head_count: usize,
    pub head_dim: usize,
    pub ffn_size: usize,
    pub context_length: usize,
    /// Type of every matrix; norms are F32 always.
    pub matrix_kind: GgmlType,
    /// Types of the matrices whose names end like this, instead of `matrix_kind`.
    pub other_kinds: &'static [(&'static str, GgmlType)],
    pub tied_embeddings: bool,
    /// About what weights of the norms before attention and before the head are. A larger gain makes attention and the
    /// distribution of the next token less even.
    pub gain: f32,
}

impl Default for TinyModel {
    fn default() -> Self {
        TinyModel {
            architecture: SUPPORTED[0],
            seed: 1,
            layer_count: 2,
            hidden_size: None,
            head_count: 4,
            kv_head_count: 2,
            head_dim: 16,
            ffn_size: 128,
            context_length: 256,
            matrix_kind: GgmlType::Q8_0,
            other_kinds: &[],
            tied_embeddings: true,
            gain: 1.0,
        }
    }
}

/// Vocabulary of [`TinyModel`]: three special tokens, then the 256 byte tokens.
pub const TINY_VOCAB_SIZE: usize = 3 + 256;

impl TinyModel {
    fn hidden(&self) -> usize {
        self.hidden_size.unwrap_or(self.head_count * self.head_dim)
    }

    /// A complete model of random weights: config, byte-level tokenizer, chat template and all tensors.
    pub fn build(&self) -> GgufBuilder {
        let mut parts = Parts {
            file: self.metadata(),
            model: self,
            matrices: SplitMix(self.seed),
            // A stream of its own, so that the matrices of a seed do not depend on which vectors there are.
            vectors: SplitMix(!self.seed),
        };
        let (facts, hidden) = (self.architecture, self.hidden());
        parts.matrix(facts.token_embedding, (hidden, TINY_VOCAB_SIZE));
        parts.vector(facts.output_norm, (self.gain, hidden));
        if !self.tied_embeddings {
            parts.matrix(facts.output, (hidden, TINY_VOCAB_SIZE));
        }
        (0..self.layer_count).for_each(|layer| parts.layer(layer));
        parts.file
    }

    fn metadata(&self) -> GgufBuilder {
        let key = |key| self.architecture.key(key);
        let number = |value: usize| MetadataValue::U32(value as u32);
        let text = |value: &str| MetadataValue::String(value.to_owned());
        let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
        let bytes = (0..=255u8).map(|byte| char_of_byte(byte).to_string());
        let tokens: Vec<String> = specials.iter().map(|&token| token.to_owned()).chain(bytes).collect();
        let kinds = (0..tokens.len())
            .map(|id| MetadataValue::I32(if id < specials.len() { 3 } else { 1 }))
            .collect();
        let template = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
                        message['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}\
                        {{ '<|im_start|>assistant\n' }}{% endif %}";
        let file = match self.hidden_size {
            None => GgufBuilder::new(),
            Some(_) => GgufBuilder::new()
                .metadata(&key("attention.key_length"), number(self.head_dim))
                .metadata(&key("attention.value_length"), number(self.head_dim)),
        };
        file.metadata("general.architecture", text(self.architecture.name))
            .metadata("general.name", text("tiny random model"))
            .metadata(&key("block_count"), number(self.layer_count))
            .metadata(&key("context_length"), number(self.context_length))
            .metadata(&key("embedding_length"), number(self.hidden()))
            .metadata(&key("feed_forward_length"), number(self.ffn_size))
            .metadata(&key("attention.head_count"), number(self.head_count))
            .metadata(&key("attention.head_count_kv"), number(self.kv_head_count))
            .metadata(&key("rope.freq_base"), MetadataValue::F32(10_000.0))
            .metadata(&key("rope.dimension_count"), number(self.head_dim))
            .metadata(&key(self.architecture.epsilon_key), MetadataValue::F32(1e-5))
            .metadata(&key("vocab_size"), number(TINY_VOCAB_SIZE))
            .metadata("tokenizer.ggml.model", text("gpt2"))
            .metadata("tokenizer.ggml.pre", text("smollm"))
            .metadata(
                "tokenizer.ggml.tokens",
                MetadataValue::Array(tokens.into_iter().map(MetadataValue::String).collect()),
            )
            .metadata("tokenizer.ggml.token_type", MetadataValue::Array(kinds))
            .metadata("tokenizer.ggml.merges", MetadataValue::Array(Vec::new()))
            .metadata("tokenizer.ggml.bos_token_id", MetadataValue::U32(1))
            .metadata("tokenizer.ggml.eos_token_id", MetadataValue::U32(2))
            .metadata("tokenizer.ggml.add_bos_token", MetadataValue::Bool(false))
            .metadata("tokenizer.chat_template", text(template))
    }
}

/// A tiny model on its way.
struct Parts<'a> {
    file: GgufBuilder,
    model: &'a TinyModel,
    matrices: SplitMix,
    vectors: SplitMix,
}

impl Parts<'_> {
    fn add(&mut self, name: &str, kind: GgmlType, content: (&[u64], Vec<u8>)) {
        self.file = std::mem::take(&mut self.file).tensor(name, kind, content);
    }

    fn matrix(&mut self, name: &str, (columns, rows): (usize, usize)) {
        let other = self.model.other_kinds.iter().find(|(end, _)| name.ends_with(end));
        let kind = other.map_or(self.model.matrix_kind, |(_, kind)| *kind);
        let bytes = random_weights(&mut self.matrices, kind, columns * rows);
        self.add(name, kind, (&[columns as u64, rows as u64], bytes));
    }

    /// Values of about `centre`.
    fn vector(&mut self, name: &str, (centre, length): (f32, usize)) {
        let noise = random_weights(&mut self.vectors, GgmlType::F32, length);
        let shifted = |noise: &[u8; 4]| (centre + f32::from_le_bytes(*noise)).to_le_bytes();
        let values = noise.as_chunks::<4>().0.iter().flat_map(shifted).collect();
        self.add(name, GgmlType::F32, (&[length as u64], values));
    }

    fn linear(&mut self, layer: usize, linear: Linear, (columns, rows): (usize, usize)) {
        if let Some(bias) = linear.bias {
            self.vector(&in_layer(layer, bias), (0.0, rows));
        }
        self.matrix(&in_layer(layer, linear.weight), (columns, rows));
    }

    fn layer(&mut self, layer: usize) {
        let (model, tensors) = (self.model, &self.model.architecture.layer);
        let (hidden, ffn, head_dim) = (model.hidden(), model.ffn_size, model.head_dim);
        let (query, kv) = (model.head_count * head_dim, model.kv_head_count * head_dim);
        let name = |tensor| in_layer(layer, tensor);
        match tensors.projections {
            Projections::Separate { query: q, key, value } => {
                self.linear(layer, q, (hidden, query));
                self.linear(layer, key, (hidden, kv));
                self.linear(layer, value, (hidden, kv));
            }
            Projections::Fused(all) => self.matrix(&name(all), (hidden, query + 2 * kv)),
        }
        self.linear(layer, tensors.attention_output, (query, hidden));
        self.vector(&name(tensors.attention_norm), (model.gain, hidden));
        self.vector(&name(tensors.ffn_norm), (1.0, hidden));
        match tensors.gate_up {
            GateUp::Separate { gate, up } => {
                self.matrix(&name(gate), (hidden, ffn));
                self.matrix(&name(up), (hidden, ffn));
            }
            GateUp::Fused(both) => self.matrix(&name(both), (hidden, 2 * ffn)),
        }
        self.matrix(&name(tensors.ffn_down), (ffn, hidden));
        for norm in [tensors.query_norm, tensors.key_norm].into_iter().flatten() {
            self.vector(&name(norm), (1.0, head_dim));
        }
        for norm in [tensors.post_attention_norm, tensors.post_ffn_norm]
            .into_iter()
            .flatten()
        {
            self.vector(&name(norm), (1.0, hidden));
        }
    }
}
