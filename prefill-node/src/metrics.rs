//! What `/metrics` shows of a prefill node. Values are set from the step loop's status and from ended transfers.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::choice::Fallbacks;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use serving_core::node::NodeStatus;
use serving_core::stage::{Stage, StageTimings};

/// From 0.1 ms (a loopback block) to 20 s, about 1-2-5.
const SECONDS_EDGES: &[f64] = &[
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0,
];
/// From one block of a small model to a long prompt of a large one.
const BYTES_EDGES: &[f64] = &[
    16_384.0,
    131_072.0,
    1_048_576.0,
    8_388_608.0,
    67_108_864.0,
    536_870_912.0,
    4_294_967_296.0,
];
const TOKENS_EDGES: &[f64] = &[
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0,
];
const SEQUENCES_EDGES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
/// This node's side of a transfer.
const SRC_ROLE: &str = "prefill";

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
    /// Labels of the decode node's refusals are closed too, but come from the wire: capped in `transfer_failed`.
    reason: String,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandoffLabels {
    transport: &'static str,
    outcome: &'static str,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabels {
    stage: &'static str,
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FallbackLabels {
    /// The one that was wanted.
    transport: &'static str,
    reason: &'static str,
}

#[derive(Clone, Copy, Debug)]
struct Edges(&'static [f64]);

impl MetricConstructor<Histogram> for Edges {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

/// Cloning shares the metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    kv_blocks: Family<StateLabel, Gauge>,
    running: Gauge,
    waiting: Family<ReasonLabel, Gauge>,
    batch_tokens: Histogram,
    batch_size: Histogram,
    step_seconds: Histogram,
    stage_seconds: Family<StageLabels, Histogram, Edges>,
    prefix_queries: Counter,
    prefix_hits: Counter,
    transfer_seconds: Family<TransferLabels, Histogram, Edges>,
    transfer_bytes: Family<TransferLabels, Histogram, Edges>,
    transfer_failures: Family<TransferFailureLabels, Counter>,
    handoffs: Family<HandoffLabels, Counter>,
    push_queue_blocks: Gauge,
    requests: Family<HandoffLabels, Counter>,
    transport_fallbacks: Family<FallbackLabels, Counter>,
    fallbacks: Arc<Fallbacks>,
}

impl Metrics {
    /// Makes and registers everything.
    pub fn new(registry: &mut Registry, fallbacks: Arc<Fallbacks>) -> Self {
        let metrics = Self {
            kv_blocks: Family::default(),
            running: Gauge::default(),
            waiting: Family::default(),
            batch_tokens: Edges(TOKENS_EDGES).new_metric(),
            batch_size: Edges(SEQUENCES_EDGES).new_metric(),
            step_seconds: Edges(SECONDS_EDGES).new_metric(),
            stage_seconds: Family::new_with_constructor(Edges(SECONDS_EDGES)),
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            transfer_seconds: Family::new_with_constructor(Edges(SECONDS_EDGES)),
            transfer_bytes: Family::new_with_constructor(Edges(BYTES_EDGES)),
            transfer_failures: Family::default(),
            handoffs: Family::default(),
            push_queue_blocks: Gauge::default(),
            requests: Family::default(),
            transport_fallbacks: Family::default(),
            fallbacks,
        };
        metrics.register(registry);
        metrics
    }

    fn register(&self, registry: &mut Registry) {
        let own = registry.sub_registry_with_prefix("baton");
        own.register(
            "kv_blocks",
            "KV blocks by state; the sum is the pool",
            self.kv_blocks.clone(),
        );
        own.register(
            "running",
            "Requests whose prompt is being computed",
            self.running.clone(),
        );
        own.register("waiting", "Requests accepted and not begun", self.waiting.clone());
        own.register("batch_tokens", "Tokens of a step", self.batch_tokens.clone());
        own.register("batch_size", "Sequences of a step", self.batch_size.clone());
        let steps = self.step_seconds.clone();
        own.register_with_unit("step", "Time of a model step", Unit::Seconds, steps);
        let stages = self.stage_seconds.clone();
        own.register_with_unit(
            "stage",
            "Time of a request's stages on this node",
            Unit::Seconds,
            stages,
        );
        let queries = self.prefix_queries.clone();
        own.register(
            "prefix_queries_tokens",
            "Prompt tokens looked up in the prefix cache",
            queries,
        );
        let hits = self.prefix_hits.clone();
        own.register("prefix_hits_tokens", "Prompt tokens found in the prefix cache", hits);
        let seconds = self.transfer_seconds.clone();
        own.register_with_unit(
            "kv_transfer",
            "Time a pair spent on one handoff's bytes",
            Unit::Seconds,
            seconds,
        );
        let bytes = self.transfer_bytes.clone();
        own.register_with_unit("kv_transfer", "KV bytes of one handoff", Unit::Bytes, bytes);
        let failures = self.transfer_failures.clone();
        own.register("kv_transfer_failures", "Handoffs that failed, by reason", failures);
        own.register("handoffs", "Handoffs that ended, by outcome", self.handoffs.clone());
        let queue = self.push_queue_blocks.clone();
        own.register("push_queue_blocks", "Computed blocks that wait to be pushed", queue);
        own.register(
            "prefill_requests",
            "Requests that ended on this node, by outcome",
            self.requests.clone(),
        );
        own.register(
            "kv_transport_fallbacks",
            "Pairs that were made without the transport this node prefers, by reason",
            self.transport_fallbacks.clone(),
        );
        service_runtime::runtime_tasks::register(registry, "baton_runtime_tasks");
    }

    /// Called after every step and every second.
    pub fn status(&self, status: &NodeStatus) {
        let blocks = &status.kv_blocks;
        for (state, count) in [
            ("free", blocks.free),
            ("active", blocks.active),
            ("cached", blocks.cached),
            ("reserved", blocks.reserved),
            ("in_transfer", blocks.in_transfer),
            ("quarantined", blocks.quarantined),
        ] {
            self.kv_blocks
                .get_or_create(&StateLabel { state })
                .set(i64::from(count));
        }
        self.running.set(i64::from(status.running_sequences));
        let waiting = self.waiting.get_or_create(&ReasonLabel { reason: "batch" });
        waiting.set(i64::from(status.waiting_sequences));
        raise(&self.prefix_queries, status.prefix_query_tokens_total);
        raise(&self.prefix_hits, status.prefix_hit_tokens_total);
        for (wanted, reason, total) in self.fallbacks.totals().filter(|(_, _, total)| *total > 0) {
            let transport = wanted.name();
            raise(
                &self
                    .transport_fallbacks
                    .get_or_create(&FallbackLabels { transport, reason }),
                total,
            );
        }
    }

    pub fn step(&self, tokens: u32, sequences: usize, took: Duration) {
        self.batch_tokens.observe(f64::from(tokens));
        self.batch_size.observe(sequences as f64);
        self.step_seconds.observe(took.as_secs_f64());
    }

    pub fn stages(&self, timings: &StageTimings) {
        for (stage, duration) in &timings.0 {
            self.stage(*stage, *duration);
        }
    }

    fn stage(&self, stage: Stage, duration: Duration) {
        let labels = StageLabels {
            stage: stage.name(),
            phase: stage.phase(),
        };
        self.stage_seconds
            .get_or_create(&labels)
            .observe(duration.as_secs_f64());
    }

    pub fn push_queue(&self, blocks: usize) {
        self.push_queue_blocks.set(blocks as i64);
    }

    pub fn handed_over(&self, transport: &'static str, kv_bytes: u64, moving: Duration) {
        let labels = TransferLabels {
            transport,
            src_role: SRC_ROLE,
        };
        self.transfer_seconds
            .get_or_create(&labels)
            .observe(moving.as_secs_f64());
        self.transfer_bytes.get_or_create(&labels).observe(kv_bytes as f64);
        self.handoff(transport, "handed_over");
    }

    /// `reason` is a closed label, but a decode node's words: anything long becomes `other`.
    pub fn transfer_failed(&self, transport: &'static str, reason: &str) {
        const LABEL_BYTES_MAX: usize = 40;
        let is_label =
            reason.len() <= LABEL_BYTES_MAX && reason.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        let labels = TransferFailureLabels {
            transport,
            src_role: SRC_ROLE,
            reason: if is_label { reason } else { "other" }.to_owned(),
        };
        self.transfer_failures.get_or_create(&labels).inc();
        self.handoff(transport, "failed");
    }

    pub fn handoff(&self, transport: &'static str, outcome: &'static str) {
        self.handoffs.get_or_create(&HandoffLabels { transport, outcome }).inc();
    }

    /// `transport` is `none` when nothing was to be handed over.
    pub fn request(&self, transport: &'static str, outcome: &'static str) {
        self.requests.get_or_create(&HandoffLabels { transport, outcome }).inc();
    }
}

/// A counter that mirrors a total kept elsewhere.
fn raise(counter: &Counter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}
