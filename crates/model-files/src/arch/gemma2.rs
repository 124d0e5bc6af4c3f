//! Gemma 2: norms after attention and after the feed-forward part, too, a GELU gate, capped scores and logits, and a window
//! in every other layer.

use super::{
    Activation, Architecture, EmbeddingScale, FolderNorms, LayerTensors, RopePairs, Unwritten, WindowLayers, llama,
};

pub(super) const FACTS: Architecture = Architecture {
    name: "gemma2",
    folder_types: &["gemma2"],
    folder_defaults: &[
        ("head_dim", 256),
        ("query_pre_attn_scalar", 256),
        ("sliding_window", 4096),
        ("attn_logit_softcapping", 50),
        ("final_logit_softcapping", 30),
    ],
    rope: RopePairs::Halves,
    activation: Activation::GeluTanh,
    embedding_scale: EmbeddingScale::SqrtHidden,
    folder_norms: FolderNorms::LessOne,
    window_layers: WindowLayers::AllBut { every: 2 },
    unwritten: Unwritten {
        window: Some(4096),
        window_rope_base: None,
        attention_softcap: Some(50.0),
        logit_softcap: Some(30.0),
        // Gemma 2 27B.
        layers_scaled_by_hidden: Some(46),
    },
    layer: LayerTensors {
        post_attention_norm: Some("post_attention_norm.weight"),
        post_ffn_norm: Some("post_ffw_norm.weight"),
        ..llama::FACTS.layer
    },
    folder_names: &[
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("attn_norm.weight", "input_layernorm.weight"),
        ("attn_q.weight", "self_attn.q_proj.weight"),
        ("attn_k.weight", "self_attn.k_proj.weight"),
        ("attn_v.weight", "self_attn.v_proj.weight"),
        ("attn_output.weight", "self_attn.o_proj.weight"),
        ("post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
        ("ffn_gate.weight", "mlp.gate_proj.weight"),
        ("ffn_up.weight", "mlp.up_proj.weight"),
        ("ffn_down.weight", "mlp.down_proj.weight"),
        ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ],
    ..llama::FACTS
};
