//! The steps, and what became of each: right, wrong, measured, or not run and why. A step that was not run is never right.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a user may ask for or leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Step {
    /// Each kernel beside the CPU.
    Kernels,
    /// Times of copies, launches and products.
    Machine,
    /// Memory between two processes, by CUDA IPC and by NCCL, with the death of one of them.
    Handoff,
    /// Tokens of the model that --model names, beside the CPU.
    Model,
}

impl Step {
    pub fn rows(self) -> &'static [Row] {
        match self {
            Step::Kernels => &[Row::Kernels],
            Step::Machine => &[Row::Machine],
            Step::Handoff => &[Row::CudaIpc, Row::Nccl],
            Step::Model => &[Row::Model],
        }
    }
}

/// A row of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Row {
    Kernels,
    Machine,
    CudaIpc,
    Nccl,
    Model,
    Sanitize,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Row::Kernels => "kernels",
            Row::Machine => "machine",
            Row::CudaIpc => "handoff by CUDA IPC",
            Row::Nccl => "handoff by NCCL",
            Row::Model => "model",
            Row::Sanitize => "sanitize",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub(super) enum Outcome {
    Right {
        said: String,
    },
    /// Figures, which nobody can call right or wrong.
    Measured {
        said: String,
    },
    Wrong {
        why: String,
    },
    NotRun {
        why: String,
    },
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Check {
    pub what: String,
    pub is_right: bool,
    /// What was seen. An error in words if it is wrong.
    pub said: String,
}

/// What a run of a figure moves or computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Amount {
    Bytes(u64),
    /// Products and sums, counted one by one.
    Operations(u64),
    /// A launch of a kernel that does next to nothing.
    Launch,
}

/// A time to compare with: what the bytes take that must be moved, at the rate of this run's copies. Caches can beat it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Floor {
    pub us: f64,
    /// What it is computed from.
    pub from: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Figure {
    pub what: String,
    /// Of one run.
    pub median_us: f64,
    /// Samples that it is the median of.
    pub n: u32,
    pub amount: Amount,
    /// `None`: none is known.
    pub floor: Option<Floor>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct StepReport {
    pub step: Row,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// 0 if it was not run.
    pub seconds: f64,
    pub checks: Vec<Check>,
    pub figures: Vec<Figure>,
}

impl StepReport {
    pub fn new(step: Row, outcome: Outcome) -> Self {
        Self {
            step,
            outcome,
            seconds: 0.0,
            checks: Vec::new(),
            figures: Vec::new(),
        }
    }

    pub fn not_run(step: Row, why: impl Into<String>) -> Self {
        Self::new(step, Outcome::NotRun { why: why.into() })
    }

    /// The first wrong check decides. A step without any check has checked nothing, which is not right either.
    pub fn of_checks(step: Row, checks: Vec<Check>) -> Self {
        let wrong = checks.iter().find(|check| !check.is_right);
        let outcome = match (wrong, checks.len()) {
            (Some(wrong), _) => Outcome::Wrong {
                why: format!("{}: {}", wrong.what, wrong.said),
            },
            (None, 0) => Outcome::Wrong {
                why: "it ended without a result".to_owned(),
            },
            (None, count) => Outcome::Right {
                said: format!("{count} checks"),
            },
        };
        Self {
            checks,
            ..Self::new(step, outcome)
        }
    }

    pub fn is_wrong(&self) -> bool {
        matches!(self.outcome, Outcome::Wrong { .. })
    }

    /// It has run, and nothing was wrong.
    pub fn is_good(&self) -> bool {
        matches!(self.outcome, Outcome::Right { .. } | Outcome::Measured { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(is_right: bool) -> Check {
        Check {
            what: "a byte".to_owned(),
            is_right,
            said: "it is 3".to_owned(),
        }
    }

    #[test]
    fn one_wrong_check_makes_a_step_wrong_and_no_check_makes_none_right() {
        let right = StepReport::of_checks(Row::Model, vec![check(true), check(true)]);
        assert!(right.is_good() && !right.is_wrong());
        let wrong = StepReport::of_checks(Row::Model, vec![check(true), check(false)]);
        assert!(wrong.is_wrong() && !wrong.is_good());
        assert!(StepReport::of_checks(Row::Model, Vec::new()).is_wrong());
        let not_run = StepReport::not_run(Row::Model, "no model");
        assert!(!not_run.is_good() && !not_run.is_wrong());
    }

    #[test]
    fn a_step_is_data_for_programs() {
        let step = StepReport::not_run(Row::CudaIpc, "no GPU");
        let json = serde_json::to_value(step).expect("plain data");
        assert_eq!(json["step"], "cuda-ipc");
        assert_eq!(json["outcome"], "not_run");
        assert_eq!(json["why"], "no GPU");
    }
}
