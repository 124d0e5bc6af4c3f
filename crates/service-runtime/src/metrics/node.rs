//! The metrics that both kinds of node expose. They are set from the loop's status, its steps, and transfers that
//! ended.

use std::collections::BTreeMap;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use serving_core::kv::CacheEvictions;
use serving_core::node::NodeStatus;
use serving_core::scheduler::DraftCounts;
use serving_core::stage::{Stage, StageTimings};

use super::membership::MembershipGauges;
use super::vllm_node::{NodeAliases, PoolFacts};
use super::{Histograms, Role, labels, raise, table};
use crate::runtime_tasks;

/// Only prefill nodes send KV.
const SRC_ROLE: &str = "prefill";
/// The label value of `baton_waiting`: a sequence waits because the batch or the pool has no room.
const CAPACITY: &str = "capacity";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransferLabels {
    transport: &'static str,
    src_role: &'static str,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransferFailureLabels {
    transport: &'static str,
    src_role: &'static str,
    reason: &'static str,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandoffLabels {
    transport: &'static str,
    outcome: &'static str,
}

/// For `baton_stage_seconds` and `baton_stage_requests`, on every process.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StageLabels {
    stage: &'static str,
    phase: &'static str,
}

impl From<Stage> for StageLabels {
    fn from(stage: Stage) -> Self {
        Self {
            stage: stage.name(),
            phase: stage.phase(),
        }
    }
}

/// The node's role.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    pub role: Role,
    /// With it the node exposes vLLM's names too.
    pub aliases: Option<PoolFacts>,
}

/// Clones share the metrics.
#[derive(Clone, Debug)]
pub struct NodeMetrics {
    role: Role,
    kv_blocks: Family<StateLabel, Gauge>,
    running: Gauge,
    waiting: Family<ReasonLabel, Gauge>,
    batch_tokens: Histogram,
    batch_size: Histogram,
    step_seconds: Histogram,
    stage_seconds: Histograms<StageLabels>,
    stage_requests: Family<StageLabels, Gauge>,
    preemptions: Counter,
    drafted: Counter,
    accepted: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    prefix_evictions: Counter,
    prefix_evictions_over_share: Counter,
    transfer_seconds: Histograms<TransferLabels>,
    transfer_bytes: Histograms<TransferLabels>,
    transfer_failures: Family<TransferFailureLabels, Counter>,
    handoffs: Family<HandoffLabels, Counter>,
    aliases: Option<NodeAliases>,
    /// Set by the node's membership.
    pub membership: MembershipGauges,
}

impl NodeMetrics {
    /// Makes and registers everything.
    pub fn register(registry: &mut Registry, facts: &NodeFacts) -> Self {
        let metrics = Self {
            role: facts.role,
            kv_blocks: Family::default(),
            running: Gauge::default(),
            waiting: Family::default(),
            batch_tokens: table::BATCH_TOKENS.new_histogram(),
            batch_size: table::BATCH_SIZE.new_histogram(),
            step_seconds: table::STEP_SECONDS.new_histogram(),
            stage_seconds: table::STAGE_SECONDS.new_histograms(),
            stage_requests: Family::default(),
            preemptions: Counter::default(),
            drafted: Counter::default(),
            accepted: Counter::default(),
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            prefix_evictions: Counter::default(),
            prefix_evictions_over_share: Counter::default(),
            transfer_seconds: table::KV_TRANSFER_SECONDS.new_histograms(),
            transfer_bytes: table::KV_TRANSFER_BYTES.new_histograms(),
            transfer_failures: Family::default(),
            handoffs: Family::default(),
            aliases: facts.aliases.as_ref().map(|pool| NodeAliases::register(registry, pool)),
            membership: MembershipGauges::register(registry),
        };
        metrics.start_series_at_zero();
        let m = &metrics;
        table::KV_BLOCKS.register(registry, m.kv_blocks.clone());
        table::RUNNING.register(registry, m.running.clone());
        table::WAITING.register(registry, m.waiting.clone());
        table::BATCH_TOKENS.register(registry, m.batch_tokens.clone());
        table::BATCH_SIZE.register(registry, m.batch_size.clone());
        table::STEP_SECONDS.register(registry, m.step_seconds.clone());
        table::STAGE_SECONDS.register(registry, m.stage_seconds.clone());
        table::STAGE_REQUESTS.register(registry, m.stage_requests.clone());
        table::PREEMPTIONS.register(registry, m.preemptions.clone());
        table::DRAFTED_TOKENS.register(registry, m.drafted.clone());
        table::ACCEPTED_TOKENS.register(registry, m.accepted.clone());
        table::PREFIX_QUERIES.register(registry, m.prefix_queries.clone());
        table::PREFIX_HITS.register(registry, m.prefix_hits.clone());
        table::PREFIX_EVICTIONS.register(registry, m.prefix_evictions.clone());
        table::PREFIX_EVICTIONS_OVER_SHARE.register(registry, m.prefix_evictions_over_share.clone());
        table::KV_TRANSFER_SECONDS.register(registry, m.transfer_seconds.clone());
        table::KV_TRANSFER_BYTES.register(registry, m.transfer_bytes.clone());
        table::KV_TRANSFER_FAILURES.register(registry, m.transfer_failures.clone());
        table::HANDOFFS.register(registry, m.handoffs.clone());
        runtime_tasks::register(registry);
        metrics
    }

    /// Every series exists from the start. A series that appears with its first event shows no increase for that event, and
    /// `rate` shows nothing until the second.
    fn start_series_at_zero(&self) {
        let values = |metric: &super::Metric, label| metric.closed_values(label, self.role).unwrap_or_default();
        for transport in values(&table::KV_TRANSFER_FAILURES, "transport") {
            for reason in values(&table::KV_TRANSFER_FAILURES, "reason") {
                let _ = self.transfer_failures.get_or_create(&TransferFailureLabels {
                    transport,
                    src_role: SRC_ROLE,
                    reason,
                });
            }
        }
        for transport in values(&table::HANDOFFS, "transport") {
            for outcome in values(&table::HANDOFFS, "outcome") {
                let _ = self.handoffs.get_or_create(&HandoffLabels { transport, outcome });
            }
        }
    }

    /// Called after each step and each second.
    pub fn status(&self, status: &NodeStatus, stages: impl Iterator<Item = Stage>) {
        for (state, count) in status.kv_blocks.by_state() {
            let gauge = self.kv_blocks.get_or_create(&StateLabel { state });
            gauge.set(i64::from(count));
        }
        self.running.set(i64::from(status.running_sequences));
        let waiting = self.waiting.get_or_create(&ReasonLabel { reason: CAPACITY });
        waiting.set(i64::from(status.waiting_sequences));
        raise(&self.preemptions, status.preemptions_total);
        raise(&self.prefix_queries, status.prefix_query_tokens_total);
        raise(&self.prefix_hits, status.prefix_hit_tokens_total);
        set_stage_requests(&self.stage_requests, self.role, stages);
        if let Some(aliases) = &self.aliases {
            aliases.status(status);
        }
    }

    /// Called with the status.
    pub fn drafts(&self, counts: DraftCounts) {
        raise(&self.drafted, counts.drafted);
        raise(&self.accepted, counts.accepted);
        if let Some(aliases) = &self.aliases {
            aliases.drafts(counts);
        }
    }

    /// Called with the status.
    pub fn evictions(&self, counts: CacheEvictions) {
        raise(&self.prefix_evictions, counts.all);
        raise(&self.prefix_evictions_over_share, counts.over_share);
    }

    pub fn step(&self, tokens: u32, sequences: usize, took: Duration) {
        self.batch_tokens.observe(f64::from(tokens));
        self.batch_size.observe(sequences as f64);
        self.step_seconds.observe(took.as_secs_f64());
        if let Some(aliases) = &self.aliases {
            aliases.step(tokens);
        }
    }

    pub fn stages(&self, timings: &StageTimings) {
        for (stage, duration) in &timings.0 {
            let stage = self.stage_seconds.get_or_create(&StageLabels::from(*stage));
            stage.observe(duration.as_secs_f64());
        }
    }

    pub fn kv_moved(&self, transport: &'static str, kv_bytes: u64, moving: Duration) {
        let labels = TransferLabels {
            transport,
            src_role: SRC_ROLE,
        };
        let seconds = self.transfer_seconds.get_or_create(&labels);
        seconds.observe(moving.as_secs_f64());
        self.transfer_bytes.get_or_create(&labels).observe(kv_bytes as f64);
    }

    /// `reason` may come from the other side. A reason that is not in the table counts as `other`.
    pub fn transfer_failed(&self, transport: &'static str, reason: &str) {
        let known = table::KV_TRANSFER_FAILURES.closed_values("reason", self.role);
        let known = known.unwrap_or_default().into_iter().find(|known| *known == reason);
        let labels = TransferFailureLabels {
            transport,
            src_role: SRC_ROLE,
            reason: known.unwrap_or(labels::OTHER),
        };
        self.transfer_failures.get_or_create(&labels).inc();
        self.handoff(transport, "failed");
    }

    pub fn handoff(&self, transport: &'static str, outcome: &'static str) {
        self.handoffs.get_or_create(&HandoffLabels { transport, outcome }).inc();
    }
}

/// Sets the count of every stage of the role; stages without requests get 0. Other stages are left out.
pub(crate) fn set_stage_requests(gauges: &Family<StageLabels, Gauge>, role: Role, stages: impl Iterator<Item = Stage>) {
    let mut counts: BTreeMap<Stage, i64> = labels::live_stages(role).iter().map(|stage| (*stage, 0)).collect();
    for stage in stages {
        if let Some(count) = counts.get_mut(&stage) {
            *count += 1;
        }
    }
    for (stage, count) in counts {
        gauges.get_or_create(&StageLabels::from(stage)).set(count);
    }
}
