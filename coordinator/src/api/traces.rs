//! `/admin/traces/{id}`: the spans of one request from every process that took part, as OTLP or ready to draw.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use opentelemetry::trace::TraceId;
use serde::Deserialize;
use serde_json::{Value, json};
use service_runtime::spans::otlp::{AnyValue, KeyValue, Span, SpanKind, Spans, StatusCode, resource_text};
use service_runtime::spans::{self};
use serving_core::cluster::NodeHealth;

use super::AppState;
use super::admin::{BadQuery, unknown_request};
use crate::records::shape::Detail;

/// A node that does not tell its spans by then is named among those that were not heard.
const ANSWER_TIME_LIMIT: Duration = Duration::from_secs(2);
/// The most a node's spans of one trace can be: 512 of them, generously.
const ANSWER_BYTES_MAX: usize = 8 << 20;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct TraceQuery {
    view: Option<String>,
}

/// All spans that could be had, and which processes could not be asked.
struct Gathered {
    spans: Spans,
    not_asked: Vec<Value>,
}

pub async fn trace(
    State(state): State<Arc<AppState>>,
    Path(id): Path<String>,
    query: Result<Query<TraceQuery>, BadQuery>,
) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(bad) => return bad.into_response(),
    };
    let record = state.insight.records.find(&id);
    let trace_id = record
        .as_ref()
        .map_or(id.as_str(), |record| record.summary.trace_id.as_str());
    let Ok(trace) = TraceId::from_hex(trace_id) else {
        return unknown_request(&id).into_response();
    };
    let gathered = gather(&state, trace).await;
    if record.is_none() && gathered.spans.is_empty() {
        return unknown_request(&id).into_response();
    }
    match query.view.as_deref() {
        Some("waterfall") => Json(waterfall(&state, trace, &gathered, record.as_deref())).into_response(),
        _ => Json(gathered.spans).into_response(),
    }
}

async fn gather(state: &AppState, trace: TraceId) -> Gathered {
    let mut all = spans::of_trace(trace);
    let snapshot = state
        .insight
        .cluster
        .as_ref()
        .map(|view| view.snapshot())
        .unwrap_or_default();
    let nodes = snapshot
        .nodes
        .into_iter()
        .filter(|node| node.health != NodeHealth::Lost);
    let mut answers: FuturesUnordered<_> = nodes
        .map(|node| async move {
            let answer = ask(&state.http, &node.address, trace).await;
            (node.name, answer)
        })
        .collect();
    let mut not_asked = Vec::new();
    while let Some((node, answer)) = answers.next().await {
        match answer {
            Ok(spans) => all.append(spans),
            Err(why) => not_asked.push(json!({ "node": node, "why": why })),
        }
    }
    Gathered { spans: all, not_asked }
}

async fn ask(http: &reqwest::Client, address: &str, trace: TraceId) -> Result<Spans, String> {
    let url = format!("http://{address}/admin/spans/{trace}");
    let asked = async {
        let response = http.get(url).send().await?.error_for_status()?;
        response.bytes().await
    };
    let answered = tokio::time::timeout(ANSWER_TIME_LIMIT, asked).await;
    let bytes = answered
        .map_err(|_| "no answer within 2 s".to_owned())?
        .map_err(|error| error.without_url().to_string())?;
    if bytes.len() > ANSWER_BYTES_MAX {
        return Err(format!("{} bytes of spans are more than can be believed", bytes.len()));
    }
    serde_json::from_slice(&bytes).map_err(|error| format!("what it answered is not OTLP: {error}"))
}

/// A span on its way into the drawing.
struct Bar<'a> {
    span: &'a Span,
    service: &'a str,
    process: &'a str,
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn waterfall(state: &AppState, trace: TraceId, gathered: &Gathered, record: Option<&Detail>) -> Value {
    let bars: Vec<Bar<'_>> = gathered
        .spans
        .each()
        .map(|(resource, span)| Bar {
            span,
            service: resource_text(resource, "service.name").unwrap_or("unknown"),
            process: resource_text(resource, "service.instance.id").unwrap_or("unknown"),
        })
        .collect();
    let ids: BTreeSet<&[u8]> = bars.iter().map(|bar| bar.span.span_id.as_slice()).collect();
    let is_top = |bar: &&Bar<'_>| !ids.contains(bar.span.parent_span_id.as_slice());
    let first = bars.iter().map(|bar| bar.span.start_time_unix_nano).min().unwrap_or(0);
    let base = record.map_or(first, |record| {
        ((record.summary.received_unix_ms * 1e6) as u64).min(first)
    });
    let mut children: BTreeMap<&[u8], Vec<&Bar<'_>>> = BTreeMap::new();
    for bar in bars.iter().filter(|bar| !is_top(bar)) {
        children
            .entry(bar.span.parent_span_id.as_slice())
            .or_default()
            .push(bar);
    }
    let mut tops: Vec<&Bar<'_>> = bars.iter().filter(is_top).collect();
    tops.sort_by_key(|bar| bar.span.start_time_unix_nano);
    // The one root may hang on the client's own span, which is not ours; any other span without its parent is an orphan.
    let is_root = |bar: &&&Bar<'_>| bar.span.kind == SpanKind::Server as i32 && bar.service.ends_with("coordinator");
    let root_count = tops.iter().filter(is_root).count().min(1);
    let orphan_count = tops.len() - root_count;
    let mut drawn = Vec::with_capacity(bars.len());
    let mut waiting: Vec<(&Bar<'_>, usize)> = tops.into_iter().rev().map(|bar| (bar, 0)).collect();
    let mut seen = BTreeSet::new();
    while let Some((bar, depth)) = waiting.pop() {
        // Two spans that name each other as parent would go round for ever.
        if !seen.insert(bar.span.span_id.as_slice()) {
            continue;
        }
        drawn.push(shape(bar, depth, base, &ids));
        let mut below = children.remove(bar.span.span_id.as_slice()).unwrap_or_default();
        below.sort_by_key(|bar| std::cmp::Reverse(bar.span.start_time_unix_nano));
        waiting.extend(below.into_iter().map(|bar| (bar, depth + 1)));
    }
    json!({
        "trace_id": trace.to_string(),
        "request": record,
        "spans": drawn,
        "clocks": record.map_or_else(|| state.insight.clocks(), |record| record.clocks.clone()),
        "not_asked": gathered.not_asked,
        "orphan_count": orphan_count,
    })
}

fn shape(bar: &Bar<'_>, depth: usize, base: u64, ids: &BTreeSet<&[u8]>) -> Value {
    let span = bar.span;
    let at = |unix_nano: u64| ((unix_nano as f64 - base as f64) / 1e3).round() / 1e3;
    let parent = Some(span.parent_span_id.as_slice()).filter(|parent| ids.contains(parent));
    let kind = match SpanKind::try_from(span.kind) {
        Ok(SpanKind::Server) => "server",
        Ok(SpanKind::Client) => "client",
        _ => "internal",
    };
    let error = span
        .status
        .as_ref()
        .filter(|status| status.code == StatusCode::Error as i32);
    let events: Vec<Value> = span
        .events
        .iter()
        .map(|event| json!({ "name": event.name, "at_ms": at(event.time_unix_nano), "attributes": attributes(&event.attributes) }))
        .collect();
    json!({
        "span_id": hex(&span.span_id),
        "parent_span_id": parent.map(hex),
        "name": span.name,
        "kind": kind,
        "service": bar.service,
        "process": bar.process,
        "depth": depth,
        "start_ms": at(span.start_time_unix_nano),
        "end_ms": at(span.end_time_unix_nano),
        "attributes": attributes(&span.attributes),
        "events": events,
        "links": span.links.iter().map(|link| hex(&link.span_id)).collect::<Vec<_>>(),
        "error": error.map(|status| if status.message.is_empty() { "error" } else { status.message.as_str() }),
    })
}

fn attributes(pairs: &[KeyValue]) -> serde_json::Map<String, Value> {
    let value = |pair: &KeyValue| {
        pair.value
            .as_ref()
            .and_then(|value| value.value.as_ref())
            .map_or(Value::Null, json_of)
    };
    pairs.iter().map(|pair| (pair.key.clone(), value(pair))).collect()
}

/// One level of lists is all that attributes have.
fn json_of(value: &AnyValue) -> Value {
    match value {
        AnyValue::StringValue(text) => json!(text),
        AnyValue::BoolValue(is) => json!(is),
        AnyValue::IntValue(number) => json!(number),
        AnyValue::DoubleValue(number) => json!(number),
        AnyValue::ArrayValue(list) => {
            let of = |value: &service_runtime::spans::otlp::Any| match &value.value {
                Some(AnyValue::StringValue(text)) => json!(text),
                Some(AnyValue::IntValue(number)) => json!(number),
                Some(AnyValue::DoubleValue(number)) => json!(number),
                Some(AnyValue::BoolValue(is)) => json!(is),
                _ => Value::Null,
            };
            list.values.iter().map(of).collect()
        }
        _ => Value::Null,
    }
}
