//! One knob at a time: which points are tried, which is chosen, and that rejected ones stay.

use clap::Parser;
use workload::record::{LoopKind, Outcome, RequestRecord, RunPart, Usage};

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    tune: TuneArgs,
}

fn args(words: &[&str]) -> TuneArgs {
    Cli::try_parse_from([&["tune", "--rate", "4"], words].concat())
        .expect("usable words")
        .tune
}

/// Ten requests in ten seconds, `good` of which meet the SLO of chat; each has its first token after `ttft_ms`.
fn run(good: u32, ttft_ms: u64) -> Run {
    let record = |at: u32| {
        let scheduled = Duration::from_secs(u64::from(at));
        let ms = if at < good { ttft_ms } else { 5000 };
        let first = scheduled + Duration::from_millis(ms);
        RequestRecord {
            id: format!("r-{at}"),
            part: RunPart::Measured,
            lane: serving_core::request::Lane::Interactive,
            prompt_tokens: 1,
            cached_tokens: None,
            output_tokens: 1,
            scheduled,
            sent: scheduled,
            tokens: vec![first],
            ended: first,
            outcome: Outcome::Completed,
            output_hash: None,
            server: None,
        }
    };
    Run {
        name: "tune".to_owned(),
        loop_kind: LoopKind::Open,
        offered: 1.0,
        records: (0..10).map(record).collect(),
        measured: Duration::from_secs(10),
        client: Usage::default(),
        server: BTreeMap::new(),
        environment: BTreeMap::new(),
    }
}

#[tokio::test]
async fn the_second_knob_is_turned_at_the_best_value_of_the_first_and_rejected_points_stay() {
    let args = args(&[
        "--try-max-num-batched-tokens",
        "64,128,256",
        "--try-max-num-seqs",
        "4,8",
    ]);
    let mut tried = Vec::new();
    let Tuned { points, is_whole, .. } = tune(&args, async |knobs: Knobs| {
        tried.push((knobs.max_num_batched_tokens, knobs.max_num_seqs));
        Ok(Some(match (knobs.max_num_batched_tokens, knobs.max_num_seqs) {
            (Some(128), Some(8)) => run(10, 100),
            (Some(128), _) => run(8, 100),
            _ => run(5, 100),
        }))
    })
    .await
    .expect("points");
    let budget = |tokens| (Some(tokens), None);
    assert_eq!(
        tried,
        [
            budget(64),
            budget(128),
            budget(256),
            (Some(128), Some(4)),
            (Some(128), Some(8))
        ]
    );
    assert!(is_whole);
    assert_eq!(
        points.iter().map(|point| point.is_chosen).collect::<Vec<_>>(),
        [false, false, false, false, true]
    );
    assert_eq!(points[4].settings["max_num_seqs"], 8);
    assert_eq!(points[4].goodput, 1.0);
}

#[tokio::test]
async fn of_equal_goodputs_the_one_with_more_room_is_chosen_and_ctrl_c_keeps_what_was_measured() {
    let args = args(&["--try-max-num-batched-tokens", "64,128", "--try-max-num-seqs", "4"]);
    let Tuned { points, is_whole, .. } = tune(&args, async |knobs: Knobs| {
        Ok(match (knobs.max_num_batched_tokens, knobs.max_num_seqs) {
            (_, Some(_)) => None,
            (Some(64), _) => Some(run(10, 250)),
            _ => Some(run(10, 100)),
        })
    })
    .await
    .expect("points");
    assert!(!is_whole);
    assert_eq!(
        points.iter().map(|point| point.is_chosen).collect::<Vec<_>>(),
        [false, true]
    );
}

#[tokio::test]
async fn a_value_that_the_nodes_refuse_takes_no_point_with_it() {
    let args = args(&["--try-max-num-batched-tokens", "64,128", "--try-max-num-seqs", "4,8"]);
    let tuned = tune(&args, async |knobs: Knobs| match knobs.max_num_seqs {
        Some(8) => Err(anyhow::anyhow!("the cluster did not start")),
        _ => Ok(Some(run(10, 100))),
    })
    .await
    .expect("points");
    assert_eq!((tuned.points.len(), tuned.is_whole), (3, true));
    let [left_out] = &tuned.left_out[..] else {
        panic!("{:?}", tuned.left_out);
    };
    assert_eq!(left_out.settings["max_num_seqs"], 8);
    assert_eq!(left_out.why, "the cluster did not start");
    let nothing = tune(&args, async |_: Knobs| {
        Err(anyhow::anyhow!("the cluster did not start"))
    })
    .await;
    assert_eq!(nothing.expect_err("no point").to_string(), "the cluster did not start");
}

#[tokio::test]
async fn a_point_of_a_late_client_is_not_chosen() {
    let args = args(&["--try-max-num-batched-tokens", "64,128", "--try-max-num-seqs", "4"]);
    let late = |mut run: Run| {
        for record in &mut run.records {
            record.sent += Duration::from_millis(50);
        }
        run
    };
    let chosen = |points: Vec<TuningPoint>| points.iter().position(|point| point.is_chosen);
    let Tuned { points, .. } = tune(&args, async |knobs: Knobs| {
        Ok(Some(match knobs.max_num_batched_tokens {
            Some(64) => run(5, 100),
            _ => late(run(10, 100)),
        }))
    })
    .await
    .expect("points");
    assert_eq!(chosen(points), Some(0));
    let Tuned { points, .. } = tune(&args, async |_: Knobs| Ok(Some(late(run(10, 100)))))
        .await
        .expect("points");
    assert_eq!(chosen(points), None);
}

#[tokio::test]
async fn a_point_at_which_nothing_was_answered_is_not_chosen() {
    let args = args(&["--try-max-num-batched-tokens", "64,128", "--try-max-num-seqs", "4"]);
    let unanswered = || {
        let mut run = run(10, 100);
        for record in &mut run.records {
            record.outcome = Outcome::Refused { status: 503 };
        }
        run
    };
    let Tuned { points, left_out, .. } = tune(&args, async |_: Knobs| Ok(Some(unanswered())))
        .await
        .expect("points");
    assert!(points.iter().all(|point| !point.is_chosen));
    let tuning = Tuning {
        topology: "1p1d".to_owned(),
        rate: 4.0,
        slo: args.slo.0.clone(),
        points,
        left_out,
    };
    let text = text(&tuning, Terminal::plain());
    assert!(text.contains("nothing was answered"), "{text}");
    let row = text.lines().nth(1).expect("the first point").split_whitespace();
    assert_eq!(row.rev().take(3).collect::<Vec<_>>(), ["-", "-", "0.00"]);
    let Tuned { points, .. } = tune(&args, async |knobs: Knobs| {
        Ok(Some(match knobs.max_num_batched_tokens {
            Some(64) => unanswered(),
            _ => run(0, 100),
        }))
    })
    .await
    .expect("points");
    assert!(
        points[1].is_chosen,
        "all answers were late, and it is the best there is"
    );
}

#[tokio::test]
async fn the_time_of_a_step_is_tried_last_and_only_where_nodes_compute_prompts_and_decode() {
    let targets_on = async |topology: &str, targets: &[&str]| {
        let words = [
            "--topology",
            topology,
            "--try-max-num-batched-tokens",
            "64",
            "--try-max-num-seqs",
            "4",
        ];
        let args = args(&[&words[..], targets].concat());
        let mut tried = Vec::new();
        let outcome = tune(&args, async |knobs: Knobs| {
            tried.push(knobs);
            Ok(Some(run(if knobs.itl_target_ms == Some(60) { 10 } else { 5 }, 100)))
        });
        let Tuned { points, .. } = outcome.await.expect("points");
        let all = Knobs {
            max_num_batched_tokens: Some(64),
            mixed_step_tokens: Some(64),
            max_num_seqs: Some(4),
            itl_target_ms: None,
        };
        assert_eq!(tried[1], all);
        let chosen = points.into_iter().find(|point| point.is_chosen).expect("one is best");
        (tried.split_off(2), chosen.settings.get("itl_target_ms").cloned())
    };
    let (targets, chosen) = targets_on("2c", &["--try-itl-target-ms", "30,60"]).await;
    let targets: Vec<_> = targets.iter().map(|knobs| knobs.itl_target_ms).collect();
    assert_eq!(targets, [Some(30), Some(60)]);
    assert_eq!(chosen, Some(60.into()));
    let (targets, _) = targets_on("2c", &[]).await;
    assert_eq!(targets.len(), ITL_TARGETS_MS_DEFAULT.len());
    let (targets, chosen) = targets_on("1p1d", &[]).await;
    assert!(targets.is_empty() && chosen.is_none());
}

#[test]
fn targets_that_no_point_would_have_are_refused() {
    let checked = |words: &[&str]| check(&args(words));
    assert!(checked(&["--topology", "1p1d", "--try-itl-target-ms", "30"]).is_err());
    let on_both = ["--topology", "2c", "--try-itl-target-ms", "30"];
    for taken in [&on_both[..], &["--topology", "1p1d"]] {
        assert!(checked(taken).is_ok(), "{taken:?}");
    }
}
