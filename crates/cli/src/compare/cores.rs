//! Which node runs on which cores. Each node has cores of its own, so no arm can borrow another pool's time.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use rustix::thread::{CpuSet, sched_getaffinity};

/// On smaller machines a core of its own for client and coordinator would leave no two nodes to compare.
const CORES_WITH_ONE_APART_MIN: usize = 4;

/// The cores of one machine, split between the nodes and everything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cores {
    /// The nodes have these to themselves, as far as this program decides.
    pub nodes: Vec<u32>,
    /// The coordinator and the client run here.
    pub others: Vec<u32>,
}

/// The cores that this process may use.
pub(super) fn available() -> anyhow::Result<Vec<u32>> {
    let set = sched_getaffinity(None).context("cannot ask which cores this process may use")?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .map(|cpu| cpu as u32)
        .collect())
}

impl Cores {
    /// `node_cores`: how many the nodes get; `None` leaves the choice to this function.
    ///
    /// # Errors
    /// There are not so many.
    pub fn split(available: &[u32], node_cores: Option<u32>) -> anyhow::Result<Self> {
        let count = available.len();
        let wanted = match node_cores {
            Some(wanted) => wanted as usize,
            None if count >= CORES_WITH_ONE_APART_MIN => count - 1,
            None => count,
        };
        ensure!(
            (1..=count).contains(&wanted),
            "--node-cores {wanted}: this process may use {count} cores (see `taskset -p $$`)"
        );
        let (nodes, rest) = available.split_at(wanted);
        let others = if rest.is_empty() { available } else { rest };
        Ok(Self {
            nodes: nodes.to_vec(),
            others: others.to_vec(),
        })
    }

    /// Whether client and coordinator share the nodes' cores.
    pub fn are_shared(&self) -> bool {
        self.others.iter().any(|core| self.nodes.contains(core))
    }

    /// Gives each node the number of cores that stands behind its name, in order.
    ///
    /// # Errors
    /// They need more cores than there are.
    pub fn place(&self, needs: &[(String, u32)]) -> anyhow::Result<BTreeMap<String, Vec<u32>>> {
        let wanted: u32 = needs.iter().map(|(_, count)| count).sum();
        ensure!(
            wanted as usize <= self.nodes.len(),
            "the nodes need {wanted} cores, and there are {}",
            self.nodes.len()
        );
        let mut left = self.nodes.iter().copied();
        let placed = needs
            .iter()
            .map(|(name, count)| (name.clone(), left.by_ref().take(*count as usize).collect()));
        Ok(placed.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_machine_shares_its_cores_and_a_larger_one_keeps_one_apart() {
        let two = Cores::split(&[0, 1], None).expect("two cores");
        assert_eq!(
            (two.nodes.as_slice(), two.others.as_slice()),
            (&[0, 1][..], &[0, 1][..])
        );
        assert!(two.are_shared());
        let eight = Cores::split(&[0, 1, 2, 3, 4, 5, 6, 7], None).expect("eight cores");
        assert_eq!((eight.nodes.len(), eight.others.as_slice()), (7, &[7][..]));
        assert!(!eight.are_shared());
        let chosen = Cores::split(&[2, 5, 7], Some(2)).expect("three cores");
        assert_eq!(
            (chosen.nodes.as_slice(), chosen.others.as_slice()),
            (&[2, 5][..], &[7][..])
        );
        assert!(Cores::split(&[0, 1], Some(3)).is_err());
        assert!(Cores::split(&[0, 1], Some(0)).is_err());
    }

    #[test]
    fn no_core_is_given_twice() {
        let cores = Cores::split(&[0, 2, 4], None).expect("three cores");
        let needs = [("prefill-0".to_owned(), 1), ("decode-0".to_owned(), 2)];
        let placed = cores.place(&needs).expect("they fit");
        assert_eq!(placed["prefill-0"], [0]);
        assert_eq!(placed["decode-0"], [2, 4]);
        let error = cores.place(&[("decode-0".to_owned(), 4)]).expect_err("too many");
        assert!(error.to_string().contains('4'), "{error}");
    }

    #[test]
    fn this_process_may_use_some_core() {
        assert!(!available().expect("cores").is_empty());
    }
}
