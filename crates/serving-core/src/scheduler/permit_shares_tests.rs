//! Permits of one or two nodes between several coordinators, by hand and in random histories with late messages.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::cluster::permits_for_tests::{Charge, Permits};
use crate::node::NodeState;
use crate::scheduler::permits::PermitCounters;

const A: ShareId = ShareId(1);
const B: ShareId = ShareId(2);
const NOW: Time = Time(1_000_000_000);

fn status(granted: u64, received_by: &[(u64, u64)]) -> NodeStatus {
    NodeStatus {
        permits_received_by: received_by.iter().map(|(epoch, n)| (NodeEpoch(*epoch), *n)).collect(),
        permits_received_total: received_by.iter().map(|(_, n)| n).sum(),
        ..crate::cluster::permits_for_tests::ready_status(granted)
    }
}

fn two(granted: u64) -> PermitShares {
    let mut shares = PermitShares::default();
    shares.connect(A, NodeEpoch(1));
    shares.connect(B, NodeEpoch(2));
    shares.divide(NOW, &status(granted, &[]));
    shares
}

fn wants(wanted: u64, waited_ms: u64, returned_total: u64) -> PermitNote {
    PermitNote {
        wanted,
        waited: Duration::from_millis(waited_ms),
        returned_total,
    }
}

fn granted(shares: &PermitShares) -> (u64, u64) {
    (shares.of(A).granted_total, shares.of(B).granted_total)
}

#[test]
fn alone_a_coordinator_gets_everything_and_a_second_one_its_half_from_it() {
    let mut shares = PermitShares::default();
    shares.connect(A, NodeEpoch(1));
    assert!(shares.divide(NOW, &status(100, &[])));
    assert_eq!(shares.of(A).granted_total, 100);
    shares.connect(B, NodeEpoch(2));
    assert!(shares.divide(NOW, &status(100, &[])));
    assert_eq!(shares.of(A).recalled_total, 50);
    assert!(!shares.divide(NOW, &status(100, &[])), "asked once");
    shares.note(NOW, A, wants(0, 0, 50));
    shares.divide(NOW, &status(100, &[]));
    assert_eq!(granted(&shares), (100, 50));
    shares.disconnect(B);
    shares.divide(NOW, &status(100, &[]));
    assert_eq!(shares.of(A).granted_total, 150, "50 came back and are its own again");
}

#[test]
fn what_one_waits_for_is_recalled_from_the_other_who_does_not_need_it() {
    let mut shares = two(100);
    assert_eq!(granted(&shares), (50, 50));
    shares.note(NOW, B, wants(80, 5, 0));
    shares.divide(NOW, &status(100, &[]));
    assert_eq!(shares.of(A).recalled_total, 30);
    shares.note(NOW, A, wants(0, 0, 30));
    shares.divide(NOW, &status(100, &[]));
    assert_eq!(granted(&shares), (50, 80));
}

#[test]
fn what_an_older_request_waits_for_is_not_taken_for_a_younger_one() {
    let mut shares = two(100);
    shares.note(NOW, A, wants(50, 9, 0));
    shares.note(NOW, B, wants(80, 5, 0));
    shares.divide(NOW, &status(100, &[]));
    assert_eq!(shares.of(A).recalled_total, 0);
    shares.note(NOW, B, wants(80, 10, 0));
    shares.divide(NOW, &status(100, &[]));
    assert_eq!(shares.of(A).recalled_total, 30, "the older one is B's now");
}

#[test]
fn room_that_comes_free_waits_for_the_oldest_request_however_large() {
    let mut shares = two(100);
    shares.note(NOW, A, wants(90, 9, 0));
    shares.note(NOW, B, wants(10, 1, 0));
    // B uses all it has, and the node is full with it.
    shares.divide(NOW, &status(100, &[(2, 50)]));
    assert_eq!(granted(&shares), (50, 50), "nothing is free");
    // Room for 20 comes free: B waits for 10, but A waits longer.
    shares.divide(NOW, &status(120, &[(2, 50)]));
    assert_eq!(granted(&shares), (70, 50));
}

#[test]
fn who_does_not_use_what_it_waited_for_yields() {
    // This node thinks that B waits longer, another one that A does; each has what it wants of one node.
    let mut shares = two(100);
    shares.note(NOW, B, wants(100, 9, 0));
    shares.note(NOW, A, wants(100, 8, 0));
    shares.divide(NOW, &status(100, &[]));
    shares.note(NOW, A, wants(100, 8, 50));
    shares.divide(NOW, &status(100, &[]));
    assert_eq!(granted(&shares), (50, 100));
    shares.divide(NOW, &status(100, &[]));
    assert_eq!(shares.of(B).recalled_total, 0);
    shares.divide(NOW + UNUSED_MAX, &status(100, &[]));
    assert_eq!(shares.of(B).recalled_total, 100);
    shares.note(NOW, B, wants(100, 9, 100));
    shares.divide(NOW + UNUSED_MAX, &status(100, &[]));
    assert_eq!(
        granted(&shares),
        (150, 100),
        "and it does not take them back, though it waits longer"
    );
}

#[test]
fn a_lying_coordinator_neither_mints_permits_nor_breaks_the_node() {
    let mut shares = two(100);
    shares.note(NOW, A, wants(u64::MAX, u64::MAX, u64::MAX));
    shares.divide(NOW, &status(100, &[(1, u64::MAX - 3), (9, 3)]));
    shares.note(NOW, B, wants(10, 0, 0));
    shares.divide(NOW, &status(100, &[]));
    assert!(shares.outstanding_total() <= 100);
    assert_eq!(shares.of(ShareId(77)), StreamPermits::default());
}

/// A node: its counters, what runs on it, its division, and the streams to the coordinators with what is under way.
struct Node {
    capacity: u64,
    running: Vec<u64>,
    counters: PermitCounters,
    shares: PermitShares,
    to: BTreeMap<usize, VecDeque<(StreamPermits, u32)>>,
    from: BTreeMap<usize, VecDeque<PermitNote>>,
    work: VecDeque<(usize, u64, Charge)>,
}

impl Node {
    fn status(&self) -> NodeStatus {
        NodeStatus {
            state: NodeState::Ready,
            permits_granted_total: self.counters.granted_total,
            permits_received_total: self.counters.received_total,
            permits_received_by: self.counters.received_by.clone(),
            ..crate::cluster::permits_for_tests::ready_status(0)
        }
    }

    fn look(&mut self, now: Time) {
        let held: u64 = self.running.iter().sum();
        self.counters.grant(self.capacity - held);
        self.shares.divide(now, &self.status());
        for (coordinator, reports) in &mut self.to {
            let seen = self.shares.of(ShareId(*coordinator as u64));
            reports.push_back((seen, self.shares.count()));
        }
        let room = self.counters.granted_total - self.counters.received_total;
        assert!(self.shares.outstanding_total() <= room, "more than the node can take");
        assert!(room + held <= self.capacity, "granted beyond the pool");
    }
}

struct Coordinator {
    queue: VecDeque<(Time, u64)>,
    permits: Vec<Permits>,
    told: Vec<(u64, u64)>,
}

/// Every request takes its cost of all nodes at once, as a prefill and a decode node are taken together.
fn run(costs: &[(usize, u64)], seed: u64, node_count: usize, coordinator_count: usize) {
    const CAPACITY: u64 = 10;
    let ids = 0..coordinator_count;
    let mut nodes: Vec<Node> = (0..node_count)
        .map(|_| Node {
            capacity: CAPACITY,
            running: Vec::new(),
            counters: PermitCounters::default(),
            shares: PermitShares::default(),
            to: ids.clone().map(|i| (i, VecDeque::new())).collect(),
            from: ids.clone().map(|i| (i, VecDeque::new())).collect(),
            work: VecDeque::new(),
        })
        .collect();
    let mut coordinators: Vec<Coordinator> = ids
        .clone()
        .map(|_| Coordinator {
            queue: VecDeque::new(),
            permits: (0..node_count).map(|_| Permits::for_tests()).collect(),
            told: vec![(0, 0); node_count],
        })
        .collect();
    for node in &mut nodes {
        for i in ids.clone() {
            node.shares.connect(ShareId(i as u64), NodeEpoch(i as u64 + 1));
        }
    }
    let (mut waiting, mut unplaced) = (costs.iter().copied(), costs.len());
    let mut now = NOW;
    let mut random = seed;
    // Late messages, work that ends late: every turn something happens somewhere, until all requests are placed.
    for turn in 0.. {
        assert!(turn < 60_000, "{unplaced} requests are stuck");
        if unplaced == 0 {
            return;
        }
        now = now + Duration::from_millis(1);
        // Knuth's MMIX multiplier; the high bits are the random ones.
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let choice = (random >> 33) as usize;
        let (n, c) = (choice % node_count, (choice / 7) % coordinator_count);
        match (choice / 64) % 6 {
            0 => {
                if let Some((to, cost)) = waiting.next() {
                    coordinators[to % coordinator_count]
                        .queue
                        .push_back((now, cost.clamp(1, CAPACITY)));
                }
            }
            1 => nodes[n].look(now),
            2 => {
                for (said, count) in nodes[n].to.get_mut(&c).into_iter().flat_map(std::mem::take) {
                    let permits = &mut coordinators[c].permits[n];
                    permits.reported(now, said);
                    if count > 1 {
                        permits.return_recalled();
                    }
                }
            }
            3 => {
                let notes = nodes[n].from.get_mut(&c).map(std::mem::take);
                for note in notes.into_iter().flatten() {
                    nodes[n].shares.note(now, ShareId(c as u64), note);
                }
            }
            4 => {
                if let Some((from, cost, charge)) = nodes[n].work.pop_front() {
                    nodes[n].counters.receive(cost, NodeEpoch(from as u64 + 1));
                    nodes[n].running.push(cost);
                    coordinators[from].permits[n].answered(charge);
                }
            }
            _ => {
                let running = &mut nodes[n].running;
                if !running.is_empty() {
                    running.remove(choice % running.len());
                }
            }
        }
        let coordinator = &mut coordinators[c];
        if let Some((_, cost)) = coordinator.queue.front().copied()
            && coordinator.permits.iter().all(|permits| permits.available() >= cost)
        {
            coordinator.queue.pop_front();
            unplaced -= 1;
            for (permits, node) in coordinator.permits.iter_mut().zip(&mut nodes) {
                let charge = permits.take(cost).expect("asked before");
                node.work.push_back((c, cost, charge));
            }
        }
        for (i, node) in nodes.iter_mut().enumerate() {
            let head = coordinator.queue.front().copied();
            let returned_total = coordinator.permits[i].return_recalled();
            let wanted = head.map_or(0, |(_, cost)| cost);
            let told = (wanted + head.map_or(0, |(since, _)| since.0), returned_total);
            if std::mem::replace(&mut coordinator.told[i], told) != told {
                let waited = head.map_or(Duration::ZERO, |(since, _)| now.since(since));
                let note = PermitNote {
                    wanted,
                    waited,
                    returned_total,
                };
                if let Some(notes) = node.from.get_mut(&c) {
                    notes.push_back(note);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn no_history_grants_more_than_there_is_or_leaves_a_request_behind(
        costs in prop::collection::vec((0usize..3, 1u64..11), 1..30),
        seed in any::<u64>(),
        node_count in 1usize..3,
        coordinator_count in 1usize..4,
    ) {
        run(&costs, seed, node_count, coordinator_count);
    }
}
