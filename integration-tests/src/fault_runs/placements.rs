//! When the coordinator gave work to a node, by its own records and spans.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::fault_matrix::rig::Rig;

/// Records that one look takes: more than arrive between two faults.
const RECORDS: usize = 1000;

/// A moment on this machine's monotonic clock and on the wall clock that records speak of.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub instant: Instant,
    unix_ms: f64,
}

impl Moment {
    pub fn now() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            instant: Instant::now(),
            unix_ms: unix.as_secs_f64() * 1000.0,
        }
    }
}

/// What became of a node's work around a fault.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placements {
    /// After the fault's begin, each time that a leg was started on the node.
    pub after: Vec<Duration>,
    /// Ids of the requests of that time that needed more than one attempt.
    pub retried: BTreeSet<String>,
}

impl Placements {
    /// Legs that were started on `node` from `fault` on for `lasts`. Ask only when the requests of that time have ended: a
    /// record has its spans at its end.
    ///
    /// # Errors
    /// The coordinator does not tell.
    pub async fn of(rig: &Rig, node: &str, (fault, lasts): (Moment, Duration)) -> Result<Self> {
        let page = get(rig, &format!("/admin/requests?limit={RECORDS}")).await?;
        let records = page["records"].as_array().context("no records")?;
        let mut found = Self::default();
        let until_ms = fault.unix_ms + lasts.as_secs_f64() * 1000.0;
        for record in records {
            let received = record["received_unix_ms"].as_f64().context("no time")?;
            let ended = received + record["e2e_ms"].as_f64().unwrap_or(f64::MAX);
            let is_retried = record["attempts"].as_u64() > Some(1);
            let was_there = record["prefill_node"] == node || record["decode_node"] == node;
            if received > until_ms || ended < fault.unix_ms || !(is_retried || was_there) {
                continue;
            }
            let id = record["id"].as_str().context("no id")?;
            if is_retried {
                found.retried.insert(id.to_owned());
            }
            let waterfall = get(rig, &format!("/admin/traces/{id}?view=waterfall")).await?;
            let starts = leg_starts(&waterfall, node).map(|start_ms| received + start_ms);
            let in_time = starts.filter(|at| (fault.unix_ms..until_ms).contains(at));
            found
                .after
                .extend(in_time.map(|at| Duration::from_secs_f64((at - fault.unix_ms) / 1000.0)));
        }
        Ok(found)
    }

    /// From the fault to the last leg that was started on the node; none when none was.
    pub fn last(&self) -> Option<Duration> {
        self.after.iter().max().copied()
    }
}

/// The coordinator's client spans that carry a leg to `node`, in ms from the request's first byte.
fn leg_starts<'a>(waterfall: &'a Value, node: &'a str) -> impl Iterator<Item = f64> + 'a {
    let spans = waterfall["spans"].as_array().into_iter().flatten();
    let legs = spans.filter(|span| matches!(span["name"].as_str(), Some("prefill" | "decode")));
    // An attribute `node` is a name and an epoch.
    let there = legs.filter(move |span| {
        let id = span["attributes"]["node"].as_str().unwrap_or_default();
        id.strip_prefix(node).is_some_and(|epoch| epoch.starts_with('@'))
    });
    there.filter_map(|span| span["start_ms"].as_f64())
}

/// One of the coordinator's pages.
///
/// # Errors
/// It does not answer well.
pub async fn get(rig: &Rig, path: &str) -> Result<Value> {
    let answer = rig.cluster.http.get(rig.cluster.url(path)).send().await?;
    let answer = answer.error_for_status().with_context(|| path.to_owned())?;
    Ok(answer.json().await?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_legs_of_that_node_count() {
        let span =
            |name: &str, node: &str, start: f64| json!({"name": name, "attributes": {"node": node}, "start_ms": start});
        let waterfall = json!({"spans": [
            span("decode", "decode-1@7f", 2.0),
            span("decode", "decode-11@7f", 3.0),
            span("prefill", "prefill-1@7f", 4.0),
            {"name": "egress", "attributes": {}, "start_ms": 5.0},
        ]});
        assert_eq!(leg_starts(&waterfall, "decode-1").collect::<Vec<_>>(), [2.0]);
    }
}
