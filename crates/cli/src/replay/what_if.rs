//! `baton replay --what-if`: the traffic of a record, simulated on the cluster as it was and with one change.

use std::fmt::Write as _;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use serving_core::node::AssignedRole;
use simulator::costs::Costs;
use simulator::scenario::SimulatedNodes;
use simulator::topology::SimulatedTopology;
use simulator::{Scenario, simulate};
use workload::comparison::Slo;
use workload::flight_record::{Ending, Reader, Traffic, traffic};
use workload::statistics::Samples;
use workload::summary::Summary;

use super::change::{Change, FORMS};
use super::prediction::{Prediction, Row};
use crate::bench::arguments::positive;
use crate::exit::{Exit, WithExit as _};

/// Each simulation draws the variation of steps anew, and the costs as another measurement may have given them. An odd number has a
/// median.
const SEEDS: u64 = 5;

#[derive(Debug, Args)]
pub(super) struct WhatIfArgs {
    /// Simulate the record's traffic as it was and with one change, and show the difference.
    #[arg(long, value_name = "CHANGE", requires = "costs", conflicts_with_all = ["until", "show"], long_help = long_help())]
    pub(super) what_if: Option<String>,
    /// What steps, messages and links cost: a file of `baton bench engine --out`, or one that was typed in.
    #[arg(long, value_name = "FILE", requires = "what_if")]
    costs: Option<PathBuf>,
    /// Limit of the time to the first token, for goodput.
    #[arg(long, default_value_t = 2_000.0, value_name = "MS", value_parser = positive, requires = "what_if")]
    slo_ttft_ms: f64,
    /// Limit of the 99th percentile of a request's gaps, for goodput.
    #[arg(long, default_value_t = 200.0, value_name = "MS", value_parser = positive, requires = "what_if")]
    slo_itl_ms: f64,
}

fn long_help() -> String {
    format!("Simulate the record's traffic as it was and with one change, and show the difference: {FORMS}.")
}

pub(super) fn run<R: Read>(reader: Reader<R>, change: &str, (args, json): (&WhatIfArgs, bool)) -> anyhow::Result<Exit> {
    let change: Change = change.parse().exit(Exit::Usage)?;
    let traffic = traffic(reader)?;
    let costs = costs(args).exit(Exit::Usage)?;
    let base = scenario(&traffic, costs)?;
    let mut changed = base.clone();
    changed.name = change.to_string();
    change.apply(&mut changed).exit(Exit::Usage)?;
    let slo = Slo {
        name: "custom".to_owned(),
        ttft_ms_max: args.slo_ttft_ms,
        itl_ms_max: args.slo_itl_ms,
    };
    let as_it_was = summaries(&base, &slo)?;
    ensure!(
        as_it_was.iter().all(|summary| summary.counts.completed > 0),
        "the simulation of the record's cluster completes no request, so it says nothing about a change. Are the costs those of its machines?"
    );
    let prediction = Prediction::of(&as_it_was, &summaries(&changed, &slo)?);
    let text = match json {
        true => as_json((&base, &changed), &traffic, &prediction)?,
        false => as_text((&base, &changed), &traffic, &prediction),
    };
    crate::stdout::print_result(&text)?;
    Ok(Exit::Ok)
}

fn costs(args: &WhatIfArgs) -> anyhow::Result<Costs> {
    let path = args.costs.as_ref().context("--what-if needs --costs FILE")?;
    crate::simulate::costs(path)
}

/// The cluster as it was recorded: all its nodes from the start, no faults.
fn scenario(traffic: &Traffic, costs: Costs) -> anyhow::Result<Scenario> {
    let of = |role| traffic.node_count(role);
    let topology = SimulatedTopology {
        prefill: of(AssignedRole::Prefill),
        decode: of(AssignedRole::Decode),
        co_located: of(AssignedRole::CoLocated),
    };
    ensure!(
        topology.to_string().parse() == Ok(topology),
        "the record has {} prefill, {} decode and {} co-located nodes; only split or co-located clusters can be simulated",
        topology.prefill,
        topology.decode,
        topology.co_located
    );
    let capacity = &traffic.capacity;
    let mut nodes = SimulatedNodes::of_kv_bytes(costs.kv_bytes_per_token);
    nodes.limits.kv_blocks = capacity.kv_blocks;
    nodes.limits.block_tokens = capacity.block_tokens;
    nodes.limits.max_batch_tokens = capacity.max_batch_tokens;
    nodes.limits.max_sequences = capacity.max_sequences;
    nodes.limits.max_model_tokens = capacity.max_model_tokens;
    let mut cluster = traffic.config.clone();
    // Simulated nodes have no model, so they have no name that the coordinator could ask for.
    cluster.model_name = None;
    Ok(Scenario {
        name: "as it was".to_owned(),
        topology,
        nodes,
        cluster,
        costs,
        trace: traffic.trace.clone(),
        interventions: Vec::new(),
        warm_up: Duration::ZERO,
        cool_down: Duration::ZERO,
        seed: 1,
    })
}

fn summaries(scenario: &Scenario, slo: &Slo) -> anyhow::Result<Vec<Summary>> {
    let of_seed = |seed| {
        let scenario = Scenario {
            seed,
            costs: scenario.costs.measured_again(seed),
            ..scenario.clone()
        };
        let outcome = simulate(&scenario).with_context(|| format!("cannot simulate {}", scenario.name))?;
        Ok(Summary::of(&outcome.run, slo))
    };
    (1..=SEEDS).map(of_seed).collect()
}

/// What the record itself says of the base: how far the simulation of the past is from the past.
fn recorded_ttft(traffic: &Traffic) -> Vec<(&'static str, Option<f64>)> {
    let samples = Samples::new(traffic.ttft_ms.iter().copied());
    let percentiles = [("ttft_ms_p50", 50.0), ("ttft_ms_p90", 90.0), ("ttft_ms_p99", 99.0)];
    percentiles
        .into_iter()
        .map(|(name, percent)| (name, samples.percentile(percent)))
        .collect()
}

fn as_json(
    (base, changed): (&Scenario, &Scenario),
    traffic: &Traffic,
    prediction: &Prediction,
) -> anyhow::Result<String> {
    let recorded: serde_json::Map<String, serde_json::Value> = recorded_ttft(traffic)
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect();
    let mut value = serde_json::json!({
        "change": changed.name,
        "topology": base.topology.to_string(),
        "topology_changed": changed.topology.to_string(),
        "requests": traffic.trace.requests.len(),
        "requests_of_unknown_length": traffic.of_unknown_length,
        "faults_not_simulated": traffic.faults,
        "recorded": recorded,
        "simulations": SEEDS,
        "typical_error": base.costs.typical_error(),
        "prediction": prediction,
        "costs": base.costs.name,
        "error": base.costs.accuracy_sentence(),
    });
    if traffic.too_long > 0 {
        value["requests_too_long"] = traffic.too_long.into();
    }
    Ok(format!("{}\n", serde_json::to_string_pretty(&value)?))
}

/// Writing to a string cannot fail.
fn as_text((base, changed): (&Scenario, &Scenario), traffic: &Traffic, prediction: &Prediction) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{} requests in {:.1} s on {}; what if {}?\n\
         medians of {SEEDS} simulations, with the costs of {};\n\
         each size of a step is drawn anew for each simulation, by the typical error of {:.1} %\n",
        traffic.trace.requests.len(),
        traffic.span().as_secs_f64(),
        base.topology,
        changed.name,
        base.costs.name,
        100.0 * base.costs.typical_error(),
    );
    let _ = writeln!(
        out,
        "{:<28}{:>12}{:>12}{:>14}",
        "", "as it was", "changed", "difference"
    );
    for row in &prediction.rows {
        let _ = writeln!(out, "{}", line_of(row));
    }
    let _ = writeln!(out, "\nerror of simulated figures: {}", base.costs.accuracy_sentence());
    for (name, recorded) in recorded_ttft(traffic) {
        let simulated = prediction.rows.iter().find(|row| row.metric == name);
        if let (Some(recorded), Some(simulated)) = (recorded, simulated.and_then(|row| row.base)) {
            let error = 100.0 * (simulated - recorded) / recorded.max(1e-9);
            let _ = writeln!(
                out,
                "{name}: {recorded:.1} in the record at the coordinator, {simulated:.1} simulated at the client ({error:+.0} %)"
            );
        }
    }
    if traffic.faults > 0 {
        let _ = writeln!(
            out,
            "{} faults of the record are not simulated: all nodes live.",
            traffic.faults
        );
    }
    if traffic.of_unknown_length > 0 {
        let _ = writeln!(
            out,
            "{} requests did not end or were turned away; they are taken to be as long as their limit.",
            traffic.of_unknown_length
        );
    }
    if traffic.too_long > 0 {
        let _ = writeln!(
            out,
            "{} requests had prompts that leave a node no room for an answer; they are left out.",
            traffic.too_long
        );
    }
    if traffic.ending == Ending::Cut {
        out.push_str("The record has no end mark: its last requests may be missing.\n");
    }
    out
}

fn line_of(row: &Row) -> String {
    let shown = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    let difference = match row.difference {
        Some(share) => format!("{:+.1} % {}", 100.0 * share, row.direction.sign()),
        // Nothing became something.
        None => format!("- {}", row.direction.sign()),
    };
    format!(
        "{:<28}{:>12}{:>12}{:>14}",
        row.metric,
        shown(row.base),
        shown(row.changed),
        difference
    )
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serving_core::cluster::ClusterConfig;
    use serving_core::ids::NodeName;
    use serving_core::node::NodeCapacity;
    use serving_core::request::Lane;
    use simulator::costs::{HostCosts, LinkCosts, Overheads, StepCosts};
    use workload::trace::{Trace, TraceRequest};

    use super::*;
    use crate::replay::prediction::Direction;

    fn costs() -> Costs {
        Costs {
            name: "test".to_owned(),
            origin: "typed in".to_owned(),
            step: StepCosts {
                fixed_seconds: 0.005,
                prefill_token_seconds: 0.001,
                decode_row_seconds: 0.001,
                ..StepCosts::default()
            },
            overheads: Overheads::default(),
            link: LinkCosts {
                name: "test".to_owned(),
                latency_seconds: 0.0,
                bytes_per_second: 1e9,
                is_streamed: false,
            },
            host: HostCosts::default(),
            kv_bytes_per_token: 1_000,
            fit: None,
            accuracy: None,
        }
    }

    /// Two prompts at a time, for one prefill node.
    fn recorded() -> Traffic {
        let request = |index: u64| TraceRequest {
            at: Duration::from_millis(index / 2 * 700),
            prompt_tokens: 300,
            output_tokens: 8,
            prefix_blocks: Vec::new(),
            lane: Lane::Interactive,
            conversation: None,
        };
        let node = |name: &str| BTreeSet::from([NodeName::new(name)]);
        Traffic {
            trace: Trace {
                name: "test".to_owned(),
                block_tokens: 16,
                requests: (0..40).map(request).collect(),
            },
            nodes: BTreeMap::from([(AssignedRole::Prefill, node("p")), (AssignedRole::Decode, node("d"))]),
            capacity: NodeCapacity {
                kv_blocks: 1_000,
                block_tokens: 16,
                max_sequences: 16,
                max_batch_tokens: 512,
                max_model_tokens: 2_048,
                block_bytes: 16_000,
            },
            config: ClusterConfig {
                model_name: Some("a model".to_owned()),
                ..ClusterConfig::default()
            },
            ttft_ms: vec![300.0],
            faults: 0,
            of_unknown_length: 0,
            too_long: 0,
            ending: Ending::Cut,
        }
    }

    #[test]
    fn a_second_prefill_node_is_predicted_to_shorten_the_wait_behind_another_prompt() {
        let slo = Slo {
            name: "custom".to_owned(),
            ttft_ms_max: 400.0,
            itl_ms_max: 100.0,
        };
        let base = scenario(&recorded(), costs()).expect("a scenario");
        let mut changed = base.clone();
        let change: Change = "nodes=+1p".parse().expect("a change");
        change.apply(&mut changed).expect("two prefill nodes");
        changed.name = change.to_string();
        let of = |scenario| summaries(scenario, &slo).expect("it can be simulated");
        let prediction = Prediction::of(&of(&base), &of(&changed));
        let direction = |metric| {
            let row = prediction.rows.iter().find(|row| row.metric == metric);
            row.map(|row| row.direction)
        };
        assert_eq!(direction("ttft_ms_p90"), Some(Direction::Lower));
        assert_eq!(direction("goodput_per_s"), Some(Direction::Higher));
        assert_eq!(direction("completed"), Some(Direction::None));
        let text = as_text((&base, &changed), &recorded(), &prediction);
        assert!(text.contains(&base.costs.accuracy_sentence()), "{text}");
        assert!(text.contains(&changed.name), "{text}");
        assert!(!text.contains("left out"), "{text}");
        let with_long_ones = Traffic {
            too_long: 2,
            ..recorded()
        };
        let text = as_text((&base, &changed), &with_long_ones, &prediction);
        assert!(text.contains("2 requests had prompts"), "{text}");
    }

    #[test]
    fn a_change_that_leaves_no_whole_cluster_is_refused() {
        let mut base = scenario(&recorded(), costs()).expect("a scenario");
        let change: Change = "nodes=-1p".parse().expect("a change");
        assert!(change.apply(&mut base).is_err());
        let mut mixed = recorded();
        mixed
            .nodes
            .insert(AssignedRole::CoLocated, BTreeSet::from([NodeName::new("c")]));
        assert!(scenario(&mixed, costs()).is_err());
    }
}
