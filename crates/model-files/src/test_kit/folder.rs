//! Writes Hugging Face folders: the model of a GGUF file in its other form, and safetensors files, sound or broken.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::arch::{Activation, FolderNorms, RopePairs};
use crate::config::{ModelConfig, Rope, RopeScaling};
use crate::files::Files;
use crate::gguf::{GgmlType, GgufFile, dequantise_row};
use crate::model::Model;

/// A folder with the model of a GGUF file. Matrices of plain numbers keep their bytes; others become F32.
#[derive(Clone, Copy, Debug)]
pub struct TinyFolder<'a> {
    pub model: &'a Model,
    /// Into how many files the weights go. One has no index.
    pub shards: usize,
}

/// A tensor of a safetensors file: its name there, type, shape (rows first) and bytes.
pub(crate) type Stored = (String, &'static str, Vec<u64>, Vec<u8>);

impl TinyFolder<'_> {
    /// Writes the folder, which must exist.
    ///
    /// # Panics
    /// When a file cannot be written, or when the model is not one of a GGUF file.
    pub fn write(&self, folder: &Path) {
        let Files::Gguf(file) = self.model.files() else {
            panic!("a model of a GGUF file")
        };
        let write = |name: &str, bytes: Vec<u8>| {
            let path: PathBuf = folder.join(name);
            std::fs::write(&path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        };
        let tensors: Vec<Stored> = file
            .tensor_names()
            .filter_map(|name| stored(self.model, file, name))
            .collect();
        write("config.json", pretty(&config_json(self.model.config())));
        write("tokenizer.json", pretty(&tokenizer_json(file)));
        write("tokenizer_config.json", pretty(&tokenizer_config_json(file)));
        if self.shards == 1 {
            write("model.safetensors", safetensors(&tensors));
            return;
        }
        let mut weight_map = Map::new();
        for (index, part) in tensors.chunks(tensors.len().div_ceil(self.shards)).enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", index + 1, self.shards);
            for (tensor, ..) in part {
                weight_map.insert(tensor.clone(), name.clone().into());
            }
            write(&name, safetensors(part));
        }
        let index = json!({ "metadata": {}, "weight_map": weight_map });
        write("model.safetensors.index.json", pretty(&index));
    }
}

/// The bytes of a safetensors file with these tensors, one after the other.
pub(crate) fn safetensors(tensors: &[Stored]) -> Vec<u8> {
    let mut header = Map::new();
    let mut end = 0;
    for (name, dtype, shape, bytes) in tensors {
        let start = end;
        end += bytes.len();
        header.insert(
            name.clone(),
            json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] }),
        );
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // Writers fill up with spaces so that the numbers are aligned.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header);
    tensors.iter().for_each(|(.., bytes)| out.extend(bytes));
    out
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}").into_bytes()
}

/// The tensor as a folder has it. `None`: folders keep such numbers in config.json.
fn stored(model: &Model, file: &GgufFile, name: &str) -> Option<Stored> {
    let config = model.config();
    let tensor = file.tensor(name).ok()?;
    let (layer, own) = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, own)) => (Some(layer), own),
        None => (None, name),
    };
    let pairs = config.architecture.folder_names;
    let (_, folder_name) = pairs.iter().find(|(gguf, _)| *gguf == own)?;
    let folder_name = match layer {
        Some(layer) => format!("model.layers.{layer}.{folder_name}"),
        None => (*folder_name).to_owned(),
    };
    let shape: Vec<u64> = tensor.dims.iter().copied().rev().collect();
    let is_plain = tensor.kind.block_elements() == 1;
    let (dtype, mut rows): (_, Vec<Vec<u8>>) = if is_plain {
        let row_bytes = tensor.bytes.len() / tensor.rows();
        (
            tensor.kind.name(),
            tensor.bytes.chunks(row_bytes).map(<[u8]>::to_vec).collect(),
        )
    } else {
        let row = |row| {
            let mut values = vec![0.0; tensor.row_elements()];
            dequantise_row(&tensor, row, &mut values);
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        };
        (GgmlType::F32.name(), (0..tensor.rows()).map(row).collect())
    };
    let is_turned = ["attn_q.weight", "attn_k.weight"].contains(&own);
    if is_turned && config.architecture.rope == RopePairs::Neighbours {
        rows = halves(&rows, config.head_dim);
    }
    if config.architecture.folder_norms == FolderNorms::LessOne && own.ends_with("norm.weight") {
        let less_one = |value: &[u8; 4]| (f32::from_le_bytes(*value) - 1.0).to_le_bytes();
        for row in &mut rows {
            *row = row.as_chunks::<4>().0.iter().flat_map(less_one).collect();
        }
    }
    Some((folder_name, dtype, shape, rows.concat()))
}

/// Rows of neighbouring pairs as rows of halves: what llama.cpp's converter does to q and k, undone.
fn halves(rows: &[Vec<u8>], head_dim: usize) -> Vec<Vec<u8>> {
    let of_head = |head: &[Vec<u8>]| {
        let firsts = head.iter().step_by(2);
        let seconds = head.iter().skip(1).step_by(2);
        firsts.chain(seconds).cloned().collect::<Vec<_>>()
    };
    rows.chunks(head_dim).flat_map(of_head).collect()
}

fn config_json(config: &ModelConfig) -> Value {
    let facts = config.architecture;
    let activation = match facts.activation {
        Activation::Silu => "silu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
    };
    let window_of = |layer| match config.window_of(layer) {
        Some(_) => "sliding_attention",
        None => "full_attention",
    };
    let mut out = json!({
        "model_type": facts.folder_types[0],
        "num_hidden_layers": config.layer_count,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.head_count,
        "num_key_value_heads": config.kv_head_count,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_epsilon,
        "hidden_act": activation,
        "tie_word_embeddings": config.tied_embeddings,
        "query_pre_attn_scalar": (1.0 / config.attention_scale.powi(2)).round(),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.window.map(|window| window.tokens),
        "use_sliding_window": config.window.is_some(),
        "layer_types": (0..config.layer_count).map(window_of).collect::<Vec<_>>(),
    });
    out["rope_parameters"] = match &config.window_rope {
        None => rope_json(&config.rope, config),
        Some(rope) => json!({
            "full_attention": rope_json(&config.rope, config),
            "sliding_attention": rope_json(rope, config),
        }),
    };
    out
}

fn rope_json(rope: &Rope, config: &ModelConfig) -> Value {
    let mut out = match &rope.scaling {
        RopeScaling::None => json!({ "rope_type": "default" }),
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_context,
        }),
        RopeScaling::Factors { factors, magnitude } => json!({
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": magnitude,
        }),
    };
    out["rope_theta"] = rope.base.into();
    out["partial_rotary_factor"] = (rope.dims as f64 / config.head_dim as f64).into();
    out
}

/// The byte-level tokenizer of [`super::TinyModel`].
fn tokenizer_json(file: &GgufFile) -> Value {
    let tokens = file.str_array("tokenizer.ggml.tokens").unwrap_or_default();
    let kinds = file.i32_array("tokenizer.ggml.token_type").unwrap_or_default();
    let control = |id: &usize| kinds.get(*id) == Some(&3);
    let added = (0..tokens.len()).filter(control).map(|id| {
        json!({
            "id": id, "content": tokens[id], "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        })
    });
    let vocab: Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| ((*token).to_owned(), id.into()))
        .collect();
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{ "type": "Digits", "individual_digits": true }, byte_level],
        },
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}

fn tokenizer_config_json(file: &GgufFile) -> Value {
    let tokens = file.str_array("tokenizer.ggml.tokens").unwrap_or_default();
    let token = |key| file.u32(key).ok().and_then(|id| tokens.get(id as usize).copied());
    json!({
        "bos_token": token("tokenizer.ggml.bos_token_id"),
        "eos_token": token("tokenizer.ggml.eos_token_id"),
        "add_bos_token": file.bool("tokenizer.ggml.add_bos_token").unwrap_or(false),
        "chat_template": file.str("tokenizer.chat_template").ok(),
    })
}
