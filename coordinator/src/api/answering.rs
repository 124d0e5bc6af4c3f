//! An answer under way, whole or as a stream: its parts, and what its end puts into the record.

use std::sync::Arc;

use opentelemetry::{Array, StringValue, Value};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::facts::Generation;
use super::form::Form;
use super::pace::Pace;
use super::record::RequestRecord;
use super::run::{OutToken, Run};
use super::shapes::EdgeTimes;

/// An answer that is about to begin: its first token has come.
pub struct Answering {
    pub run: Run,
    pub reply: Form,
    pub pace: Pace,
    pub record: Arc<RequestRecord>,
    pub first: Option<OutToken>,
    /// The parts that end with the answer.
    pub egress: Span,
}

/// Puts what the run knows at its end, good or bad, into the record.
pub fn note_end(record: &RequestRecord, run: &Run, pace: &mut Pace, is_streaming: bool) -> EdgeTimes {
    record.update(|generation| run.note(generation));
    pace.close(is_streaming)
}

pub fn note_finish_reasons<'a>(generation: &mut Generation, last: impl Iterator<Item = &'a OutToken>) {
    let reasons: Vec<&'static str> = last
        .filter_map(|out| out.finish)
        .map(|finish| finish.openai_name())
        .collect();
    let cut = reasons.iter().find(|reason| **reason == "length");
    generation.finish = cut.or(reasons.first()).copied();
    let reasons = reasons.into_iter().map(StringValue::from).collect();
    generation
        .span
        .set_attribute("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons)));
}
