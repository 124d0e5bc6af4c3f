//! The page `/admin/cluster` (docs/reference/records.md). Every member may be absent.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::records::Clock;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Cluster {
    pub coordinator: Coordinator,
    pub membership: Membership,
    pub nodes: Vec<Node>,
    pub pairs: Vec<Pair>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Coordinator {
    pub version: String,
    pub uptime_s: f64,
    /// The address where nodes join.
    pub control: String,
    pub model: String,
    pub readiness: String,
    pub not_ready_because: Option<String>,
    /// Set for a ready cluster: why decode nodes compute the prompts although they are not co-located.
    pub unsplit_because: Option<String>,
    /// Waiting requests by lane.
    pub waiting: BTreeMap<String, u64>,
    pub unfinished: u64,
}

impl Coordinator {
    pub fn is_ready(&self) -> bool {
        self.readiness == "ready"
    }

    /// `interactive 0, batch 2`.
    pub fn waiting_words(&self) -> String {
        let lanes: Vec<String> = self.waiting.iter().map(|(lane, n)| format!("{lane} {n}")).collect();
        if lanes.is_empty() {
            "not known".to_owned()
        } else {
            lanes.join(", ")
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Membership {
    /// `embedded` or `etcd`. Empty from a server that does not say.
    pub kind: String,
    pub etcd: Option<String>,
    pub registered: bool,
    pub is_stale: bool,
    pub nodes: Vec<String>,
    pub coordinators: Vec<String>,
    pub trouble: Option<String>,
}

impl Membership {
    /// `None` with embedded membership: there is nothing to say.
    pub fn words(&self) -> Option<String> {
        let etcd = self.etcd.as_deref()?;
        let own = if self.registered {
            "registered"
        } else {
            "NOT registered"
        };
        let view = if self.is_stale {
            "; etcd is away, serving on the last view of it"
        } else {
            ""
        };
        let why = self
            .trouble
            .as_deref()
            .map(|why| format!(": {why}"))
            .unwrap_or_default();
        let names = |names: &[String]| {
            if names.is_empty() {
                "none".to_owned()
            } else {
                names.join(", ")
            }
        };
        Some(format!(
            "membership {etcd}: {own}{view}{why}; coordinators {}; nodes {}",
            names(&self.coordinators),
            names(&self.nodes)
        ))
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Node {
    pub name: String,
    pub epoch: String,
    pub role: String,
    pub state: String,
    pub address: String,
    pub version: String,
    pub transports: Vec<String>,
    pub lease_left_ms: Option<f64>,
    pub lease_age_ms: Option<f64>,
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    pub kv_blocks: BTreeMap<String, u64>,
    pub block_tokens: Option<u64>,
    pub clock: Option<Clock>,
}

/// Block counts of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvUse {
    /// Blocks held by a sequence, a reservation, a transfer or in quarantine. No other request can have them now.
    pub used: u64,
    /// Blocks kept for prefix hits. They are given up when they are needed.
    pub cached: u64,
    pub total: u64,
}

impl KvUse {
    pub fn fraction(self) -> f64 {
        self.used as f64 / self.total.max(1) as f64
    }
}

impl Node {
    /// `None` when the node has not reported it.
    pub fn kv_use(&self) -> Option<KvUse> {
        let sum = |of: &dyn Fn(&str) -> bool| {
            let counts = self.kv_blocks.iter().filter(|(state, _)| of(state));
            counts.fold(0_u64, |sum, (_, count)| sum.saturating_add(*count))
        };
        let total = sum(&|_| true);
        let cached = sum(&|state| state == "cached");
        let used = sum(&|state| state != "cached" && state != "free");
        (total > 0).then_some(KvUse { used, cached, total })
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pair {
    pub prefill: String,
    pub decode: String,
    pub is_usable: bool,
    pub unusable_reason: Option<String>,
    pub kv_bytes_total: u64,
    pub handoffs_total: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_and_free_blocks_are_not_in_use() {
        let node: Node = serde_json::from_value(serde_json::json!({
            "kv_blocks": {"free": 1400, "active": 20, "cached": 30, "reserved": 1, "in_transfer": 2, "quarantined": 3}
        }))
        .expect("fits");
        assert_eq!(
            node.kv_use(),
            Some(KvUse {
                used: 26,
                cached: 30,
                total: 1456
            })
        );
        assert_eq!(Node::default().kv_use(), None);
    }
}
