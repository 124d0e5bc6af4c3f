//! Qwen2 and Qwen2.5: like Llama, with biases on q, k and v.

use super::{Architecture, LayerTensors, Linear, RopePairs};

pub(super) const FACTS: Architecture = Architecture {
    name: "qwen2",
    epsilon_key: "attention.layer_norm_rms_epsilon",
    // llama.cpp's converter leaves the rows of q and k as they are.
    rope: RopePairs::Halves,
    token_embedding: "token_embd.weight",
    output_norm: "output_norm.weight",
    output: "output.weight",
    layer: LayerTensors {
        attention_norm: "attn_norm.weight",
        query: Linear {
            weight: "attn_q.weight",
            bias: Some("attn_q.bias"),
        },
        key: Linear {
            weight: "attn_k.weight",
            bias: Some("attn_k.bias"),
        },
        value: Linear {
            weight: "attn_v.weight",
            bias: Some("attn_v.bias"),
        },
        attention_output: Linear {
            weight: "attn_output.weight",
            bias: None,
        },
        ffn_norm: "ffn_norm.weight",
        ffn_gate: "ffn_gate.weight",
        ffn_up: "ffn_up.weight",
        ffn_down: "ffn_down.weight",
    },
};
