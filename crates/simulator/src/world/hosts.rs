//! Nodes on one machine share it: how fast each computes depends on how many do, and on what.

use std::ops::Range;

use crate::costs::{ByKind, HostCosts, StepKind};

#[derive(Debug)]
pub(super) struct Hosts {
    nodes_per_host: usize,
    nodes: usize,
    /// Running steps of each machine.
    running: Vec<ByKind<u32>>,
}

impl Hosts {
    pub fn new(nodes: usize, costs: &HostCosts) -> Self {
        let nodes_per_host = costs.nodes_per_host.max(1) as usize;
        Self {
            nodes_per_host,
            nodes,
            running: vec![ByKind::default(); nodes.div_ceil(nodes_per_host)],
        }
    }

    /// One step of this kind more, or one fewer, runs on this node's machine. True when that concerns others.
    pub fn count(&mut self, node: usize, kind: StepKind, is_one_more: bool) -> bool {
        let count = self.running[node / self.nodes_per_host].of_mut(kind);
        *count = match is_one_more {
            true => *count + 1,
            false => count.saturating_sub(1),
        };
        self.nodes_per_host > 1
    }

    /// Speed of this node's step, which is counted.
    pub fn speed(&self, node: usize, own: StepKind, costs: &HostCosts) -> f64 {
        let mut others = self.running[node / self.nodes_per_host];
        let of_own_kind = others.of_mut(own);
        *of_own_kind = of_own_kind.saturating_sub(1);
        costs.speed(own, &others)
    }

    /// The nodes of this node's machine.
    pub fn neighbours(&self, node: usize) -> Range<usize> {
        let first = node / self.nodes_per_host * self.nodes_per_host;
        first..(first + self.nodes_per_host).min(self.nodes)
    }
}
