//! Whether the tokens of a GPU are those of exact numbers, as far as bf16 allows. Pure.

use serving_core::ids::TokenId;

use super::tokens::Forced;
use crate::doctor::step::Check;

/// Ten times what bf16 left with a real model on the false driver (docs/measurements/engine-accuracy.md, "The GPU engine"). A wrong
/// kernel leaves differences far above.
const MEDIAN_MAX: f64 = 0.05;
/// The limits of the golden outputs for bf16 (integration-tests/src/goldens.rs).
const LARGEST_MAX: f64 = 0.25;
/// Another token may be the best one only where the reference's best two are so near.
const MARGIN_MAX: f64 = 0.1;

/// The greedy tokens of exact numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Reference {
    pub outputs: Vec<TokenId>,
    pub logprobs: Vec<f64>,
    /// Of each step: the log-probability of the best token less that of the second.
    pub margins: Vec<f64>,
}

/// What a comparison of all prompts found.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Judged {
    differences: Vec<f64>,
    /// Margins of the steps whose best token is another one.
    flips: Vec<f64>,
    /// Free running: tokens before the first that differs, of all; and the margin of each step that left the reference.
    equal: usize,
    tokens: usize,
    left: Vec<f64>,
}

impl Judged {
    /// All have one value for each output of the reference.
    pub fn add(&mut self, reference: &Reference, forced: &Forced, free: &[TokenId]) {
        let differences = forced.logprobs.iter().zip(&reference.logprobs);
        self.differences
            .extend(differences.map(|(got, want)| (got - want).abs()));
        let steps = forced.best.iter().zip(&reference.outputs).zip(&reference.margins);
        let flips = steps.filter(|((best, output), _)| best != output);
        self.flips.extend(flips.map(|(_, margin)| *margin));
        let pairs = free.iter().zip(&reference.outputs);
        let equal = pairs.take_while(|(free, output)| free == output).count();
        self.equal += equal;
        self.tokens += reference.outputs.len();
        self.left.extend(reference.margins.get(equal));
    }

    /// Each token after those of the reference: what the prompt's kernels say.
    pub fn forced(&self) -> Check {
        let mut sorted = self.differences.clone();
        sorted.sort_by(f64::total_cmp);
        // A NaN is the largest, and no limit holds for it.
        let at = |share: f64| {
            sorted
                .get((sorted.len().saturating_sub(1) as f64 * share) as usize)
                .copied()
        };
        let (median, high, largest) = (at(0.5), at(0.99), at(1.0));
        let flip = largest_of(&self.flips);
        let is_below = |value: Option<f64>, limit: f64| value.is_some_and(|value| value <= limit);
        Check {
            what: format!("log-probabilities of {} given tokens", sorted.len()),
            is_right: is_below(median, MEDIAN_MAX) && is_below(largest, LARGEST_MAX) && flip < MARGIN_MAX,
            said: format!(
                "difference median {:.4}, p99 {:.4}, largest {:.4}; {} steps have another best token, largest margin {flip:.4}",
                median.unwrap_or(f64::NAN),
                high.unwrap_or(f64::NAN),
                largest.unwrap_or(f64::NAN),
                self.flips.len()
            ),
        }
    }

    /// Each token after the GPU's own: what the kernels of decode say.
    pub fn free(&self) -> Check {
        let left = largest_of(&self.left);
        Check {
            what: "greedy tokens, one after the other".to_owned(),
            is_right: self.tokens > 0 && left < MARGIN_MAX,
            said: format!(
                "{} of {} are the same; {} prompts went another way, largest margin {left:.4}",
                self.equal,
                self.tokens,
                self.left.len()
            ),
        }
    }
}

fn largest_of(margins: &[f64]) -> f64 {
    margins.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference() -> Reference {
        Reference {
            outputs: [5, 6, 7].map(TokenId).to_vec(),
            logprobs: vec![-0.1, -0.2, -0.3],
            margins: vec![0.05, 2.0, 2.0],
        }
    }

    fn judged(logprobs: [f64; 3], best: [u32; 3], free: [u32; 3]) -> Judged {
        let forced = Forced {
            logprobs: logprobs.to_vec(),
            best: best.map(TokenId).to_vec(),
        };
        let mut judged = Judged::default();
        judged.add(&reference(), &forced, &free.map(TokenId));
        judged
    }

    #[test]
    fn small_differences_are_right_and_so_is_another_token_where_two_are_near() {
        let judged = judged([-0.11, -0.2, -0.3], [9, 6, 7], [9, 1, 1]);
        assert!(judged.forced().is_right && judged.free().is_right, "{judged:?}");
        assert_eq!((judged.equal, judged.tokens), (0, 3));
    }

    #[test]
    fn another_token_where_none_is_near_is_wrong() {
        let judged = judged([-0.1, -0.2, -0.3], [5, 1, 7], [5, 1, 7]);
        assert!(!judged.forced().is_right && !judged.free().is_right, "{judged:?}");
    }

    #[test]
    fn large_differences_and_what_is_no_number_are_wrong() {
        for logprobs in [[-0.1, -0.2, -0.6], [-0.2, -0.3, -0.3], [-0.1, f64::NAN, -0.3]] {
            assert!(
                !judged(logprobs, [5, 6, 7], [5, 6, 7]).forced().is_right,
                "{logprobs:?}"
            );
        }
    }

    #[test]
    fn nothing_compared_is_nothing_right() {
        assert!(!Judged::default().forced().is_right && !Judged::default().free().is_right);
    }
}
