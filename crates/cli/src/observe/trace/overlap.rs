//! What the order of two spans shows: the KV that moved while the prompt was still computed, and clocks that disagree.

use std::collections::BTreeMap;

use coordinator::records::shape::{ClockShape, SpanShape};

/// Times are milliseconds as floats, made from nanoseconds. A smaller difference is rounding.
const ROUNDING_MS: f64 = 0.005;

/// The part of a `kv.send` during which its process was in `prefill.forward`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overlap {
    pub from_ms: f64,
    pub to_ms: f64,
}

/// `None` for any other span, and when the two never ran at the same time.
pub fn with_prefill(span: &SpanShape, spans: &[SpanShape]) -> Option<Overlap> {
    if span.name != "kv.send" {
        return None;
    }
    let forwards = spans
        .iter()
        .filter(|other| other.name == "prefill.forward" && other.process == span.process);
    let overlaps = forwards.map(|forward| Overlap {
        from_ms: span.start_ms.max(forward.start_ms),
        to_ms: span.end_ms.min(forward.end_ms),
    });
    // After a retry on the same node there are several. This is the one with which it ran.
    let length = |overlap: &Overlap| overlap.to_ms - overlap.from_ms;
    overlaps
        .filter(|overlap| length(overlap) > 0.0)
        .max_by(|a, b| length(a).total_cmp(&length(b)))
}

/// A span that seems to begin before its parent, by more than the errors of the clocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Early {
    pub parent: usize,
    pub by_ms: f64,
    /// `None`: the clock of one of them was never measured.
    pub error_ms: Option<f64>,
}

/// The results, by index of the span.
pub fn early_spans(spans: &[SpanShape], clocks: &[ClockShape]) -> BTreeMap<usize, Early> {
    let by_id: BTreeMap<&str, usize> = spans
        .iter()
        .enumerate()
        .map(|(at, span)| (span.span_id.as_str(), at))
        .collect();
    let mut found = BTreeMap::new();
    for (at, span) in spans.iter().enumerate() {
        let parent = span.parent_span_id.as_deref().and_then(|id| by_id.get(id)).copied();
        let Some(parent) = parent.filter(|parent| *parent != at) else {
            continue;
        };
        let error_ms = error_between(&span.process, &spans[parent].process, clocks);
        let by_ms = spans[parent].start_ms - span.start_ms;
        if by_ms > error_ms.unwrap_or(0.0) + ROUNDING_MS {
            found.insert(
                at,
                Early {
                    parent,
                    by_ms,
                    error_ms,
                },
            );
        }
    }
    found
}

/// Clocks are measured against the coordinator's clock, so the coordinator is not in the list.
fn error_between(a: &str, b: &str, clocks: &[ClockShape]) -> Option<f64> {
    if a == b {
        return Some(0.0);
    }
    let known: Vec<f64> = clocks
        .iter()
        .filter(|clock| clock.node == a || clock.node == b)
        .map(|clock| clock.error_ms.abs())
        .collect();
    (!known.is_empty()).then(|| known.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &str, process: &str, (id, parent): (&str, &str), (start_ms, end_ms): (f64, f64)) -> SpanShape {
        SpanShape {
            name: name.to_owned(),
            process: process.to_owned(),
            span_id: id.to_owned(),
            parent_span_id: Some(parent.to_owned()),
            start_ms,
            end_ms,
            ..SpanShape::default()
        }
    }

    #[test]
    fn the_overlap_is_with_the_forward_of_the_same_process() {
        let spans = [
            span("prefill.forward", "prefill-1", ("1", "0"), (0.0, 100.0)),
            span("prefill.forward", "prefill-0", ("2", "0"), (10.0, 50.0)),
            span("kv.send", "prefill-0", ("3", "0"), (30.0, 60.0)),
        ];
        let expected = Overlap {
            from_ms: 30.0,
            to_ms: 50.0,
        };
        assert_eq!(with_prefill(&spans[2], &spans), Some(expected));
        assert_eq!(with_prefill(&spans[1], &spans), None);
        let later = span("kv.send", "prefill-0", ("4", "0"), (50.0, 60.0));
        assert_eq!(with_prefill(&later, &spans), None);
    }

    #[test]
    fn only_what_the_clock_error_does_not_explain_is_early() {
        let clocks = [ClockShape {
            node: "prefill-0".to_owned(),
            offset_ms: 0.0,
            error_ms: 0.5,
        }];
        let early_by = |by_ms: f64, process: &str| {
            let spans = [
                span("a", "coordinator", ("1", "none"), (10.0, 50.0)),
                span("b", process, ("2", "1"), (10.0 - by_ms, 20.0)),
                span("itself", process, ("3", "3"), (0.0, 20.0)),
            ];
            early_spans(&spans, &clocks).get(&1).copied()
        };
        assert_eq!(early_by(0.4, "prefill-0"), None);
        assert_eq!(early_by(0.6, "prefill-0").and_then(|early| early.error_ms), Some(0.5));
        assert_eq!(early_by(0.1, "decode-0").map(|early| early.error_ms), Some(None));
        assert!(early_by(0.1, "coordinator").is_some());
    }
}
