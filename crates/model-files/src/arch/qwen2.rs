//! Qwen2 and Qwen2.5: like Llama, with biases on q, k and v.

use super::{Architecture, LayerTensors, Linear, Projections, RopePairs, llama};

pub(super) const FACTS: Architecture = Architecture {
    name: "qwen2",
    folder_types: &["qwen2"],
    folder_defaults: &[("use_sliding_window", 0)],
    // llama.cpp's converter leaves the rows of q and k as they are.
    rope: RopePairs::Halves,
    layer: LayerTensors {
        projections: Projections::Separate {
            query: biased("attn_q.weight", "attn_q.bias"),
            key: biased("attn_k.weight", "attn_k.bias"),
            value: biased("attn_v.weight", "attn_v.bias"),
        },
        ..llama::FACTS.layer
    },
    ..llama::FACTS
};

const fn biased(weight: &'static str, bias: &'static str) -> Linear {
    Linear {
        weight,
        bias: Some(bias),
    }
}
