//! What each kernel computes, in plain f64 on the host. Inputs are the values that the kernel is given, already rounded to
//! bf16 where it reads bf16. Results are not rounded: the limits of the checks allow for that.
//!
//! Four definitions are not repeated here, because the host has them: the types of weights (`model_files::gguf`), the hash of a
//! block (`engine::KvMemory`), the draw of a token (`engine::Sampler`), and copies.

use super::calls::{GateFunction, RopePairs};

pub(crate) fn rms_norm(x: &[f64], weight: &[f64], epsilon: f64) -> Vec<f64> {
    let mean = x.iter().map(|value| value * value).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + epsilon).sqrt();
    x.iter()
        .zip(weight)
        .map(|(value, weight)| value * scale * weight)
        .collect()
}

pub(crate) fn gate(function: GateFunction, gate: f64, up: f64) -> f64 {
    let exponent = match function {
        GateFunction::Silu => gate,
        GateFunction::GeluTanh => {
            let inner = gate + 0.044715 * gate * gate * gate;
            2.0 * (2.0 / std::f64::consts::PI).sqrt() * inner
        }
    };
    gate / (1.0 + (-exponent).exp()) * up
}

pub(crate) fn capped(x: f64, cap: f64) -> f64 {
    cap * (x / cap).tanh()
}

/// Turns the first `2 * turns.len()` values of a head; each turn is a cosine and a sine.
pub(crate) fn turn(head: &mut [f64], turns: &[(f64, f64)], kind: RopePairs) {
    for (pair, (cosine, sine)) in turns.iter().enumerate() {
        let (first, second) = match kind {
            RopePairs::Neighbours => (2 * pair, 2 * pair + 1),
            RopePairs::Halves => (pair, pair + turns.len()),
        };
        let (a, b) = (head[first], head[second]);
        head[first] = a * cosine - b * sine;
        head[second] = a * sine + b * cosine;
    }
}

/// How scores are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scores {
    pub scale: f64,
    pub softcap: Option<f64>,
    pub window: Option<u32>,
}

/// One query against the keys and values of positions 0 to its own.
pub(crate) fn attend(query: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>], scores: Scores) -> Vec<f64> {
    let hidden = scores
        .window
        .map_or(0, |window| keys.len().saturating_sub(window as usize));
    let score = |key: &Vec<f64>| {
        let score = dot(query, key) * scores.scale;
        scores.softcap.map_or(score, |cap| capped(score, cap))
    };
    let seen: Vec<f64> = keys[hidden..].iter().map(score).collect();
    let largest = seen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = seen.iter().map(|score| (score - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; query.len()];
    for (weight, value) in weights.iter().zip(&values[hidden..]) {
        for (out, value) in out.iter_mut().zip(value) {
            *out += weight * value / sum;
        }
    }
    out
}

pub(crate) fn dot(x: &[f64], w: &[f64]) -> f64 {
    x.iter().zip(w).map(|(x, w)| x * w).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_over_one_key_is_its_value() {
        let scores = Scores {
            scale: 1.0,
            softcap: Some(50.0),
            window: None,
        };
        let (keys, values) = (vec![vec![200.0, 0.0]], vec![vec![3.0, 4.0]]);
        assert_eq!(attend(&[1.0, 1.0], &keys, &values, scores), [3.0, 4.0]);
    }

    #[test]
    fn a_window_hides_what_is_before_it() {
        let scores = Scores {
            scale: 1.0,
            softcap: None,
            window: Some(1),
        };
        let (keys, values) = (vec![vec![9.0], vec![1.0]], vec![vec![5.0], vec![6.0]]);
        assert_eq!(attend(&[1.0], &keys, &values, scores), [6.0]);
    }

    #[test]
    fn the_gates_are_the_published_functions() {
        assert!((gate(GateFunction::Silu, 1.0, 2.0) - 2.0 * 0.731_058_578_6).abs() < 1e-9);
        // GELU in its tanh form at 1 is 0.841192.
        assert!((gate(GateFunction::GeluTanh, 1.0, 1.0) - 0.841_192).abs() < 1e-6);
    }
}
