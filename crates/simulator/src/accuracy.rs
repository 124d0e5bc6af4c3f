//! How far simulations with a file of costs were from real runs.

use serde::{Deserialize, Serialize};
use workload::statistics::Samples;

/// Errors against real runs, as `benchmarks/simulator/accuracy` measured them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    pub date: String,
    pub command: String,
    pub entries: Vec<AccuracyEntry>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AccuracyEntry {
    pub topology: String,
    pub load: String,
    /// `ttft_ms_p50`...
    pub metric: String,
    /// Median of the real runs.
    pub real: f64,
    pub simulated: f64,
    /// Median of the differences between two real runs, as a share of `real`.
    pub real_difference: f64,
}

impl AccuracyEntry {
    /// As a share of the real figure, without its sign.
    pub fn error(&self) -> f64 {
        (self.simulated - self.real).abs() / self.real.abs().max(1e-9)
    }

    /// The larger of 10 % and 1.5 times what real runs differ by.
    pub fn allowed(&self) -> f64 {
        (1.5 * self.real_difference).max(0.1)
    }
}

impl Accuracy {
    /// The median of the errors.
    pub(crate) fn error_median(&self) -> f64 {
        let errors = Samples::new(self.entries.iter().map(AccuracyEntry::error));
        errors.percentile(50.0).unwrap_or(0.0)
    }

    /// One sentence for whoever reads a simulated figure.
    pub fn sentence(&self) -> String {
        let errors = Samples::new(self.entries.iter().map(AccuracyEntry::error));
        let met = self
            .entries
            .iter()
            .filter(|entry| entry.error() <= entry.allowed())
            .count();
        let median = self.error_median();
        let largest = errors.percentile(100.0).unwrap_or(0.0);
        format!(
            "against real runs of {}: median error {:.0} %, largest {:.0} %, {met} of {} figures within the larger of 10 % and 1.5 times what real runs differ by",
            self.date,
            median * 100.0,
            largest * 100.0,
            self.entries.len()
        )
    }
}
