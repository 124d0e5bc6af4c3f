//! `/admin`: the remembered requests, the cluster and the service levels, as JSON. `docs/reference/records.md` is the reference.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{FromRequestParts, Path, Query, State};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serving_core::node::PairHealth;
use serving_core::stage::Stage;

use super::AppState;
use super::error::{ApiError, short};
use crate::cluster_metrics::{ClusterSnapshot, NodeSnapshot};
use crate::insight::Insight;
use crate::records::pages::{
    ClusterPage, CoordinatorPage, LaneBudget, NodeClock, NodePage, PairPage, ProfilePage, SloPage, StageBudget,
    WaitingPage,
};
use crate::records::shape::{ClockShape, Detail, ms, now_unix_ms};
use crate::records::{Listing, Page};
use crate::request_handle::Readiness;
use crate::slo::{Breach, SloProfile};

/// A query string.
pub struct Asked<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let asked = Query::try_from_uri(&parts.uri).map(|Query(asked)| Self(asked));
        asked.map_err(|bad| ApiError::bad_request(format!("{}; see docs/reference/records.md.", bad.body_text())))
    }
}

pub async fn requests(State(state): State<Arc<AppState>>, Asked(listing): Asked<Listing>) -> Json<Page> {
    let records = &state.insight.records;
    records.closing.settled().await;
    // Only a page of ends has fingerprints, so only its reader makes the coordinator compute them.
    let is_recording = listing.prefixes && listing.ended_from.is_some();
    let recording = is_recording.then(|| records.prefixes.asked(Instant::now(), rand::random()));
    let mut page = match listing.ended_from {
        Some(from) => records.ended_from(&listing, from),
        None => records.list(&listing),
    };
    if let (Some(prefixes), Some(recording)) = (&mut page.prefixes, recording) {
        prefixes.recording = recording;
    }
    Json(page)
}

pub async fn request(State(state): State<Arc<AppState>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    state.insight.records.closing.settled().await;
    let detail = state.insight.records.find(&id).ok_or_else(|| unknown_request(&id))?;
    Ok(Json(&*detail).into_response())
}

/// The record never existed, or it was removed for newer ones.
pub fn unknown_request(id: &str) -> ApiError {
    let id = short(id);
    let message = format!(
        "No request `{id}` is remembered: it never was here, or newer ones have taken its place (--request-records). See GET /admin/requests."
    );
    ApiError::not_found("request_not_found", message)
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
            trace_viewer_url: insight.trace_viewer.as_ref().map(ToString::to_string),
        },
        membership: insight.registry.page(),
        nodes: snapshot.nodes.iter().map(|node| node_page(node, &clocks)).collect(),
        pairs: pairs_page(&snapshot, insight),
    }
}

fn node_page(node: &NodeSnapshot, clocks: &[ClockShape]) -> NodePage {
    let state = if node.is_suspected && !node.health.is_over() {
        "suspected"
    } else {
        node.health.name()
    };
    let clock = clocks.iter().find(|clock| clock.node == node.name());
    let (record, status) = (&node.record, node.status());
    NodePage {
        name: node.name().to_owned(),
        epoch: node.epoch_hex().to_string(),
        role: record.assigned_role().name().into(),
        roles: record.roles.iter().map(|role| role.name().into()).collect(),
        state: state.into(),
        address: record.address.clone(),
        version: record.version.clone(),
        transports: record.transports.clone(),
        lease_left_ms: Some(ms(node.lease_left)),
        lease_age_ms: Some(ms(node.lease_age)),
        coordinators: node.last_status.as_ref().map_or(0, |status| status.coordinators),
        running: Some(status.map_or(0, |status| status.running_sequences)),
        waiting: Some(status.map_or(0, |status| status.waiting_sequences)),
        permits_available: node.permits_available,
        kv_blocks: status.map(|status| status.kv_blocks).unwrap_or_default(),
        block_tokens: record.capacity.block_tokens,
        clock: clock.map(|clock| NodeClock {
            offset_ms: clock.offset_ms,
            error_ms: clock.error_ms,
        }),
    }
}

fn pairs_page(snapshot: &ClusterSnapshot, insight: &Insight) -> Vec<PairPage> {
    let totals = insight.records.pairs();
    let pairs = snapshot
        .nodes
        .iter()
        .flat_map(|node| node.pairs().iter().map(move |pair| (node, pair)));
    let page = |(node, pair): (&NodeSnapshot, &PairHealth)| {
        let (prefill, decode) = (node.name(), pair.decode_node.name.to_string());
        let peer = snapshot.nodes.iter().find(|peer| peer.record.id == pair.decode_node);
        let misfit = peer.and_then(|peer| node.record.incompatibility(&peer.record));
        let moved = totals
            .get(&(prefill.to_owned(), decode.clone()))
            .copied()
            .unwrap_or_default();
        PairPage {
            prefill: prefill.to_owned(),
            decode,
            is_usable: pair.unusable_reason.is_none(),
            unusable_reason: pair.unusable_reason.clone(),
            unusable_because: misfit.map(|why| why.to_string()),
            transport: pair.transport.clone(),
            kv_bytes_total: moved.kv_bytes,
            handoffs_total: moved.handoffs,
        }
    };
    pairs.map(page).collect()
}

pub async fn slo(State(state): State<Arc<AppState>>) -> Json<SloPage> {
    state.insight.records.closing.settled().await;
    let config = state.insight.slo_rules.config();
    let objective = config.objective();
    let counted = state.insight.slo.report(objective, Instant::now());
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
            budget_left: counts.budget_left(objective),
        });
        lane.collect()
    };
    let profile = |profile: &Arc<SloProfile>| ProfilePage {
        name: profile.name.clone().into(),
        ttft_ms_max: Some(ms(profile.ttft_max)),
        itl_ms_max: Some(ms(profile.itl_max)),
        lanes: lanes(profile),
    };
    Json(SloPage {
        objective: Some(objective),
        profiles: config.profiles().iter().map(profile).collect(),
        stages: stage_budgets(&state.insight),
    })
}

/// How a TTFT budget of 400 ms is split, in ms, by the stages that each part is for: tokenizing, queues, gateway, prefill,
/// network. The last 25 ms are a reserve that belongs to no stage.
const BUDGET_OF_400_MS: [(f64, &[Stage]); 5] = [
    (10.0, &[Stage::Parse, Stage::Tokenize]),
    (50.0, &[Stage::Queue, Stage::StepWait, Stage::PrefillQueue]),
    (15.0, &[Stage::Route, Stage::Reserve, Stage::Dispatch]),
    (280.0, &[Stage::PrefillForward]),
    (20.0, &[Stage::FirstTokenReturn, Stage::Egress]),
];
const BUDGET_WHOLE: Duration = Duration::from_millis(400);
/// The number of ended requests whose stages are looked at.
const BUDGET_SAMPLE: usize = 1_000;

/// The parts of the budget against their 99th percentiles over the last requests, scaled to the strictest of these requests'
/// own limits.
fn stage_budgets(insight: &Insight) -> Vec<StageBudget> {
    let ended = insight.records.last_ended(BUDGET_SAMPLE);
    let profiles = insight.slo_rules.config();
    let limit = |detail: &Arc<Detail>| {
        let profile = profiles.by_name(&detail.summary.slo);
        profile.map_or(BUDGET_WHOLE, |profile| profile.ttft_max)
    };
    let strictest = ended.iter().map(limit).min().unwrap_or(BUDGET_WHOLE);
    let scale = strictest.as_secs_f64() / BUDGET_WHOLE.as_secs_f64();
    let part = |(budget, stages): &(f64, &'static [Stage])| {
        let names: Vec<&'static str> = stages.iter().map(|stage| stage.name()).collect();
        let sum = |detail: &Detail| {
            let before = detail
                .stages
                .iter()
                .filter(|stage| stage.phase == "ttft" && names.contains(&&*stage.stage));
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
            stage: names.join(" + ").into(),
            of: names.iter().map(|name| (*name).into()).collect(),
            budget_ms: Some(budget * scale),
            p99_ms: p99.copied(),
            count: sums.len(),
        }
    };
    BUDGET_OF_400_MS.iter().map(part).collect()
}
