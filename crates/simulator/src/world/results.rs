//! The outcome, when every request has ended.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serving_core::cluster::{HandoffOutcome, MigrationOutcome};
use serving_core::node::NodeState;
use workload::parts::LeftOut;
use workload::record::{LoopKind, RequestRecord, Run, Usage};

use super::{World, node};
use crate::outcome::{NodeOutcome, Outcome, Totals};

impl World<'_> {
    pub(super) fn outcome(mut self) -> Outcome {
        let mut records: Vec<RequestRecord> = std::mem::take(&mut self.clients.records)
            .into_iter()
            .flatten()
            .collect();
        let left_out = LeftOut {
            warm_up: self.scenario.warm_up,
            cool_down: self.scenario.cool_down,
        };
        left_out.set_parts(&mut records);
        let (from, to) = left_out.measured_part(&records);
        let totals = self.totals(&records);
        let nodes: Vec<NodeOutcome> = self.nodes.iter().map(node_outcome).collect();
        let usage = |node: &NodeOutcome| Usage {
            cpu: node.busy,
            memory_bytes_max: u64::from(node.kv_blocks_used_max) * node::block_bytes(self.scenario),
        };
        let server = nodes.iter().map(|node| (node.name.clone(), usage(node))).collect();
        let run = Run {
            name: self.scenario.name.clone(),
            loop_kind: LoopKind::Simulated,
            offered: offered(&records),
            records,
            measured: to.saturating_sub(from),
            client: Usage::default(),
            server,
            environment: self.environment(),
        };
        Outcome { run, totals, nodes }
    }

    fn totals(&self, records: &[RequestRecord]) -> Totals {
        let stats = self.cluster.stats();
        let of = |wanted: HandoffOutcome| -> u64 {
            let counts = stats.handoffs.iter().filter(|((_, outcome), _)| *outcome == wanted);
            counts.map(|(_, count)| count).sum()
        };
        let blocks = self.nodes.iter().filter(|node| node.is_alive).map(|node| {
            let counts = node.scheduler.pool().counts();
            counts.active + counts.reserved + counts.in_transfer + counts.quarantined
        });
        let preemptions = |node: &super::node::Node| {
            node.preemptions_before + node.scheduler.status(NodeState::Ready).preemptions_total
        };
        Totals {
            virtual_time: records.iter().map(|record| record.ended).max().unwrap_or_default(),
            events: self.agenda.taken(),
            handoffs: of(HandoffOutcome::Committed),
            local_prefills: stats
                .local_prefills
                .iter()
                .map(|(reason, count)| (reason.name().to_owned(), *count))
                .collect(),
            retries: stats
                .retries
                .iter()
                .map(|(reason, count)| ((*reason).to_owned(), *count))
                .collect(),
            migrations: stats.migrations.get(&MigrationOutcome::Started).copied().unwrap_or(0),
            nodes_lost: stats.nodes_lost,
            preemptions: self.nodes.iter().map(preemptions).sum(),
            blocks_left: blocks.sum(),
            violations: stats.protocol_violations + stats.illegal_transitions,
        }
    }

    /// What a reader needs to judge the run, or to make it again.
    fn environment(&self) -> BTreeMap<String, serde_json::Value> {
        let scenario = self.scenario;
        let (limits, cluster, costs) = (&scenario.nodes.limits, &scenario.cluster, &scenario.costs);
        let (step_target, mixed) = (scenario.nodes.step_target, scenario.nodes.mixed_step_tokens);
        let interventions: Vec<String> = scenario.interventions.iter().map(ToString::to_string).collect();
        let facts: [(&str, serde_json::Value); 16] = [
            ("topology", scenario.topology.to_string().into()),
            ("trace", scenario.trace.name.clone().into()),
            ("seed", scenario.seed.into()),
            ("costs", costs.name.clone().into()),
            ("costs_origin", costs.origin.clone().into()),
            ("simulation_error", costs.accuracy_sentence().into()),
            ("link", costs.link.name.clone().into()),
            ("routing", cluster.routing.name().into()),
            ("local_prefill_below_tokens", cluster.local_prefill_below_tokens.into()),
            ("kv_blocks", limits.kv_blocks.into()),
            ("block_size", limits.block_tokens.into()),
            ("max_num_seqs", limits.max_sequences.into()),
            ("max_num_batched_tokens", limits.max_batch_tokens.into()),
            ("mixed_step_tokens", mixed.map(NonZeroU32::get).into()),
            (
                "itl_target_ms",
                step_target.map(|target| target.as_millis() as u64).into(),
            ),
            ("interventions", interventions.into()),
        ];
        facts
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}

/// Requests a second that were due in the measured part.
fn offered(records: &[RequestRecord]) -> f64 {
    let measured = || records.iter().filter(|record| record.is_measured());
    let first = measured().map(|record| record.scheduled).min().unwrap_or_default();
    let last = measured().map(|record| record.scheduled).max().unwrap_or_default();
    let gaps = measured().count().saturating_sub(1) as f64;
    let span = last.saturating_sub(first).as_secs_f64();
    // So many gaps between so many arrivals.
    if span > 0.0 { gaps / span } else { 0.0 }
}

fn node_outcome(node: &super::node::Node) -> NodeOutcome {
    NodeOutcome {
        name: node.name.to_string(),
        role: node.role.name().to_owned(),
        busy: node.busy,
        steps: node.steps,
        computed_tokens: node.computed_before + node.scheduler.status(NodeState::Ready).computed_tokens_total,
        kv_bytes_sent: node.kv_bytes_sent,
        kv_blocks_used_max: node.kv_blocks_used_max,
    }
}
