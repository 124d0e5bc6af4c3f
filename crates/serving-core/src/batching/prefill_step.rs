//! The prefill batcher's steps: which chunks run together, and what a finished chunk sets off.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::batching::prefill::{PrefillBatcher, PrefillEvent, PrefillOutcome};
use crate::batching::prefill_entry::PrefillEntry;
use crate::batching::sequence::Sequence;
use crate::batching::step_plan::RowSource;
use crate::batching::{
    NodeFailure, NodeLimits, PlannedRow, RowLogits, SampledToken, SequenceLength, StepPlan, finish_reason,
};
use crate::ids::ChoiceIndex;
use crate::request::{Request, TokenEvent};
use crate::time::Time;

/// A prompt is halved only when each half pushes at least this many last chunks. One more step costs some 3 ms, and the KV
/// of 512 tokens takes 10 ms over gRPC (docs/measurements/latency.md). Both take as long at 256 tokens: two halves of four
/// last chunks of 32.
const HALF_IN_LAST_CHUNKS_MIN: u32 = 4;

impl RowSource for BTreeMap<u64, PrefillEntry> {
    fn sequence(&self, row: &PlannedRow) -> (&Sequence, &Arc<Request>) {
        let entry = &self[&row.serial];
        (&entry.sequence, &entry.request)
    }
}

impl PrefillBatcher {
    /// The next step: chunks in order of arrival, several prompts together, at most the token budget. `None` when
    /// nothing waits. `step_done` or `step_failed` must follow.
    pub fn next_step(&mut self, now: Time) -> Option<StepPlan<'_>> {
        assert!(self.plan.is_empty(), "a step is planned while another runs");
        let limits = self.config.limits;
        let mut budget = limits.max_batch_tokens;
        let is_alone = self.entries.values().filter(|entry| !entry.is_held()).count() == 1;
        for (serial, entry) in &mut self.entries {
            if budget == 0 || self.plan.len() >= limits.max_sequences as usize {
                break;
            }
            if entry.is_held() {
                continue;
            }
            entry.chunk_planned(now);
            let pending = entry.sequence.pending();
            let token_count = match self.config.last_chunk_tokens {
                Some(last) if is_alone && entry.is_handed_over() && pending <= budget => {
                    let cut = before_last_chunk(entry, &limits, last);
                    entry.is_cut |= cut.is_some();
                    cut.unwrap_or(pending)
                }
                _ => pending.min(budget),
            };
            budget -= token_count;
            let draws = if token_count == pending { entry.draws() } else { 0 };
            let logits = match (entry.request.prompt_logprobs, draws) {
                (Some(_), _) => RowLogits::All,
                (None, 0) => RowLogits::None,
                (None, _) => RowLogits::Last,
            };
            self.plan.push(PlannedRow {
                key: entry.key,
                choice: ChoiceIndex(0),
                first_position: entry.sequence.computed,
                token_count,
                logits,
                draws,
                serial: *serial,
            });
        }
        (!self.plan.is_empty()).then_some(StepPlan {
            rows: &self.plan,
            source: &self.entries,
        })
    }

    /// The step ran. `sampled` holds the plan's draws in order and is emptied.
    pub fn step_done(&mut self, now: Time, sampled: &mut Vec<SampledToken>) {
        let mut plan = std::mem::take(&mut self.plan);
        let mut tokens = sampled.drain(..);
        for row in &plan {
            self.computed_tokens += u64::from(row.token_count);
            let drawn: Vec<SampledToken> = tokens.by_ref().take(row.draws as usize).collect();
            assert_eq!(
                drawn.len(),
                row.draws as usize,
                "the shell must give back every draw of the plan"
            );
            self.chunk_done(now, row, drawn);
        }
        drop(tokens);
        plan.clear();
        self.plan = plan;
        self.end_deferred();
    }

    /// The step did not run: every request in it fails, the others stay.
    pub fn step_failed(&mut self, detail: &str) {
        let mut plan = std::mem::take(&mut self.plan);
        for row in plan.drain(..) {
            self.end(
                row.serial,
                Some(NodeFailure::Engine {
                    detail: detail.to_owned(),
                }),
            );
        }
        self.plan = plan;
        self.end_deferred();
    }

    fn chunk_done(&mut self, now: Time, row: &PlannedRow, drawn: Vec<SampledToken>) {
        let Some(entry) = self.entries.get_mut(&row.serial) else {
            return;
        };
        entry.sequence.computed += row.token_count;
        entry.sequence.publish(&mut self.pool);
        let is_last = entry.sequence.pending() == 0;
        self.events.extend(entry.push_complete(&mut self.pool, is_last));
        if is_last {
            self.prompt_done(now, row.serial, drawn);
        }
        self.grant();
    }

    fn prompt_done(&mut self, now: Time, serial: u64, drawn: Vec<SampledToken>) {
        let limit = self.config.limits.max_model_tokens;
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        let request = &entry.request;
        let index = entry.sequence.next_output(request.client_prompt_tokens);
        let length = SequenceLength {
            outputs: index.0 + 1,
            total: entry.sequence.len() + 1,
            limit,
        };
        let mut tokens = Vec::with_capacity(drawn.len());
        for SampledToken {
            choice,
            token,
            logprobs,
            ..
        } in drawn
        {
            let Ok(token) = token else {
                return self.end(serial, Some(NodeFailure::Sampling));
            };
            let finish = finish_reason(request, token, length);
            tokens.push(TokenEvent {
                choice,
                index,
                token,
                logprobs,
                finish,
            });
        }
        entry.first_tokens_drawn(now, &self.config);
        let continues = entry.is_handed_over() && tokens.iter().any(|event| event.finish.is_none());
        let hash_blocks = match entry.request.report_kv_hashes {
            true => entry.sequence.table.ids().to_vec(),
            false => Vec::new(),
        };
        let (key, timings) = (entry.key, entry.timings.clone());
        self.events.push_back(PrefillEvent::FirstTokens {
            key,
            tokens,
            timings,
            continues,
            hash_blocks,
        });
        if !continues {
            self.finish(serial, PrefillOutcome::EndedAtFirstToken);
        }
    }
}

/// Tokens to compute now so that a last chunk remains, cut where a block ends: only whole blocks can be pushed.
/// `None` when what is left is too short to be worth a step more.
fn before_last_chunk(entry: &PrefillEntry, limits: &NodeLimits, last: NonZeroU32) -> Option<u32> {
    let sequence = &entry.sequence;
    let (end, pending) = (sequence.len(), sequence.pending());
    let to_push = entry.tokens_to_push(limits.block_tokens);
    let last = match sequence.computed > entry.cached_tokens {
        _ if entry.is_cut => return None,
        true => last.get(),
        // All bytes of a prompt of one chunk would move after it: of halves one moves while the other is computed. Through
        // shared memory all of it takes less than the step more does.
        false if entry.is_streamed && to_push / 2 >= last.get().saturating_mul(HALF_IN_LAST_CHUNKS_MIN) => {
            to_push.min(pending) / 2
        }
        false => return None,
    };
    if pending < last.saturating_mul(2) {
        return None;
    }
    let cut = (end - last).next_multiple_of(limits.block_tokens);
    (sequence.computed < cut && cut < end).then(|| cut - sequence.computed)
}
