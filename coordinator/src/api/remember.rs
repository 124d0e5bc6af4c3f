//! What is kept of a request: the facts of its record as the JSON of `records`, while it runs and when it has ended.

use std::time::{Duration, Instant};

use serving_core::stage::{Stage, StageTimings};

use super::facts::{Facts, Generation};
use crate::insight::Insight;
use crate::records::prompts::PromptRecord;
use crate::records::shape::{
    ClockShape, Detail, RecordState, Serving, StallShape, Summary, ms, now_unix_ms, slow_because, stage_shapes,
};
use crate::records::stalls::{Stall, StallFacts};
use crate::slo::{Breach, Ended, judge};

/// What the edge knows of a request besides its generation.
pub struct Known<'a> {
    pub facts: &'a Facts,
    pub request_id: &'a str,
    pub received_at: Instant,
    pub e2e: Duration,
    pub tokens_out: u32,
    pub insight: &'a Insight,
}

/// How a request ended.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub outcome: &'static str,
    pub status: u16,
}

/// All that is known of a request now.
pub struct Remembered {
    pub detail: Detail,
    pub stalls: Vec<Stall>,
    /// `None` when it is not judged, or has not ended.
    pub breaches: Option<Vec<Breach>>,
}

pub fn stalls_of(g: &Generation, stages: &StageTimings) -> Vec<Stall> {
    g.gaps.stalls(|choice| {
        let prompt = g.prompts.iter().find(|prompt| prompt.choices.contains(&choice));
        let (placement, stages) = match prompt {
            Some(prompt) => (prompt.placement.as_ref(), &prompt.summary.timings),
            None => (g.placement.as_ref(), stages),
        };
        StallFacts {
            stages,
            prefill_node: placement.and_then(|p| p.prefill_node.as_ref()),
            decode_node: placement.and_then(|p| p.decode_node.as_ref()),
        }
    })
}

pub fn remember(known: &Known<'_>, g: &Generation, end: Option<End>) -> Remembered {
    let stages = g.stages();
    let stalls = stalls_of(g, &stages);
    let breaches = end.and_then(|end| {
        let ended = Ended {
            outcome: end.outcome,
            status: end.status,
            ttft: g.ttft,
            itl_p99: g.gaps.quantile(0.99),
            e2e: known.e2e,
        };
        judge(&g.slo, &ended)
    });
    let mut summary = summary(known, g, end);
    summary.stall_count = stalls.len();
    summary.breached = breaches.iter().flatten().map(|breach| breach.name().into()).collect();
    if end.is_some() {
        summary.slow_because = slow_because(&summary, (&stages, g.summary.clock_error), &stalls);
    }
    let nodes = (
        summary.serving.prefill_node.as_deref(),
        summary.serving.decode_node.as_deref(),
    );
    let mut detail = Detail {
        stages: stage_shapes(&stages, nodes),
        stalls: stalls
            .iter()
            .map(|stall| stall_shape(known.received_at, stall))
            .collect(),
        failed_legs: g.summary.failed_legs.clone(),
        prompts: g.prompts.iter().map(PromptRecord::shape).collect(),
        clocks: Vec::new(),
        prefixes: g.prefixes.clone(),
        summary,
    };
    detail.clocks = clocks(known.insight, &detail);
    Remembered {
        detail,
        stalls,
        breaches,
    }
}

fn summary(known: &Known<'_>, g: &Generation, end: Option<End>) -> Summary {
    let facts = known.facts;
    let placement = g.placement.as_ref();
    let stages = g.stages();
    let error = facts.error.as_ref().map(|error| error.message.clone());
    let output_tokens = known.tokens_out.max(g.output_tokens);
    let state = match (end, placement) {
        (Some(_), _) => RecordState::Ended,
        (None, _) if output_tokens > 0 => RecordState::Streaming,
        (None, Some(_)) => RecordState::Placed,
        (None, None) if g.is_submitted => RecordState::Queued,
        (None, None) => RecordState::Received,
    };
    Summary {
        seq: g.seq,
        id: known.request_id.to_owned(),
        trace_id: facts.trace.trace_id_hex(),
        response_id: g.response_id.clone(),
        // A clock that is set meanwhile moves the start, never a duration.
        received_unix_ms: now_unix_ms() - ms(known.received_at.elapsed()),
        endpoint: g.endpoint.into(),
        model: g.model.clone(),
        lane: g.lane.name().into(),
        is_streaming: g.is_streaming,
        state,
        outcome: end.map(|end| end.outcome.into()),
        status: end.map(|end| end.status),
        error,
        serving: Serving::of(placement, &g.summary, (g.prompt_tokens, output_tokens)),
        queue_ms: stages.get(Stage::Queue).or(placement.map(|p| p.queued_for)).map(ms),
        ttft_ms: g.ttft.map(ms),
        tpot_ms: g.tpot.map(ms),
        itl_p50_ms: g.gaps.quantile(0.5).map(ms),
        itl_p99_ms: g.gaps.quantile(0.99).map(ms),
        itl_max_ms: g.gaps.max().map(ms),
        e2e_ms: ms(known.e2e),
        unattributed_ms: g.unattributed_ms(),
        last_token_ms: g.last_token.map(ms),
        last_token_to_end_ms: g.last_token_to_end.map(ms),
        stall_count: 0,
        slo: g.slo.name.clone().into(),
        breached: Vec::new(),
        slow_because: None,
    }
}

fn stall_shape(received_at: Instant, stall: &Stall) -> StallShape {
    StallShape {
        choice: stall.choice,
        token: stall.token,
        at_ms: ms(stall.ended_at.saturating_duration_since(received_at)),
        gap_ms: ms(stall.gap),
        cause: stall.cause.name().into(),
        words: stall.words.clone(),
    }
}

/// The clocks of the nodes that took part.
fn clocks(insight: &Insight, detail: &Detail) -> Vec<ClockShape> {
    let took_part = |clock: &ClockShape| detail.nodes().any(|node| node == clock.node);
    insight.clocks().into_iter().filter(took_part).collect()
}
