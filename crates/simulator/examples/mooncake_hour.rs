//! An hour of the Mooncake conversation trace on 100 prefill and 100 decode nodes, for a profiler.
use std::time::Instant;
use serving_core::cluster::ClusterConfig;
use simulator::costs::*;
use simulator::scenario::SimulatedNodes;
use simulator::{Scenario, simulate};
use workload::trace::scaling::{Scaling, StepSpread};
fn main() {
    let divisor: u32 = std::env::args().nth(1).map_or(1, |d| d.parse().unwrap());
    let path = "/work/shared/traces/mooncake/conversation_trace.jsonl";
    let mut file = std::fs::File::open(path).unwrap();
    let trace = workload::trace::read("conversation_trace.jsonl", &mut file, &Default::default()).unwrap();
    let scaling = Scaling { length_divisor: divisor, spread: Some(StepSpread { step: std::time::Duration::from_secs(3), seed: 1 }), ..Default::default() };
    let trace = scaling.apply(&trace).unwrap().trace;
    let costs = Costs::from_json(&std::fs::read_to_string(std::env::args().nth(2).unwrap()).unwrap()).unwrap();
    let mut nodes = SimulatedNodes::of_kv_bytes(costs.kv_bytes_per_token);
    nodes.limits.kv_blocks = u32::try_from((64u64 << 30) / (costs.kv_bytes_per_token * 16)).unwrap();
    nodes.limits.max_model_tokens = 131_072;
    nodes.limits.max_batch_tokens = 8_192;
    nodes.limits.max_sequences = 128;
    let scenario = Scenario { name: "x".into(), topology: "100p100d".parse().unwrap(), nodes, cluster: ClusterConfig::default(), costs, trace, interventions: vec![], warm_up: Default::default(), cool_down: Default::default(), seed: 1 };
    let began = Instant::now();
    let outcome = simulate(&scenario).unwrap();
    let done = outcome.run.records.iter().filter(|r| r.outcome == workload::record::Outcome::Completed).count();
    println!("{:.1} s wall, {} events, {} of {} completed, {:?}", began.elapsed().as_secs_f64(), outcome.totals.events, done, outcome.run.records.len(), outcome.totals);
}
