//! The whole fault matrix, for docs/reliability.md: `-- SEEDS [TOPOLOGY] [FILTER]`, for example `-- 3` or `-- 1 1p1d link`.
//! Needs the binary with failpoints (`scripts/build-failpoints`). Exit status 1 when anything was violated.

use std::process::ExitCode;
use std::time::Instant;

use integration_tests::fault_matrix::report::table;
use integration_tests::fault_matrix::rig::RigOptions;
use integration_tests::fault_matrix::{campaign, cells};

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let mut words = std::env::args().skip(1);
    let seeds: u64 = words.next().as_deref().unwrap_or("1").parse()?;
    let topology = words.next().unwrap_or_else(|| "2p2d".to_owned());
    let filter = words.next().unwrap_or_default();
    let started = Instant::now();
    let (mut reports, mut violations, mut commits, mut lines) = (Vec::new(), Vec::new(), 0, 0);
    for seed in 1..=seeds {
        let all = cells::sample(usize::MAX, seed)?;
        let wanted: Vec<_> = all
            .into_iter()
            .filter(|cell| cell.to_string().contains(&filter))
            .collect();
        let (total, done) = (wanted.len(), std::cell::Cell::new(0));
        let told = |report: &integration_tests::fault_matrix::strike::CellReport| {
            done.set(done.get() + 1);
            let (n, took) = (done.get(), report.took);
            eprintln!(
                "seed {seed} {n}/{total} {}: {:?} {:?} {took:.1?} {:?}",
                report.cell, report.outcomes, report.errors, report.violations
            );
        };
        let campaign = campaign::run(&wanted, &RigOptions::new(&topology, seed), told).await?;
        violations.extend(
            campaign
                .violations()
                .into_iter()
                .map(|what| format!("seed {seed}: {what}")),
        );
        (commits, lines) = (commits + campaign.commits, lines + campaign.log_lines);
        reports.extend(campaign.reports);
    }
    println!("{}", table(&reports));
    println!(
        "{topology}, seeds 1 to {seeds}, {commits} committed handoffs, {lines} lines of event log, {:.0?}",
        started.elapsed()
    );
    println!("{} violations", violations.len());
    for violation in &violations {
        println!("- {violation}");
    }
    Ok(match violations.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
