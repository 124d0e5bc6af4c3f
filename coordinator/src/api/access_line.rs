//! The access log: one line for each request, written when its record ends.

use std::time::Duration;

use serving_core::stage::Stage;

use super::facts::{Facts, Generation};
use super::probes::is_probe;
use crate::records::shape::ms;

/// The facts of which a line is made.
pub struct Line<'a> {
    pub facts: &'a Facts,
    pub request_id: &'a str,
    pub status: u16,
    pub outcome: &'static str,
    pub e2e: Duration,
}

impl Line<'_> {
    /// The name of the caller's key.
    fn key_name(&self) -> Option<&str> {
        self.facts.key.as_ref().map(|key| key.entry.name.as_str())
    }
}

/// The line of a generation request.
pub fn generation_line(line: &Line<'_>, g: &Generation) {
    let placement = g.placement.as_ref();
    let error = line.facts.error.clone().unwrap_or_default();
    let (error_code, error_param) = (error.code, error.param);
    tracing::info!(
        target: "access",
        trace_id = line.facts.trace.trace_id_hex(),
        request_id = line.request_id,
        method = line.facts.method,
        path = line.facts.path,
        status = line.status,
        outcome = line.outcome,
        key = line.key_name(),
        error_code,
        error_param,
        model = g.model.as_deref().unwrap_or("unknown"),
        lane = g.lane.name(),
        prompt_tokens = g.prompt_tokens,
        output_tokens = g.output_tokens,
        cached_tokens = g.summary.cached_tokens,
        prefill_node = placement.and_then(|p| p.prefill_node.as_ref()).map(tracing::field::display),
        decode_node = placement.and_then(|p| p.decode_node.as_ref()).map(tracing::field::display),
        route_reason = placement.map(|p| p.route_reason.as_str()),
        local_prefill = placement.and_then(|p| p.local_prefill).map(|reason| reason.name()),
        attempts = g.summary.attempts,
        failed_legs = (!g.summary.failed_legs.is_empty()).then(|| g.summary.failed_legs.join(" ")),
        // The nodes' stages of a request that was broken off are unknown; only the placement is known.
        queue_ms = g.stages().get(Stage::Queue).or(placement.map(|p| p.queued_for)).map(ms),
        ttft_ms = g.ttft.map(ms),
        unattributed_ms = g.unattributed_ms(),
        last_token_to_end_ms = g.last_token_to_end.map(ms),
        e2e_ms = ms(line.e2e),
        "request"
    );
}

/// The line of any other request.
pub fn plain_line(line: &Line<'_>) {
    let trace_id = line.facts.trace.trace_id_hex();
    let (method, path, e2e_ms) = (line.facts.method.as_str(), line.facts.path.as_str(), ms(line.e2e));
    let (request_id, status, outcome) = (line.request_id, line.status, line.outcome);
    let key = line.key_name();
    // Probes and scrapes come every few seconds, so their lines are debug output.
    // A probe's 503 is a normal answer and comes again each second.
    if is_probe(path) && (status < 400 || status == 503) {
        tracing::debug!(target: "access", trace_id, request_id, method, path, status, outcome, key, e2e_ms, "request");
    } else {
        tracing::info!(target: "access", trace_id, request_id, method, path, status, outcome, key, e2e_ms, "request");
    }
}
