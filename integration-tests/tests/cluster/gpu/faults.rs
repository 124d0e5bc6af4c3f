//! T26 in small: a node on the false GPU dies in the middle of a handoff, by each transport between GPUs. `examples/faults.rs` runs the
//! whole fault matrix and the long runs on such nodes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use integration_tests::false_gpu::FalseGpu;
use integration_tests::fault_matrix::campaign;
use integration_tests::fault_matrix::cells::{Cell, FaultKind, Victim};
use integration_tests::fault_matrix::client::{self, Manner};
use integration_tests::fault_matrix::nodes::Nodes;
use integration_tests::fault_matrix::rig::{Rig, RigOptions};
use integration_tests::fault_matrix::strike::{REST_WITHIN, Workload, strike};
use integration_tests::fault_matrix::verdict::{Connection, Outcome, judge};
use integration_tests::token_exact::{Answer, Case};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use service_runtime::failpoints::FaultPoint;

const GPU: FalseGpu = FalseGpu {
    write_model: super::write_model,
    kernel_cache: Some(super::COMPILED),
};
/// Two chunks and four blocks: the second block is half of the transfer, and leaves before the second chunk is computed.
const PROMPT_TOKENS: Range<usize> = 50..60;
const OUTPUT_TOKENS: u32 = 6;
const SEED: u64 = 5;
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

fn nodes(transports: &'static str) -> Nodes {
    Nodes {
        transports,
        gpu: Some(GPU),
    }
}

/// A seed with which a cell strikes at the first passage: a single request passes the point once.
fn at_the_first_passage(cell: Cell) -> StdRng {
    let mut seeds = (0..u64::MAX).map(StdRng::seed_from_u64);
    let found = seeds.find(|random| cell.passages(&mut random.clone()) == 0);
    found.expect("every other seed is one")
}

/// Handoffs by this transport so far, and those by all.
async fn handoffs(rig: &Rig, transport: &str) -> (u64, BTreeMap<String, u64>) {
    let by_transport = rig.handoffs().await.expect("the coordinator's metrics");
    let by_this = by_transport.get(transport).copied().unwrap_or(0);
    (by_this, by_transport)
}

/// Kills the node in the middle of the first case's handoff. Once it is back, the second case goes by the same transport.
async fn kill(rig: &mut Rig, victim: Victim, (cases, answers): (&[Case], &[Answer])) {
    let cell = Cell {
        victim,
        fault: FaultKind::Kill,
        point: FaultPoint::TransferHalf,
    };
    let transport = rig.nodes().transports;
    let work = Workload {
        cases: &cases[..1],
        baseline: &answers[..1],
        is_probed: false,
    };
    let struck = strike(rig, cell, work, &mut at_the_first_passage(cell)).await;
    let report = struck.expect("the rig works");
    println!(
        "{transport}, {cell}: {:?} {:?}, its end {:.1?} after the kill, the living node ended the transfer after {:.1?}, at rest {:.1?} after the answer",
        report.outcomes, report.errors, report.to_end, report.to_aborts, report.to_rest
    );
    assert!(!report.is_missed, "{transport}, {cell}: the point was not reached");
    assert_eq!(report.violations, Vec::<String>::new(), "{transport}, {cell}");
    assert_eq!(
        report.to_aborts.len(),
        1,
        "{transport}, {cell}: one transfer was under way"
    );
    let (before, _) = handoffs(rig, transport).await;
    let manner = Manner::staying(ANSWER_WITHIN);
    let seen = client::stream(&rig.cluster.http, rig.base_url(), &cases[1], manner).await;
    let outcome = judge(Connection::Holds, &seen, &answers[1]);
    assert_eq!(outcome, Ok(Outcome::Completed), "{transport}, after {cell}");
    let (after, by_transport) = handoffs(rig, transport).await;
    assert_eq!(after, before + 1, "{transport}, after {cell}: {by_transport:?}");
    println!("{transport}, after {cell}: handoffs by transport {by_transport:?}");
    rig.wait_for_rest(REST_WITHIN).await.expect("every block at rest");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_node_that_dies_in_a_handoff_costs_no_wrong_token_and_the_living_leak_nothing() {
    let lengths = (OUTPUT_TOKENS, SEED);
    // The nodes of both transports give the tokens of one node.
    let fault_free = campaign::baseline_of_length(nodes("cuda-ipc"), 2, PROMPT_TOKENS, lengths).await;
    let (cases, answers) = fault_free.expect("answers of one node");
    for transport in ["cuda-ipc", "nccl"] {
        let options = RigOptions {
            // The same prompts again are handed over whole.
            prefix_cache: false,
            ..RigOptions::of(nodes(transport), "1p1d", SEED)
        };
        let mut rig = Rig::start(&options).await.expect("it starts");
        for victim in [Victim::Decode, Victim::Prefill] {
            kill(&mut rig, victim, (&cases, &answers)).await;
        }
        let findings = rig.stop().await.expect("everybody ends");
        assert_eq!(findings.violations, Vec::<String>::new(), "{transport}");
    }
}
