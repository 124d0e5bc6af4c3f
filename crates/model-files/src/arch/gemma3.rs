//! Gemma 3 (text): like Gemma 2, with norms over the heads of q and k instead of caps, and a window in five of six layers,
//! whose RoPE has a base of its own.

use super::{Architecture, LayerTensors, Unwritten, WindowLayers, gemma2};

pub(super) const FACTS: Architecture = Architecture {
    name: "gemma3",
    folder_types: &["gemma3_text"],
    folder_parts_of: &["gemma3"],
    // The published models that read images leave out most of their text_config.
    folder_defaults: &[
        ("vocab_size", 262_208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("max_position_embeddings", 131_072),
        ("query_pre_attn_scalar", 256),
        ("sliding_window", 4096),
        ("rope_theta", 1_000_000),
        ("rope_local_base_freq", 10_000),
    ],
    window_layers: WindowLayers::AllBut { every: 6 },
    unwritten: Unwritten {
        window: None,
        window_rope_base: Some(10_000.0),
        attention_softcap: None,
        logit_softcap: None,
        // Gemma 3 27B.
        layers_scaled_by_hidden: Some(62),
    },
    layer: LayerTensors {
        query_norm: Some("attn_q_norm.weight"),
        key_norm: Some("attn_k_norm.weight"),
        ..gemma2::FACTS.layer
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
        ("post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
        ("ffn_gate.weight", "mlp.gate_proj.weight"),
        ("ffn_up.weight", "mlp.up_proj.weight"),
        ("ffn_down.weight", "mlp.down_proj.weight"),
        ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ],
    ..gemma2::FACTS
};
