//! What `/metrics` shows of a prefill node. Values are set from the step loop's status and from ended transfers.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::choice::Fallbacks;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::metrics::node::{NodeFacts, NodeMetrics};
use service_runtime::metrics::vllm_node::PoolFacts;
use service_runtime::metrics::{Role, raise, table};
use serving_core::node::NodeStatus;
use serving_core::stage::{Stage, StageTimings};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    transport: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FallbackLabels {
    /// The one that was wanted.
    transport: &'static str,
    reason: &'static str,
}

/// Cloning shares the metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    node: NodeMetrics,
    push_queue_blocks: Gauge,
    requests: Family<RequestLabels, Counter>,
    transport_fallbacks: Family<FallbackLabels, Counter>,
    fallbacks: Arc<Fallbacks>,
}

impl Metrics {
    /// Makes and registers everything; with `aliases` under vLLM's names too.
    pub fn new(registry: &mut Registry, fallbacks: Arc<Fallbacks>, aliases: Option<PoolFacts>) -> Self {
        let role = Role::Prefill;
        let metrics = Self {
            node: NodeMetrics::register(registry, &NodeFacts { role, aliases }),
            push_queue_blocks: Gauge::default(),
            requests: Family::default(),
            transport_fallbacks: Family::default(),
            fallbacks,
        };
        metrics.start_series_at_zero();
        table::PUSH_QUEUE_BLOCKS.register(registry, metrics.push_queue_blocks.clone());
        table::PREFILL_REQUESTS.register(registry, metrics.requests.clone());
        table::KV_TRANSPORT_FALLBACKS.register(registry, metrics.transport_fallbacks.clone());
        metrics
    }

    /// As on every node: a rate needs two samples of a series.
    fn start_series_at_zero(&self) {
        let values = |label| table::PREFILL_REQUESTS.closed_values(label, Role::Prefill);
        for transport in values("transport").unwrap_or_default() {
            for outcome in values("outcome").unwrap_or_default() {
                let _ = self.requests.get_or_create(&RequestLabels { transport, outcome });
            }
        }
        self.count_fallbacks();
    }

    /// Called after every step and every second.
    pub fn status(&self, status: &NodeStatus, stages: impl Iterator<Item = Stage>) {
        self.node.status(status, stages);
        self.count_fallbacks();
    }

    fn count_fallbacks(&self) {
        for (wanted, reason, total) in self.fallbacks.totals() {
            let transport = wanted.name();
            let labels = FallbackLabels { transport, reason };
            raise(&self.transport_fallbacks.get_or_create(&labels), total);
        }
    }

    pub fn membership(&self) -> MembershipGauges {
        self.node.membership.clone()
    }

    pub fn step(&self, tokens: u32, sequences: usize, took: Duration) {
        self.node.step(tokens, sequences, took);
    }

    pub fn stages(&self, timings: &StageTimings) {
        self.node.stages(timings);
    }

    pub fn push_queue(&self, blocks: usize) {
        self.push_queue_blocks.set(blocks as i64);
    }

    pub fn handed_over(&self, transport: &'static str, kv_bytes: u64, moving: Duration) {
        self.node.kv_moved(transport, kv_bytes, moving);
        self.node.handoff(transport, "handed_over");
    }

    /// `reason` may be a decode node's word.
    pub fn transfer_failed(&self, transport: &'static str, reason: &str) {
        self.node.transfer_failed(transport, reason);
    }

    pub fn handoff(&self, transport: &'static str, outcome: &'static str) {
        self.node.handoff(transport, outcome);
    }

    /// `transport` is `none` when nothing was to be handed over.
    pub fn request(&self, transport: &'static str, outcome: &'static str) {
        self.requests.get_or_create(&RequestLabels { transport, outcome }).inc();
    }
}

#[cfg(test)]
mod tests {
    use kv_transfer::choice::TransportKind;
    use kv_transfer::transport::{AbortReason, PairFault, TransferError};
    use proto::messages::RefusedReason;
    use service_runtime::metrics::exposition::{differences, without_a_start};
    use service_runtime::metrics::vllm;
    use serving_core::node::NodeState;
    use serving_core::scheduler::{NodeFailure, NodeLimits, Scheduler, SchedulerConfig};

    use super::*;

    fn text(registry: &Registry) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        text
    }

    fn exercised(aliases: Option<PoolFacts>) -> String {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry, Arc::default(), aliases);
        assert_eq!(without_a_start(&text(&registry), Role::Prefill, &[table::ALL]), [""; 0]);
        let limits = NodeLimits {
            kv_blocks: 8,
            block_tokens: 16,
            max_batch_tokens: 64,
            max_sequences: 4,
            max_model_tokens: 64,
            vocab_size: 16,
            prefix_cache: true,
        };
        let scheduler = Scheduler::new(SchedulerConfig::prefill(limits, Duration::from_secs(1), None));
        metrics.status(&scheduler.status(NodeState::Ready), [Stage::PrefillQueue].into_iter());
        metrics.step(64, 2, Duration::from_millis(7));
        let mut timings = StageTimings::default();
        timings.push(Stage::PrefillForward, Duration::from_millis(5));
        metrics.stages(&timings);
        metrics.push_queue(3);
        metrics.handed_over(TransportKind::Grpc.name(), 1 << 20, Duration::from_millis(3));
        metrics.transfer_failed("unsettled", PairFault::Connecting.name());
        metrics.transfer_failed("grpc", "what another version says");
        metrics.handoff("unsettled", AbortReason::Cancelled.name());
        metrics.request("none", RefusedReason::NoCapacity.name());
        text(&registry)
    }

    // The gauge of the async runtime needs one.
    #[tokio::test]
    async fn what_is_exposed_is_what_the_table_says() {
        let plain = exercised(None);
        assert_eq!(differences(&plain, Role::Prefill, &[table::ALL]), [""; 0]);
        assert!(!plain.contains("vllm:"), "{plain}");
        let pool = PoolFacts {
            model_name: "m".to_owned(),
            block_tokens: 16,
            blocks: 8,
        };
        let both = exercised(Some(pool));
        assert_eq!(differences(&both, Role::Prefill, &[table::ALL, vllm::ALL]), [""; 0]);
        for line in [
            r#"baton_stage_requests{stage="prefill_queue",phase="ttft"} 1"#,
            r#"baton_kv_transfer_failures_total{transport="unsettled",src_role="prefill",reason="connecting"} 1"#,
            r#"baton_kv_transfer_failures_total{transport="grpc",src_role="prefill",reason="other"} 1"#,
            r#"vllm:iteration_tokens_total_bucket{le="64.0",model_name="m",engine="0"} 1"#,
        ] {
            assert!(both.contains(line), "{line} is not in\n{both}");
        }
    }

    #[test]
    fn the_table_knows_every_end_of_a_request_and_of_a_transfer() {
        let of = |metric: &service_runtime::metrics::Metric, label| {
            let values = metric.closed_values(label, Role::Prefill);
            values.expect("a closed list")
        };
        let failures = of(&table::KV_TRANSFER_FAILURES, "reason");
        for name in TransferError::NAMES
            .iter()
            .chain(&PairFault::NAMES)
            .chain(&["hold_expired"])
        {
            assert!(failures.contains(name), "{name} is not in {failures:?}");
        }
        let handoffs = of(&table::HANDOFFS, "outcome");
        let aborted = AbortReason::ALL
            .into_iter()
            .filter(|reason| *reason != AbortReason::HoldExpired);
        for name in aborted.map(AbortReason::name) {
            assert!(handoffs.contains(&name), "{name} is not in {handoffs:?}");
        }
        let requests = of(&table::PREFILL_REQUESTS, "outcome");
        for name in NodeFailure::NAMES {
            assert!(requests.contains(&name), "{name} is not in {requests:?}");
        }
        let wanted = of(&table::KV_TRANSPORT_FALLBACKS, "transport");
        let reasons = of(&table::KV_TRANSPORT_FALLBACKS, "reason");
        for (transport, reason, _) in Fallbacks::default().totals() {
            assert!(
                wanted.contains(&transport.name()) && reasons.contains(&reason),
                "{reason}"
            );
        }
    }
}
