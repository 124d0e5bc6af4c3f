//! The events that both nodes send back while they serve a request.

use std::time::Duration;

use serving_core::stage::{Stage, StageTimings};
use serving_core::time::Time;

use super::tokens::{tokens_from_wire, tokens_to_wire};
use super::{ConvertError, LARGE_LIST_MAX, Result, at_most, detail, name, nanos, required, unknown};
use crate::messages::{
    DecodeEvent, DecodeFinished, Failed, NodeFault, Opened, PrefillEvent, PrefillFinished, PrefillOutcome,
    RefuseReason, Refused, StepNote, TokenBatch,
};
use crate::v1;

/// The closed list has 16 stages; retries may repeat some.
const STAGES_MAX: usize = 256;

impl From<DecodeEvent> for v1::DecodeEvent {
    fn from(event: DecodeEvent) -> Self {
        use v1::decode_event::Event;
        let event = match event {
            DecodeEvent::Opened(opened) => Event::Opened(v1::Opened {
                ticket: opened.ticket.map(Into::into),
                prefix_blocks: opened.prefix_blocks,
                cached_tokens: opened.cached_tokens,
                at_ns: opened.at.0,
            }),
            DecodeEvent::Tokens(batch) => Event::Tokens(batch.into()),
            DecodeEvent::PromptLogprobs(logprobs) => Event::PromptLogprobs(logprobs.into()),
            DecodeEvent::Committed { timings, cached_tokens } => Event::Committed(v1::Committed {
                timings: Some(timings.into()),
                cached_tokens,
            }),
            DecodeEvent::Finished(done) => Event::Finished(v1::Finished {
                timings: Some(done.timings.into()),
                cached_tokens: done.cached_tokens,
                preemptions: done.preemptions,
                drafted_tokens: done.drafted_tokens,
                accepted_tokens: done.accepted_tokens,
                kv_hashes: done.kv_hashes,
                kv_bytes: done.kv_bytes,
                transport: done.transport,
            }),
            DecodeEvent::Failed(failed) => Event::Failed(failed.into()),
            DecodeEvent::Refused(refused) => Event::Refused(refused.into()),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<v1::DecodeEvent> for DecodeEvent {
    type Error = ConvertError;
    fn try_from(wire: v1::DecodeEvent) -> Result<Self> {
        use v1::decode_event::Event;
        Ok(match required(wire.event, "decode_event")? {
            Event::Opened(opened) => DecodeEvent::Opened(Opened {
                ticket: opened.ticket.map(TryInto::try_into).transpose()?,
                prefix_blocks: opened.prefix_blocks,
                cached_tokens: opened.cached_tokens,
                at: Time(opened.at_ns),
            }),
            Event::Tokens(batch) => DecodeEvent::Tokens(batch.try_into()?),
            Event::PromptLogprobs(logprobs) => DecodeEvent::PromptLogprobs(logprobs.try_into()?),
            Event::Committed(committed) => DecodeEvent::Committed {
                timings: timings(committed.timings, "committed.timings")?,
                cached_tokens: committed.cached_tokens,
            },
            Event::Finished(done) => DecodeEvent::Finished(DecodeFinished {
                timings: timings(done.timings, "finished.timings")?,
                cached_tokens: done.cached_tokens,
                preemptions: done.preemptions,
                drafted_tokens: done.drafted_tokens,
                accepted_tokens: done.accepted_tokens,
                kv_hashes: at_most(done.kv_hashes, LARGE_LIST_MAX, "finished.kv_hashes")?,
                kv_bytes: done.kv_bytes,
                transport: transport(done.transport)?,
            }),
            Event::Failed(failed) => DecodeEvent::Failed(failed.try_into()?),
            Event::Refused(refused) => DecodeEvent::Refused(refused.try_into()?),
        })
    }
}

impl From<PrefillEvent> for v1::PrefillEvent {
    fn from(event: PrefillEvent) -> Self {
        use v1::prefill_event::Event;
        let event = match event {
            PrefillEvent::Accepted { cached_tokens, at } => Event::Accepted(v1::Accepted {
                cached_tokens,
                at_ns: at.0,
            }),
            PrefillEvent::Tokens(batch) => Event::Tokens(batch.into()),
            PrefillEvent::PromptLogprobs(logprobs) => Event::PromptLogprobs(logprobs.into()),
            PrefillEvent::FirstToken { timings, sampled_at } => Event::FirstToken(v1::FirstToken {
                timings: Some(timings.into()),
                sampled_at_ns: sampled_at.0,
            }),
            PrefillEvent::Finished(done) => Event::Finished(v1::PrefillFinished {
                outcome: match done.outcome {
                    PrefillOutcome::HandedOver => v1::prefill_finished::Outcome::HandedOver,
                    PrefillOutcome::EndedAtFirstToken => v1::prefill_finished::Outcome::EndedAtFirstToken,
                }
                .into(),
                timings: Some(done.timings.into()),
                kv_bytes: done.kv_bytes,
                transfer_ns: nanos(done.transfer),
                transport: done.transport,
                cached_tokens: done.cached_tokens,
                kv_hashes: done.kv_hashes,
            }),
            PrefillEvent::Failed(failed) => Event::Failed(failed.into()),
            PrefillEvent::Refused(refused) => Event::Refused(refused.into()),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<v1::PrefillEvent> for PrefillEvent {
    type Error = ConvertError;
    fn try_from(wire: v1::PrefillEvent) -> Result<Self> {
        use v1::prefill_event::Event;
        Ok(match required(wire.event, "prefill_event")? {
            Event::Accepted(accepted) => PrefillEvent::Accepted {
                cached_tokens: accepted.cached_tokens,
                at: Time(accepted.at_ns),
            },
            Event::Tokens(batch) => PrefillEvent::Tokens(batch.try_into()?),
            Event::PromptLogprobs(logprobs) => PrefillEvent::PromptLogprobs(logprobs.try_into()?),
            Event::FirstToken(first) => PrefillEvent::FirstToken {
                timings: timings(first.timings, "first_token.timings")?,
                sampled_at: Time(first.sampled_at_ns),
            },
            Event::Finished(done) => PrefillEvent::Finished(prefill_finished(done)?),
            Event::Failed(failed) => PrefillEvent::Failed(failed.try_into()?),
            Event::Refused(refused) => PrefillEvent::Refused(refused.try_into()?),
        })
    }
}

/// Empty when nothing was handed over.
fn transport(text: String) -> Result<String> {
    match text.as_str() {
        "" => Ok(text),
        _ => name(text, "finished.transport"),
    }
}

fn prefill_finished(wire: v1::PrefillFinished) -> Result<PrefillFinished> {
    use v1::prefill_finished::Outcome;
    let outcome = match Outcome::try_from(wire.outcome) {
        Ok(Outcome::HandedOver) => PrefillOutcome::HandedOver,
        Ok(Outcome::EndedAtFirstToken) => PrefillOutcome::EndedAtFirstToken,
        _ => return Err(unknown("finished.outcome", wire.outcome)),
    };
    Ok(PrefillFinished {
        outcome,
        timings: timings(wire.timings, "finished.timings")?,
        kv_bytes: wire.kv_bytes,
        transfer: Duration::from_nanos(wire.transfer_ns),
        transport: transport(wire.transport)?,
        cached_tokens: wire.cached_tokens,
        kv_hashes: at_most(wire.kv_hashes, LARGE_LIST_MAX, "finished.kv_hashes")?,
    })
}

impl From<TokenBatch> for v1::TokenBatch {
    fn from(batch: TokenBatch) -> Self {
        Self {
            tokens: tokens_to_wire(batch.tokens),
            sampled_at_ns: batch.sampled_at.0,
            step: batch.step.map(|step| v1::StepNote {
                step_ns: nanos(step.took),
                prompt_tokens: step.prompt_tokens,
                preemptions: step.preemptions,
            }),
        }
    }
}

impl TryFrom<v1::TokenBatch> for TokenBatch {
    type Error = ConvertError;
    fn try_from(wire: v1::TokenBatch) -> Result<Self> {
        Ok(Self {
            tokens: tokens_from_wire(wire.tokens, "tokens")?,
            sampled_at: Time(wire.sampled_at_ns),
            step: wire.step.map(|step| StepNote {
                took: Duration::from_nanos(step.step_ns),
                prompt_tokens: step.prompt_tokens,
                preemptions: step.preemptions,
            }),
        })
    }
}

/// `step_wait` travels as a part of `prefill_queue`, so that nodes can be upgraded before the coordinator.
impl From<StageTimings> for v1::StageTimings {
    fn from(timings: StageTimings) -> Self {
        let step_wait = timings.get(Stage::StepWait);
        let mut stages: Vec<v1::StageTiming> = Vec::with_capacity(timings.0.len());
        for (stage, duration) in timings.0 {
            let duration = match stage {
                Stage::StepWait => continue,
                Stage::PrefillQueue => duration.saturating_add(step_wait.unwrap_or_default()),
                _ => duration,
            };
            stages.push(v1::StageTiming {
                stage: stage.name().to_owned(),
                before_first_token: stage.is_before_first_token(),
                duration_ns: nanos(duration),
            });
        }
        Self {
            stages,
            step_wait_ns: step_wait.map(nanos),
        }
    }
}

/// A stage of a newer version is left out: its time is then unattributed.
impl TryFrom<v1::StageTimings> for StageTimings {
    type Error = ConvertError;
    fn try_from(wire: v1::StageTimings) -> Result<Self> {
        let mut timings = StageTimings::default();
        for timing in at_most(wire.stages, STAGES_MAX, "stages")? {
            let known = Stage::ALL.iter().find(|stage| {
                stage.name() == timing.stage && stage.is_before_first_token() == timing.before_first_token
            });
            let Some(stage) = known else { continue };
            let duration = Duration::from_nanos(timing.duration_ns);
            match (stage, wire.step_wait_ns) {
                (Stage::PrefillQueue, Some(step_wait)) => {
                    let step_wait = Duration::from_nanos(step_wait).min(duration);
                    timings.push(Stage::StepWait, step_wait);
                    timings.push(Stage::PrefillQueue, duration.saturating_sub(step_wait));
                }
                _ => timings.push(*stage, duration),
            }
        }
        Ok(timings)
    }
}

fn timings(wire: Option<v1::StageTimings>, field: &'static str) -> Result<StageTimings> {
    required(wire, field)?.try_into()
}

impl From<Failed> for v1::Failed {
    fn from(failed: Failed) -> Self {
        use v1::failed::Fault as Wire;
        Self {
            fault: match failed.fault {
                NodeFault::Engine => Wire::Engine,
                NodeFault::Transfer => Wire::Transfer,
                NodeFault::Deadline => Wire::Deadline,
                NodeFault::Peer => Wire::Peer,
                NodeFault::Internal => Wire::Internal,
                NodeFault::Draining => Wire::Draining,
                NodeFault::RuledOut => Wire::RuledOut,
            }
            .into(),
            reason: failed.reason,
            detail: detail(&failed.detail),
        }
    }
}

impl TryFrom<v1::Failed> for Failed {
    type Error = ConvertError;
    fn try_from(wire: v1::Failed) -> Result<Self> {
        use v1::failed::Fault as Wire;
        let fault = match Wire::try_from(wire.fault) {
            Ok(Wire::Engine) => NodeFault::Engine,
            Ok(Wire::Transfer) => NodeFault::Transfer,
            Ok(Wire::Deadline) => NodeFault::Deadline,
            Ok(Wire::Peer) => NodeFault::Peer,
            Ok(Wire::Internal) => NodeFault::Internal,
            Ok(Wire::Draining) => NodeFault::Draining,
            Ok(Wire::RuledOut) => NodeFault::RuledOut,
            _ => return Err(unknown("failed.fault", wire.fault)),
        };
        Ok(Self {
            fault,
            reason: name(wire.reason, "failed.reason")?,
            detail: detail(&wire.detail),
        })
    }
}

impl From<Refused> for v1::Refused {
    fn from(refused: Refused) -> Self {
        use v1::refused::Reason as Wire;
        Self {
            reason: match refused.reason {
                RefuseReason::NoCapacity => Wire::NoCapacity,
                RefuseReason::StaleEpoch => Wire::StaleEpoch,
                RefuseReason::Draining => Wire::Draining,
                RefuseReason::Duplicate => Wire::Duplicate,
                RefuseReason::Invalid => Wire::Invalid,
                RefuseReason::Incompatible => Wire::Incompatible,
            }
            .into(),
            detail: detail(&refused.detail),
        }
    }
}

impl TryFrom<v1::Refused> for Refused {
    type Error = ConvertError;
    fn try_from(wire: v1::Refused) -> Result<Self> {
        use v1::refused::Reason as Wire;
        let reason = match Wire::try_from(wire.reason) {
            Ok(Wire::NoCapacity) => RefuseReason::NoCapacity,
            Ok(Wire::StaleEpoch) => RefuseReason::StaleEpoch,
            Ok(Wire::Draining) => RefuseReason::Draining,
            Ok(Wire::Duplicate) => RefuseReason::Duplicate,
            Ok(Wire::Invalid) => RefuseReason::Invalid,
            Ok(Wire::Incompatible) => RefuseReason::Incompatible,
            _ => return Err(unknown("refused.reason", wire.reason)),
        };
        Ok(Self {
            reason,
            detail: detail(&wire.detail),
        })
    }
}
