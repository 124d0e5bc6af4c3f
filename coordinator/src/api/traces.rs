//! `/admin/traces/{id}`: the spans of one request from every process that took part, as OTLP or ready to draw.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use opentelemetry::trace::TraceId;
use serde::Deserialize;
use serde_json::Value;
use service_runtime::spans;
use service_runtime::spans::otlp::{EventView, SpanView, Spans};
use serving_core::ids::NodeEpoch;

use super::AppState;
use super::admin::{Asked, unknown_request};
use super::error::ApiError;
use crate::records::shape::{Detail, NotAsked, SpanEvent, SpanShape, Waterfall};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct TraceQuery {
    view: Option<String>,
}

/// All spans that could be read, and the processes that could not be asked.
struct Gathered {
    spans: Spans,
    not_asked: Vec<NotAsked>,
}

pub async fn trace(
    State(state): State<Arc<AppState>>,
    Path(id): Path<String>,
    Asked(query): Asked<TraceQuery>,
) -> Result<Response, ApiError> {
    state.insight.records.closing.settled().await;
    let record = state.insight.records.find(&id);
    let trace_id = record.as_ref().map_or(&id, |record| &record.summary.trace_id);
    let trace = TraceId::from_hex(trace_id).map_err(|_| unknown_request(&id))?;
    let gathered = gather(&state, trace, record.as_deref()).await;
    if record.is_none() && gathered.spans.is_empty() {
        return Err(unknown_request(&id));
    }
    Ok(match query.view.as_deref() {
        Some("waterfall") => Json(waterfall(&state, trace, gathered, record.as_deref())).into_response(),
        _ => Json(gathered.spans).into_response(),
    })
}

/// The nodes that took part, by the request's record. A failed leg reads `decode:decode-1:connection_lost`.
pub(super) fn took_part(record: &Detail) -> BTreeSet<&str> {
    let of_legs = record.failed_legs.iter().filter_map(|leg| leg.split(':').nth(1));
    record.nodes().chain(of_legs).collect()
}

async fn gather(state: &AppState, trace: TraceId, record: Option<&Detail>) -> Gathered {
    let mut all = spans::of_trace(trace, None).await;
    let insight = &state.insight;
    let path = &path_of_spans(trace, insight.epoch);
    let nodes = insight.nodes();
    let is_here = |name: &str| nodes.iter().any(|(node, _)| node == name);
    let took_part = record.map(took_part).unwrap_or_default();
    let gone = took_part.into_iter().filter(|name| !is_here(name));
    let not_asked = |node: &str, why: String| NotAsked {
        node: node.to_owned(),
        why,
    };
    let went = "it is no member any more, and its spans went with it";
    let mut missing: Vec<NotAsked> = gone.map(|node| not_asked(node, went.to_owned())).collect();
    let mut answers: FuturesUnordered<_> = nodes
        .into_iter()
        .map(|(node, address)| async move {
            let answer = insight.ask_node((&node, &address), path).await;
            (node, answer.and_then(|bytes| spans_of(&bytes)))
        })
        .collect();
    while let Some((node, answer)) = answers.next().await {
        match answer {
            Ok(spans) => all.append(spans),
            Err(why) => missing.push(not_asked(&node, why)),
        }
    }
    Gathered {
        spans: all,
        not_asked: missing,
    }
}

/// A node answers with times on this coordinator's wall clock. One of an earlier version leaves them on the clock of the coordinator
/// that it knew first.
fn path_of_spans(trace: TraceId, epoch: Option<NodeEpoch>) -> String {
    let clock = epoch.map_or(String::new(), |epoch| format!("?clock={epoch}"));
    format!("/admin/spans/{trace}{clock}")
}

fn spans_of(answer: &[u8]) -> Result<Spans, String> {
    serde_json::from_slice(answer).map_err(|error| format!("what it answered is not OTLP: {error}"))
}

fn waterfall(state: &AppState, trace: TraceId, gathered: Gathered, record: Option<&Detail>) -> Waterfall {
    let spans = gathered.spans.views();
    let first = spans.iter().map(|span| span.start_unix_ns).min().unwrap_or(0);
    let base = record.map_or(first, |record| (record.summary.received_unix_ms * 1e6) as u64);
    // A client may send one trace id with every request, so only this request's root is drawn. The root's parent may be the
    // client's own span, which is not ours. Any other span without its parent is an orphan and is shown.
    let is_root = |span: &SpanView| span.kind == "server" && span.service.ends_with("coordinator");
    let is_other = |span: &SpanView| {
        let id = span.attributes.get("x_request_id").and_then(Value::as_str);
        is_root(span) && record.is_some_and(|record| id != Some(record.summary.id.as_str()))
    };
    let order = without(drawing_order(&spans), is_other);
    let orphan_count = order
        .iter()
        .filter(|(span, depth)| *depth == 0 && !is_root(span))
        .count();
    let drawn = order.iter().map(|(span, depth)| shape(span, *depth, base)).collect();
    Waterfall {
        trace_id: trace.to_string(),
        request: record.cloned(),
        spans: drawn,
        clocks: record.map_or_else(|| state.insight.clocks(), |record| record.clocks.clone()),
        not_asked: gathered.not_asked,
        orphan_count,
    }
}

/// Leaves out whole trees whose top is not wanted.
fn without(order: Vec<(&SpanView, usize)>, is_unwanted: impl Fn(&SpanView) -> bool) -> Vec<(&SpanView, usize)> {
    let mut is_out = false;
    let keep = |(span, depth): &(&SpanView, usize)| {
        if *depth == 0 {
            is_out = is_unwanted(span);
        }
        !is_out
    };
    order.into_iter().filter(keep).collect()
}

/// Parents before children, siblings by start, each with its depth. A span that has no parent here is at the top.
fn drawing_order(spans: &[SpanView]) -> Vec<(&SpanView, usize)> {
    let ids: BTreeSet<&str> = spans.iter().map(|span| span.span_id.as_str()).collect();
    let mut below: BTreeMap<&str, Vec<&SpanView>> = BTreeMap::new();
    for span in spans {
        let parent = span.parent_id.as_deref().filter(|parent| ids.contains(parent));
        below.entry(parent.unwrap_or_default()).or_default().push(span);
    }
    for siblings in below.values_mut() {
        siblings.sort_by_key(|span| std::cmp::Reverse(span.start_unix_ns));
    }
    let mut waiting: Vec<(&SpanView, usize)> = below
        .remove("")
        .unwrap_or_default()
        .into_iter()
        .map(|span| (span, 0))
        .collect();
    let mut order = Vec::with_capacity(spans.len());
    while let Some((span, depth)) = waiting.pop() {
        order.push((span, depth));
        // The span is taken out first. Two spans that name each other as parent are never reached, so the loop ends.
        let children = below.remove(span.span_id.as_str()).unwrap_or_default();
        waiting.extend(children.into_iter().map(|child| (child, depth + 1)));
    }
    order
}

fn shape(span: &SpanView, depth: usize, base: u64) -> SpanShape {
    let at = |unix_ns: u64| ((unix_ns as f64 - base as f64) / 1e3).round() / 1e3;
    let event = |event: &EventView| SpanEvent {
        name: event.name.clone(),
        at_ms: at(event.at_unix_ns),
        attributes: event.attributes.clone(),
    };
    SpanShape {
        span_id: span.span_id.clone(),
        parent_span_id: span.parent_id.clone().filter(|_| depth > 0),
        name: span.name.clone(),
        kind: span.kind.into(),
        service: span.service.clone(),
        process: span.process.clone(),
        depth,
        start_ms: at(span.start_unix_ns),
        end_ms: at(span.end_unix_ns),
        attributes: span.attributes.clone(),
        events: span.events.iter().map(event).collect(),
        links: span.links.clone(),
        error: span
            .error
            .as_deref()
            .map(|error| if error.is_empty() { "error" } else { error }.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(id: &str, parent: Option<&str>, start: u64) -> SpanView {
        SpanView {
            span_id: id.to_owned(),
            parent_id: parent.map(str::to_owned),
            name: id.to_owned(),
            kind: "internal",
            service: "s".to_owned(),
            process: "p".to_owned(),
            start_unix_ns: start,
            end_unix_ns: start + 1,
            attributes: Default::default(),
            events: Vec::new(),
            links: Vec::new(),
            error: None,
        }
    }

    #[test]
    fn nodes_are_asked_for_spans_on_this_coordinators_clock() {
        let trace = TraceId::from(5_u128);
        let path = path_of_spans(trace, Some(NodeEpoch(0xab)));
        assert_eq!(path, format!("/admin/spans/{trace}?clock=00000000000000ab"));
        assert_eq!(path_of_spans(trace, None), format!("/admin/spans/{trace}"));
    }

    #[test]
    fn the_node_of_a_failed_leg_took_part_although_it_is_not_in_the_last_placement() {
        let mut record = Detail {
            failed_legs: vec![
                "decode:decode-1:connection_lost".to_owned(),
                "prefill:prefill-0:transfer".to_owned(),
            ],
            ..Detail::default()
        };
        record.summary.serving.prefill_node = Some("prefill-0".into());
        record.summary.serving.decode_node = Some("decode-0".into());
        let nodes: Vec<&str> = took_part(&record).into_iter().collect();
        assert_eq!(nodes, ["decode-0", "decode-1", "prefill-0"]);
    }

    #[test]
    fn parents_come_before_children_and_siblings_by_start_whatever_is_sent() {
        let spans = [
            span("b", Some("root"), 5),
            span("a", Some("root"), 3),
            span("under-a", Some("a"), 9),
            span("root", Some("the client's"), 1),
            span("x", Some("y"), 1),
            span("y", Some("x"), 1),
            span("self", Some("self"), 1),
        ];
        let order = drawing_order(&spans);
        let drawn: Vec<(&str, usize)> = order
            .iter()
            .map(|(span, depth)| (span.span_id.as_str(), *depth))
            .collect();
        assert_eq!(drawn, [("root", 0), ("a", 1), ("under-a", 2), ("b", 1)]);
    }

    #[test]
    fn the_tree_of_another_request_with_the_same_trace_is_left_out() {
        let spans = [
            span("mine", None, 1),
            span("child", Some("mine"), 2),
            span("other", None, 0),
            span("its", Some("other"), 3),
        ];
        let order = without(drawing_order(&spans), |span| span.span_id == "other");
        let drawn: Vec<&str> = order.iter().map(|(span, _)| span.span_id.as_str()).collect();
        assert_eq!(drawn, ["mine", "child"]);
    }
}
