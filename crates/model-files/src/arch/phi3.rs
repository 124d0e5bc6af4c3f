//! Phi-3 and Phi-4: like Llama, with one matrix for q, k and v and one for both halves of the gated unit.

use super::{Architecture, GateUp, LayerTensors, Projections, RopePairs, llama};

pub(super) const FACTS: Architecture = Architecture {
    name: "phi3",
    folder_types: &["phi3"],
    rope: RopePairs::Halves,
    layer: LayerTensors {
        projections: Projections::Fused("attn_qkv.weight"),
        gate_up: GateUp::Fused("ffn_up.weight"),
        ..llama::FACTS.layer
    },
    folder_names: &[
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("attn_norm.weight", "input_layernorm.weight"),
        ("attn_qkv.weight", "self_attn.qkv_proj.weight"),
        ("attn_output.weight", "self_attn.o_proj.weight"),
        ("ffn_norm.weight", "post_attention_layernorm.weight"),
        ("ffn_up.weight", "mlp.gate_up_proj.weight"),
        ("ffn_down.weight", "mlp.down_proj.weight"),
    ],
    ..llama::FACTS
};
