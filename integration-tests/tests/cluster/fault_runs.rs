//! Small versions of the long runs of `examples/faults.rs`: what they promise, without their clocks.

use std::time::Duration;

use integration_tests::fault_runs::{cancels, deadlines, flips, retries, reuse};

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_at_any_point_frees_every_block() {
    let run = cancels::run(1, 5).await.expect("the run");
    assert!(run.samples.len() >= 13, "{}", run.samples.len());
    for sample in &run.samples {
        println!("{sample:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_much_beyond_his_deadline_whatever_fails() {
    let run = deadlines::run(60, 5).await.expect("the run");
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
async fn failing_transfers_are_retried_within_the_budget() {
    let run = retries::run(Duration::from_secs(8), Duration::from_secs(3), 5)
        .await
        .expect("the run");
    println!("{run:?}");
    assert!(run.failed_transfers > 0.0, "nothing was tried");
    // Ten retries a minute are free of the ratio.
    let allowed = (run.requests as f64 * 0.2).max(10.0);
    assert!(
        run.retries <= allowed,
        "{} retries for {} requests",
        run.retries,
        run.requests
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_are_reused_at_once_never_carry_anothers_tokens() {
    for transport in ["grpc", "shm"] {
        let run = reuse::run(4, transport, 5).await.expect("the run");
        println!("{transport} {run:?}");
        assert_eq!(run.violations, Vec::<String>::new(), "{transport}");
        assert!(run.compared_texts >= 4 && run.left > 2, "{run:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_turned_bit_is_detected_and_no_text_changes() {
    let run = flips::run(6, 5).await.expect("the run");
    println!("{run:?}");
    assert_eq!(run.violations, Vec::<String>::new());
    assert!(run.flipped > 0);
    assert_eq!(run.detected, run.flipped);
}
