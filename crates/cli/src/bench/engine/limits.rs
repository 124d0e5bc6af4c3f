//! The least time that a step can take on a machine: a roofline (Williams, Waterman, Patterson: "Roofline", CACM 52(4), 2009). Either
//! the arithmetic takes longer or the reading of weights and KV, and the other one could run beside it.

use engine::Numerics;
use model_files::config::ModelConfig;
use serde::Serialize;
use simulator::costs::StepShape;

/// What a machine did a second while it did nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Peaks {
    pub int8_ops_per_second: f64,
    pub f32_ops_per_second: f64,
    /// Of a range as large as the packed weights.
    pub read_bytes_per_second: f64,
}

/// What a token of a model costs. A window of attention is not counted: for a context beyond it the limit is too low.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ModelCosts {
    /// Weights of the layers' matrices. Each is multiplied once for a token.
    layer_weights: f64,
    /// Of the output matrix, for a token that is drawn.
    head_weights: f64,
    /// Operations for a token and one position that it attends to: two products of a head's size, for each query head and layer.
    attention_ops: f64,
    /// Of all packed weights.
    weight_bytes: f64,
    kv_bytes_per_token: f64,
    /// Weights are multiplied as 8-bit integers, else in f32.
    is_int8: bool,
}

impl ModelCosts {
    pub fn new(config: &ModelConfig, numerics: Numerics, weight_bytes: u64, kv_bytes_per_token: u64) -> Self {
        let product = |a: usize, b: usize| a as f64 * b as f64;
        let queries = config.head_count * config.head_dim;
        let keys = config.kv_head_count * config.head_dim;
        let layer =
            product(config.hidden_size, 2 * queries + 2 * keys) + 3.0 * product(config.hidden_size, config.ffn_size);
        Self {
            layer_weights: config.layer_count as f64 * layer,
            head_weights: product(config.hidden_size, config.vocab_size),
            attention_ops: 4.0 * product(config.layer_count, queries),
            weight_bytes: weight_bytes as f64,
            kv_bytes_per_token: kv_bytes_per_token as f64,
            is_int8: numerics == Numerics::Int8Blocks,
        }
    }

    /// Seconds.
    pub fn least(&self, shape: &StepShape, peaks: &Peaks) -> f64 {
        let tokens = (shape.prefill_tokens + shape.decode_rows) as f64;
        let products = 2.0 * (tokens * self.layer_weights + shape.draws as f64 * self.head_weights);
        let attention = (shape.prefill_pairs + shape.decode_context) as f64 * self.attention_ops;
        let of_products = match self.is_int8 {
            true => peaks.int8_ops_per_second,
            false => peaks.f32_ops_per_second,
        };
        let arithmetic = products / of_products + attention / peaks.f32_ops_per_second;
        // A chunk's positions read the KV before them together, so that only decoding sequences count.
        let bytes = self.weight_bytes + shape.decode_context as f64 * self.kv_bytes_per_token;
        arithmetic.max(bytes / peaks.read_bytes_per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SmolLM2-135M, and round figures of a machine like that of docs/measurements/engine-speed.md.
    const COSTS: ModelCosts = ModelCosts {
        layer_weights: 106e6,
        head_weights: 28e6,
        attention_ops: 4.0 * 30.0 * 576.0,
        weight_bytes: 98e6,
        kv_bytes_per_token: 23_040.0,
        is_int8: true,
    };
    const PEAKS: Peaks = Peaks {
        int8_ops_per_second: 1_425e9,
        f32_ops_per_second: 364e9,
        read_bytes_per_second: 52e9,
    };

    fn least(rows: &[(u32, u32)]) -> f64 {
        let mut shape = StepShape::default();
        for (tokens, before) in rows {
            shape.add(*tokens, *before, 1);
        }
        COSTS.least(&shape, &PEAKS)
    }

    #[test]
    fn a_prompt_is_bound_by_arithmetic_and_one_stream_by_reading() {
        // 512 tokens: 108.5 Gop of products and 9.1 of attention.
        assert!((least(&[(512, 0)]) - 0.101_2).abs() < 0.000_2, "{}", least(&[(512, 0)]));
        // 98 MB of weights, and of KV 11.8 MB.
        assert!((least(&[(1, 511)]) - 0.002_111).abs() < 0.000_01);
        // The weights are read once for eight streams.
        assert!(least(&[(1, 127); 8]) < 2.0 * least(&[(1, 127)]));
    }

    #[test]
    fn exact_arithmetic_has_the_peak_of_f32() {
        let exact = ModelCosts {
            is_int8: false,
            ..COSTS
        };
        let mut shape = StepShape::default();
        shape.add(512, 0, 1);
        assert!(exact.least(&shape, &PEAKS) > 3.0 * COSTS.least(&shape, &PEAKS));
    }
}
