//! What a user declares about clusters that somebody else started: their resources, and what this program cannot see.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::Value;
use workload::comparison::Resources;

use crate::exit::{Exit, WithExit};
use crate::model::source::parse_size;

/// How every declared value is marked in reports.
pub(super) const DECLARED: &str = "declared, not measured";
/// A file of facts has a few lines for each arm.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Facts {
    /// By the names of the arms.
    #[serde(default)]
    pub arms: BTreeMap<String, ArmFacts>,
    /// How client and servers are placed.
    pub client_placement: Option<String>,
    /// Same coordinator, tokenizer, HTTP path and policy in all arms.
    pub same_edge: Option<String>,
    /// How busy each pool was, from the user's own monitoring.
    pub pool_utilisation: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ArmFacts {
    /// Such as `1p1d`; for the report.
    pub topology: Option<String>,
    pub cores: u32,
    #[serde(default)]
    pub gpus: u32,
    /// Such as `24GiB`.
    pub memory: String,
    /// US dollars for an hour of the whole arm.
    pub price_per_hour: Option<f64>,
    /// How the arm was tuned: what was tried and what was chosen.
    pub tuned: Option<String>,
    #[serde(default)]
    pub settings: BTreeMap<String, Value>,
}
