//! Sweeps over a server whose queue is computed, so that its knee is known and no clock decides a test.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Parser;
use serde_json::{Value, json};
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
    assert_eq!(report.status(), Exit::Ok);
    let json = serde_json::to_value(&report).expect("JSON");
    assert_eq!(json["knee"]["found"], "at");
}

/// A prefix cache would know the prompts of the runs before.
#[tokio::test]
async fn each_run_has_prompts_of_its_own() {
    let args = args(&["--rates", "10,20,10", "--random-output-len", "2", "--seed", "7"]);
    let mut seeds = Vec::new();
    let server = async |plan: LoadPlan| {
        seeds.push(plan.seed);
        queue(plan).await
    };
    settings(&args, &judge(&args), server).await.expect("runs");
    assert_eq!((seeds.len(), seeds[0]), (3, 7));
    assert!(seeds[0] != seeds[1] && seeds[0] != seeds[2] && seeds[1] != seeds[2]);
}

#[tokio::test]
async fn rates_above_one_that_is_over_saturated_are_left_out() {
    let args = args(&["--rates", "10,100,200,400", "--random-output-len", "2"]);
    let sweep = settings(&args, &judge(&args), queue).await.expect("runs");
    let labels: Vec<&str> = sweep.points.iter().map(|(point, _)| point.label.as_str()).collect();
    assert_eq!(labels, ["10.000 req/s", "100.000 req/s"]);
    let report = serde_json::to_value(SweepReport::of(&args, &judge(&args), &sweep)).expect("JSON");
    assert_eq!(report["bends"], json!(["10.000 req/s"]));
}

#[tokio::test]
async fn the_slo_does_not_hold_at_a_rate_that_is_over_saturated() {
    // The run at 100 ends before a wait reaches the limit, but its queue grows all the time.
    let words = [
        "--rates",
        "10,100,200",
        "--random-output-len",
        "2",
        "--slo",
        "1000000:50",
    ];
    let args = args(&words);
    let sweep = settings(&args, &judge(&args), queue).await.expect("runs");
    let met = |at: usize| sweep.points[at].0.summary.attainment.both;
    assert_eq!((sweep.points.len(), met(0), met(1)), (2, 1.0, 1.0));
    let report = serde_json::to_value(SweepReport::of(&args, &judge(&args), &sweep)).expect("JSON");
    assert_eq!(report["bends"], json!(["10.000 req/s"]));
}

/// The same server and a client that sends 50 ms late above 15 requests a second.
async fn late_client(plan: LoadPlan) -> anyhow::Result<Run> {
    let mut run = queue(plan).await?;
    if run.offered > 15.0 {
        for record in &mut run.records {
            record.sent += Duration::from_millis(50);
        }
    }
    Ok(run)
}

#[tokio::test]
async fn a_client_that_sends_late_ends_the_search_and_keeps_its_points() {
    let args = args(&["--find-knee", "10", "--burstiness", "1000000000"]);
    let sweep = find_knee(&args, &judge(&args), 10.0, late_client).await.expect("runs");
    assert_eq!((sweep.knee, sweep.client_late_at), (None, Some(20.0)));
    let report = SweepReport::of(&args, &judge(&args), &sweep);
    assert_eq!(exit(&sweep, report.status()), Exit::NoVerdict);
    let json = serde_json::to_value(&report).expect("JSON");
    assert_eq!(json["points"][0]["summary"]["lag"]["is_valid"], true);
    assert_eq!(json["points"][1]["summary"]["lag"]["is_valid"], false);
    assert_eq!(json["client_late_at"], 20.0);
    // The late point is no failure of the server.
    assert_eq!(json["bends"], json!([]));
}

/// The same server, which dies of ten users.
async fn mortal(plan: LoadPlan) -> anyhow::Result<Run> {
    anyhow::ensure!(plan.pace != Pace::Closed { users: 10 }, "no server answers");
    queue(plan).await
}

#[tokio::test]
async fn a_server_that_dies_ends_the_sweep_and_takes_no_point_with_it() {
    let of = async |users: &str| {
        let args = args(&["--users", users]);
        settings(&args, &judge(&args), mortal).await
    };
    let sweep = of("1,5,10,20").await.expect("two points");
    assert_eq!((sweep.points.len(), sweep.is_cut), (2, false));
    let why = format!("{:#}", sweep.broken.expect("the reason"));
    assert!(why.contains("10 users") && why.contains("no server answers"), "{why}");
    let error = of("10,20").await.expect_err("nothing was measured");
    assert_eq!(error.to_string(), "no server answers");
}

#[tokio::test]
async fn a_load_of_a_late_client_meets_no_contract() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("contract.toml");
    std::fs::write(&file, "ttft_ms_p95_max = 100000\n").expect("a file");
    let status = async |rates: &str| {
        let args = args(&["--rates", rates, "--contract", file.to_str().expect("a path")]);
        let sweep = settings(&args, &judge(&args), late_client).await.expect("runs");
        SweepReport::of(&args, &judge(&args), &sweep).status()
    };
    assert_eq!(status("20").await, Exit::NoVerdict);
    assert_eq!(status("10,20").await, Exit::Ok);
}

/// The bends of a sweep in which requests come evenly and wait for nobody up to 50 requests a second.
async fn bends(words: &[&str]) -> Value {
    let even = ["--burstiness", "1000000000", "--slo", "20.5:50", "--seconds", "1"];
    let args = args(&[words, &even[..]].concat());
    let sweep = settings(&args, &judge(&args), queue).await.expect("runs");
    let report = serde_json::to_value(SweepReport::of(&args, &judge(&args), &sweep)).expect("JSON");
    report["bends"].clone()
}

#[tokio::test]
async fn each_shape_has_its_own_bend_whatever_the_order_of_its_loads() {
    assert_eq!(bends(&["--rates", "60,20,10"]).await, json!(["20.000 req/s"]));
    assert_eq!(bends(&["--rates", "60,55"]).await, json!([]));
    let two_shapes = ["--rates", "60,20", "--random-output-len", "2,4", "--force"];
    assert_eq!(
        bends(&two_shapes).await,
        json!(["20.000 req/s, 256/2 tokens", "20.000 req/s, 256/4 tokens"])
    );
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
    for (limit, status, step) in [(1000, Exit::Ok, "stop"), (10, Exit::NotMet, "ttft")] {
        std::fs::write(&file, format!("ttft_ms_p95_max = {limit}\n")).expect("a file");
        let args = args(&["--users", "1", "--contract", file.to_str().expect("a path")]);
        let sweep = settings(&args, &judge(&args), queue).await.expect("runs");
        let report = SweepReport::of(&args, &judge(&args), &sweep);
        assert_eq!(report.status(), status);
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
    // A search takes the first length only, so the others would be passed over.
    assert!(checked(&["--find-knee", "2", "--random-output-len", "1,2", "--force"]).is_err());
    // Users send when their answer has ended, so these flags would be passed over.
    for of_rates in [["--burstiness", "0.3"], ["--seconds", "30"]] {
        for users in [&["--users", "1,5"][..], &[]] {
            let error = checked(&[&of_rates[..], users].concat()).expect_err("no rates");
            assert!(error.to_string().contains(of_rates[0]), "{error}");
        }
        for rates in [["--rates", "1,2"], ["--find-knee", "2"]] {
            assert!(checked(&[&of_rates[..], &rates[..]].concat()).is_ok(), "{of_rates:?}");
        }
    }
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

#[test]
fn a_trace_gives_the_lengths_and_a_load_the_times() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("trace.jsonl");
    let row = r#"{"timestamp":9000,"input_length":600,"output_length":40,"hash_ids":[1,2]}"#;
    std::fs::write(&file, [row; 3].join("\n")).expect("a file");
    let words = ["--rates", "10", "--length-scale", "4"];
    let file = ["--dataset-path", file.to_str().expect("a path")];
    let args = args(&[&words[..], &file].concat());
    let plan = Setting::all(&args)[0].plan(&args).expect("a trace");
    let requests = &plan.trace.requests;
    for request in requests {
        assert_eq!((request.prompt_tokens, request.output_tokens), (150, 10));
    }
    let last = requests.last().expect("requests").at.as_secs_f64();
    assert!(requests.len() == 3 && (last - 0.3).abs() < 1e-6, "{last}");
    let with = |more: &[&str]| Cli::try_parse_from([&["sweep"], &file[..], more].concat()).is_ok();
    assert!(with(&[]) && !with(&["--random-input-len", "8"]));
}
