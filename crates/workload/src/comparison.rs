//! A comparison of arms: what a report shows, and what a verdict may rest on.
//!
//! An arm is one configuration: a topology with its settings, or the address of a server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::record::Run;

/// Everything that a report shows. It is the report's JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// `YYYY-MM-DD`.
    pub date: String,
    /// The command that made it.
    pub command: String,
    pub hypothesis: Option<String>,
    pub slo: Slo,
    pub arms: Vec<Arm>,
    pub shapes: Vec<Shape>,
    pub fairness: Fairness,
    pub environment: BTreeMap<String, serde_json::Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// Name of a built-in profile, or `custom`.
    pub name: String,
    pub ttft_ms_max: f64,
    /// Limit of the 99th percentile of a request's own gaps between tokens.
    pub itl_ms_max: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    pub name: String,
    pub kind: ArmKind,
    /// `2c`, `1p1d`, or an address.
    pub topology: String,
    /// The settings that were chosen by its sweep, and the cores of each process.
    pub settings: BTreeMap<String, serde_json::Value>,
    pub resources: Resources,
    /// Each point of the sweep that tuned it, the rejected ones as well.
    pub tuning: Vec<TuningPoint>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArmKind {
    CoLocated,
    Disaggregated,
    /// Disaggregated; prompts below a threshold are computed on the decode node.
    Conditional,
    /// A server that somebody else started.
    External,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Resources {
    pub cores: u32,
    pub gpus: u32,
    pub memory_bytes: u64,
    /// US dollars for an hour of the whole arm.
    pub price_per_hour: Option<f64>,
    /// False: declared by the user.
    pub is_measured: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TuningPoint {
    pub settings: BTreeMap<String, serde_json::Value>,
    /// Requests a second that met both limits.
    pub goodput: f64,
    /// 0: no answer had such a time ([`TuningPoint::p99s_ms`]).
    pub ttft_ms_p99: f64,
    /// 0: no answer had such a time.
    pub itl_ms_p99: f64,
    pub is_chosen: bool,
}

impl TuningPoint {
    /// The p99 of TTFT and of ITL. `None`: no answer had such a time.
    pub fn p99s_ms(&self) -> [Option<f64>; 2] {
        [self.ttft_ms_p99, self.itl_ms_p99].map(|ms| (ms > 0.0).then_some(ms))
    }
}

/// One shape of traffic, measured on every arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// `long prompts beside running streams`.
    pub name: String,
    /// Lengths, arrivals and prefixes in words.
    pub traffic: String,
    /// A hash of the trace that all arms got, and of its seed.
    pub trace_hash: String,
    /// In the order in which they ran.
    pub runs: Vec<ArmRun>,
    pub contrasts: Vec<Contrast>,
    /// One sentence that names percentile, load and shape.
    pub verdict: String,
}

/// One run of one arm. `repeat` counts from 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmRun {
    pub arm: String,
    pub repeat: u32,
    pub run: Run,
}

/// One metric of two arms, with the interval of its difference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contrast {
    /// `ttft_ms_p99`, `itl_ms_p99`, `goodput_per_core`...
    pub metric: String,
    /// Requests a second that were offered.
    pub load: f64,
    pub baseline: String,
    pub candidate: String,
    pub baseline_value: f64,
    pub candidate_value: f64,
    /// Candidate by baseline.
    pub ratio: f64,
    /// The 95 % interval of the ratio (`verdict/interval.rs`).
    pub ratio_low: f64,
    pub ratio_high: f64,
    pub finding: Finding,
}

/// What the interval says of the candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    Wins,
    Loses,
    NoDifferenceShown,
}

/// The fairness list of the design. `None` is a missing field: it shows a red banner and forbids a verdict.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fairness {
    pub equal_resources: Option<String>,
    pub every_arm_tuned: Option<String>,
    pub same_edge: Option<String>,
    pub same_trace: Option<String>,
    pub open_loop_and_lag: Option<String>,
    pub warm_up_excluded: Option<String>,
    pub order_and_repeats: Option<String>,
    pub outputs_equal: Option<String>,
    pub failures_counted: Option<String>,
    pub one_token_per_event: Option<String>,
    pub several_shapes: Option<String>,
    pub client_placement: Option<String>,
    pub transfer_share: Option<String>,
    pub pool_utilisation: Option<String>,
    pub verdict_per_shape: Option<String>,
}
