//! Whether a request sent now has a way through the cluster, how much of the cluster it could use, and which drain would end that.

use std::fmt;

use crate::cluster::Cluster;
use crate::cluster::member::{Node, NodeHealth};
use crate::compatibility::Incompatibility;
use crate::ids::NodeName;
use crate::node::NodeRole;
use crate::time::Time;

/// What a ready cluster can use now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reach {
    pub prefill_nodes: usize,
    pub decode_nodes: usize,
    /// Pairs that their prefill node has reported as usable; one it has not reported on does not count.
    pub usable_pairs: usize,
    /// Why prompts are computed where they are decoded. `None` while some pair can hand KV over, and where no decode node needs
    /// one because all are co-located.
    pub unsplit: Option<Unsplit>,
    /// In order of name: nodes whose connections broke, so that this coordinator gives them no new work for a moment.
    pub suspected: Vec<NodeName>,
}

/// Why requests run unsplit although the cluster was not made for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsplit {
    NoPrefillNode { known: usize },
    NoUsablePair(Option<Misfit>),
}

impl fmt::Display for Unsplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPrefillNode { known } => write!(f, "no prefill node is ready ({known} known)")?,
            Self::NoUsablePair(misfit) => {
                let words = misfit.as_ref().map(ToString::to_string).unwrap_or_default();
                write!(f, "no prefill node reports a working link to a decode node{words}")?;
            }
        }
        f.write_str("; requests run unsplit: decode nodes compute the prompts")
    }
}

/// The first of the pairs that do not fit, and how many there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    first: Incompatibility,
    pairs: usize,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pairs {
            1 => write!(f, " (incompatible: {})", self.first),
            pairs => write!(f, " ({pairs} pairs are incompatible; of the first: {})", self.first),
        }
    }
}

/// What an unsplit cluster counts as, for those who ask whether it is ready. Requests are taken either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenUnsplit {
    #[default]
    Ready,
    NotReady,
}

impl Reach {
    /// # Errors
    /// Why this counts as not ready, in words.
    pub fn counted(self, when_unsplit: WhenUnsplit) -> Result<Self, String> {
        match (&self.unsplit, when_unsplit) {
            (Some(why), WhenUnsplit::NotReady) => Err(format!("{why}, which counts as not ready here")),
            _ => Ok(self),
        }
    }
}

/// A drain that would leave nobody who decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastDecodeNode {
    /// Requests on the node, by its last report.
    pub requests: u32,
}

impl Cluster {
    /// PROTOCOL rule 15; otherwise what is missing, in words a person can act on.
    pub fn readiness(&self, now: Time) -> Result<Reach, String> {
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
                    .any(|p| p.record.compatibility.hash == d.record.compatibility.hash && p.pair_is_usable(d.id()))
        };
        if !live(NodeRole::Decode).any(reaches) {
            let misfit = self.misfit().map(|misfit| misfit.to_string()).unwrap_or_default();
            return Err(format!(
                "no ready prefill node has a working link to a decode node{misfit}, and local prefill is not allowed"
            ));
        }
        let pairs_of = |p: &Node| {
            live(NodeRole::Decode)
                .filter(|d| p.pair_is_reported_usable(d.id()))
                .count()
        };
        let prefill_nodes = live(NodeRole::Prefill).count();
        let usable_pairs = live(NodeRole::Prefill).map(pairs_of).sum();
        let is_meant_to_split = live(NodeRole::Decode).any(|d| !d.record.is_co_located);
        let suspected = self.members.iter().filter(|n| !n.life.is_over() && n.is_suspected(now));
        Ok(Reach {
            prefill_nodes,
            decode_nodes: live(NodeRole::Decode).count(),
            usable_pairs,
            unsplit: match (prefill_nodes, usable_pairs) {
                (0, _) if is_meant_to_split => Some(Unsplit::NoPrefillNode {
                    known: of(NodeRole::Prefill).count(),
                }),
                (_, 0) if is_meant_to_split => Some(Unsplit::NoUsablePair(self.misfit())),
                _ => None,
            },
            suspected: suspected.map(|n| n.id().name.clone()).collect(),
        })
    }

    /// Pairs of live nodes that may not exchange KV.
    fn misfit(&self) -> Option<Misfit> {
        let live = |role| {
            self.members
                .iter()
                .filter(move |n| n.record.role == role && n.is_live())
        };
        let decode = || live(NodeRole::Decode).filter(|d| !d.record.is_co_located);
        let mut found =
            live(NodeRole::Prefill).flat_map(|p| decode().filter_map(|d| p.record.incompatibility(&d.record)));
        let first = found.next()?;
        let pairs = 1 + found.count();
        Some(Misfit { first, pairs })
    }

    /// Whether somebody can decode once the node of that name drains. One that drains already, or is gone, changes nothing.
    ///
    /// # Errors
    /// It is the last; whoever asks for the drain must say that this is meant.
    pub fn check_drain(&self, now: Time, name: &NodeName) -> Result<(), LastDecodeNode> {
        let decodes = |n: &&Node| n.record.role == NodeRole::Decode;
        let Some(node) = self.members.iter().filter(decodes).find(|n| n.id().name == *name) else {
            return Ok(());
        };
        let is_going = node.health().is_over() || node.health() == NodeHealth::Draining;
        let mut others = self.members.iter().filter(decodes).filter(|n| n.id() != node.id());
        if is_going || others.any(|n| n.is_usable(now)) {
            return Ok(());
        }
        let requests = |s: &crate::node::NodeStatus| s.running_sequences.saturating_add(s.waiting_sequences);
        Err(LastDecodeNode {
            requests: node.status.as_ref().map_or(0, requests),
        })
    }
}

#[cfg(test)]
#[path = "readiness_tests.rs"]
mod tests;
