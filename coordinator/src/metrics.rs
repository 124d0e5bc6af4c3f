//! The coordinator's registry: reports of the HTTP edge, measurements of the streams, counts of the brain.

mod aliases;
mod labels;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{self, Registry};
use service_runtime::metrics::config::MetricsConfig;
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::metrics::node::StageLabels;
use service_runtime::metrics::{Histograms, HistogramsWithExemplars, Metric, Role, table};
use service_runtime::runtime_tasks;
use serving_core::cluster::NodeHealth;
use serving_core::node::{NodeCapacity, NodeRole};
use serving_core::request::Lane;
use serving_core::stage::Stage;

use crate::api::{EdgeMetrics, EndedRequest};
use crate::cluster_metrics::{ClusterCollector, ClusterSnapshot, NodeSnapshot};
use crate::insight::ClusterView;
use crate::records::stalls::StallCause;
use crate::slo::{Breach, SloConfig};

use aliases::Aliases;
use labels::{BreachLabels, KeyRefusalLabel, LaneLabel, OutcomeLabels, SloLabels, StallLabels, TraceLabel};

/// The whole registry, shared by the edge, the streams and the control loop. Recording holds short locks only.
#[derive(Debug)]
pub struct Metrics {
    requests: Family<OutcomeLabels, Counter>,
    ttft: HistogramsWithExemplars<LaneLabel, TraceLabel>,
    itl: HistogramsWithExemplars<LaneLabel, TraceLabel>,
    itl_stalls: Family<StallLabels, Counter>,
    slo_total: Family<SloLabels, Counter>,
    slo_good: Family<SloLabels, Counter>,
    slo_breaches: Family<BreachLabels, Counter>,
    slo_objective: Gauge<f64, AtomicU64>,
    tpot: Histograms<LaneLabel>,
    e2e: Histograms<LaneLabel>,
    prompt_tokens: Histogram,
    output_tokens: Histogram,
    stages: Histograms<StageLabels>,
    first_to_second_token: Histogram,
    last_token_to_end: Histogram,
    panics: Counter,
    key_refusals: Family<KeyRefusalLabel, Counter>,
    membership: MembershipGauges,
    /// The same under vLLM's names, if they were asked for.
    aliases: Option<Aliases>,
    cluster: Arc<Mutex<ClusterSnapshot>>,
    registry: Arc<Registry>,
}

impl Metrics {
    pub fn new(served_model: &str, config: MetricsConfig, slo: &SloConfig) -> Self {
        let cluster = Arc::new(Mutex::new(ClusterSnapshot::default()));
        let mut registry = Registry::default();
        let aliases = config
            .vllm_metrics
            .then(|| Aliases::register(&mut registry, served_model));
        let r = &mut registry;
        let mut metrics = Self {
            requests: registered(r, &table::REQUESTS, Family::default()),
            ttft: registered(r, &table::TTFT, table::TTFT.new_histograms_with_exemplars()),
            itl: registered(r, &table::ITL, table::ITL.new_histograms_with_exemplars()),
            itl_stalls: registered(r, &table::ITL_STALLS, Family::default()),
            slo_total: registered(r, &table::SLO_TOTAL, Family::default()),
            slo_good: registered(r, &table::SLO_GOOD, Family::default()),
            slo_breaches: registered(r, &table::SLO_BREACHES, Family::default()),
            slo_objective: registered(r, &table::SLO_OBJECTIVE, Gauge::default()),
            tpot: registered(r, &table::TPOT, table::TPOT.new_histograms()),
            e2e: registered(r, &table::E2E, table::E2E.new_histograms()),
            prompt_tokens: registered(r, &table::PROMPT_TOKENS, table::PROMPT_TOKENS.new_histogram()),
            output_tokens: registered(r, &table::OUTPUT_TOKENS, table::OUTPUT_TOKENS.new_histogram()),
            stages: registered(r, &table::STAGE_SECONDS, table::STAGE_SECONDS.new_histograms()),
            first_to_second_token: registered(
                r,
                &table::FIRST_TO_SECOND_TOKEN,
                table::FIRST_TO_SECOND_TOKEN.new_histogram(),
            ),
            last_token_to_end: registered(r, &table::LAST_TOKEN_TO_END, table::LAST_TOKEN_TO_END.new_histogram()),
            panics: registered(r, &table::HANDLER_PANICS, Counter::default()),
            key_refusals: registered(r, &table::KEY_REFUSALS, Family::default()),
            membership: MembershipGauges::register(r),
            cluster: cluster.clone(),
            aliases,
            registry: Arc::default(),
        };
        metrics.slo_objective.set(slo.objective());
        metrics.start_series_at_zero(served_model, slo);
        let alias_model = metrics.aliases.as_ref().map(|_| served_model.to_owned());
        registry.register_collector(Box::new(ClusterCollector::new(cluster, alias_model)));
        runtime_tasks::register(&mut registry);
        metrics.registry = Arc::new(registry);
        metrics
    }

    pub fn membership(&self) -> MembershipGauges {
        self.membership.clone()
    }

    /// The exposition for `/metrics` of the membership port.
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.clone()
    }

    /// Every series exists from the start. A series that appears with its first event shows no increase for that event, and
    /// `rate` shows nothing until the second.
    fn start_series_at_zero(&self, served_model: &str, slo: &SloConfig) {
        let reasons = table::KEY_REFUSALS.closed_values("reason", Role::Coordinator);
        for reason in reasons.into_iter().flatten() {
            let _ = self.key_refusals.get_or_create(&KeyRefusalLabel { reason });
        }
        let outcomes = table::REQUESTS.closed_values("outcome", Role::Coordinator);
        for lane in Lane::ALL.map(Lane::name) {
            for outcome in outcomes.iter().flatten() {
                let _ = self.requests.get_or_create(&OutcomeLabels {
                    model: served_model.to_owned(),
                    lane,
                    outcome: (*outcome).to_owned(),
                });
            }
            for cause in StallCause::ALL.map(StallCause::name) {
                let _ = self.itl_stalls.get_or_create(&StallLabels { lane, cause });
            }
            for profile in slo.profiles() {
                let slo = profile.name.clone();
                for breach in Breach::ALL.map(Breach::name) {
                    let slo = slo.clone();
                    let _ = self.slo_breaches.get_or_create(&BreachLabels { slo, lane, breach });
                }
                let labels = SloLabels { slo, lane };
                let _ = self.slo_total.get_or_create(&labels);
                let _ = self.slo_good.get_or_create(&labels);
            }
        }
    }

    pub fn first_to_second_token(&self, gap: Duration) {
        self.first_to_second_token.observe(gap.as_secs_f64());
    }

    fn judged(&self, ended: &EndedRequest<'_>) {
        let lane = ended.lane.name();
        for cause in ended.stalls {
            let cause = cause.name();
            self.itl_stalls.get_or_create(&StallLabels { lane, cause }).inc();
        }
        let Some((slo, breaches)) = ended.slo else { return };
        let labels = SloLabels {
            slo: slo.to_owned(),
            lane,
        };
        self.slo_total.get_or_create(&labels).inc();
        let good = self.slo_good.get_or_create(&labels);
        good.inc_by(u64::from(breaches.is_empty()));
        for breach in breaches {
            let labels = BreachLabels {
                slo: slo.to_owned(),
                lane,
                breach: breach.name(),
            };
            self.slo_breaches.get_or_create(&labels).inc();
        }
    }

    /// Replaces what `/metrics` shows of the cluster.
    pub fn publish(&self, update: impl FnOnce(&mut ClusterSnapshot)) {
        update(&mut self.cluster.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// A metric that is in the registry. Clones share their values.
fn registered<M: registry::Metric + Clone>(registry: &mut Registry, line: &Metric, metric: M) -> M {
    line.register(registry, metric.clone());
    metric
}

impl ClusterView for Metrics {
    fn snapshot(&self) -> ClusterSnapshot {
        self.cluster.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn decode_capacities(&self) -> Vec<NodeCapacity> {
        let takes_requests =
            |node: &&NodeSnapshot| node.record.role == NodeRole::Decode && node.health == NodeHealth::Ready;
        let cluster = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
        let nodes = cluster.nodes.iter().filter(takes_requests);
        nodes.map(|node| node.record.capacity).collect()
    }
}

impl EdgeMetrics for Metrics {
    fn request_ended(&self, ended: &EndedRequest<'_>) {
        let lane = LaneLabel {
            lane: ended.lane.name(),
        };
        let labels = OutcomeLabels {
            model: ended.model.to_owned(),
            lane: ended.lane.name(),
            outcome: ended.outcome.to_owned(),
        };
        self.requests.get_or_create(&labels).inc();
        if let Some(ttft) = ended.ttft {
            let trace = TraceLabel {
                trace_id: ended.trace_id.to_owned(),
            };
            self.ttft
                .get_or_create(&lane)
                .observe(ttft.as_secs_f64(), Some(trace), None);
        }
        if let Some(tpot) = ended.tpot {
            self.tpot.get_or_create(&lane).observe(tpot.as_secs_f64());
        }
        if let Some(took) = ended.last_token_to_end {
            self.last_token_to_end.observe(took.as_secs_f64());
        }
        // Requests that were turned away would draw the medians to 0.
        if ended.has_run {
            self.e2e.get_or_create(&lane).observe(ended.e2e.as_secs_f64());
            self.prompt_tokens.observe(f64::from(ended.prompt_tokens));
            self.output_tokens.observe(f64::from(ended.output_tokens));
        }
        self.judged(ended);
        // The stages before the first token sum to its time, so they count where there was one.
        let is_counted = |stage: Stage| ended.ttft.is_some() || !stage.is_before_first_token();
        for (stage, duration) in ended.stages.0.iter().filter(|(stage, _)| is_counted(*stage)) {
            let stage = self.stages.get_or_create(&StageLabels::from(*stage));
            stage.observe(duration.as_secs_f64());
        }
        if let Some(aliases) = &self.aliases {
            aliases.request_ended(ended);
        }
    }

    fn token_gap(&self, lane: Lane, gap: Duration, trace_id: &str) {
        let lane = LaneLabel { lane: lane.name() };
        let trace_id = trace_id.to_owned();
        self.itl
            .get_or_create(&lane)
            .observe(gap.as_secs_f64(), Some(TraceLabel { trace_id }), None);
        if let Some(aliases) = &self.aliases {
            aliases.token_gap(gap);
        }
    }

    fn stage_entered(&self, stage: Stage) {
        self.publish(|snapshot| *snapshot.at_edge.entry(stage).or_default() += 1);
    }

    fn stage_left(&self, stage: Stage) {
        self.publish(|snapshot| {
            if let Some(count) = snapshot.at_edge.get_mut(&stage) {
                *count = count.saturating_sub(1);
            }
        });
    }

    fn handler_panicked(&self) {
        self.panics.inc();
    }

    fn key_refused(&self, reason: &'static str) {
        self.key_refusals.get_or_create(&KeyRefusalLabel { reason }).inc();
    }

    fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail. If a collector gave up, the text so far is still worth showing.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests;
