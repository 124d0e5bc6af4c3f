//! What the legs report about a request besides its tokens: times, cached tokens, moved bytes, and that a leg has failed. Of an attempt
//! that is over, only the failures of its legs count.

use std::time::Instant;

use proto::messages::{DecodeFinished, PrefillFinished};
use serving_core::ids::Attempt;
use serving_core::stage::StageTimings;

use super::RequestStream;
use crate::stage_clock::StageClock;

impl RequestStream {
    /// Runs `mark` on the stage clock if `attempt` is still the live one.
    pub fn mark(&self, attempt: Attempt, mark: impl FnOnce(&mut StageClock, Instant)) {
        let mut s = self.state();
        if s.live == Some(attempt) {
            mark(&mut s.clock, Instant::now());
        }
    }

    pub fn node_timings(&self, attempt: Attempt, timings: &StageTimings) {
        self.mark(attempt, |clock, _| clock.node_reported(timings));
    }

    /// Prompt tokens that were cached where the prompt is computed. A later report is the better one: it is the prefill node's, and the
    /// first token may come before it through the decode node. An attempt after the first token has another prompt and does not count.
    pub fn cached(&self, attempt: Attempt, cached_tokens: u32) {
        let mut s = self.state();
        let is_of_answer = s.first_token.is_none_or(|(_, first)| first == attempt);
        if s.live == Some(attempt) && is_of_answer {
            s.summary.cached_tokens = cached_tokens;
        }
    }

    pub fn prefill_finished(&self, attempt: Attempt, finished: PrefillFinished) {
        let mut s = self.state();
        if s.live != Some(attempt) {
            return;
        }
        s.clock.node_reported(&finished.timings);
        s.summary.kv_bytes = finished.kv_bytes;
        s.summary.transfer = finished.transfer;
        s.summary.transport = Some(finished.transport).filter(|t| !t.is_empty());
        if s.summary.kv_hashes.is_empty() {
            s.summary.kv_hashes = finished.kv_hashes;
        }
    }

    pub fn decode_finished(&self, attempt: Attempt, finished: DecodeFinished) {
        let mut s = self.state();
        if s.live != Some(attempt) {
            return;
        }
        s.clock.node_reported(&finished.timings);
        let summary = &mut s.summary;
        summary.preemptions = summary.preemptions.saturating_add(finished.preemptions);
        summary.drafted_tokens = summary.drafted_tokens.saturating_add(finished.drafted_tokens);
        summary.accepted_tokens = summary.accepted_tokens.saturating_add(finished.accepted_tokens);
        if s.summary.kv_bytes == 0 {
            s.summary.kv_bytes = finished.kv_bytes;
        }
        // The prefill node says so too, but not always before the answer is over.
        if s.summary.transport.is_none() {
            s.summary.transport = Some(finished.transport).filter(|transport| !transport.is_empty());
        }
        // The decode node's hashes are those of the blocks that were read back while answering.
        if !finished.kv_hashes.is_empty() {
            s.summary.kv_hashes = finished.kv_hashes;
        }
    }

    /// `what` is `leg:node:cause`, for the record of the request.
    pub fn leg_failed(&self, what: String) {
        self.state().summary.failed_legs.push(what);
    }
}
