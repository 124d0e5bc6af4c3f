//! A seeded sample of the fault matrix, in which no kind of fault occurs twice. `examples/faults.rs` runs the whole matrix.

use integration_tests::etcd_process;
use integration_tests::fault_matrix::cells::Victim;
use integration_tests::fault_matrix::report::table;
use integration_tests::fault_matrix::rig::RigOptions;
use integration_tests::fault_matrix::verdict::Outcome;
use integration_tests::fault_matrix::{campaign, cells};

/// Of the 16 pairs of victim and fault, each at a point that the seed chooses: change it and other cells run.
const CELLS: usize = 6;
const SEED: u64 = 3;

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_at_any_point_costs_no_wrong_token_no_second_end_and_no_block() {
    let mut cells = cells::sample(CELLS, SEED).expect("cells");
    if etcd_process::program().is_none() {
        println!("not run: the cells in which etcd fails, for BATON_ETCD is not set");
        cells.retain(|cell| cell.victim != Victim::Etcd);
    }
    let told = |report: &integration_tests::fault_matrix::strike::CellReport| {
        println!(
            "{}: {:?}, at rest after {:?}, {:?} in all",
            report.cell, report.outcomes, report.to_rest, report.took
        );
    };
    let options = RigOptions::new("2p2d", SEED);
    let campaign = campaign::run(&cells, &options, told).await;
    let campaign = campaign.expect("the rig works");
    println!("{}", table(&campaign.reports));
    assert_eq!(campaign.violations(), Vec::<String>::new());
    let completed = campaign.reports.iter().flat_map(|report| &report.outcomes);
    let completed = completed.filter(|outcome| **outcome == Outcome::Completed).count();
    assert!(completed > CELLS * 3, "most requests outlive their fault: {completed}");
    assert!(
        campaign.commits > CELLS * 3,
        "and were handed over: {}",
        campaign.commits
    );
}
