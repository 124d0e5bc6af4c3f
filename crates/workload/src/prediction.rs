//! What memory bandwidth allows a lone request, beside what was measured.

use serde::{Deserialize, Serialize};

/// Measured by predicted TPOT below this: memory explains it.
const EXPLAINED_MAX: f64 = 1.3;
/// Above this something else takes most of the time.
const FAR_BELOW_MIN: f64 = 2.0;
/// Faster than memory allows: a figure that was given is wrong.
const IMPOSSIBLE_MAX: f64 = 0.9;

/// Each token reads every weight once, so a lone request gets bandwidth / bytes of the weights tokens a second. Attention over the
/// KV cache comes on top, which is small for short contexts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    pub tokens_per_s: f64,
    pub tpot_ms: f64,
}

/// A prediction and a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PredictedAndMeasured {
    pub predicted: Prediction,
    pub tpot_ms: f64,
    /// Measured by predicted TPOT.
    pub ratio: f64,
}

impl Prediction {
    /// `None` when one of the figures is not a number above 0.
    pub fn decode(weights_bytes: f64, bandwidth_bytes_per_s: f64) -> Option<Self> {
        let is_good = |value: f64| value.is_finite() && value > 0.0;
        (is_good(weights_bytes) && is_good(bandwidth_bytes_per_s)).then(|| Self {
            tokens_per_s: bandwidth_bytes_per_s / weights_bytes,
            tpot_ms: weights_bytes / bandwidth_bytes_per_s * 1e3,
        })
    }
    pub fn beside(self, tpot_ms: f64) -> PredictedAndMeasured {
        PredictedAndMeasured {
            predicted: self,
            tpot_ms,
            ratio: tpot_ms / self.tpot_ms,
        }
    }
}

impl PredictedAndMeasured {
    pub(crate) fn is_far_below(&self) -> bool {
        self.ratio > FAR_BELOW_MIN
    }
    /// Figures and verdict.
    pub fn words(&self) -> String {
        let verdict = match self.ratio {
            ratio if ratio < IMPOSSIBLE_MAX => {
                "faster than memory allows, so the bandwidth or the bytes of the weights are not right"
            }
            ratio if ratio <= EXPLAINED_MAX => "memory bandwidth explains it",
            ratio if ratio <= FAR_BELOW_MIN => "memory bandwidth explains most of it",
            _ => "something other than memory bandwidth takes most of the time",
        };
        format!(
            "predicted {:.1} tokens/s ({:.1} ms each), measured {:.1} tokens/s ({:.1} ms each), {:.2} times the predicted TPOT: {verdict}",
            self.predicted.tokens_per_s,
            self.predicted.tpot_ms,
            1e3 / self.tpot_ms,
            self.tpot_ms,
            self.ratio
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_billion_weights_of_two_bytes_at_600_gb_a_second_give_37_and_a_half_tokens() {
        let predicted = Prediction::decode(16e9, 600e9).unwrap();
        assert_eq!(predicted.tokens_per_s, 37.5);
        assert!((predicted.tpot_ms - 26.67).abs() < 0.01);
        assert!(predicted.beside(27.0).words().ends_with("memory bandwidth explains it"));
        assert!(!predicted.beside(50.0).is_far_below());
        assert!(predicted.beside(60.0).is_far_below());
        assert!(predicted.beside(10.0).words().contains("not right"));
    }

    #[test]
    fn figures_that_make_no_sense_predict_nothing() {
        assert_eq!(Prediction::decode(0.0, 1.0), None);
        assert_eq!(Prediction::decode(1.0, f64::NAN), None);
    }
}
