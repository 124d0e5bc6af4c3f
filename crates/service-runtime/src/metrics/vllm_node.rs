//! A node's metrics under vLLM's names: one KV pool and one batch, as vLLM has them.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serving_core::node::NodeStatus;
use serving_core::scheduler::DraftCounts;
use serving_core::scheduler::NodeLimits;

use super::config::MetricsConfig;
use super::{Histograms, raise, vllm};

/// vLLM numbers the engines of one server. A process here has one engine.
pub const ENGINE: &str = "0";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct EngineLabels {
    pub model_name: String,
    pub engine: &'static str,
}

impl EngineLabels {
    pub fn new(model_name: &str) -> Self {
        Self {
            model_name: model_name.to_owned(),
            engine: ENGINE,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheConfigLabels {
    model_name: String,
    engine: &'static str,
    block_size: u32,
    num_gpu_blocks: u32,
}

/// How the KV pool of a node is divided.
#[derive(Clone, Debug)]
pub struct PoolFacts {
    pub model_name: String,
    pub block_tokens: u32,
    pub blocks: u32,
}

impl PoolFacts {
    /// The metrics of a node that exposes vLLM's names.
    pub fn if_wanted(config: MetricsConfig, model_name: &str, limits: &NodeLimits) -> Option<Self> {
        config.vllm_metrics.then(|| Self {
            model_name: model_name.to_owned(),
            block_tokens: limits.block_tokens,
            blocks: limits.kv_blocks,
        })
    }
}

type Share = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug)]
pub(super) struct NodeAliases {
    running: Gauge,
    waiting: Gauge,
    kv_usage: Share,
    preemptions: Counter,
    drafted: Counter,
    accepted: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    iteration_tokens: prometheus_client::metrics::histogram::Histogram,
}

impl NodeAliases {
    pub fn register(registry: &mut Registry, pool: &PoolFacts) -> Self {
        let labels = EngineLabels::new(&pool.model_name);
        let gauge = |registry: &mut Registry, metric: &super::Metric| {
            let family = Family::<EngineLabels, Gauge>::default();
            metric.register(registry, family.clone());
            family.get_or_create_owned(&labels)
        };
        // The old name and the new name are one counter in two families.
        let counter = |registry: &mut Registry, metrics: &[super::Metric]| {
            let family = Family::<EngineLabels, Counter>::default();
            for metric in metrics {
                metric.register(registry, family.clone());
            }
            family.get_or_create_owned(&labels)
        };
        let usage = Family::<EngineLabels, Share>::default();
        vllm::KV_USAGE.register(registry, usage.clone());
        vllm::KV_USAGE_OLD.register(registry, usage.clone());
        let iteration_tokens: Histograms<EngineLabels> = vllm::ITERATION_TOKENS.new_histograms();
        vllm::ITERATION_TOKENS.register(registry, iteration_tokens.clone());
        let config = Family::<CacheConfigLabels, Gauge>::default();
        vllm::CACHE_CONFIG.register(registry, config.clone());
        let cut = CacheConfigLabels {
            model_name: pool.model_name.clone(),
            engine: ENGINE,
            block_size: pool.block_tokens,
            num_gpu_blocks: pool.blocks,
        };
        config.get_or_create(&cut).set(1);
        Self {
            running: gauge(registry, &vllm::REQUESTS_RUNNING),
            waiting: gauge(registry, &vllm::REQUESTS_WAITING),
            kv_usage: usage.get_or_create_owned(&labels),
            preemptions: counter(registry, &[vllm::PREEMPTIONS]),
            drafted: counter(registry, &[vllm::DRAFTED_TOKENS]),
            accepted: counter(registry, &[vllm::ACCEPTED_TOKENS]),
            prefix_queries: counter(registry, &[vllm::PREFIX_QUERIES, vllm::PREFIX_QUERIES_OLD]),
            prefix_hits: counter(registry, &[vllm::PREFIX_HITS, vllm::PREFIX_HITS_OLD]),
            iteration_tokens: iteration_tokens.get_or_create_owned(&labels),
        }
    }

    pub fn status(&self, status: &NodeStatus) {
        self.running.set(i64::from(status.running_sequences));
        self.waiting.set(i64::from(status.waiting_sequences));
        self.kv_usage.set(status.kv_blocks.held_share());
        raise(&self.preemptions, status.preemptions_total);
        raise(&self.prefix_queries, status.prefix_query_tokens_total);
        raise(&self.prefix_hits, status.prefix_hit_tokens_total);
    }

    pub fn drafts(&self, counts: DraftCounts) {
        raise(&self.drafted, counts.drafted);
        raise(&self.accepted, counts.accepted);
    }

    pub fn step(&self, tokens: u32) {
        self.iteration_tokens.observe(f64::from(tokens));
    }
}
