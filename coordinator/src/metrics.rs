//! The coordinator's registry: what the HTTP edge reports, what the streams measure, what the brain counts.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use serving_core::request::Lane;

use crate::api::{EdgeMetrics, EndedRequest};
use crate::cluster_metrics::{ClusterCollector, ClusterSnapshot};
use crate::insight::ClusterView;
use crate::records::stalls::StallCause;
use crate::slo::{Breach, OBJECTIVE};

/// Edges of TELEMETRY 3.4; the bold ones there are usual SLO limits, so that attainment can be read off exactly.
const TTFT_EDGES: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.8, 1.0, 1.5, 2.5,
    3.0, 5.0, 10.0, 20.0, 40.0, 80.0,
];
const ITL_EDGES: &[f64] = &[
    0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
];
/// Stages last from tens of microseconds (route) to minutes (decode).
const STAGE_EDGES: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
];
const E2E_EDGES: &[f64] = &[
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0,
];
/// 1-2-5, as vLLM has them.
const TOKEN_EDGES: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5,
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    model: String,
    lane: &'static str,
    outcome: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LaneLabel {
    lane: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StallLabels {
    lane: &'static str,
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SloLabels {
    slo: &'static str,
    lane: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BreachLabels {
    slo: &'static str,
    lane: &'static str,
    breach: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabels {
    stage: &'static str,
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TraceLabel {
    trace_id: String,
}

#[derive(Clone, Copy)]
struct Edges(&'static [f64]);

impl MetricConstructor<Histogram> for Edges {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}
impl MetricConstructor<HistogramWithExemplars<TraceLabel>> for Edges {
    fn new_metric(&self) -> HistogramWithExemplars<TraceLabel> {
        HistogramWithExemplars::new(self.0.iter().copied())
    }
}

type PerLane = Family<LaneLabel, Histogram, Edges>;

/// All of it, shared by the edge, the streams and the control loop. Recording never blocks for long: short locks only.
pub struct Metrics {
    requests: Family<OutcomeLabels, Counter>,
    ttft: Family<LaneLabel, HistogramWithExemplars<TraceLabel>, Edges>,
    itl: PerLane,
    itl_stalls: Family<StallLabels, Counter>,
    slo_total: Family<SloLabels, Counter>,
    slo_good: Family<SloLabels, Counter>,
    slo_breaches: Family<BreachLabels, Counter>,
    slo_objective: Gauge<f64, AtomicU64>,
    tpot: PerLane,
    e2e: PerLane,
    prompt_tokens: Histogram,
    output_tokens: Histogram,
    stages: Family<StageLabels, Histogram, Edges>,
    first_to_second_token: Histogram,
    panics: Counter,
    cluster: Arc<Mutex<ClusterSnapshot>>,
    registry: Arc<Registry>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let cluster = Arc::new(Mutex::new(ClusterSnapshot::default()));
        let mut registry = Registry::with_prefix("baton");
        let mut metrics = Self {
            requests: Family::default(),
            ttft: Family::new_with_constructor(Edges(TTFT_EDGES)),
            itl: Family::new_with_constructor(Edges(ITL_EDGES)),
            itl_stalls: Family::default(),
            slo_total: Family::default(),
            slo_good: Family::default(),
            slo_breaches: Family::default(),
            slo_objective: Gauge::default(),
            tpot: Family::new_with_constructor(Edges(ITL_EDGES)),
            e2e: Family::new_with_constructor(Edges(E2E_EDGES)),
            prompt_tokens: Histogram::new(TOKEN_EDGES.iter().copied()),
            output_tokens: Histogram::new(TOKEN_EDGES.iter().copied()),
            stages: Family::new_with_constructor(Edges(STAGE_EDGES)),
            first_to_second_token: Histogram::new(ITL_EDGES.iter().copied()),
            panics: Counter::default(),
            cluster: cluster.clone(),
            registry: Arc::default(),
        };
        metrics.register(&mut registry);
        registry.register_collector(Box::new(ClusterCollector::new(cluster)));
        service_runtime::runtime_tasks::register(&mut registry, "runtime_tasks");
        metrics.registry = Arc::new(registry);
        metrics
    }

    /// For the `/metrics` of the membership port.
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.clone()
    }

    fn register(&self, r: &mut Registry) {
        r.register("requests", "Generation requests that ended", self.requests.clone());
        r.register(
            "ttft_seconds",
            "First byte received to first token written",
            self.ttft.clone(),
        );
        r.register("itl_seconds", "Gap between two tokens of one choice", self.itl.clone());
        r.register(
            "itl_stalls",
            "Gaps over four times the request's median, by cause",
            self.itl_stalls.clone(),
        );
        self.slo_objective.set(OBJECTIVE);
        self.start_series_at_zero();
        r.register("slo", "Requests judged by an SLO profile", self.slo_total.clone());
        r.register("slo_good", "Requests that kept it", self.slo_good.clone());
        r.register("slo_breaches", "What the others did wrong", self.slo_breaches.clone());
        r.register(
            "slo_objective",
            "Share of good requests promised",
            self.slo_objective.clone(),
        );
        r.register(
            "tpot_seconds",
            "(last token - first token) / (tokens - 1)",
            self.tpot.clone(),
        );
        r.register(
            "e2e_seconds",
            "First byte received to the answer's end",
            self.e2e.clone(),
        );
        r.register(
            "prompt_tokens",
            "Prompt tokens of one request",
            self.prompt_tokens.clone(),
        );
        r.register(
            "output_tokens",
            "Output tokens of one request",
            self.output_tokens.clone(),
        );
        r.register(
            "stage_seconds",
            "Time in each stage; phase ttft sums to TTFT",
            self.stages.clone(),
        );
        let gap = "First token to second: what the handoff costs a reader";
        r.register("first_to_second_token_seconds", gap, self.first_to_second_token.clone());
        r.register("handler_panics", "Requests whose handler panicked", self.panics.clone());
    }

    /// A series that appears with its first event shows no increase for it, and `rate` shows nothing until its second.
    fn start_series_at_zero(&self) {
        for lane in Lane::ALL.map(Lane::name) {
            for cause in StallCause::ALL.map(StallCause::name) {
                let _ = self.itl_stalls.get_or_create(&StallLabels { lane, cause });
            }
        }
        // The profiles that are chosen when nobody names one.
        for (slo, lane) in [("chat", "interactive"), ("async-batch", "batch")] {
            let labels = SloLabels { slo, lane };
            self.slo_total.get_or_create(&labels).inc_by(0);
            self.slo_good.get_or_create(&labels).inc_by(0);
            for breach in Breach::ALL {
                let breach = breach.name();
                self.slo_breaches
                    .get_or_create(&BreachLabels { slo, lane, breach })
                    .inc_by(0);
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
        let labels = SloLabels { slo, lane };
        self.slo_total.get_or_create(&labels).inc();
        let good = self.slo_good.get_or_create(&labels);
        // Made even when it stays zero: a rate needs both series.
        good.inc_by(u64::from(breaches.is_empty()));
        for breach in breaches {
            let breach = breach.name();
            self.slo_breaches
                .get_or_create(&BreachLabels { slo, lane, breach })
                .inc();
        }
    }

    /// Replaces what `/metrics` shows of the cluster.
    pub fn publish(&self, update: impl FnOnce(&mut ClusterSnapshot)) {
        update(&mut self.cluster.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl ClusterView for Metrics {
    fn snapshot(&self) -> ClusterSnapshot {
        self.cluster.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        self.e2e.get_or_create(&lane).observe(ended.e2e.as_secs_f64());
        self.prompt_tokens.observe(f64::from(ended.prompt_tokens));
        self.output_tokens.observe(f64::from(ended.output_tokens));
        self.judged(ended);
        for (stage, duration) in &ended.stages.0 {
            let labels = StageLabels {
                stage: stage.name(),
                phase: stage.phase(),
            };
            self.stages.get_or_create(&labels).observe(duration.as_secs_f64());
        }
    }

    fn token_gap(&self, lane: Lane, gap: Duration) {
        let lane = LaneLabel { lane: lane.name() };
        self.itl.get_or_create(&lane).observe(gap.as_secs_f64());
    }

    fn handler_panicked(&self) {
        self.panics.inc();
    }

    fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail; what was written is still worth showing if a collector gave up.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serving_core::stage::{Stage, StageTimings};

    #[test]
    fn a_request_shows_up_under_its_labels() {
        let metrics = Metrics::new();
        let mut stages = StageTimings::default();
        stages.push(Stage::Queue, Duration::from_millis(3));
        stages.push(Stage::Egress, Duration::from_millis(1));
        stages.push(Stage::EgressRest, Duration::from_millis(2));
        metrics.request_ended(&EndedRequest {
            model: "smol",
            lane: Lane::Batch,
            outcome: "ok",
            ttft: Some(Duration::from_millis(120)),
            tpot: Some(Duration::from_millis(25)),
            e2e: Duration::from_secs(1),
            prompt_tokens: 10,
            output_tokens: 20,
            stages: &stages,
            trace_id: "0af7651916cd43dd8448eb211c80319c",
            stalls: &[StallCause::PrefillChunk],
            slo: Some(("rag", &[Breach::Ttft])),
        });
        metrics.token_gap(Lane::Batch, Duration::from_millis(700));
        let text = metrics.render();
        for line in [
            r#"baton_requests_total{model="smol",lane="batch",outcome="ok"} 1"#,
            r#"baton_ttft_seconds_bucket{le="0.15",lane="batch"} 1"#,
            r#"baton_stage_seconds_count{stage="egress",phase="ttft"} 1"#,
            r#"baton_stage_seconds_count{stage="egress",phase="rest"} 1"#,
            r#"baton_itl_stalls_total{lane="batch",cause="prefill_chunk"} 1"#,
            r#"baton_slo_total{slo="rag",lane="batch"} 1"#,
            r#"baton_slo_good_total{slo="rag",lane="batch"} 0"#,
            r#"baton_slo_breaches_total{slo="rag",lane="batch",breach="ttft"} 1"#,
            "trace_id=\"0af7651916cd43dd8448eb211c80319c\"",
            "# EOF",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
