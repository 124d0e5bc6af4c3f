//! W3C trace context at the edge: it comes from the client, goes to the nodes, and is shown in answers and the access log.

use std::fmt;

use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// A `traceparent` (W3C Trace Context, version 00).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceContext {
    pub trace_id: u128,
    pub span_id: u64,
    pub is_sampled: bool,
}

impl TraceContext {
    /// `None` for a header that the standard calls invalid. The request is then traced as if there were no header.
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str, length: usize| {
            text.len() == length && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        };
        if !is_hex(version, 2) || version == "ff" || (version == "00" && parts.next().is_some()) {
            return None;
        }
        if !is_hex(trace, 32) || !is_hex(span, 16) || !is_hex(flags, 2) {
            return None;
        }
        let trace_id = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
        let span_id = u64::from_str_radix(span, 16).ok().filter(|id| *id != 0)?;
        let is_sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        Some(Self {
            trace_id,
            span_id,
            is_sampled,
        })
    }

    /// The trace context of a request's root span. With an exporter it is that of the exported span, else it is drawn here,
    /// so that the logs of all processes can be joined by trace id without a collector.
    pub fn of_root(span: &Span, incoming: Option<Self>) -> Self {
        if let Some(parent) = incoming {
            let remote = SpanContext::new(
                TraceId::from(parent.trace_id),
                SpanId::from(parent.span_id),
                if parent.is_sampled {
                    TraceFlags::SAMPLED
                } else {
                    TraceFlags::default()
                },
                true,
                TraceState::default(),
            );
            // This fails only where no exporter is installed. Then there is nothing to attach to.
            let _ = span.set_parent(opentelemetry::Context::new().with_remote_span_context(remote));
        }
        let context = span.context();
        let own = context.span().span_context().clone();
        if own.is_valid() && incoming.is_none_or(|parent| parent.span_id != span_number(&own)) {
            return Self {
                trace_id: u128::from_be_bytes(own.trace_id().to_bytes()),
                span_id: span_number(&own),
                is_sampled: own.is_sampled(),
            };
        }
        Self {
            trace_id: incoming.map_or_else(|| rand::random::<u128>().max(1), |parent| parent.trace_id),
            span_id: rand::random::<u64>().max(1),
            is_sampled: incoming.is_some_and(|parent| parent.is_sampled),
        }
    }

    pub fn trace_id_hex(&self) -> String {
        format!("{:032x}", self.trace_id)
    }
}

fn span_number(context: &SpanContext) -> u64 {
    u64::from_be_bytes(context.span_id().to_bytes())
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "00-{:032x}-{:016x}-{:02x}",
            self.trace_id,
            self.span_id,
            u8::from(self.is_sampled)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_valid_header_round_trips() {
        let context = TraceContext::parse(SAMPLE).expect("the standard's own example");
        assert_eq!(context.to_string(), SAMPLE);
        assert_eq!(context.trace_id_hex(), "4bf92f3577b34da6a3ce929d0e0e4736");
    }

    #[test]
    fn invalid_headers_are_as_none() {
        for bad in [
            "",
            "00",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-é-00f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn without_an_exporter_the_clients_trace_id_is_kept() {
        let incoming = TraceContext::parse(SAMPLE);
        let own = TraceContext::of_root(&Span::none(), incoming);
        assert_eq!(Some(own.trace_id), incoming.map(|c| c.trace_id));
        assert_ne!(Some(own.span_id), incoming.map(|c| c.span_id));
    }
}
