//! The last spans of a process, by trace, in limited number.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use opentelemetry::trace::{SpanContext, TraceFlags, TraceId};
use opentelemetry_sdk::trace::SpanData;

/// A span takes about a kilobyte, so this is some 20 MB: the spans of the last thousand or two requests. The trace with the
/// oldest first span goes first.
const SPANS_MAX: usize = 20_000;
/// A client may send one trace id with every request, so only the first spans of one trace are kept.
const SPANS_PER_TRACE_MAX: usize = 512;

#[derive(Debug, Default)]
struct Kept {
    by_trace: HashMap<TraceId, Vec<SpanData>>,
    oldest_first: VecDeque<TraceId>,
    count: usize,
}

#[derive(Debug, Default)]
pub(super) struct SpanStore {
    kept: Mutex<Kept>,
}

impl SpanStore {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, span: SpanData) {
        let trace = span.span_context.trace_id();
        let mut kept = self.kept();
        let is_new = !kept.by_trace.contains_key(&trace);
        let spans = kept.by_trace.entry(trace).or_default();
        if spans.len() >= SPANS_PER_TRACE_MAX {
            return;
        }
        spans.push(span);
        kept.count += 1;
        if is_new {
            kept.oldest_first.push_back(trace);
        }
        while kept.count > SPANS_MAX {
            let Some(oldest) = kept.oldest_first.pop_front() else {
                return;
            };
            let gone = kept.by_trace.remove(&oldest).map_or(0, |spans| spans.len());
            kept.count -= gone;
        }
    }

    pub(super) fn clear(&self) {
        *self.kept() = Kept::default();
    }

    pub(super) fn get(&self, trace: TraceId) -> Vec<SpanData> {
        self.kept().by_trace.get(&trace).cloned().unwrap_or_default()
    }

    /// Makes the spans of a trace sampled, and returns those that were not.
    pub(super) fn sample(&self, trace: TraceId) -> Vec<SpanData> {
        let mut kept = self.kept();
        let spans = kept.by_trace.get_mut(&trace).into_iter().flatten();
        let unsampled = spans.filter(|span| !span.span_context.is_sampled());
        unsampled
            .map(|span| {
                span.span_context = sampled(&span.span_context);
                span.clone()
            })
            .collect()
    }
}

fn sampled(context: &SpanContext) -> SpanContext {
    SpanContext::new(
        context.trace_id(),
        context.span_id(),
        context.trace_flags() | TraceFlags::SAMPLED,
        context.is_remote(),
        context.trace_state().clone(),
    )
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::SystemTime;

    use opentelemetry::InstrumentationScope;
    use opentelemetry::trace::{SpanId, SpanKind, Status, TraceState};

    use super::*;

    pub fn span(trace: u128, id: u64) -> SpanData {
        let now = SystemTime::UNIX_EPOCH;
        SpanData {
            span_context: SpanContext::new(
                TraceId::from(trace),
                SpanId::from(id),
                TraceFlags::default(),
                false,
                TraceState::default(),
            ),
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: "x".into(),
            start_time: now,
            end_time: now,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: Default::default(),
            links: Default::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::builder("t").build(),
        }
    }

    #[test]
    fn whole_traces_are_forgotten_the_oldest_first() {
        let store = SpanStore::default();
        let traces = SPANS_MAX as u128 / 10 + 5;
        for trace in 1..=traces {
            for id in 1..=10 {
                store.add(span(trace, id));
            }
        }
        let kept = |trace: u128| store.get(TraceId::from(trace)).len();
        assert_eq!((kept(1), kept(5), kept(6), kept(traces)), (0, 0, 10, 10));
        let kept = store.kept();
        assert_eq!(kept.by_trace.len(), kept.oldest_first.len());
    }

    #[test]
    fn a_span_becomes_sampled_once() {
        let store = SpanStore::default();
        let trace = TraceId::from(1u128);
        let ids = |spans: Vec<SpanData>| -> Vec<SpanId> {
            assert!(spans.iter().all(|span| span.span_context.is_sampled()));
            spans.iter().map(|span| span.span_context.span_id()).collect()
        };
        store.add(span(1, 1));
        store.add(span(2, 1));
        assert_eq!(ids(store.sample(trace)), [SpanId::from(1u64)]);
        // The next request with this trace id.
        store.add(span(1, 2));
        assert_eq!(ids(store.sample(trace)), [SpanId::from(2u64)]);
        assert!(store.sample(trace).is_empty());
        assert_eq!(ids(store.get(trace)).len(), 2);
    }

    #[test]
    fn one_trace_cannot_push_all_others_out() {
        let store = SpanStore::default();
        store.add(span(1, 1));
        for id in 1..=2 * SPANS_MAX as u64 {
            store.add(span(2, id));
        }
        assert_eq!(store.get(TraceId::from(1)).len(), 1);
        assert_eq!(store.get(TraceId::from(2)).len(), SPANS_PER_TRACE_MAX);
    }
}
