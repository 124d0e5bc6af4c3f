//! What `/metrics` shows of a node. Values are set from the loop's status and from ended requests and transfers.

use std::sync::Arc;
use std::time::Duration;

use engine::DeviceMemoryUse;
use kv_transfer::choice::Fallbacks;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::messages::RefuseReason;
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::metrics::node::{NodeFacts, NodeMetrics};
use service_runtime::metrics::vllm_node::PoolFacts;
use service_runtime::metrics::{Role, raise, table};
use serving_core::kv::CacheEvictions;
use serving_core::node::NodeStatus;
use serving_core::request::LocalPrefillReason;
use serving_core::scheduler::DraftCounts;
use serving_core::stage::{Stage, StageTimings};

use crate::request::LegRequest;

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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

/// Cloning shares the metrics. Those that a role does not register stay unseen.
#[derive(Clone, Debug)]
pub struct Metrics {
    node: NodeMetrics,
    push_queue_blocks: Gauge,
    requests: Family<RequestLabels, Counter>,
    transport_fallbacks: Family<FallbackLabels, Counter>,
    transport_retries: Family<RequestLabels, Counter>,
    local_prefills: Family<ReasonLabel, Counter>,
    /// Without series on a node that has no device, so that the exposition leaves it out.
    device_memory: Family<KindLabel, Gauge>,
    fallbacks: Arc<Fallbacks>,
}

impl Metrics {
    /// Makes everything and registers what a prefill node has; with `aliases` under vLLM's names too.
    pub fn of_prefill(registry: &mut Registry, fallbacks: Arc<Fallbacks>, aliases: Option<PoolFacts>) -> Self {
        let metrics = Self::new(registry, (Role::Prefill, aliases), fallbacks);
        // As on every node: a rate needs two samples of a series.
        let values = |label| table::PREFILL_REQUESTS.closed_values(label, Role::Prefill);
        for transport in values("transport").unwrap_or_default() {
            for outcome in values("outcome").unwrap_or_default() {
                let _ = metrics.requests.get_or_create(&RequestLabels { transport, outcome });
            }
        }
        metrics.count_fallbacks();
        table::PUSH_QUEUE_BLOCKS.register(registry, metrics.push_queue_blocks.clone());
        table::PREFILL_REQUESTS.register(registry, metrics.requests.clone());
        table::KV_TRANSPORT_FALLBACKS.register(registry, metrics.transport_fallbacks.clone());
        table::KV_TRANSPORT_RETRIES.register(registry, metrics.transport_retries.clone());
        metrics
    }

    /// Makes everything and registers what a decode node has; with `aliases` under vLLM's names too.
    pub fn of_decode(registry: &mut Registry, aliases: Option<PoolFacts>) -> Self {
        let metrics = Self::new(registry, (Role::Decode, aliases), Arc::default());
        for reason in LocalPrefillReason::ALL.map(LocalPrefillReason::name) {
            let _ = metrics.local_prefills.get_or_create(&ReasonLabel { reason });
        }
        table::LOCAL_PREFILLS.register(registry, metrics.local_prefills.clone());
        metrics
    }

    fn new(registry: &mut Registry, (role, aliases): (Role, Option<PoolFacts>), fallbacks: Arc<Fallbacks>) -> Self {
        let metrics = Self {
            node: NodeMetrics::register(registry, &NodeFacts { role, aliases }),
            push_queue_blocks: Gauge::default(),
            requests: Family::default(),
            transport_fallbacks: Family::default(),
            transport_retries: Family::default(),
            local_prefills: Family::default(),
            device_memory: Family::default(),
            fallbacks,
        };
        table::DEVICE_MEMORY.register(registry, metrics.device_memory.clone());
        metrics
    }

    /// Called with every step and at least every second.
    pub fn status(&self, status: &NodeStatus, stages: impl Iterator<Item = Stage>) {
        self.node.status(status, stages);
        self.count_fallbacks();
    }

    /// Called with the status.
    pub fn drafts(&self, counts: DraftCounts) {
        self.node.drafts(counts);
    }

    /// Called with the status.
    pub fn evictions(&self, counts: CacheEvictions) {
        self.node.evictions(counts);
    }

    fn count_fallbacks(&self) {
        for (wanted, reason, total) in self.fallbacks.totals() {
            let transport = wanted.name();
            let labels = FallbackLabels { transport, reason };
            raise(&self.transport_fallbacks.get_or_create(&labels), total);
        }
        for (wanted, outcome, total) in self.fallbacks.retries() {
            let transport = wanted.name();
            let labels = RequestLabels { transport, outcome };
            raise(&self.transport_retries.get_or_create(&labels), total);
        }
    }

    pub fn device_memory(&self, memory: DeviceMemoryUse) {
        let DeviceMemoryUse {
            weights_bytes,
            buffers_bytes,
            kv_bytes,
            free_bytes,
        } = memory;
        for (kind, bytes) in [
            ("weights", weights_bytes),
            ("buffers", buffers_bytes),
            ("kv", kv_bytes),
            ("free", free_bytes),
        ] {
            let gauge = self.device_memory.get_or_create(&KindLabel { kind });
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
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

    pub fn local_prefill(&self, reason: LocalPrefillReason) {
        let reason = reason.name();
        self.local_prefills.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// A handoff has moved its KV; `outcome` is this end's word for it.
    pub fn handoff_done(&self, (transport, outcome): (&'static str, &'static str), kv_bytes: u64, moving: Duration) {
        self.node.kv_moved(transport, kv_bytes, moving);
        self.node.handoff(transport, outcome);
    }

    /// A handoff that ended without its KV.
    pub fn handoff(&self, transport: &'static str, outcome: &'static str) {
        self.node.handoff(transport, outcome);
    }

    /// `reason` may be a peer's word.
    pub fn transfer_failed(&self, transport: &'static str, reason: &str) {
        self.node.transfer_failed(transport, reason);
    }

    /// A request was refused, by the loop or before the loop has seen it.
    pub(crate) fn refused(&self, leg: &LegRequest, reason: RefuseReason) {
        if let LegRequest::Prefill(_) = leg {
            self.request("none", reason.name());
        }
    }

    /// A prefill leg has ended. `transport` is `none` when nothing was to be handed over.
    pub fn request(&self, transport: &'static str, outcome: &'static str) {
        self.requests.get_or_create(&RequestLabels { transport, outcome }).inc();
    }
}

#[cfg(test)]
mod tests {
    use kv_transfer::receiver::{ReceiveEnd, TransferRefusal};
    use kv_transfer::transport::{AbortReason, PairFault, TransferError};
    use service_runtime::metrics::exposition::{differences, read, without_a_start};
    use service_runtime::metrics::vllm;
    use serving_core::node::NodeState;
    use serving_core::scheduler::{NodeFailure, NodeLimits, Scheduler, SchedulerConfig};

    use super::*;

    fn aliases() -> PoolFacts {
        PoolFacts {
            model_name: "m".to_owned(),
            block_tokens: 16,
            blocks: 8,
        }
    }

    fn status() -> NodeStatus {
        let limits = NodeLimits {
            kv_blocks: 8,
            block_tokens: 16,
            max_batch_tokens: 64,
            max_sequences: 4,
            max_model_tokens: 64,
            vocab_size: 16,
            prefix_cache: true,
        };
        let reservation = Duration::from_secs(1);
        Scheduler::new(SchedulerConfig::decode(limits, reservation)).status(NodeState::Ready)
    }

    fn text(registry: &Registry) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).expect("a string takes everything");
        text
    }

    const MEMORY: DeviceMemoryUse = DeviceMemoryUse {
        weights_bytes: 5,
        buffers_bytes: 4,
        kv_bytes: 3,
        free_bytes: 2,
    };

    fn decode(aliases: Option<PoolFacts>) -> String {
        let mut registry = Registry::default();
        let metrics = Metrics::of_decode(&mut registry, aliases);
        assert_eq!(without_a_start(&text(&registry), Role::Decode, &[table::ALL]), [""; 0]);
        metrics.device_memory(MEMORY);
        metrics.step(12, 3, Duration::from_millis(4));
        metrics.status(&status(), [Stage::Decode, Stage::Decode].into_iter());
        let mut timings = StageTimings::default();
        timings.push(Stage::Commit, Duration::from_millis(1));
        metrics.stages(&timings);
        metrics.local_prefill(LocalPrefillReason::Short);
        metrics.handoff_done(
            (kv_transfer::shm::KIND.name(), "committed"),
            4096,
            Duration::from_millis(2),
        );
        metrics.transfer_failed(kv_transfer::grpc::KIND.name(), ReceiveEnd::PairLost.name());
        text(&registry)
    }

    fn prefill(aliases: Option<PoolFacts>) -> String {
        let mut registry = Registry::default();
        let metrics = Metrics::of_prefill(&mut registry, Arc::default(), aliases);
        assert_eq!(without_a_start(&text(&registry), Role::Prefill, &[table::ALL]), [""; 0]);
        metrics.device_memory(MEMORY);
        metrics.status(&status(), [Stage::PrefillQueue].into_iter());
        metrics.step(64, 2, Duration::from_millis(7));
        let mut timings = StageTimings::default();
        timings.push(Stage::PrefillForward, Duration::from_millis(5));
        metrics.stages(&timings);
        metrics.push_queue(3);
        metrics.handoff_done(
            (kv_transfer::grpc::KIND.name(), "handed_over"),
            1 << 20,
            Duration::from_millis(3),
        );
        metrics.transfer_failed("unsettled", PairFault::Connecting.name());
        metrics.transfer_failed("grpc", "what another version says");
        metrics.handoff("unsettled", AbortReason::Cancelled.name());
        metrics.request("none", RefuseReason::NoCapacity.name());
        text(&registry)
    }

    // The gauge of the async runtime needs one.
    #[tokio::test]
    async fn what_is_exposed_is_what_the_table_says() {
        for (role, exercised) in [(Role::Prefill, prefill as fn(_) -> String), (Role::Decode, decode)] {
            let plain = exercised(None);
            assert_eq!(differences(&plain, role, &[table::ALL]), [""; 0]);
            assert!(!plain.contains("vllm:"), "{plain}");
            let both = exercised(Some(aliases()));
            assert_eq!(differences(&both, role, &[table::ALL, vllm::ALL]), [""; 0]);
        }
        let (prefill, decode) = (prefill(Some(aliases())), decode(Some(aliases())));
        for (text, line) in [
            (&decode, r#"baton_stage_requests{stage="decode",phase="rest"} 2"#),
            (
                &decode,
                r#"baton_kv_transfer_failures_total{transport="grpc",src_role="prefill",reason="pair_lost"} 1"#,
            ),
            (&decode, r#"baton_device_memory_bytes{kind="kv"} 3"#),
            (&decode, r#"vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0"#),
            (
                &decode,
                r#"vllm:cache_config_info{model_name="m",engine="0",block_size="16",num_gpu_blocks="8"} 1"#,
            ),
            (
                &prefill,
                r#"baton_stage_requests{stage="prefill_queue",phase="ttft"} 1"#,
            ),
            (
                &prefill,
                r#"baton_kv_transfer_failures_total{transport="unsettled",src_role="prefill",reason="connecting"} 1"#,
            ),
            (
                &prefill,
                r#"baton_kv_transfer_failures_total{transport="grpc",src_role="prefill",reason="other"} 1"#,
            ),
            (
                &prefill,
                r#"vllm:iteration_tokens_total_bucket{le="64.0",model_name="m",engine="0"} 1"#,
            ),
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[tokio::test]
    async fn stages_are_empty_again_when_the_node_is_idle() {
        let mut registry = Registry::default();
        let metrics = Metrics::of_decode(&mut registry, None);
        metrics.status(&status(), [Stage::PrefillQueue].into_iter());
        assert!(text(&registry).contains(r#"{stage="prefill_queue",phase="ttft"} 1"#));
        metrics.status(&status(), std::iter::empty());
        let text = text(&registry);
        let stages = text.lines().filter(|line| line.starts_with("baton_stage_requests{"));
        let busy: Vec<&str> = stages.filter(|line| !line.ends_with(" 0")).collect();
        assert_eq!(busy, [""; 0]);
    }

    #[test]
    fn a_node_without_a_device_shows_no_memory_of_one() {
        let mut registry = Registry::default();
        let metrics = Metrics::of_prefill(&mut registry, Arc::default(), None);
        assert!(!text(&registry).contains("baton_device_memory"));
        metrics.device_memory(MEMORY);
        assert!(text(&registry).contains(r#"baton_device_memory_bytes{kind="free"} 2"#));
    }

    #[test]
    fn the_table_knows_how_a_transfer_can_end_here() {
        let listed = table::KV_TRANSFER_FAILURES.closed_values("reason", Role::Decode);
        let listed = listed.expect("a closed list");
        let here = ReceiveEnd::NAMES.iter().filter(|name| **name != "aborted_here");
        for name in here.chain(&TransferRefusal::NAMES) {
            assert!(listed.contains(name), "{name} is not in {listed:?}");
        }
        let carriers = table::KV_TRANSFER_FAILURES.closed_values("transport", Role::Decode);
        let kinds = kv_transfer::transports::kinds();
        assert_eq!(carriers, Some(kinds.iter().map(|kind| kind.name()).collect()));
        let mut registry = Registry::default();
        Metrics::of_decode(&mut registry, None).transfer_failed("shm", "a word of its own");
        let failures = &read(&text(&registry))["baton_kv_transfer_failures"];
        assert!(
            !failures
                .series
                .iter()
                .any(|series| series["reason"] == "a word of its own")
        );
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
        let received = table::HANDOFFS.closed_values("outcome", Role::Decode);
        let received = received.expect("a closed list");
        for name in AbortReason::FAULTLESS.map(AbortReason::name) {
            assert!(received.contains(&name), "{name} is not in {received:?}");
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
