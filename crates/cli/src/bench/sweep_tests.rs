//! Sweeps over a server whose queue is computed, so that its knee is known and no clock decides a test.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Parser;
use workload::record::{LoopKind, Outcome, RequestRecord, RunPart, Usage};

use super::*;
use crate::bench::load::plan::Pace;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    sweep: SweepArgs,
}

fn args(words: &[&str]) -> SweepArgs {
    Cli::try_parse_from([&["sweep"], words].concat())
        .expect("usable words")
        .sweep
}

fn judge(args: &SweepArgs) -> Judge {
    args.judge.read().expect("no contract, or a good one")
}

/// One server: each prompt takes 20 ms, one after another; tokens then come every 5 ms.
async fn queue(plan: LoadPlan) -> anyhow::Result<Run> {
    let mut free = Duration::ZERO;
    let is_closed = matches!(plan.pace, Pace::Closed { .. });
    let records: Vec<RequestRecord> = (0_u32..)
        .zip(&plan.trace.requests)
        .map(|(at, request)| {
            let scheduled = if is_closed { free } else { request.at };
            free = free.max(scheduled) + Duration::from_millis(20);
            let tokens: Vec<Duration> = (0..request.output_tokens)
                .map(|token| free + Duration::from_millis(5) * token)
                .collect();
            RequestRecord {
                id: format!("r-{at}"),
                part: RunPart::Measured,
                lane: request.lane,
                prompt_tokens: request.prompt_tokens,
                cached_tokens: None,
                output_tokens: request.output_tokens,
                scheduled,
                sent: scheduled,
                ended: *tokens.last().expect("an output"),
                tokens,
                outcome: Outcome::Completed,
                output_hash: None,
                server: None,
            }
        })
        .collect();
    let first = records.first().expect("a request").scheduled;
    let last = records.iter().map(|record| record.ended).max().expect("a request");
    Ok(Run {
        name: plan.name.clone(),
        loop_kind: if is_closed { LoopKind::Closed } else { LoopKind::Open },
        offered: match plan.pace {
            Pace::Closed { users } => f64::from(users),
            Pace::Open { .. } => records.len() as f64 / records.last().expect("a request").scheduled.as_secs_f64(),
        },
        measured: last - first,
        records,
        client: Usage::default(),
        server: BTreeMap::new(),
        environment: BTreeMap::new(),
    })
}

#[tokio::test]
async fn the_knee_of_a_queue_lies_below_its_capacity() {
    // 50 requests a second are its capacity. Even arrivals at less wait for nobody: the limit of 20 ms holds up to 50.
    let args = args(&[
        "--find-knee",
        "10",
        "--slo",
        "20.5:50",
        "--burstiness",
        "1000000000",
        "--random-output-len",
        "4",
    ]);
    let sweep = find_knee(&args, &judge(&args), 10.0, queue).await.expect("runs");
    let Some(Knee::At { rate, failed_at }) = sweep.knee else {
        panic!("{:?}", sweep.knee)
    };
    assert!((47.5..=50.5).contains(&rate) && failed_at > rate, "{rate} {failed_at}");
    let report = SweepReport::of(&args, &judge(&args), &sweep);
    assert!(report.is_met());
    let json = serde_json::to_value(&report).expect("JSON");
    assert_eq!(json["knee"]["found"], "at");
}

#[tokio::test]
async fn rates_above_one_that_is_over_saturated_are_left_out() {
    let args = args(&["--rates", "10,100,200,400", "--random-output-len", "2"]);
    let sweep = settings(&args, &judge(&args), queue).await.expect("runs");
    let labels: Vec<&str> = sweep.points.iter().map(|(point, _)| point.label.as_str()).collect();
    assert_eq!(labels, ["10.000 req/s", "100.000 req/s"]);
    let report = serde_json::to_value(SweepReport::of(&args, &judge(&args), &sweep)).expect("JSON");
    assert_eq!(report["bend"], "10.000 req/s");
}

#[tokio::test]
async fn without_flags_there_are_four_loads_and_each_run_warns_of_its_closed_loop() {
    let args = args(&[]);
    let sweep = settings(&args, &judge(&args), queue).await.expect("runs");
    assert_eq!(sweep.points.len(), 4);
    let report = SweepReport::of(&args, &judge(&args), &sweep);
    let json = serde_json::to_value(&report).expect("JSON");
    assert_eq!(json["points"][3]["label"], "20 users");
    let alone = json["points"][0]["slowdown"]["p50"]
        .as_f64()
        .expect("a run with one user");
    assert!((alone - 1.0).abs() < 1e-6, "{alone}");
    assert_eq!(json["warnings"][0]["warning"], "closed_loop");
}

#[tokio::test]
async fn a_contract_decides_the_exit_status_and_names_the_next_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("contract.toml");
    for (limit, is_met, step) in [(1000, true, "stop"), (10, false, "ttft")] {
        std::fs::write(&file, format!("ttft_ms_p95_max = {limit}\n")).expect("a file");
        let args = args(&["--users", "1", "--contract", file.to_str().expect("a path")]);
        let sweep = settings(&args, &judge(&args), queue).await.expect("runs");
        let report = SweepReport::of(&args, &judge(&args), &sweep);
        assert_eq!(report.is_met(), is_met);
        assert_eq!(serde_json::to_value(&report).expect("JSON")["next_step"]["step"], step);
    }
}

#[test]
fn two_knobs_need_force_and_conflicts_are_refused() {
    let checked = |words: &[&str]| check(&args(words));
    assert!(checked(&["--users", "1,5"]).is_ok());
    assert!(checked(&["--random-input-len", "128,512"]).is_ok());
    let error = checked(&["--users", "1,5", "--random-input-len", "128,512"]).expect_err("two knobs");
    assert!(error.to_string().contains("--users and --random-input-len"), "{error}");
    assert!(checked(&["--users", "1,5", "--random-input-len", "128,512", "--force"]).is_ok());
    assert!(checked(&["--find-knee", "2", "--random-output-len", "1,2"]).is_err());
    assert!(Cli::try_parse_from(["sweep", "--users", "1", "--rates", "2"]).is_err());
    assert!(Cli::try_parse_from(["sweep", "--rates", "0"]).is_err());
}

#[test]
fn several_lengths_without_a_load_are_measured_with_one_user() {
    let settings = Setting::all(&args(&["--random-input-len", "128,512,2048"]));
    let lengths: Vec<(Load, u32)> = settings
        .iter()
        .map(|setting| (setting.load, setting.prompt_tokens))
        .collect();
    assert_eq!(
        lengths,
        [(Load::Users(1), 128), (Load::Users(1), 512), (Load::Users(1), 2048)]
    );
}
