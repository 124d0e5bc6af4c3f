//! The state of the brain as metrics: a snapshot that the control loop replaces, and its encoding at scrape time.

use std::collections::BTreeMap;
use std::fmt::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use service_runtime::metrics::{Metric, Role, labels, table, vllm, vllm_node};
use serving_core::cluster::{
    Cluster, ClusterStats, HandoffOutcome, LegError, MigrationOutcome, NodeHealth, RefuseReason,
};
use serving_core::ids::NodeEpoch;
use serving_core::node::{AssignedRole, KvBlockCounts, NodeStatus};
use serving_core::request::{Lane, LocalPrefillReason};
use serving_core::routing::RouteReason;
use serving_core::stage::Stage;
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
    pub assigned_role: AssignedRole,
    /// The roles that its process can take.
    pub roles: Vec<AssignedRole>,
    pub role: &'static str,
    pub health: NodeHealth,
    pub is_suspected: bool,
    pub lease_left: Duration,
    /// Time since the lease was last renewed.
    pub lease_age: Duration,
    /// The number of coordinators that the node says it is connected to.
    pub coordinators: u32,
    /// As the node last reported it. The report is at most a status interval old while the node is connected.
    pub kv_blocks: KvBlockCounts,
    pub running_sequences: u32,
    pub waiting_sequences: u32,
    pub permits_available: u64,
    pub preemptions_total: u64,
    pub prefix_query_tokens_total: u64,
    pub prefix_hit_tokens_total: u64,
    /// Keys of this node in the prefix directory.
    pub prefix_blocks: usize,
    /// A prefill node's links: each decode node, and whether the prefill node reports the link as usable.
    pub pairs: Vec<PairSnapshot>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PairSnapshot {
    pub decode_node: String,
    /// `None` while the link can be used.
    pub unusable_reason: Option<String>,
}

/// Everything that the brain exports.
#[derive(Clone, Debug, Default)]
pub struct ClusterSnapshot {
    pub policy: &'static str,
    pub stats: ClusterStats,
    pub waiting_interactive: usize,
    pub waiting_batch: usize,
    pub unfinished: usize,
    /// Requests that the brain has, by stage.
    pub in_cluster: BTreeMap<Stage, u64>,
    /// Requests that the HTTP edge has and the brain does not, by stage.
    pub at_edge: BTreeMap<Stage, u64>,
    pub nodes: Vec<NodeSnapshot>,
}

impl ClusterSnapshot {
    pub fn take_counts(&mut self, cluster: &Cluster) {
        self.policy = cluster.policy_name();
        self.stats.clone_from(cluster.stats());
        self.waiting_interactive = cluster.waiting(Lane::Interactive);
        self.waiting_batch = cluster.waiting(Lane::Batch);
        self.unfinished = cluster.unfinished();
        self.in_cluster.clear();
        for phase in cluster.phases() {
            *self.in_cluster.entry(phase.stage()).or_default() += 1;
        }
    }

    pub fn take_nodes(&mut self, now: Time, cluster: &Cluster) {
        let snapshot = |n: &serving_core::cluster::Node| {
            let status = n.status.as_ref();
            let is_over = n.life.is_over();
            NodeSnapshot {
                name: n.record.id.name.to_string(),
                epoch: n.record.id.epoch,
                address: n.record.address.clone(),
                version: n.record.version.clone(),
                transports: n.record.transports.clone(),
                block_tokens: n.record.capacity.block_tokens,
                assigned_role: n.record.assigned_role(),
                roles: n.record.roles.clone(),
                role: n.record.role.name(),
                health: n.health(),
                is_suspected: n.is_suspected(now),
                lease_left: if is_over {
                    Duration::ZERO
                } else {
                    n.lease_until.remaining(now)
                },
                lease_age: now.since(n.status_at),
                coordinators: status.map_or(0, |s| s.coordinators),
                // What a lost node holds is unknown, and is no longer memory of this cluster.
                kv_blocks: status.filter(|_| !is_over).map(|s| s.kv_blocks).unwrap_or_default(),
                running_sequences: status.filter(|_| !is_over).map_or(0, |s| s.running_sequences),
                waiting_sequences: status.filter(|_| !is_over).map_or(0, |s| s.waiting_sequences),
                permits_available: n.permits.available(),
                preemptions_total: status.map_or(0, |s| s.preemptions_total),
                prefix_query_tokens_total: status.map_or(0, |s| s.prefix_query_tokens_total),
                prefix_hit_tokens_total: status.map_or(0, |s| s.prefix_hit_tokens_total),
                prefix_blocks: if is_over { 0 } else { n.prefixes.blocks() },
                pairs: status.filter(|_| !is_over).map(pairs).unwrap_or_default(),
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
    /// The served model, if vLLM's names were asked for.
    alias_model: Option<String>,
}

type Labels<'a> = Vec<(&'static str, &'a str)>;

/// Metrics with all their label sets.
struct Writer<'a, 'b> {
    encoder: &'a mut DescriptorEncoder<'b>,
}

impl Writer<'_, '_> {
    fn counters<'l>(
        &mut self,
        metric: &Metric,
        values: impl IntoIterator<Item = (Labels<'l>, u64)>,
    ) -> Result<(), Error> {
        metric.encode(self.encoder, |mut place| {
            for (labels, value) in values {
                ConstCounter::new(value).encode(place.encode_family(&labels.as_slice())?)?;
            }
            Ok(())
        })
    }

    /// A counter with one closed label. Every value has its series from the start; `Metrics` says why.
    fn each<K: Ord>(
        &mut self,
        (metric, label): (&Metric, &'static str),
        counts: &BTreeMap<K, u64>,
        all: impl IntoIterator<Item = (K, &'static str)>,
    ) -> Result<(), Error> {
        let value = |(key, name)| (vec![(label, name)], counts.get(&key).copied().unwrap_or(0));
        self.counters(metric, all.into_iter().map(value))
    }

    fn counter(&mut self, metric: &Metric, value: u64) -> Result<(), Error> {
        metric.encode(self.encoder, |place| ConstCounter::new(value).encode(place))
    }

    fn gauge(&mut self, metric: &Metric, value: f64) -> Result<(), Error> {
        metric.encode(self.encoder, |place| ConstGauge::new(value).encode(place))
    }

    fn gauges<'l>(
        &mut self,
        metric: &Metric,
        values: impl IntoIterator<Item = (Labels<'l>, f64)>,
    ) -> Result<(), Error> {
        metric.encode(self.encoder, |mut place| {
            for (labels, value) in values {
                ConstGauge::new(value).encode(place.encode_family(&labels.as_slice())?)?;
            }
            Ok(())
        })
    }
}

impl ClusterCollector {
    pub(crate) fn new(snapshot: Arc<Mutex<ClusterSnapshot>>, alias_model: Option<String>) -> Self {
        Self { snapshot, alias_model }
    }
}

impl Collector for ClusterCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let s = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut w = Writer { encoder: &mut encoder };
        decisions(&s, &mut w)?;
        handoffs(&s.stats, &mut w)?;
        queue(&s, &mut w)?;
        stages(&s, &mut w)?;
        nodes(&s.nodes, &mut w)?;
        match &self.alias_model {
            Some(model) => aliases(&s, model, &mut w),
            None => Ok(()),
        }
    }
}

fn decisions(s: &ClusterSnapshot, w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let stats = &s.stats;
    // The brain has not yet said what its policy is, so there is no policy to count for.
    let reasons = RouteReason::ALL.into_iter().filter(|_| !s.policy.is_empty());
    w.counters(
        &table::ROUTING_DECISIONS,
        reasons.map(|reason| {
            let count = stats.routing_decisions.get(&reason).copied().unwrap_or(0);
            (vec![("policy", s.policy), ("reason", reason.name())], count)
        }),
    )?;
    let local = LocalPrefillReason::ALL.map(|reason| (reason, reason.name()));
    w.each((&table::LOCAL_PREFILLS, "reason"), &stats.local_prefills, local)?;
    let retries = LegError::NAMES.map(|name| (name, name));
    w.each((&table::HANDOFF_RETRIES, "reason"), &stats.retries, retries)?;
    let refusals = RefuseReason::ALL.map(|reason| (reason.name(), reason.name()));
    w.each((&table::NODE_REFUSALS, "reason"), &stats.refusals, refusals)?;
    let migrations = MigrationOutcome::ALL.map(|outcome| (outcome, outcome.name()));
    w.each((&table::MIGRATIONS, "outcome"), &stats.migrations, migrations)?;
    w.each(
        (&table::SHED, "lane"),
        &stats.shed,
        Lane::ALL.map(|lane| (lane, lane.name())),
    )?;
    w.counter(&table::NODES_LOST, stats.nodes_lost)?;
    w.counter(&table::PAIR_RESTS, stats.pair_rests)?;
    w.counter(&table::STALE_EVENTS, stats.stale_events)?;
    w.counter(&table::PROTOCOL_VIOLATIONS, stats.protocol_violations)?;
    w.counter(&table::ILLEGAL_TRANSITIONS, stats.illegal_transitions)
}

fn handoffs(stats: &ClusterStats, w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let transports = table::HANDOFFS.closed_values("transport", Role::Coordinator);
    let mut counts: BTreeMap<(&str, HandoffOutcome), u64> = BTreeMap::new();
    for transport in transports.unwrap_or_default() {
        counts.extend(HandoffOutcome::ALL.map(|outcome| ((transport, outcome), 0)));
    }
    for ((transport, outcome), count) in &stats.handoffs {
        counts.insert((transport, *outcome), *count);
    }
    let labels = |transport, outcome: HandoffOutcome| vec![("transport", transport), ("outcome", outcome.name())];
    let counts = counts.into_iter();
    w.counters(
        &table::HANDOFFS,
        counts.map(|((transport, outcome), count)| (labels(transport, outcome), count)),
    )
}

fn queue(s: &ClusterSnapshot, w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let lanes = [
        (Lane::Interactive, s.waiting_interactive),
        (Lane::Batch, s.waiting_batch),
    ];
    w.gauges(
        &table::QUEUE_REQUESTS,
        lanes.iter().map(|(l, n)| (vec![("lane", l.name())], *n as f64)),
    )?;
    w.gauge(&table::UNFINISHED_REQUESTS, s.unfinished as f64)
}

/// Every stage that can be shown; the stages without requests are 0.
fn stages(s: &ClusterSnapshot, w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let count = |stage| s.in_cluster.get(stage).or(s.at_edge.get(stage)).copied().unwrap_or(0);
    let stages = labels::live_stages(Role::Coordinator).iter();
    w.gauges(
        &table::STAGE_REQUESTS,
        stages.map(|stage| {
            let labels = vec![("stage", stage.name()), ("phase", stage.phase())];
            (labels, count(stage) as f64)
        }),
    )
}

/// The numbers of running and waiting requests, under vLLM's names.
fn aliases(s: &ClusterSnapshot, model: &str, w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let labels = || vec![("model_name", model), ("engine", vllm_node::ENGINE)];
    let waiting = s.waiting_interactive + s.waiting_batch;
    let running = s.unfinished.saturating_sub(waiting);
    w.gauges(&vllm::REQUESTS_RUNNING, [(labels(), running as f64)])?;
    w.gauges(&vllm::REQUESTS_WAITING, [(labels(), waiting as f64)])
}

fn nodes(nodes: &[NodeSnapshot], w: &mut Writer<'_, '_>) -> Result<(), Error> {
    w.gauges(
        &table::NODE_UP,
        ["prefill", "decode"].into_iter().flat_map(|role| {
            NodeHealth::ALL.into_iter().map(move |state| {
                let count = nodes.iter().filter(|n| n.role == role && n.health == state).count();
                (vec![("role", role), ("state", state.name())], count as f64)
            })
        }),
    )?;
    w.gauges(
        &table::CLUSTER_KV_BLOCKS,
        nodes.iter().filter(|n| !n.health.is_over()).flat_map(|n| {
            n.kv_blocks.by_state().map(|(state, count)| {
                (
                    vec![("node", n.name.as_str()), ("role", n.role), ("state", state)],
                    f64::from(count),
                )
            })
        }),
    )?;
    let per_node = |value: fn(&NodeSnapshot) -> f64| {
        // A lost node stays visible, with a lease of 0. A node that has left is not shown.
        let shown = nodes.iter().filter(|n| n.health != NodeHealth::Left);
        shown.map(move |n| (vec![("node", n.name.as_str()), ("role", n.role)], value(n)))
    };
    let lease = per_node(|n| n.lease_left.as_secs_f64());
    w.gauges(&table::MEMBERSHIP_LEASE, lease)?;
    let suspected = per_node(|n| f64::from(u8::from(n.is_suspected)));
    w.gauges(&table::BREAKER_STATE, suspected)?;
    let running = per_node(|n| f64::from(n.running_sequences));
    w.gauges(&table::NODE_RUNNING_SEQUENCES, running)?;
    let waiting = per_node(|n| f64::from(n.waiting_sequences));
    w.gauges(&table::NODE_WAITING_SEQUENCES, waiting)?;
    let permits = per_node(|n| n.permits_available as f64);
    w.gauges(&table::NODE_PERMITS_AVAILABLE, permits)?;
    let prefixes = per_node(|n| n.prefix_blocks as f64);
    w.gauges(&table::NODE_PREFIX_BLOCKS, prefixes)?;
    pairs_up(nodes, w)?;
    node_totals(nodes, w)
}

/// Links between the pools, as the prefill nodes report them.
fn pairs_up(nodes: &[NodeSnapshot], w: &mut Writer<'_, '_>) -> Result<(), Error> {
    w.gauges(
        &table::PAIR_UP,
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

/// Totals that nodes count since they started.
fn node_totals(nodes: &[NodeSnapshot], w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let counts = |value: fn(&NodeSnapshot) -> u64| {
        nodes
            .iter()
            .map(move |n| (vec![("node", n.name.as_str()), ("role", n.role)], value(n)))
    };
    w.counters(&table::NODE_PREEMPTIONS, counts(|n| n.preemptions_total))?;
    w.counters(&table::NODE_PREFIX_QUERIES, counts(|n| n.prefix_query_tokens_total))?;
    w.counters(&table::NODE_PREFIX_HITS, counts(|n| n.prefix_hit_tokens_total))
}
