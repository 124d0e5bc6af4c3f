//! The JSON of `/admin/cluster` and `/admin/slo`, for the coordinator that writes it and the client that reads it.
//! `docs/reference/records.md` is its reference. A reader takes a missing member for its default.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serving_core::node::KvBlockCounts;

use crate::registry::RegistryPage;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterPage {
    pub coordinator: CoordinatorPage,
    pub membership: RegistryPage,
    pub nodes: Vec<NodePage>,
    pub pairs: Vec<PairPage>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CoordinatorPage {
    pub name: String,
    pub version: String,
    pub now_unix_ms: f64,
    pub uptime_s: u64,
    pub listen: String,
    /// The address where nodes join.
    pub control: String,
    pub model: Option<String>,
    pub readiness: Cow<'static, str>,
    pub not_ready_because: Option<String>,
    /// Set for a ready cluster: why decode nodes compute the prompts although they are not co-located.
    pub unsplit_because: Option<String>,
    pub waiting: WaitingPage,
    pub unfinished: usize,
    /// Where traces are viewed, with `{trace_id}` where the id belongs.
    pub trace_viewer_url: Option<String>,
}

/// Waiting requests by lane.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WaitingPage {
    pub interactive: usize,
    pub batch: usize,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodePage {
    pub name: String,
    pub epoch: String,
    pub role: Cow<'static, str>,
    pub roles: Vec<Cow<'static, str>>,
    pub state: Cow<'static, str>,
    pub address: String,
    pub version: String,
    pub transports: Vec<String>,
    pub lease_left_ms: Option<f64>,
    pub lease_age_ms: Option<f64>,
    pub coordinators: u32,
    pub running: Option<u32>,
    pub waiting: Option<u32>,
    pub permits_available: u64,
    pub kv_blocks: KvBlockCounts,
    pub block_tokens: u32,
    pub clock: Option<NodeClock>,
}

/// The coordinator's wall clock less the node's, and the error of that.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeClock {
    pub offset_ms: f64,
    pub error_ms: f64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PairPage {
    pub prefill: String,
    pub decode: String,
    pub is_usable: bool,
    /// A closed label.
    pub unusable_reason: Option<String>,
    /// Of two nodes that do not fit: the facts in which they differ, with both values.
    pub unusable_because: Option<String>,
    /// What carries KV over it while it is usable.
    pub transport: Option<String>,
    pub kv_bytes_total: u64,
    pub handoffs_total: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SloPage {
    pub objective: Option<f64>,
    pub profiles: Vec<ProfilePage>,
    pub stages: Vec<StageBudget>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ProfilePage {
    pub name: Cow<'static, str>,
    pub ttft_ms_max: Option<f64>,
    pub itl_ms_max: Option<f64>,
    pub lanes: Vec<LaneBudget>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneBudget {
    pub lane: Cow<'static, str>,
    pub total: u64,
    pub good: u64,
    pub breaches: BTreeMap<Cow<'static, str>, u64>,
    pub burn_5m: Option<f64>,
    pub burn_1h: Option<f64>,
    /// 1 is the whole budget, 0 and below means spent. `None` before the first request.
    pub budget_left: Option<f64>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StageBudget {
    pub stage: Cow<'static, str>,
    /// The stages of a record that the budget is for.
    pub of: Vec<Cow<'static, str>>,
    pub budget_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    pub count: usize,
}
