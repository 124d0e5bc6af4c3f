//! Small versions of those long runs of `examples/faults.rs` whose load, or whose outage, is timed: what they promise, without their
//! clocks. `../fault_runs.rs` has the others.

use std::time::Duration;

use integration_tests::etcd_process;
use integration_tests::fault_matrix::nodes::Nodes;
use integration_tests::fault_matrix::rig::Timers;
use integration_tests::fault_runs::judged::Judged;
use integration_tests::fault_runs::load::{Rate, Terms};
use integration_tests::fault_runs::{
    coordinator_kills, coordinator_pauses, etcd_outages, kills, pauses, retries, rolling,
};

/// Of the runs under load. Only clients of a coordinator that goes try again.
const TERMS: Terms = Terms {
    nodes: Nodes::ON_PROCESSORS,
    prompts: 8,
    rate: Rate::PerSecond(3.0),
    calm: Duration::from_millis(500),
    reconnects_within: Duration::ZERO,
    seed: 5,
};
const RECONNECTING: Terms = Terms {
    reconnects_within: Duration::from_secs(45),
    ..TERMS
};

/// A machine that is busy with something else makes nodes miss their lease of two seconds, and a request that meets that
/// four times ends by an explicit error. Wrong texts and missing ends are wrong anywhere; these are among the violations.
fn most_are_answered(judged: &Judged) -> bool {
    judged.sent > 0 && judged.completed * 10 >= judged.sent * 7
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
async fn nodes_that_die_under_load_cost_no_answer() {
    let plan = kills::Plan {
        kills_each: 1,
        terms: TERMS,
    };
    let run = kills::run(plan, |victim, placements| println!("{victim}: {placements:?}"))
        .await
        .expect("the run");
    println!("{}", run.summary());
    assert_eq!(run.violations, Vec::<String>::new());
    assert!(most_are_answered(&run.judged), "{:?}", run.judged);
    assert!(run.kills == 2 && run.commits > 0, "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_wakes_after_its_lease_hurts_nobody() {
    // Whether a shorter pause evicts nobody is for the long run: on a busy CI machine other processes miss their lease, too.
    let plan = pauses::Plan {
        pauses: vec![(Duration::from_secs(4), 1)],
        terms: TERMS,
    };
    let run = pauses::run(&plan, |pause| println!("{pause:?}"))
        .await
        .expect("the run");
    println!("{}", run.summary());
    let broken: Vec<&String> = run
        .violations
        .iter()
        .filter(|what| !what.contains("missed only"))
        .collect();
    assert_eq!(broken, Vec::<&String>::new());
    assert!(run.pauses.iter().all(|pause| pause.lost_after.is_some()), "{run:?}");
    assert!(most_are_answered(&run.judged), "{:?}", run.judged);
    let mid_transfer = run.pauses.iter().filter(|pause| pause.is_in_transfer).count();
    assert!(mid_transfer > 0, "nothing was late: {run:?}");
    assert!(
        run.cut_pushes.values().sum::<f64>() >= mid_transfer as f64,
        "a late push was committed: {run:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_outlive_their_coordinator_and_serve_the_next_one() {
    let run = coordinator_kills::run(coordinator_kills::Plan {
        kills: 1,
        terms: RECONNECTING,
    })
    .await
    .expect("the run");
    println!("{}", run.summary());
    assert_eq!(run.violations, Vec::<String>::new());
    assert_eq!((run.to_first_token.len(), run.node_restarts), (1, 0));
    assert_eq!(run.judged.failed, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_that_was_late_loses_no_node_and_moves_no_stream() {
    let plan = coordinator_pauses::Plan {
        // Twice the rig's lease.
        pauses: vec![coordinator_pauses::Planned {
            lasts: Duration::from_secs(4),
            keeps: coordinator_pauses::Keeps::Streams,
        }],
        streams: 6,
        timers: Timers::Short,
        seed: 5,
    };
    let run = coordinator_pauses::run(&plan, |pause| println!("{pause:?}"))
        .await
        .expect("the run");
    println!("{}", run.summary());
    assert_eq!(run.broken(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_fails_no_request_beside_a_client_that_does_not_read() {
    let run = rolling::run(rolling::Plan {
        rounds: 1,
        nodes_each: 1,
        // An answer under this load takes less, also on a slow machine. Half a second of it is for the goodbye.
        grace: Duration::from_secs(6),
        terms: RECONNECTING,
    })
    .await
    .expect("the run");
    println!("{}", run.summary());
    // How long a drain takes is for the long run.
    assert_eq!(run.violations, Vec::<String>::new());
    assert_eq!(run.judged.failed, Vec::<String>::new());
    assert_eq!(run.drains.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn everybody_registers_again_in_an_etcd_that_comes_back_empty() {
    if etcd_process::program().is_none() {
        println!("not run: BATON_ETCD is not set");
        return;
    }
    let plan = etcd_outages::Plan {
        outages: vec![(etcd_outages::How::Emptied, Duration::from_secs(1))],
        terms: TERMS,
    };
    let run = etcd_outages::run(&plan, |outage| println!("{outage:?}"))
        .await
        .expect("the run");
    println!("{}", run.summary());
    assert_eq!(run.violations, Vec::<String>::new());
    assert!(most_are_answered(&run.judged), "{:?}", run.judged);
    // How soon, and that nobody's lease runs out meanwhile, is for the long run.
    assert!(run.outages.iter().all(|outage| outage.to_members.is_some()), "{run:?}");
}
