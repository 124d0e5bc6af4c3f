//! Whether a request sent now has a way through the cluster, and how much of the cluster it could use.

use crate::cluster::Cluster;
use crate::cluster::membership::Node;
use crate::node::NodeRole;

/// What a ready cluster can use now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    pub prefill_nodes: usize,
    pub decode_nodes: usize,
    /// Pairs that their prefill node has reported as usable; one it has not reported on does not count.
    pub usable_pairs: usize,
}

impl Cluster {
    /// PROTOCOL rule 15; otherwise what is missing, in words a person can act on.
    pub fn readiness(&self) -> Result<Reach, String> {
        let of = |role| self.members.iter().filter(move |n| n.record.role == role);
        let live = |role| of(role).filter(|n| n.is_live());
        if live(NodeRole::Decode).next().is_none() {
            let known = of(NodeRole::Decode).count();
            return Err(format!("no decode node is ready ({known} known)"));
        }
        let reaches = |d: &Node| {
            d.record.is_co_located
                || self.config.allow_local_prefill
                || live(NodeRole::Prefill)
                    .any(|p| p.record.compatibility == d.record.compatibility && p.pair_is_usable(d.id()))
        };
        if !live(NodeRole::Decode).any(reaches) {
            return Err(
                "no ready prefill node has a working link to a decode node, and local prefill is not allowed".into(),
            );
        }
        let pairs_of = |p: &Node| {
            live(NodeRole::Decode)
                .filter(|d| p.pair_is_reported_usable(d.id()))
                .count()
        };
        Ok(Reach {
            prefill_nodes: live(NodeRole::Prefill).count(),
            decode_nodes: live(NodeRole::Decode).count(),
            usable_pairs: live(NodeRole::Prefill).map(pairs_of).sum(),
        })
    }
}
