//! What the brain knows, as metrics: a snapshot the control loop replaces, and its encoding at scrape time.

use std::fmt::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use serving_core::cluster::{Cluster, ClusterStats, Life, NodeHealth};
use serving_core::ids::NodeEpoch;
use serving_core::node::{KvBlockCounts, NodeStatus};
use serving_core::request::Lane;
use serving_core::time::Time;

/// One node as `/metrics` shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSnapshot {
    pub name: String,
    pub epoch: NodeEpoch,
    pub address: String,
    pub version: String,
    pub transports: Vec<String>,
    pub block_tokens: u32,
    pub is_co_located: bool,
    pub role: &'static str,
    pub health: NodeHealth,
    pub is_suspected: bool,
    pub lease_left: Duration,
    /// As last reported; at most a status interval old while the node is connected.
    pub kv_blocks: KvBlockCounts,
    pub running_sequences: u32,
    pub waiting_sequences: u32,
    pub permits_available: u64,
    pub preemptions_total: u64,
    pub prefix_query_tokens_total: u64,
    pub prefix_hit_tokens_total: u64,
    /// A prefill node's links: decode node, and whether it reports the link as usable.
    pub pairs: Vec<PairSnapshot>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PairSnapshot {
    pub decode_node: String,
    /// `None` while it can be used.
    pub unusable_reason: Option<String>,
}

/// Everything the brain exports.
#[derive(Clone, Debug, Default)]
pub struct ClusterSnapshot {
    pub policy: &'static str,
    pub stats: ClusterStats,
    pub waiting_interactive: usize,
    pub waiting_batch: usize,
    pub unfinished: usize,
    pub nodes: Vec<NodeSnapshot>,
}

impl ClusterSnapshot {
    pub fn take_counts(&mut self, cluster: &Cluster) {
        self.policy = cluster.policy_name();
        self.stats.clone_from(cluster.stats());
        self.waiting_interactive = cluster.waiting(Lane::Interactive);
        self.waiting_batch = cluster.waiting(Lane::Batch);
        self.unfinished = cluster.unfinished();
    }

    pub fn take_nodes(&mut self, now: Time, cluster: &Cluster) {
        let snapshot = |n: &serving_core::cluster::Node| {
            let status = n.status.as_ref();
            let is_lost = matches!(n.life, Life::Lost { .. });
            NodeSnapshot {
                name: n.record.id.name.to_string(),
                epoch: n.record.id.epoch,
                address: n.record.address.clone(),
                version: n.record.version.clone(),
                transports: n.record.transports.clone(),
                block_tokens: n.record.capacity.block_tokens,
                is_co_located: n.record.is_co_located,
                role: n.record.role.name(),
                health: n.health(),
                is_suspected: n.is_suspected(now),
                lease_left: if is_lost {
                    Duration::ZERO
                } else {
                    n.lease_until.remaining(now)
                },
                // What a lost node holds is unknown, and no longer memory of this cluster.
                kv_blocks: status.filter(|_| !is_lost).map(|s| s.kv_blocks).unwrap_or_default(),
                running_sequences: status.filter(|_| !is_lost).map_or(0, |s| s.running_sequences),
                waiting_sequences: status.filter(|_| !is_lost).map_or(0, |s| s.waiting_sequences),
                permits_available: n.permits.available(),
                preemptions_total: status.map_or(0, |s| s.preemptions_total),
                prefix_query_tokens_total: status.map_or(0, |s| s.prefix_query_tokens_total),
                prefix_hit_tokens_total: status.map_or(0, |s| s.prefix_hit_tokens_total),
                pairs: status.filter(|_| !is_lost).map(pairs).unwrap_or_default(),
            }
        };
        self.nodes = cluster.members().iter().map(snapshot).collect();
    }
}

fn pairs(status: &NodeStatus) -> Vec<PairSnapshot> {
    let pairs = status.pairs.iter();
    pairs
        .map(|pair| PairSnapshot {
            decode_node: pair.decode_node.name.to_string(),
            unusable_reason: pair.unusable_reason.clone(),
        })
        .collect()
}

#[derive(Debug)]
pub(crate) struct ClusterCollector {
    snapshot: Arc<Mutex<ClusterSnapshot>>,
}

type Labels<'a> = Vec<(&'static str, &'a str)>;

/// One metric with all its label sets.
struct Writer<'a, 'b> {
    encoder: &'a mut DescriptorEncoder<'b>,
}

impl Writer<'_, '_> {
    fn counters<'l>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'l>, u64)>,
    ) -> Result<(), Error> {
        let mut metric = self.encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in values {
            ConstCounter::new(value).encode(metric.encode_family(&labels.as_slice())?)?;
        }
        Ok(())
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        let counter = ConstCounter::new(value);
        counter.encode(self.encoder.encode_descriptor(name, help, None, MetricType::Counter)?)
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) -> Result<(), Error> {
        let gauge = ConstGauge::new(value);
        gauge.encode(self.encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
    }

    fn gauges<'l>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'l>, f64)>,
    ) -> Result<(), Error> {
        let mut metric = self.encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in values {
            ConstGauge::new(value).encode(metric.encode_family(&labels.as_slice())?)?;
        }
        Ok(())
    }
}

impl ClusterCollector {
    pub(crate) fn new(snapshot: Arc<Mutex<ClusterSnapshot>>) -> Self {
        Self { snapshot }
    }
}

impl Collector for ClusterCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let s = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut w = Writer { encoder: &mut encoder };
        decisions(&s, &mut w)?;
        queue(&s, &mut w)?;
        nodes(&s.nodes, &mut w)
    }
}

fn decisions(s: &ClusterSnapshot, w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let stats = &s.stats;
    w.counters(
        "routing_decisions",
        "Choices of a node, by policy and reason",
        stats
            .routing_decisions
            .iter()
            .map(|(r, n)| (vec![("policy", s.policy), ("reason", r.name())], *n)),
    )?;
    w.counters(
        "local_prefills",
        "Prompts computed on the decode node",
        stats
            .local_prefills
            .iter()
            .map(|(r, n)| (vec![("reason", r.name())], *n)),
    )?;
    w.counters(
        "handoffs",
        "Placements with a prefill and a decode node, by end",
        stats
            .handoffs
            .iter()
            .map(|((t, o), n)| (vec![("transport", t.as_str()), ("outcome", o.name())], *n)),
    )?;
    w.counters(
        "handoff_retries",
        "Attempts that followed a failed one",
        stats.retries.iter().map(|(r, n)| (vec![("reason", *r)], *n)),
    )?;
    w.counters(
        "node_refusals",
        "Work a node refused; the request was queued again",
        stats.refusals.iter().map(|(r, n)| (vec![("reason", *r)], *n)),
    )?;
    w.counters(
        "migrations",
        "Requests that had to go on elsewhere after their first token",
        stats.migrations.iter().map(|(o, n)| (vec![("outcome", o.name())], *n)),
    )?;
    w.counters(
        "shed",
        "Requests turned away for want of room or time",
        stats.shed.iter().map(|(l, n)| (vec![("lane", l.name())], *n)),
    )?;
    w.counter(
        "pair_rests",
        "Pairs taken out of use for a while because their transfers kept failing",
        stats.pair_rests,
    )?;
    w.counter("stale_events", "Events of attempts that were over", stats.stale_events)?;
    w.counter(
        "protocol_violations",
        "Messages that broke the protocol",
        stats.protocol_violations,
    )?;
    w.counter(
        "illegal_transitions",
        "Bugs of the coordinator's state machine",
        stats.illegal_transitions,
    )
}

fn queue(s: &ClusterSnapshot, w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let lanes = [
        (Lane::Interactive, s.waiting_interactive),
        (Lane::Batch, s.waiting_batch),
    ];
    w.gauges(
        "queue_requests",
        "Requests waiting for a place",
        lanes.iter().map(|(l, n)| (vec![("lane", l.name())], *n as f64)),
    )?;
    w.gauge(
        "unfinished_requests",
        "Requests admitted and not ended",
        s.unfinished as f64,
    )
}

fn nodes(nodes: &[NodeSnapshot], w: &mut Writer<'_, '_>) -> Result<(), Error> {
    w.gauges(
        "node_up",
        "Nodes by role and state",
        ["prefill", "decode"].into_iter().flat_map(|role| {
            NodeHealth::ALL.into_iter().map(move |state| {
                let count = nodes.iter().filter(|n| n.role == role && n.health == state).count();
                (vec![("role", role), ("state", state.name())], count as f64)
            })
        }),
    )?;
    w.gauges(
        "kv_blocks",
        "KV blocks of every node by state",
        nodes.iter().filter(|n| n.health != NodeHealth::Lost).flat_map(|n| {
            let k = n.kv_blocks;
            let states = [
                ("free", k.free),
                ("active", k.active),
                ("cached", k.cached),
                ("reserved", k.reserved),
                ("in_transfer", k.in_transfer),
                ("quarantined", k.quarantined),
            ];
            states.map(|(state, count)| {
                (
                    vec![("node", n.name.as_str()), ("role", n.role), ("state", state)],
                    f64::from(count),
                )
            })
        }),
    )?;
    let per_node = |value: fn(&NodeSnapshot) -> f64| {
        nodes
            .iter()
            .map(move |n| (vec![("node", n.name.as_str()), ("role", n.role)], value(n)))
    };
    w.gauges(
        "membership_lease_seconds",
        "Time left on the lease",
        per_node(|n| n.lease_left.as_secs_f64()),
    )?;
    w.gauges(
        "breaker_state",
        "1 while a node is suspected after connection errors",
        per_node(|n| f64::from(u8::from(n.is_suspected))),
    )?;
    w.gauges(
        "node_running_sequences",
        "Sequences in the node's batch",
        per_node(|n| f64::from(n.running_sequences)),
    )?;
    w.gauges(
        "node_waiting_sequences",
        "Sequences waiting on the node",
        per_node(|n| f64::from(n.waiting_sequences)),
    )?;
    w.gauges(
        "node_permits_available",
        "Work the node would take now: prompt tokens or blocks",
        per_node(|n| n.permits_available as f64),
    )?;
    pairs_up(nodes, w)?;
    node_totals(nodes, w)
}

/// Links between the pools, as the prefill nodes report them.
fn pairs_up(nodes: &[NodeSnapshot], w: &mut Writer<'_, '_>) -> Result<(), Error> {
    w.gauges(
        "pair_up",
        "1 while a prefill node can push KV to a decode node",
        nodes.iter().flat_map(|n| {
            n.pairs.iter().map(|pair| {
                let reason = pair.unusable_reason.as_deref();
                let labels = vec![
                    ("prefill_node", n.name.as_str()),
                    ("decode_node", pair.decode_node.as_str()),
                    ("reason", reason.unwrap_or("usable")),
                ];
                (labels, f64::from(u8::from(reason.is_none())))
            })
        }),
    )
}

/// What nodes count since they started.
fn node_totals(nodes: &[NodeSnapshot], w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let counts = |value: fn(&NodeSnapshot) -> u64| {
        nodes
            .iter()
            .map(move |n| (vec![("node", n.name.as_str()), ("role", n.role)], value(n)))
    };
    w.counters(
        "node_preemptions",
        "Sequences evicted to free blocks",
        counts(|n| n.preemptions_total),
    )?;
    w.counters(
        "node_prefix_queries_tokens",
        "Prompt tokens looked up in prefix caches",
        counts(|n| n.prefix_query_tokens_total),
    )?;
    w.counters(
        "node_prefix_hits_tokens",
        "Prompt tokens found there",
        counts(|n| n.prefix_hit_tokens_total),
    )
}
