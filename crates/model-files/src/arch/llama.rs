//! Llama, and the models that copy it: Llama 2 and 3, Mistral, SmolLM2.

use super::{Architecture, LayerTensors, Linear, RopePairs};

pub(super) const FACTS: Architecture = Architecture {
    name: "llama",
    epsilon_key: "attention.layer_norm_rms_epsilon",
    // The original weights turn halves. llama.cpp's converter permutes the rows of q and k so that neighbours turn.
    rope: RopePairs::Neighbours,
    token_embedding: "token_embd.weight",
    output_norm: "output_norm.weight",
    output: "output.weight",
    layer: LayerTensors {
        attention_norm: "attn_norm.weight",
        query: Linear {
            weight: "attn_q.weight",
            bias: None,
        },
        key: Linear {
            weight: "attn_k.weight",
            bias: None,
        },
        value: Linear {
            weight: "attn_v.weight",
            bias: None,
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
