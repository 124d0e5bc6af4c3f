//! Reads requests and their waterfalls as `baton trace` does, and says what is wrong with them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::cluster::TestCluster;
use crate::wait::wait_until;
use crate::{MODEL, PROSE};

/// Spans of other processes come with the request's last message or a moment after it.
const WHOLE_WITHIN: Duration = Duration::from_secs(5);

/// Sends one completion and returns its id, which finds its record.
///
/// # Errors
/// No answer, or one that is no 2xx.
pub async fn complete(cluster: &TestCluster, id: &str, extra: Value) -> Result<String> {
    let mut body = json!({ "model": MODEL, "temperature": 0, "ignore_eos": true });
    for (key, value) in extra.as_object().into_iter().flatten() {
        body[key] = value.clone();
    }
    let path = if body.get("messages").is_some() {
        "/v1/chat/completions"
    } else {
        "/v1/completions"
    };
    let answer = cluster
        .http
        .post(cluster.url(path))
        .header("x-request-id", id)
        .json(&body)
        .send()
        .await?;
    answer.error_for_status()?.bytes().await?;
    Ok(id.to_owned())
}

/// `words` words of prose, from another place for each `turn`: no prefix cache has it.
pub fn prompt(words: usize, turn: usize) -> String {
    PROSE
        .split_whitespace()
        .skip(turn * 97)
        .take(words)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The record, once its request has ended.
///
/// # Errors
/// It never ended, or there is none.
pub async fn record(cluster: &TestCluster, id: &str) -> Result<Value> {
    let url = cluster.url(&format!("/admin/requests/{id}"));
    wait_until("the record of an ended request", WHOLE_WITHIN, || async {
        let answer = cluster.http.get(&url).send().await.map_err(|error| error.to_string())?;
        let record: Value = answer.json().await.map_err(|error| error.to_string())?;
        match record["state"] == "ended" {
            true => Ok(record),
            false => Err(record.to_string()),
        }
    })
    .await
}

/// The waterfall, once it is whole.
///
/// # Errors
/// What is missing of it.
pub async fn whole(cluster: &TestCluster, id: &str) -> Result<Value> {
    let url = cluster.url(&format!("/admin/traces/{id}?view=waterfall"));
    wait_until("a whole waterfall", WHOLE_WITHIN, || async {
        let answer = cluster.http.get(&url).send().await.map_err(|error| error.to_string())?;
        let trace: Value = answer.json().await.map_err(|error| error.to_string())?;
        let faults = faults(&trace);
        match faults.is_empty() {
            true => Ok(trace),
            false => Err(faults.join("; ")),
        }
    })
    .await
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Names of all spans with how often they occur.
pub fn names(trace: &Value) -> BTreeMap<String, usize> {
    let mut names = BTreeMap::new();
    for span in list(&trace["spans"]) {
        *names
            .entry(span["name"].as_str().unwrap_or_default().to_owned())
            .or_default() += 1;
    }
    names
}

/// Everything that is wrong in the trace of a request of one attempt that ended well.
pub fn faults(trace: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    let spans = list(&trace["spans"]);
    let request = &trace["request"];
    let ids: BTreeSet<&str> = spans.iter().filter_map(|span| span["span_id"].as_str()).collect();
    let roots = spans.iter().filter(|span| span["parent_span_id"].is_null()).count();
    if roots != 1 || trace["orphan_count"] != 0 {
        faults.push(format!("{roots} roots, {} orphans", trace["orphan_count"]));
    }
    if !list(&trace["not_asked"]).is_empty() {
        faults.push(format!("not asked: {}", trace["not_asked"]));
    }
    if ids.len() != spans.len() {
        faults.push("two spans have one id".to_owned());
    }
    let names = names(trace);
    for (name, count) in expected(request) {
        let got = names.get(name).copied().unwrap_or(0);
        if got != count {
            faults.push(format!("{got} spans `{name}` instead of {count}"));
        }
    }
    for span in spans {
        let (start, end) = (span["start_ms"].as_f64(), span["end_ms"].as_f64());
        if start.zip(end).is_none_or(|(start, end)| start > end) {
            faults.push(format!("{} begins at {start:?} and ends at {end:?}", span["name"]));
        }
    }
    let is_handoff = request["transport"].is_string();
    let send = spans
        .iter()
        .find(|span| span["name"] == "kv.send")
        .map(|span| span["span_id"].clone());
    let links = spans
        .iter()
        .find(|span| span["name"] == "kv.recv")
        .map(|span| span["links"].clone());
    if is_handoff && links != send.map(|id| json!([id])) {
        faults.push(format!("kv.recv links to {links:?}"));
    }
    faults
}

/// The spans of one request, by the way it went.
fn expected(request: &Value) -> Vec<(&'static str, usize)> {
    let has = |key: &str| usize::from(request[key].is_string());
    let (prefill, decode, handoff) = (has("prefill_node"), has("decode_node"), has("transport"));
    let computed = 1;
    vec![
        ("parse", 1),
        ("tokenize", 1),
        ("admission", 1),
        ("route", 1),
        ("egress", 1),
        // Client and server.
        ("prefill", 2 * prefill),
        ("prefill.queue", computed),
        ("prefill.forward", computed),
        ("kv.send", handoff),
        ("kv.recv", handoff),
        ("decode", 2 * decode),
        ("decode.open", 2 * decode),
        ("decode.queue", decode),
        ("decode.loop", decode),
    ]
}

/// What the stages of the time to the first token leave of it, in ms, recomputed from the record; and what the record says.
///
/// # Errors
/// A record without a first token.
pub fn unattributed_ms(record: &Value) -> Result<(f64, f64)> {
    let ttft = record["ttft_ms"].as_f64().context("no ttft")?;
    let said = record["unattributed_ms"].as_f64().context("no unattributed")?;
    let before = list(&record["stages"]).iter().filter(|stage| stage["phase"] == "ttft");
    let sum: f64 = before.filter_map(|stage| stage["ms"].as_f64()).sum();
    Ok((ttft - sum, said))
}

/// Length of a stage in ms; 0 when it was not passed through.
pub fn stage_ms(record: &Value, stage: &str, phase: &str) -> f64 {
    let of = list(&record["stages"])
        .iter()
        .filter(|s| s["stage"] == stage && s["phase"] == phase);
    of.filter_map(|stage| stage["ms"].as_f64()).sum()
}
