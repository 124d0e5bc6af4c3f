//! Small versions of those long runs of `examples/faults.rs` that load no cluster steadily: what they promise, without their clocks.
//! `alone/fault_runs.rs` has the others.

use integration_tests::fault_matrix::nodes::Nodes;
use integration_tests::fault_runs::{cancels, deadlines, flips, migrate, reuse};

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_at_any_point_frees_every_block() {
    let run = cancels::run(1, Nodes::ON_PROCESSORS, 5).await.expect("the run");
    assert!(run.samples.len() >= 13, "{}", run.samples.len());
    for sample in &run.samples {
        println!("{sample:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_much_beyond_his_deadline_whatever_fails() {
    let run = deadlines::run(24, Nodes::ON_PROCESSORS, 5).await.expect("the run");
    println!("{run:?}");
    // The quarter second is measured by the long run; a busy CI machine gets no time limit, but wrong texts and missing
    // ends are wrong anywhere.
    let broken: Vec<&String> = run
        .violations
        .iter()
        .filter(|what| !what.contains("after a deadline"))
        .collect();
    assert_eq!(broken, Vec::<&String>::new());
    assert!(!run.late.is_empty() && run.completed > 0, "both kinds of end occur");
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_are_reused_at_once_never_carry_anothers_tokens() {
    for transports in ["grpc", "shm"] {
        let nodes = Nodes {
            transports,
            ..Nodes::ON_PROCESSORS
        };
        let run = reuse::run(2, nodes, 5).await.expect("the run");
        println!("{transports} {run:?}");
        assert_eq!(run.violations, Vec::<String>::new(), "{transports}");
        assert!(run.compared_texts >= 2 && run.left > 0, "{run:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_turned_bit_is_detected_and_no_text_changes() {
    let run = flips::run(6, Nodes::ON_PROCESSORS, 5).await.expect("the run");
    println!("{run:?}");
    assert_eq!(run.violations, Vec::<String>::new());
    assert!(run.flipped > 0);
    assert_eq!(run.detected, run.flipped);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_dead_decode_node_go_on_elsewhere_without_a_gap_or_repeat() {
    let run = migrate::run(12, 1, 5).await.expect("the run");
    println!("{}", run.summary());
    assert_eq!(run.violations, Vec::<String>::new());
    assert_eq!(run.completed, 12);
    assert!(run.migrated > 0, "nothing was moved: {run:?}");
}
