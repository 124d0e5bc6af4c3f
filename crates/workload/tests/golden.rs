//! Percentiles and intervals beside those of numpy and scipy (integration-tests/python/make_statistics.py).

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serving_core::request::Lane;
use workload::comparison::{Arm, ArmKind, ArmRun, Comparison, Fairness, Resources, Shape, Slo};
use workload::record::{LoopKind, Outcome, RequestRecord, Run, RunPart, Usage};
use workload::statistics::Samples;
use workload::verdict::{Metric, VerdictPlan, conclude};

#[derive(Deserialize)]
struct Golden {
    samples: Vec<GoldenSamples>,
    pairs: Vec<GoldenPair>,
}

#[derive(Deserialize)]
struct GoldenSamples {
    values: Vec<f64>,
    percentiles: Vec<(f64, f64)>,
    mean: f64,
    std: f64,
}

/// For each arm and repeat, which requests met the SLO.
#[derive(Deserialize)]
struct GoldenPair {
    met: [Vec<String>; 2],
    ratio: f64,
    low: f64,
    high: f64,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("data/statistics.json")).expect("the file of make_statistics.py")
}

#[track_caller]
fn assert_near(found: f64, expected: f64, share: f64) {
    let distance = (found - expected).abs();
    assert!(distance <= share * expected.abs() + 1e-12, "{found} is not {expected}");
}

#[test]
fn percentiles_mean_and_deviation_are_those_of_numpy() {
    for golden in golden().samples {
        let samples = Samples::new(golden.values.iter().copied());
        for (percent, value) in golden.percentiles {
            assert_near(samples.percentile(percent).expect("samples"), value, 1e-12);
        }
        assert_near(samples.mean().expect("samples"), golden.mean, 1e-12);
        assert_near(samples.std().expect("samples"), golden.std, 1e-9);
    }
}

/// A request that was due at its number of milliseconds and got one token, in time or not.
fn request(at: u64, met: bool) -> RequestRecord {
    let scheduled = Duration::from_millis(at);
    let ended = scheduled + Duration::from_millis(if met { 10 } else { 1000 });
    RequestRecord {
        id: format!("r-{at}"),
        part: RunPart::Measured,
        lane: Lane::Interactive,
        prompt_tokens: 1,
        cached_tokens: None,
        output_tokens: 1,
        scheduled,
        sent: scheduled,
        tokens: vec![ended],
        ended,
        outcome: Outcome::Completed,
        output_hash: None,
        server: None,
    }
}

fn run(met: &str) -> Run {
    Run {
        name: "golden".to_owned(),
        loop_kind: LoopKind::Open,
        offered: 10.0,
        records: (0..)
            .zip(met.chars())
            .map(|(at, met)| request(at, met == '1'))
            .collect(),
        measured: Duration::from_secs(10),
        client: Usage::default(),
        server: BTreeMap::new(),
        environment: BTreeMap::new(),
    }
}

fn comparison(golden: &GoldenPair) -> Comparison {
    let names = ["baseline", "candidate"];
    let arm = |name: &str| Arm {
        name: name.to_owned(),
        kind: ArmKind::External,
        topology: name.to_owned(),
        settings: BTreeMap::new(),
        resources: Resources::default(),
        tuning: Vec::new(),
    };
    let runs = names.iter().zip(&golden.met).flat_map(|(name, repeats)| {
        (0..).zip(repeats).map(|(repeat, met)| ArmRun {
            arm: (*name).to_owned(),
            repeat,
            run: run(met),
        })
    });
    let shape = Shape {
        name: "golden".to_owned(),
        traffic: String::new(),
        trace_hash: String::new(),
        runs: runs.collect(),
        contrasts: Vec::new(),
        verdict: String::new(),
    };
    // Each field of the fairness list is told.
    let told = serde_json::to_value(Fairness::default()).expect("fairness");
    let told: serde_json::Map<_, _> = told
        .as_object()
        .expect("fields")
        .keys()
        .map(|name| (name.clone(), "told".into()))
        .collect();
    Comparison {
        date: "2026-11-25".to_owned(),
        command: String::new(),
        hypothesis: None,
        slo: Slo {
            name: "custom".to_owned(),
            ttft_ms_max: 100.0,
            itl_ms_max: 100.0,
        },
        arms: names.map(arm).to_vec(),
        shapes: vec![shape],
        fairness: serde_json::from_value(told.into()).expect("fairness"),
        environment: BTreeMap::new(),
    }
}

/// 200 resamples give a standard error to about 5 %, and so an interval's reach.
#[test]
fn intervals_are_near_those_of_an_independent_program() {
    let plan = VerdictPlan {
        primary: Metric::Goodput,
        secondary: Vec::new(),
        ..VerdictPlan::against("baseline")
    };
    for golden in golden().pairs {
        let mut comparison = comparison(&golden);
        assert_eq!(conclude(&mut comparison, &plan), []);
        let contrast = &comparison.shapes[0].contrasts[0];
        assert_near(contrast.ratio, golden.ratio, 1e-9);
        assert_near(contrast.ratio - contrast.ratio_low, golden.ratio - golden.low, 0.12);
        assert_near(contrast.ratio_high - contrast.ratio, golden.high - golden.ratio, 0.12);
    }
}
