//! Qwen3: like Llama, with a norm over each head of q and k. Its heads have a size of their own.

use super::{Architecture, LayerTensors, RopePairs, llama};

pub(super) const FACTS: Architecture = Architecture {
    name: "qwen3",
    folder_types: &["qwen3"],
    folder_defaults: &[("use_sliding_window", 0)],
    // llama.cpp's converter leaves the rows of q and k as they are.
    rope: RopePairs::Halves,
    layer: LayerTensors {
        query_norm: Some("attn_q_norm.weight"),
        key_norm: Some("attn_k_norm.weight"),
        ..llama::FACTS.layer
    },
    folder_names: &[
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("attn_norm.weight", "input_layernorm.weight"),
        ("attn_q.weight", "self_attn.q_proj.weight"),
        ("attn_q_norm.weight", "self_attn.q_norm.weight"),
        ("attn_k.weight", "self_attn.k_proj.weight"),
        ("attn_k_norm.weight", "self_attn.k_norm.weight"),
        ("attn_v.weight", "self_attn.v_proj.weight"),
        ("attn_output.weight", "self_attn.o_proj.weight"),
        ("ffn_norm.weight", "post_attention_layernorm.weight"),
        ("ffn_gate.weight", "mlp.gate_proj.weight"),
        ("ffn_up.weight", "mlp.up_proj.weight"),
        ("ffn_down.weight", "mlp.down_proj.weight"),
    ],
    ..llama::FACTS
};
