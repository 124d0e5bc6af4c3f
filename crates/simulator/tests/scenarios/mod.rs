//! Scenarios with round figures, so that a test can work out what comes out.

use std::time::Duration;

use serving_core::cluster::{ClusterConfig, OnIllegalTransition};
use serving_core::request::Lane;
use simulator::Scenario;
use simulator::costs::{Costs, HostCosts, LinkCosts, Overheads, StepCosts};
use simulator::scenario::SimulatedNodes;
use workload::trace::{Trace, TraceRequest, Turn};

/// One request of a trace, in the making.
#[derive(Clone, Debug)]
pub struct Planned(TraceRequest);

impl Planned {
    pub fn at(ms: u64) -> Self {
        Self(TraceRequest {
            at: Duration::from_millis(ms),
            prompt_tokens: 1,
            output_tokens: 1,
            prefix_blocks: Vec::new(),
            lane: Lane::Interactive,
            conversation: None,
        })
    }
    pub fn tokens(mut self, prompt: u32, output: u32) -> Self {
        (self.0.prompt_tokens, self.0.output_tokens) = (prompt, output);
        self
    }
    pub fn blocks(mut self, ids: &[u64]) -> Self {
        self.0.prefix_blocks = ids.to_vec();
        self
    }
    pub fn turn(mut self, turn: u32, think_ms: u64) -> Self {
        self.0.conversation = Some(Turn {
            conversation: 1,
            turn,
            think_time: Duration::from_millis(think_ms),
        });
        self
    }
}

pub fn costs() -> Costs {
    Costs {
        name: "round figures".into(),
        origin: "typed in".into(),
        step: StepCosts {
            fixed_seconds: 0.010,
            prefill_token_seconds: 0.001,
            prefill_pair_seconds: 0.0,
            decode_row_seconds: 0.002,
            decode_context_token_seconds: 0.0,
            draw_seconds: 0.003,
            ..StepCosts::default()
        },
        overheads: Overheads {
            request_seconds: 0.002,
            prompt_token_seconds: 0.000_01,
            hop_seconds: 0.001,
            hop_prompt_token_seconds: 0.0,
            egress_seconds: 0.000_25,
            loop_seconds: 0.000_5,
            commit_seconds: 0.002,
            role_change_seconds: 0.3,
        },
        link: LinkCosts {
            name: "grpc".into(),
            latency_seconds: 0.001,
            bytes_per_second: 1e6,
            is_streamed: false,
        },
        host: HostCosts::default(),
        kv_bytes_per_token: 1_000,
        fit: None,
        accuracy: None,
    }
}

pub fn scenario(topology: &str, planned: &[Planned]) -> Scenario {
    let mut nodes = SimulatedNodes::of_kv_bytes(1_000);
    nodes.limits.kv_blocks = 512;
    // A prompt of several chunks would have a last chunk, and a step more.
    nodes.last_chunk_tokens = 0;
    Scenario {
        name: topology.to_owned(),
        topology: topology.parse().expect("a topology"),
        nodes,
        cluster: ClusterConfig {
            on_illegal_transition: OnIllegalTransition::Panic,
            ..ClusterConfig::default()
        },
        costs: costs(),
        trace: Trace {
            name: "by hand".into(),
            block_tokens: 16,
            requests: planned.iter().map(|planned| planned.0.clone()).collect(),
        },
        interventions: Vec::new(),
        warm_up: Duration::ZERO,
        cool_down: Duration::ZERO,
        seed: 1,
    }
}
