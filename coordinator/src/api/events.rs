//! `/admin/events`: requests as they change state, and the cluster once a second, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::extract::State;
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::stream;
use serde_json::json;
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::time::{Interval, MissedTickBehavior};

use super::AppState;
use super::admin::{Asked, cluster_page};
use crate::keys::Caller;
use crate::keys::file::Scope;
use crate::records::Listing;
use crate::records::shape::Summary;

const CLUSTER_INTERVAL: Duration = Duration::from_secs(1);

/// The task that ends with its connection.
struct Follower {
    state: Arc<AppState>,
    requests: Option<Receiver<Arc<Summary>>>,
    cluster: Option<Interval>,
    listing: Listing,
    /// Where keys are asked for.
    caller: Option<Caller>,
}

pub async fn events(
    State(state): State<Arc<AppState>>,
    caller: Option<Extension<Caller>>,
    Asked(listing): Asked<Listing>,
) -> impl IntoResponse {
    let kinds = &listing.kinds;
    let wants = |kind: &str| kinds.is_empty() || kinds.split(',').any(|wanted| wanted.trim() == kind);
    let (wants_requests, wants_cluster) = (wants("request"), wants("cluster"));
    let follower = Follower {
        requests: wants_requests.then(|| state.insight.records.follow()),
        cluster: wants_cluster.then(|| {
            let mut interval = tokio::time::interval(CLUSTER_INTERVAL);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        }),
        listing,
        state,
        caller: caller.map(|Extension(caller)| caller),
    };
    let events = stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await?;
        Some((Ok::<Event, Infallible>(event), follower))
    });
    Sse::new(events).keep_alive(KeepAlive::default())
}

impl Follower {
    async fn next(&mut self) -> Option<Event> {
        loop {
            let event = tokio::select! {
                biased;
                () = self.state.insight.drain.requested() => return None,
                received = receive(&mut self.requests) => match received {
                    Ok(summary) if self.listing.admits(&summary) => Event::default().event("request").json_data(&*summary),
                    Ok(_) => continue,
                    Err(RecvError::Lagged(missed)) => Event::default().event("lagged").json_data(json!({ "missed": missed })),
                    Err(RecvError::Closed) => return None,
                },
                () = tick(&mut self.cluster) => Event::default().event("cluster").json_data(cluster_page(&self.state)),
            };
            let caller = self.caller.as_ref();
            if caller.is_some_and(|caller| !caller.may_still(Scope::Admin, Instant::now())) {
                return None;
            }
            // All numbers come from counters and durations, so none is a number that JSON cannot express.
            if let Ok(event) = event {
                return Some(event);
            }
        }
    }
}

async fn receive(requests: &mut Option<Receiver<Arc<Summary>>>) -> Result<Arc<Summary>, RecvError> {
    match requests {
        Some(requests) => requests.recv().await,
        None => std::future::pending().await,
    }
}

async fn tick(interval: &mut Option<Interval>) {
    match interval {
        Some(interval) => {
            interval.tick().await;
        }
        None => std::future::pending().await,
    }
}
