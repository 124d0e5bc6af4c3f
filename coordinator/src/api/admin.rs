//! `/admin`: the remembered requests, the cluster and the service levels, as JSON. `docs/reference/records.md` is the reference.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;

use super::AppState;
use super::error::ApiError;
use crate::cluster_metrics::{ClusterSnapshot, NodeSnapshot, PairSnapshot};
use crate::insight::Insight;
use crate::records::pages::{
    ClusterPage, CoordinatorPage, LaneBudget, NodeClock, NodePage, PairPage, ProfilePage, SloPage, StageBudget,
    WaitingPage,
};
use crate::records::shape::{ClockShape, ms};
use crate::records::{Filter, Listing};
use crate::request_handle::Readiness;
use crate::slo::{Breach, OBJECTIVE, PROFILES, SloProfile};

const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1_000;

/// `Filter` with the other parameters of a list. It is one flat struct, because flattened structs lose their types in a
/// query string.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ListQuery {
    limit: Option<usize>,
    before: Option<u64>,
    slowest: bool,
    pub kinds: Option<String>,
    outcome: Option<String>,
    lane: Option<String>,
    model: Option<String>,
    node: Option<String>,
    breached: Option<bool>,
    stalled: Option<bool>,
    running: Option<bool>,
    slower_than_ms: Option<f64>,
}

impl ListQuery {
    pub fn filter(self) -> Filter {
        let some = |text: Option<String>| text.filter(|text| !text.is_empty());
        Filter {
            outcome: some(self.outcome),
            lane: some(self.lane),
            model: some(self.model),
            node: some(self.node),
            breached: self.breached,
            stalled: self.stalled,
            running: self.running,
            slower_than_ms: self.slower_than_ms,
        }
    }
}

pub async fn requests(State(state): State<Arc<AppState>>, query: Result<Query<ListQuery>, BadQuery>) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(bad) => return bad_query(&bad).into_response(),
    };
    let listing = Listing {
        limit: query.limit.unwrap_or(LIMIT_DEFAULT).clamp(1, LIMIT_MAX),
        before: query.before,
        slowest_first: query.slowest,
        filter: query.filter(),
    };
    state.insight.records.closing.settled().await;
    let page = state.insight.records.list(&listing);
    Json(json!({
        "records": page.records,
        "next_before": page.next_before,
        "now_unix_ms": now_unix_ms(),
        "kept": page.kept,
        "forgotten": page.forgotten,
    }))
    .into_response()
}

pub type BadQuery = axum::extract::rejection::QueryRejection;

pub fn bad_query(bad: &BadQuery) -> ApiError {
    ApiError::bad_request(format!("{}; see docs/reference/records.md.", bad.body_text()))
}

pub async fn request(State(state): State<Arc<AppState>>, Path(id): Path<String>) -> Response {
    state.insight.records.closing.settled().await;
    match state.insight.records.find(&id) {
        Some(detail) => Json(&*detail).into_response(),
        None => unknown_request(&id).into_response(),
    }
}

/// The record never existed, or it was removed for newer ones.
pub fn unknown_request(id: &str) -> ApiError {
    let message = format!(
        "No request `{}` is remembered: it never was here, or newer ones have taken its place (--request-records). See GET /admin/requests.",
        super::forms::short(id)
    );
    ApiError {
        code: Some("request_not_found"),
        ..ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }
}

pub async fn cluster(State(state): State<Arc<AppState>>) -> Json<ClusterPage> {
    Json(cluster_page(&state))
}

/// The page, which followers of the events get once a second as well.
pub fn cluster_page(state: &AppState) -> ClusterPage {
    let insight = &state.insight;
    let snapshot = insight.cluster.as_ref().map(|view| view.snapshot()).unwrap_or_default();
    let (readiness, why, unsplit) = match state.submit.readiness() {
        Readiness::Ready(reach) => ("ready", None, reach.unsplit.map(|why| why.to_string())),
        Readiness::NotReady(why) => ("not_ready", Some(why), None),
        Readiness::Draining => ("draining", None, None),
    };
    let clocks = insight.clocks();
    ClusterPage {
        coordinator: CoordinatorPage {
            name: insight.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            now_unix_ms: now_unix_ms(),
            uptime_s: state.started_at.elapsed().as_secs(),
            listen: insight.listen.clone(),
            control: insight.control.clone(),
            model: state.served_models.first().cloned(),
            readiness: readiness.into(),
            not_ready_because: why.map(|why| why.to_string()),
            unsplit_because: unsplit,
            waiting: WaitingPage {
                interactive: snapshot.waiting_interactive,
                batch: snapshot.waiting_batch,
            },
            unfinished: snapshot.unfinished,
        },
        membership: insight.registry.page(),
        nodes: snapshot.nodes.iter().map(|node| node_page(node, &clocks)).collect(),
        pairs: pairs_page(&snapshot, insight),
    }
}

/// The coordinator's wall clock, for readers whose own clock differs.
fn now_unix_ms() -> f64 {
    ms(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn node_page(node: &NodeSnapshot, clocks: &[ClockShape]) -> NodePage {
    let state = if node.is_suspected && !node.health.is_over() {
        "suspected"
    } else {
        node.health.name()
    };
    let clock = clocks.iter().find(|clock| clock.node == node.name);
    NodePage {
        name: node.name.clone(),
        epoch: format!("{:016x}", node.epoch.0),
        role: node.assigned_role.name().into(),
        roles: node.roles.iter().map(|role| role.name().into()).collect(),
        state: state.into(),
        address: node.address.clone(),
        version: node.version.clone(),
        transports: node.transports.clone(),
        lease_left_ms: Some(ms(node.lease_left)),
        lease_age_ms: Some(ms(node.lease_age)),
        coordinators: node.coordinators,
        running: Some(node.running_sequences),
        waiting: Some(node.waiting_sequences),
        permits_available: node.permits_available,
        kv_blocks: node.kv_blocks,
        block_tokens: node.block_tokens,
        clock: clock.map(|clock| NodeClock {
            offset_ms: clock.offset_ms,
            error_ms: clock.error_ms,
        }),
    }
}

fn pairs_page(snapshot: &ClusterSnapshot, insight: &Insight) -> Vec<PairPage> {
    let totals = insight.records.pairs();
    let of_node = |node: &NodeSnapshot| {
        let pair = |pair: &PairSnapshot| {
            let moved = totals
                .get(&(node.name.clone(), pair.decode_node.clone()))
                .copied()
                .unwrap_or_default();
            PairPage {
                prefill: node.name.clone(),
                decode: pair.decode_node.clone(),
                is_usable: pair.unusable_reason.is_none(),
                unusable_reason: pair.unusable_reason.clone(),
                kv_bytes_total: moved.kv_bytes,
                handoffs_total: moved.handoffs,
            }
        };
        node.pairs.iter().map(pair).collect::<Vec<_>>()
    };
    snapshot.nodes.iter().flat_map(of_node).collect()
}

pub async fn slo(State(state): State<Arc<AppState>>) -> Json<SloPage> {
    state.insight.records.closing.settled().await;
    let counted = state.insight.slo.report(Instant::now());
    let lanes = |profile: &SloProfile| {
        let of_profile = counted.iter().filter(|((name, _), _, _)| *name == profile.name);
        let lane = of_profile.map(|((_, lane), counts, burn)| LaneBudget {
            lane: (*lane).into(),
            total: counts.total,
            good: counts.good,
            breaches: Breach::ALL
                .into_iter()
                .map(|breach| (breach.name().into(), counts.breaches.get(&breach).copied().unwrap_or(0)))
                .collect(),
            burn_5m: burn.over_5m,
            burn_1h: burn.over_1h,
            budget_left: counts.budget_left(),
        });
        lane.collect()
    };
    let profile = |profile: &SloProfile| ProfilePage {
        name: profile.name.into(),
        ttft_ms_max: Some(ms(profile.ttft_max)),
        itl_ms_max: Some(ms(profile.itl_max)),
        lanes: lanes(profile),
    };
    Json(SloPage {
        objective: Some(OBJECTIVE),
        profiles: PROFILES.iter().map(profile).collect(),
        stages: stage_budgets(&state.insight),
    })
}

/// How a TTFT budget of 400 ms is split, in ms: network 20, queue 50, prefill 280, tokenise 10, gateway 15. The last 25 ms
/// are a reserve that belongs to no stage.
const BUDGET_OF_400_MS: [(&str, f64, &[&str]); 5] = [
    ("tokenise", 10.0, &["parse", "tokenize"]),
    ("queue", 50.0, &["queue", "prefill_queue"]),
    ("gateway", 15.0, &["route", "reserve", "dispatch"]),
    ("prefill", 280.0, &["prefill_forward"]),
    ("net", 20.0, &["first_token_return", "egress"]),
];
/// The number of ended requests whose stages are looked at.
const BUDGET_SAMPLE: usize = 1_000;

/// The parts of the budget against their 99th percentiles over the last requests, scaled to each request's own limit.
fn stage_budgets(insight: &Insight) -> Vec<StageBudget> {
    let ended = insight.records.last_ended(BUDGET_SAMPLE);
    let limit = |name: &str| SloProfile::by_name(name).map_or(Duration::from_millis(400), |profile| profile.ttft_max);
    let largest = ended
        .iter()
        .map(|detail| limit(&detail.summary.slo))
        .min()
        .unwrap_or(Duration::from_millis(400));
    let scale = ms(largest) / 400.0;
    let part = |(name, budget, stages): &(&'static str, f64, &'static [&'static str])| {
        let sum = |detail: &crate::records::shape::Detail| {
            let before = detail
                .stages
                .iter()
                .filter(|stage| stage.phase == "ttft" && stages.contains(&&*stage.stage));
            before.map(|stage| stage.ms).sum::<f64>()
        };
        let mut sums: Vec<f64> = ended
            .iter()
            .filter(|detail| detail.summary.outcome.as_deref() == Some("ok") && detail.summary.ttft_ms.is_some())
            .map(|detail| sum(detail))
            .collect();
        sums.sort_by(f64::total_cmp);
        let rank = (sums.len() as f64 * 0.99).ceil() as usize;
        let p99 = rank.checked_sub(1).and_then(|rank| sums.get(rank));
        StageBudget {
            stage: (*name).into(),
            of: stages.iter().map(|stage| (*stage).into()).collect(),
            budget_ms: Some(budget * scale),
            p99_ms: p99.copied(),
            count: sums.len(),
        }
    };
    BUDGET_OF_400_MS.iter().map(part).collect()
}
