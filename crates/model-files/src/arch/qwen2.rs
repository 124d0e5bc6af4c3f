//! Qwen2 and Qwen2.5: like Llama, with biases on q, k and v.

use super::{Architecture, LayerTensors, Linear, RopePairs, llama};

pub(super) const FACTS: Architecture = Architecture {
    name: "qwen2",
    // llama.cpp's converter leaves the rows of q and k as they are.
    rope: RopePairs::Halves,
    layer: LayerTensors {
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
        ..llama::FACTS.layer
    },
    ..llama::FACTS
};
