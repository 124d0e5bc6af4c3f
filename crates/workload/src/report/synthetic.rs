//! A made-up comparison, out of a seed: it shows what a report looks like, and it tests the report.
//!
//! The arms follow simple rules (one queue for prompts, gaps that grow beside a prompt), so that the pictures have the forms
//! of real ones. The report of it says that nothing was measured.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use serving_core::request::Lane;

use crate::comparison::{Arm, ArmKind, ArmRun, Comparison, Fairness, Resources, Shape, Slo, TuningPoint};
use crate::record::{LoopKind, Outcome, RequestRecord, Run, RunPart, ServerRecord, Usage};
use crate::verdict::{VerdictPlan, conclude};

const REQUESTS: usize = 60;
const REPEATS: u32 = 3;
/// Requests a second of the shape that is measured at several loads, and of the other one.
const RATES: [f64; 3] = [1.5, 3.0, 4.5];
const RATE: f64 = 6.0;
/// Milliseconds for each prompt token, and between two tokens of an undisturbed stream.
const PROMPT_MS_PER_TOKEN: f64 = 0.14;
const GAP_MS: f64 = 14.0;
const KV_BYTES_PER_TOKEN: f64 = 23_040.0;
const KV_BYTES_PER_MS: f64 = 1.4e6;

/// Three arms, two shapes, three repeats. The same seed gives the same comparison.
pub fn comparison(seed: u64) -> Comparison {
    let arms = arms();
    let long = Traffic {
        long_share: 0.25,
        short: 120,
        long: 1_500,
    };
    let short = Traffic {
        long_share: 0.0,
        short: 160,
        long: 160,
    };
    let shapes = vec![
        shape(("long prompts beside running streams", &RATES), &long, &arms, seed),
        shape(("short prompts only", &[RATE]), &short, &arms, seed + 1),
    ];
    let mut comparison = Comparison {
        hypothesis: Some(
            "Disaggregation lowers p99 ITL beside long prompts and costs throughput with short ones.".to_owned(),
        ),
        arms,
        shapes,
        fairness: fairness(),
        ..empty()
    };
    conclude(&mut comparison, &VerdictPlan::against("co-located"));
    comparison
}

/// Nothing but a date and a command.
pub fn empty() -> Comparison {
    Comparison {
        date: "2026-11-25".to_owned(),
        command: "baton report --example --out DIR".to_owned(),
        hypothesis: None,
        slo: Slo {
            name: "chat".to_owned(),
            ttft_ms_max: 300.0,
            itl_ms_max: 50.0,
        },
        arms: Vec::new(),
        shapes: Vec::new(),
        fairness: Fairness::default(),
        environment: BTreeMap::from([
            ("made_up".to_owned(), Value::Bool(true)),
            ("model".to_owned(), json!("made-up-135m")),
            (
                "machine".to_owned(),
                json!({"cores": 4, "cpu": "made-up CPU", "memory": "16 GB", "os": "Linux"}),
            ),
            ("versions".to_owned(), json!({"baton": "0.1.0", "rustc": "1.95.0"})),
            ("seed".to_owned(), json!(1)),
            ("weights_bytes".to_owned(), json!(145_000_000)),
            ("memory_bytes_per_s".to_owned(), json!(20_000_000_000_u64)),
            ("parameters".to_owned(), json!(135_000_000)),
            ("flops_per_s".to_owned(), json!(2_200_000_000_000_u64)),
            ("link_bytes_per_s".to_owned(), json!(3_000_000_000_u64)),
            (
                "predictions".to_owned(),
                json!([
                    {"what": "ITL p99 of the disaggregated arm", "predicted": 15.0, "measured": 15.7, "unit": "ms", "from": "made up"}
                ]),
            ),
        ]),
    }
}

struct Traffic {
    long_share: f64,
    short: u32,
    long: u32,
}

fn arms() -> Vec<Arm> {
    let kinds = [
        ("co-located", ArmKind::CoLocated, "2c"),
        ("disaggregated", ArmKind::Disaggregated, "1p1d"),
        ("conditional", ArmKind::Conditional, "1p1d"),
    ];
    let arm = |(name, kind, topology): (&str, ArmKind, &str)| Arm {
        name: name.to_owned(),
        kind,
        topology: topology.to_owned(),
        settings: settings(512),
        resources: Resources {
            cores: 4,
            gpus: 0,
            memory_bytes: 8 << 30,
            price_per_hour: Some(0.2),
            is_measured: true,
        },
        tuning: [256, 512, 1_024].map(point).into(),
    };
    kinds.map(arm).into()
}

fn settings(chunk: u32) -> BTreeMap<String, Value> {
    BTreeMap::from([
        ("max_num_batched_tokens".to_owned(), json!(chunk)),
        ("max_num_seqs".to_owned(), json!(32)),
    ])
}

fn point(chunk: u32) -> TuningPoint {
    let off = f64::from(chunk.abs_diff(512)) / 512.0;
    TuningPoint {
        settings: settings(chunk),
        goodput: 3.1 - off,
        ttft_ms_p99: 240.0 + 90.0 * off,
        itl_ms_p99: 38.0 + 30.0 * off,
        is_chosen: chunk == 512,
    }
}

fn fairness() -> Fairness {
    let text = |text: &str| Some(text.to_owned());
    Fairness {
        equal_resources: text("Made up: 4 cores for each arm, two for each node."),
        every_arm_tuned: text("Made up: three chunk budgets for each arm."),
        same_edge: text("Made up: one coordinator binary for all arms."),
        same_trace: text("Made up: one seed for each repeat, the same in all arms."),
        open_loop_and_lag: text("Open loop, Poisson arrivals; client lag p99 below 1 ms."),
        warm_up_excluded: text("The first six requests of each run do not count."),
        order_and_repeats: text("A Latin square of three arms, three repeats."),
        outputs_equal: text("All hashes are equal: made up."),
        failures_counted: text("Refused and failed requests meet no limit."),
        one_token_per_event: text("One token for each event."),
        several_shapes: text("Two shapes."),
        client_placement: text("A core of its own."),
        transfer_share: text("In the KV table."),
        pool_utilisation: text("In the table of processor time."),
        verdict_per_shape: text("One sentence for each shape."),
    }
}

fn shape((name, rates): (&str, &[f64]), traffic: &Traffic, arms: &[Arm], seed: u64) -> Shape {
    let mut runs = Vec::new();
    for rate in rates {
        for repeat in 0..REPEATS {
            // Every arm gets the same requests: the seed knows nothing of the arm.
            let mut random = StdRng::seed_from_u64(seed * 1_000 + u64::from(repeat));
            let arrivals = arrivals(traffic, *rate, &mut random);
            for turn in 0..arms.len() {
                let arm = &arms[(turn + repeat as usize) % arms.len()];
                runs.push(ArmRun {
                    arm: arm.name.clone(),
                    repeat,
                    run: run(arm, *rate, &arrivals, &mut random),
                });
            }
        }
    }
    let Traffic {
        long_share,
        short,
        long,
    } = traffic;
    let others = match long_share {
        0.0 => String::new(),
        share => format!(", {:.0} % of them of {long} tokens", share * 100.0),
    };
    Shape {
        name: name.to_owned(),
        traffic: format!(
            "prompts of about {short} tokens{others}; 20 to 60 output tokens; Poisson arrivals; nothing shared"
        ),
        trace_hash: format!("made-up-{seed}"),
        runs,
        contrasts: Vec::new(),
        verdict: String::new(),
    }
}

/// One request that is due: when (ms), and its lengths.
struct Due {
    at: f64,
    prompt: u32,
    output: u32,
}

fn arrivals(traffic: &Traffic, rate: f64, random: &mut StdRng) -> Vec<Due> {
    let mut at = 0.0;
    let mut due = || {
        at += -(1.0 - random.random::<f64>()).ln() / rate * 1e3;
        let is_long = random.random::<f64>() < traffic.long_share;
        let about = if is_long { traffic.long } else { traffic.short };
        Due {
            at,
            prompt: random.random_range(about * 9 / 10..=about * 11 / 10),
            output: random.random_range(20..=60),
        }
    };
    (0..REQUESTS).map(|_| due()).collect()
}

/// When a prompt is computed, in ms, and where.
struct Prefill {
    from: f64,
    to: f64,
    is_local: bool,
}

fn run(arm: &Arm, rate: f64, arrivals: &[Due], random: &mut StdRng) -> Run {
    let is_co_located = arm.kind == ArmKind::CoLocated;
    let slots = if is_co_located { 2 } else { 1 };
    let mut free = vec![0.0_f64; slots + 1];
    let prefills: Vec<Prefill> = arrivals
        .iter()
        .map(|due| {
            let is_local = is_co_located || (arm.kind == ArmKind::Conditional && due.prompt < 256);
            let pool = if is_local && !is_co_located {
                slots..slots + 1
            } else {
                0..slots
            };
            let slot = pool.min_by(|a, b| free[*a].total_cmp(&free[*b])).unwrap_or(0);
            let from = due.at.max(free[slot]) + 1.0 + random.random::<f64>();
            // Beside streams, a chunk waits for their steps.
            let slower = if is_local { 1.25 } else { 1.0 };
            let to = from
                + f64::from(due.prompt) * PROMPT_MS_PER_TOKEN * slower * (0.95 + 0.1 * random.random::<f64>())
                + 4.0;
            free[slot] = to;
            Prefill { from, to, is_local }
        })
        .collect();
    let records: Vec<RequestRecord> = (0..arrivals.len())
        .map(|index| record(arm, index, (arrivals, &prefills), random))
        .collect();
    let measured = || records.iter().filter(|record| record.is_measured());
    let first = measured().map(|record| record.scheduled).min().unwrap_or_default();
    let last = measured().map(|record| record.ended).max().unwrap_or_default();
    let busy = |share: f64, memory: u64| Usage {
        cpu: (last - first).mul_f64(share),
        memory_bytes_max: memory << 20,
    };
    let nodes = if is_co_located {
        ["node-0", "node-1"]
    } else {
        ["prefill-0", "decode-0"]
    };
    Run {
        name: arm.name.clone(),
        loop_kind: LoopKind::Open,
        offered: rate,
        measured: last - first,
        records,
        client: busy(0.04, 40),
        server: BTreeMap::from([
            ("coordinator".to_owned(), busy(0.06, 60)),
            (nodes[0].to_owned(), busy(1.1, 700)),
            (nodes[1].to_owned(), busy(1.5, 900)),
        ]),
        environment: BTreeMap::from([("flags".to_owned(), json!(format!("--topology {}", arm.topology)))]),
    }
}

fn record(arm: &Arm, index: usize, (arrivals, prefills): (&[Due], &[Prefill]), random: &mut StdRng) -> RequestRecord {
    let (due, prefill) = (&arrivals[index], &prefills[index]);
    let is_handed_off = !prefill.is_local;
    let kv_bytes = f64::from(due.prompt) * KV_BYTES_PER_TOKEN;
    let kv_ms = kv_bytes / KV_BYTES_PER_MS * (0.9 + 0.3 * random.random::<f64>());
    let mut at = prefill.to + 1.5;
    let mut tokens = vec![at];
    let gap_ms = if arm.kind == ArmKind::CoLocated {
        GAP_MS * 0.9
    } else {
        GAP_MS
    };
    while tokens.len() < due.output as usize {
        let gap = gap_ms * (0.92 + 0.2 * random.random::<f64>());
        // Chunks of prompts on the same node share the steps of the streams.
        let beside = prefills
            .iter()
            .filter(|other| other.is_local && other.from < at + gap && other.to > at);
        let shared: f64 = beside
            .map(|other| (other.to.min(at + gap) - other.from.max(at)) * 1.4)
            .sum();
        let stall = if random.random::<f64>() < 0.002 { 60.0 } else { 0.0 };
        at += gap + shared + stall;
        tokens.push(at);
    }
    let outcome = match random.random_range(0..400) {
        0 => Outcome::Refused { status: 429 },
        1 => Outcome::Failed {
            error: "the stream ended before its last event".to_owned(),
        },
        _ => Outcome::Completed,
    };
    if outcome != Outcome::Completed {
        tokens.clear();
    }
    let lag = 0.1 + 0.4 * random.random::<f64>();
    RequestRecord {
        id: format!("made-up-{index}"),
        part: if index < 6 { RunPart::WarmUp } else { RunPart::Measured },
        lane: Lane::Interactive,
        prompt_tokens: due.prompt,
        cached_tokens: Some(0),
        output_tokens: tokens.len() as u32,
        scheduled: time(due.at),
        sent: time(due.at + lag),
        ended: time(tokens.last().copied().unwrap_or(due.at + 5.0) + 0.5),
        server: (!tokens.is_empty()).then(|| ServerRecord {
            prefill_node: Some(if is_handed_off { "prefill-0" } else { "decode-0" }.to_owned()),
            decode_node: Some("decode-0".to_owned()),
            local_prefill: prefill.is_local.then(|| {
                if arm.kind == ArmKind::CoLocated {
                    "co_located"
                } else {
                    "short_prompt"
                }
                .to_owned()
            }),
            kv_bytes: is_handed_off.then_some(kv_bytes as u64),
            kv_transfer_ms: is_handed_off.then_some(kv_ms),
            stages: stages(due, prefill, lag),
        }),
        tokens: tokens.into_iter().map(time).collect(),
        outcome,
        output_hash: Some(index as u64 * 7_919),
    }
}

fn stages(due: &Due, prefill: &Prefill, lag: f64) -> Vec<(String, f64)> {
    let wait = (prefill.from - due.at - lag - 1.0).max(0.0);
    let all = [
        ("parse", 0.1),
        ("tokenize", 0.2),
        ("queue", wait * 0.7),
        ("route", 0.05),
        ("reserve", 0.4),
        ("dispatch", if prefill.is_local { 0.0 } else { 0.3 }),
        ("prefill_queue", wait * 0.3),
        ("prefill_forward", prefill.to - prefill.from),
        ("first_token_return", 0.3),
        ("egress", 0.1),
    ];
    all.map(|(name, ms)| (name.to_owned(), ms)).into()
}

fn time(ms: f64) -> Duration {
    // Whole microseconds: the JSON stays short.
    Duration::from_micros((ms.max(0.0) * 1e3) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_comparison() {
        assert_eq!(comparison(3), comparison(3));
        assert_ne!(comparison(3), comparison(4));
    }

    #[test]
    fn no_token_comes_before_its_request_was_due() {
        for run in comparison(1).shapes.iter().flat_map(|shape| &shape.runs) {
            for record in &run.run.records {
                assert!(
                    record
                        .tokens
                        .first()
                        .is_none_or(|first| *first > record.sent && record.sent >= record.scheduled)
                );
            }
        }
    }
}
