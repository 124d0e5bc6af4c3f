//! What `/metrics` shows of a decode node, written by the step thread alone.

use std::time::Duration;

use kv_transfer::choice::TransportKind;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use service_runtime::metrics::Role;
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::metrics::node::{NodeFacts, NodeMetrics};
use service_runtime::metrics::table;
use service_runtime::metrics::vllm_node::PoolFacts;
use serving_core::node::NodeStatus;
use serving_core::request::LocalPrefillReason;
use serving_core::stage::{Stage, StageTimings};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Cloning shares the metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    node: NodeMetrics,
    local_prefills: Family<ReasonLabel, Counter>,
}

impl Metrics {
    /// Makes and registers everything; with `aliases` under vLLM's names too.
    pub fn register(registry: &mut Registry, aliases: Option<PoolFacts>) -> Self {
        let role = Role::Decode;
        let metrics = Self {
            node: NodeMetrics::register(registry, &NodeFacts { role, aliases }),
            local_prefills: Family::default(),
        };
        for reason in LocalPrefillReason::ALL.map(LocalPrefillReason::name) {
            let _ = metrics.local_prefills.get_or_create(&ReasonLabel { reason });
        }
        table::LOCAL_PREFILLS.register(registry, metrics.local_prefills.clone());
        metrics
    }

    pub fn membership(&self) -> MembershipGauges {
        self.node.membership.clone()
    }

    pub fn step(&self, tokens: u32, sequences: usize, took: Duration) {
        self.node.step(tokens, sequences, took);
    }

    pub fn status(&self, status: &NodeStatus, stages: impl Iterator<Item = Stage>) {
        self.node.status(status, stages);
    }

    /// Of a request that has ended well.
    pub fn stages(&self, timings: &StageTimings) {
        self.node.stages(timings);
    }

    pub fn local_prefill(&self, reason: LocalPrefillReason) {
        let reason = reason.name();
        self.local_prefills.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub fn handoff_committed(&self, transport: TransportKind, moving: Duration, bytes: u64) {
        self.node.kv_moved(transport.name(), bytes, moving);
        self.node.handoff(transport.name(), "committed");
    }

    /// `reason` is one of the receiver's closed labels.
    pub fn handoff_failed(&self, transport: TransportKind, reason: &str) {
        self.node.transfer_failed(transport.name(), reason);
    }
}

#[cfg(test)]
mod tests {
    use kv_transfer::receiver::{ReceiveEnd, RefuseReason};
    use service_runtime::metrics::exposition::{differences, read, without_a_start};
    use service_runtime::metrics::vllm;
    use serving_core::node::NodeState;
    use serving_core::scheduler::{NodeLimits, Scheduler, SchedulerConfig};

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

    fn exercised(aliases: Option<PoolFacts>) -> String {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry, aliases);
        assert_eq!(without_a_start(&text(&registry), Role::Decode, &[table::ALL]), [""; 0]);
        metrics.step(12, 3, Duration::from_millis(4));
        metrics.status(&status(), [Stage::Decode, Stage::Decode].into_iter());
        let mut timings = StageTimings::default();
        timings.push(Stage::Commit, Duration::from_millis(1));
        metrics.stages(&timings);
        metrics.local_prefill(LocalPrefillReason::Short);
        metrics.handoff_committed(TransportKind::Shm, Duration::from_millis(2), 4096);
        metrics.handoff_failed(TransportKind::Grpc, ReceiveEnd::PairLost.name());
        text(&registry)
    }

    // The gauge of the async runtime needs one.
    #[tokio::test]
    async fn what_is_exposed_is_what_the_table_says() {
        let plain = exercised(None);
        assert_eq!(differences(&plain, Role::Decode, &[table::ALL]), [""; 0]);
        assert!(!plain.contains("vllm:"), "{plain}");
        let both = exercised(Some(aliases()));
        assert_eq!(differences(&both, Role::Decode, &[table::ALL, vllm::ALL]), [""; 0]);
        for line in [
            r#"baton_stage_requests{stage="decode",phase="rest"} 2"#,
            r#"baton_kv_transfer_failures_total{transport="grpc",src_role="prefill",reason="pair_lost"} 1"#,
            r#"vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0"#,
            r#"vllm:cache_config_info{model_name="m",engine="0",block_size="16",num_gpu_blocks="8"} 1"#,
        ] {
            assert!(both.contains(line), "{line} is not in\n{both}");
        }
    }

    #[tokio::test]
    async fn stages_are_empty_again_when_the_node_is_idle() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry, None);
        metrics.status(&status(), [Stage::PrefillQueue].into_iter());
        assert!(text(&registry).contains(r#"{stage="prefill_queue",phase="ttft"} 1"#));
        metrics.status(&status(), std::iter::empty());
        let text = text(&registry);
        let stages = text.lines().filter(|line| line.starts_with("baton_stage_requests{"));
        let busy: Vec<&str> = stages.filter(|line| !line.ends_with(" 0")).collect();
        assert_eq!(busy, [""; 0]);
    }

    #[test]
    fn the_table_knows_how_a_transfer_can_end_here() {
        let listed = table::KV_TRANSFER_FAILURES.closed_values("reason", Role::Decode);
        let listed = listed.expect("a closed list");
        let here = ReceiveEnd::NAMES.iter().filter(|name| **name != "aborted_here");
        for name in here.chain(&RefuseReason::NAMES) {
            assert!(listed.contains(name), "{name} is not in {listed:?}");
        }
        let carriers = table::KV_TRANSFER_FAILURES.closed_values("transport", Role::Decode);
        assert_eq!(carriers, Some(TransportKind::ALL.map(TransportKind::name).to_vec()));
        let mut registry = Registry::default();
        Metrics::register(&mut registry, None).handoff_failed(TransportKind::Shm, "a word of its own");
        let failures = &read(&text(&registry))["baton_kv_transfer_failures"];
        assert!(
            !failures
                .series
                .iter()
                .any(|series| series["reason"] == "a word of its own")
        );
    }
}
