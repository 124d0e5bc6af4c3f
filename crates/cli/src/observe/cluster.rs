//! What the page `/admin/cluster` (docs/reference/records.md) says, in words and figures.

use coordinator::records::pages::{CoordinatorPage, NodePage, PairPage};
use coordinator::registry::RegistryPage;

pub fn is_ready(coordinator: &CoordinatorPage) -> bool {
    coordinator.readiness == "ready"
}

/// `batch 2, interactive 0`.
pub fn waiting_words(coordinator: &CoordinatorPage) -> String {
    let waiting = &coordinator.waiting;
    format!("batch {}, interactive {}", waiting.batch, waiting.interactive)
}

/// `incompatible: block_tokens is 32 on prefill-1 and 16 on decode-0`; nothing for a pair that is usable.
pub fn why_not(pair: &PairPage) -> String {
    let parts = [&pair.unusable_reason, &pair.unusable_because];
    let parts: Vec<&str> = parts.into_iter().filter_map(Option::as_deref).collect();
    parts.join(": ")
}

/// `None` with embedded membership: there is nothing to say.
pub fn membership_words(membership: &RegistryPage) -> Option<String> {
    let etcd = membership.etcd.as_deref()?;
    let own = if membership.registered {
        "registered"
    } else {
        "NOT registered"
    };
    let view = if membership.is_stale {
        "; etcd is away, serving on the last view of it"
    } else {
        ""
    };
    let why = membership
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
        names(&membership.coordinators),
        names(&membership.nodes)
    ))
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

/// `None` when the node has not reported it.
pub fn kv_use(node: &NodePage) -> Option<KvUse> {
    let blocks = node.kv_blocks;
    // The counts come from outside, and the sum of six of them may be more than 32 bits hold.
    let total = blocks.by_state().iter().map(|(_, count)| u64::from(*count)).sum();
    let cached = u64::from(blocks.cached);
    let used = total - cached - u64::from(blocks.free);
    (total > 0).then_some(KvUse { used, cached, total })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_and_free_blocks_are_not_in_use() {
        let node: NodePage = serde_json::from_value(serde_json::json!({
            "kv_blocks": {"free": 1400, "active": 20, "cached": 30, "reserved": 1, "in_transfer": 2, "quarantined": 3}
        }))
        .expect("fits");
        assert_eq!(
            kv_use(&node),
            Some(KvUse {
                used: 26,
                cached: 30,
                total: 1456
            })
        );
        assert_eq!(kv_use(&NodePage::default()), None);
    }
}
