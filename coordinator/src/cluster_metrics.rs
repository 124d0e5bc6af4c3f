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
    Cluster, ClusterStats, HandoffOutcome, LegError, MigrationOutcome, Node, NodeHealth, RefuseReason,
};
use serving_core::node::{NodeRecord, NodeRole, NodeStatus, PairHealth};
use serving_core::request::{Lane, LocalPrefillReason};
use serving_core::routing::RouteReason;
use serving_core::stage::Stage;
use serving_core::time::Time;

/// One node as `/metrics` and `/admin/cluster` show it.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSnapshot {
    pub record: NodeRecord,
    /// As the node last reported it. The report is at most a status interval old while the node is connected.
    pub last_status: Option<NodeStatus>,
    pub health: NodeHealth,
    pub is_suspected: bool,
    pub lease_left: Duration,
    /// Time since the lease was last renewed.
    pub lease_age: Duration,
    pub permits_available: u64,
    /// Keys of this node in the prefix directory.
    pub prefix_blocks: usize,
}

impl NodeSnapshot {
    fn of(node: &Node, now: Time) -> Self {
        let is_over = node.life.is_over();
        let lease_left = node.lease_until.remaining(now);
        Self {
            record: node.record.clone(),
            last_status: node.status.clone(),
            health: node.health(),
            is_suspected: node.is_suspected(now) || node.is_resting(now),
            lease_left: if is_over { Duration::ZERO } else { lease_left },
            lease_age: now.since(node.status_at),
            permits_available: node.permits.available(),
            prefix_blocks: if is_over { 0 } else { node.prefixes.blocks() },
        }
    }

    pub fn name(&self) -> &str {
        self.record.id.name.as_str()
    }

    pub fn epoch_hex(&self) -> String {
        format!("{:016x}", self.record.id.epoch.0)
    }

    /// What a lost node holds is unknown, and is no longer memory of this cluster.
    pub fn status(&self) -> Option<&NodeStatus> {
        self.last_status.as_ref().filter(|_| !self.health.is_over())
    }

    /// A prefill node's links, as it reports them.
    pub fn pairs(&self) -> &[PairHealth] {
        self.status().map_or(&[], |status| &status.pairs)
    }
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
        for (phase, count) in cluster.phase_counts() {
            *self.in_cluster.entry(phase.stage()).or_default() += count;
        }
    }

    pub fn take_nodes(&mut self, now: Time, cluster: &Cluster) {
        let nodes = cluster.members().iter();
        self.nodes = nodes.map(|node| NodeSnapshot::of(node, now)).collect();
    }
}

#[derive(Debug)]
pub(crate) struct ClusterCollector {
    snapshot: Arc<Mutex<ClusterSnapshot>>,
    /// The served model, if vLLM's names were asked for.
    alias_model: Option<String>,
}

/// How a value is read out of something.
type Of<T, V> = fn(&T) -> V;
type Labels<'a> = Vec<(&'static str, &'a str)>;

/// Metrics with all their label sets.
struct Writer<'a, 'b> {
    encoder: &'a mut DescriptorEncoder<'b>,
}

impl Writer<'_, '_> {
    fn counters<'l>(&mut self, metric: &Metric, values: impl Iterator<Item = (Labels<'l>, u64)>) -> Result<(), Error> {
        metric.encode(self.encoder, |mut place| {
            for (labels, value) in values {
                ConstCounter::new(value).encode(place.encode_family(&labels.as_slice())?)?;
            }
            Ok(())
        })
    }

    fn gauges<'l>(&mut self, metric: &Metric, values: impl Iterator<Item = (Labels<'l>, f64)>) -> Result<(), Error> {
        metric.encode(self.encoder, |mut place| {
            for (labels, value) in values {
                ConstGauge::new(value).encode(place.encode_family(&labels.as_slice())?)?;
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
    let alone = [
        (&table::NODES_LOST, stats.nodes_lost),
        (&table::PAIR_RESTS, stats.pair_rests),
        (&table::NODE_RESTS, stats.node_rests),
        (&table::STALE_EVENTS, stats.stale_events),
        (&table::PROTOCOL_VIOLATIONS, stats.protocol_violations),
        (&table::ILLEGAL_TRANSITIONS, stats.illegal_transitions),
    ];
    alone
        .into_iter()
        .try_for_each(|(metric, count)| w.counter(metric, count))
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
    w.gauges(&vllm::REQUESTS_RUNNING, [(labels(), running as f64)].into_iter())?;
    w.gauges(&vllm::REQUESTS_WAITING, [(labels(), waiting as f64)].into_iter())
}

fn nodes(nodes: &[NodeSnapshot], w: &mut Writer<'_, '_>) -> Result<(), Error> {
    let count = |role, health| {
        let is_counted = |node: &&NodeSnapshot| node.record.role == role && node.health == health;
        nodes.iter().filter(is_counted).count() as f64
    };
    let up = [NodeRole::Prefill, NodeRole::Decode].into_iter().flat_map(|role| {
        let of_health = move |state: NodeHealth| (vec![("role", role.name()), ("state", state.name())], (role, state));
        NodeHealth::ALL.into_iter().map(of_health)
    });
    w.gauges(
        &table::NODE_UP,
        up.map(|(labels, (role, state))| (labels, count(role, state))),
    )?;
    w.gauges(
        &table::CLUSTER_KV_BLOCKS,
        nodes.iter().filter(|n| !n.health.is_over()).flat_map(|n| {
            let blocks = n.status().map(|status| status.kv_blocks).unwrap_or_default();
            blocks.by_state().map(|(state, count)| {
                let labels = [labels_of(n), vec![("state", state)]].concat();
                (labels, f64::from(count))
            })
        }),
    )?;
    // A lost node stays visible, with a lease of 0. A node that has left is not shown.
    let shown = || nodes.iter().filter(|n| n.health != NodeHealth::Left);
    let gauges: [(&Metric, Of<NodeSnapshot, f64>); 6] = [
        (&table::MEMBERSHIP_LEASE, |n| n.lease_left.as_secs_f64()),
        (&table::BREAKER_STATE, |n| f64::from(u8::from(n.is_suspected))),
        (&table::NODE_RUNNING_SEQUENCES, |n| {
            n.status().map_or(0.0, |s| s.running_sequences.into())
        }),
        (&table::NODE_WAITING_SEQUENCES, |n| {
            n.status().map_or(0.0, |s| s.waiting_sequences.into())
        }),
        (&table::NODE_PERMITS_AVAILABLE, |n| n.permits_available as f64),
        (&table::NODE_PREFIX_BLOCKS, |n| n.prefix_blocks as f64),
    ];
    for (metric, value) in gauges {
        w.gauges(metric, shown().map(|n| (labels_of(n), value(n))))?;
    }
    let pairs = nodes.iter().flat_map(|n| n.pairs().iter().map(move |pair| (n, pair)));
    w.gauges(
        &table::PAIR_UP,
        pairs.map(|(n, pair)| {
            let reason = pair.unusable_reason.as_deref();
            let labels = vec![
                ("prefill_node", n.name()),
                ("decode_node", pair.decode_node.name.as_str()),
                ("reason", reason.unwrap_or("usable")),
            ];
            (labels, f64::from(u8::from(reason.is_none())))
        }),
    )?;
    // Totals that nodes count since they started.
    let totals: [(&Metric, Of<NodeStatus, u64>); 3] = [
        (&table::NODE_PREEMPTIONS, |s| s.preemptions_total),
        (&table::NODE_PREFIX_QUERIES, |s| s.prefix_query_tokens_total),
        (&table::NODE_PREFIX_HITS, |s| s.prefix_hit_tokens_total),
    ];
    for (metric, total) in totals {
        // A node that has not reported yet has no total: a zero would look like a restart of the node.
        let of_node = |n: &'_ NodeSnapshot| n.last_status.as_ref().map(total);
        w.counters(metric, nodes.iter().filter_map(|n| Some((labels_of(n), of_node(n)?))))?;
    }
    Ok(())
}

fn labels_of(node: &NodeSnapshot) -> Labels<'_> {
    vec![("node", node.name()), ("role", node.record.role.name())]
}
