//! Llama, and the models that copy it: Llama 2 and 3, Mistral, SmolLM2.

use super::{
    Activation, Architecture, EmbeddingScale, FolderNorms, GateUp, LayerTensors, Linear, Projections, RopePairs,
    Unwritten, WindowLayers,
};

pub(super) const FACTS: Architecture = Architecture {
    name: "llama",
    folder_types: &["llama", "mistral"],
    folder_parts_of: &[],
    folder_defaults: &[],
    epsilon_key: "attention.layer_norm_rms_epsilon",
    // The original weights turn halves. llama.cpp's converter permutes the rows of q and k so that neighbours turn.
    rope: RopePairs::Neighbours,
    activation: Activation::Silu,
    embedding_scale: EmbeddingScale::One,
    folder_norms: FolderNorms::Whole,
    window_layers: WindowLayers::All,
    unwritten: Unwritten::NOTHING,
    token_embedding: "token_embd.weight",
    output_norm: "output_norm.weight",
    output: "output.weight",
    layer: LayerTensors {
        attention_norm: "attn_norm.weight",
        projections: Projections::Separate {
            query: plain("attn_q.weight"),
            key: plain("attn_k.weight"),
            value: plain("attn_v.weight"),
        },
        query_norm: None,
        key_norm: None,
        attention_output: plain("attn_output.weight"),
        post_attention_norm: None,
        ffn_norm: "ffn_norm.weight",
        gate_up: GateUp::Separate {
            gate: "ffn_gate.weight",
            up: "ffn_up.weight",
        },
        ffn_down: "ffn_down.weight",
        post_ffn_norm: None,
    },
    folder_names: &[
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("attn_norm.weight", "input_layernorm.weight"),
        ("attn_q.weight", "self_attn.q_proj.weight"),
        ("attn_q.bias", "self_attn.q_proj.bias"),
        ("attn_k.weight", "self_attn.k_proj.weight"),
        ("attn_k.bias", "self_attn.k_proj.bias"),
        ("attn_v.weight", "self_attn.v_proj.weight"),
        ("attn_v.bias", "self_attn.v_proj.bias"),
        ("attn_output.weight", "self_attn.o_proj.weight"),
        ("ffn_norm.weight", "post_attention_layernorm.weight"),
        ("ffn_gate.weight", "mlp.gate_proj.weight"),
        ("ffn_up.weight", "mlp.up_proj.weight"),
        ("ffn_down.weight", "mlp.down_proj.weight"),
    ],
};

/// A matrix without a bias.
pub(super) const fn plain(weight: &'static str) -> Linear {
    Linear { weight, bias: None }
}
