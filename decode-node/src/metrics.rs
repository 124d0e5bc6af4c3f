//! The decode node's metrics: names and edges of TELEMETRY 3.4, written by the step thread alone.

use kv_transfer::choice::TransportKind;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use serving_core::node::NodeStatus;
use serving_core::request::LocalPrefillReason;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransportLabel {
    transport: &'static str,
    src_role: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    transport: &'static str,
    outcome: &'static str,
}

/// Prefill nodes alone send KV.
const SRC_ROLE: &str = "prefill";

/// 1 ms to 5 s: a block on loopback to a long prompt on 1 Gb/s.
const TRANSFER_SECONDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
/// 64 KiB to 4 GiB.
const TRANSFER_BYTES: [f64; 9] = [
    65536.0,
    262144.0,
    1048576.0,
    4194304.0,
    16777216.0,
    67108864.0,
    268435456.0,
    1073741824.0,
    4294967296.0,
];
/// vLLM's `iteration_tokens_total` edges, thinned.
const BATCH_TOKENS: [f64; 11] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 2048.0];
const BATCH_SIZE: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

/// Handles; the registry owns the encoding.
#[derive(Clone, Debug)]
pub struct Metrics {
    kv_blocks: Family<StateLabel, Gauge>,
    running: Gauge,
    waiting: Family<ReasonLabel, Gauge>,
    batch_tokens: Histogram,
    batch_size: Histogram,
    preemptions: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    transfer_seconds: Family<TransportLabel, Histogram>,
    transfer_bytes: Family<TransportLabel, Histogram>,
    transfer_failures: Family<ReasonLabel, Counter>,
    handoffs: Family<OutcomeLabel, Counter>,
    local_prefills: Family<ReasonLabel, Counter>,
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            kv_blocks: Family::default(),
            running: Gauge::default(),
            waiting: Family::default(),
            batch_tokens: Histogram::new(BATCH_TOKENS),
            batch_size: Histogram::new(BATCH_SIZE),
            preemptions: Counter::default(),
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            transfer_seconds: Family::new_with_constructor(|| Histogram::new(TRANSFER_SECONDS)),
            transfer_bytes: Family::new_with_constructor(|| Histogram::new(TRANSFER_BYTES)),
            transfer_failures: Family::default(),
            handoffs: Family::default(),
            local_prefills: Family::default(),
        };
        service_runtime::runtime_tasks::register(registry, "baton_runtime_tasks");
        let m = &metrics;
        registry.register("baton_kv_blocks", "KV blocks by state", m.kv_blocks.clone());
        registry.register("baton_running", "Sequences in the running batch", m.running.clone());
        registry.register("baton_waiting", "Sequences waiting for the batch", m.waiting.clone());
        registry.register("baton_batch_tokens", "Tokens per engine step", m.batch_tokens.clone());
        registry.register("baton_batch_size", "Sequences per engine step", m.batch_size.clone());
        registry.register(
            "baton_preemptions",
            "Sequences that lost their blocks",
            m.preemptions.clone(),
        );
        let help = "Prompt tokens looked up in the prefix cache";
        registry.register("baton_prefix_queries_tokens", help, m.prefix_queries.clone());
        let help = "Prompt tokens found in the prefix cache";
        registry.register("baton_prefix_hits_tokens", help, m.prefix_hits.clone());
        let help = "First to last frame of a committed handoff";
        registry.register("baton_kv_transfer_seconds", help, m.transfer_seconds.clone());
        let help = "KV bytes of a committed handoff";
        registry.register("baton_kv_transfer_bytes", help, m.transfer_bytes.clone());
        let help = "Handoffs that ended without commit";
        registry.register("baton_kv_transfer_failures", help, m.transfer_failures.clone());
        registry.register("baton_handoffs", "Handoffs by outcome", m.handoffs.clone());
        registry.register(
            "baton_local_prefills",
            "Prompts computed here, by reason",
            m.local_prefills.clone(),
        );
        metrics
    }

    pub fn step(&self, tokens: u32, sequences: usize) {
        self.batch_tokens.observe(f64::from(tokens));
        self.batch_size.observe(sequences as f64);
    }

    pub fn status(&self, status: &NodeStatus) {
        let blocks = &status.kv_blocks;
        let states = [
            ("free", blocks.free),
            ("active", blocks.active),
            ("cached", blocks.cached),
            ("reserved", blocks.reserved),
            ("in_transfer", blocks.in_transfer),
            ("quarantined", blocks.quarantined),
        ];
        for (state, count) in states {
            self.kv_blocks
                .get_or_create(&StateLabel { state })
                .set(i64::from(count));
        }
        self.running.set(i64::from(status.running_sequences));
        let capacity = ReasonLabel {
            reason: "capacity".to_owned(),
        };
        self.waiting
            .get_or_create(&capacity)
            .set(i64::from(status.waiting_sequences));
        catch_up(&self.preemptions, status.preemptions_total);
        catch_up(&self.prefix_queries, status.prefix_query_tokens_total);
        catch_up(&self.prefix_hits, status.prefix_hit_tokens_total);
    }

    pub fn local_prefill(&self, reason: LocalPrefillReason) {
        self.local_prefills
            .get_or_create(&ReasonLabel {
                reason: reason.name().to_owned(),
            })
            .inc();
    }

    pub fn handoff_committed(&self, transport: TransportKind, seconds: f64, bytes: u64) {
        let labels = TransportLabel {
            transport: transport.name(),
            src_role: SRC_ROLE,
        };
        self.transfer_seconds.get_or_create(&labels).observe(seconds);
        self.transfer_bytes.get_or_create(&labels).observe(bytes as f64);
        self.handoff(transport, "committed");
    }

    fn handoff(&self, transport: TransportKind, outcome: &'static str) {
        let transport = transport.name();
        self.handoffs.get_or_create(&OutcomeLabel { transport, outcome }).inc();
    }

    /// `reason` is one of the receiver's closed labels.
    pub fn handoff_failed(&self, transport: TransportKind, reason: &str) {
        self.transfer_failures
            .get_or_create(&ReasonLabel {
                reason: reason.to_owned(),
            })
            .inc();
        self.handoff(transport, "failed");
    }
}

/// The batcher counts for itself; the counter follows.
fn catch_up(counter: &Counter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}
