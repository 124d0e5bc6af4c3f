//! Nodes on one machine share it: how fast each computes depends on how many do.

use std::ops::Range;

use crate::costs::HostCosts;

#[derive(Debug)]
pub(super) struct Hosts {
    nodes_per_host: usize,
    nodes: usize,
    computing: Vec<u32>,
}

impl Hosts {
    pub fn new(nodes: usize, costs: &HostCosts) -> Self {
        let nodes_per_host = costs.nodes_per_host.max(1) as usize;
        Self {
            nodes_per_host,
            nodes,
            computing: vec![0; nodes.div_ceil(nodes_per_host)],
        }
    }

    /// One node more, or one fewer, computes on this node's machine. True when that concerns others.
    pub fn count(&mut self, node: usize, is_one_more: bool) -> bool {
        let count = &mut self.computing[node / self.nodes_per_host];
        *count = match is_one_more {
            true => *count + 1,
            false => count.saturating_sub(1),
        };
        self.nodes_per_host > 1
    }

    pub fn speed(&self, node: usize, costs: &HostCosts) -> f64 {
        costs.speed(self.computing[node / self.nodes_per_host])
    }

    /// The nodes of this node's machine.
    pub fn neighbours(&self, node: usize) -> Range<usize> {
        let first = node / self.nodes_per_host * self.nodes_per_host;
        first..(first + self.nodes_per_host).min(self.nodes)
    }
}
