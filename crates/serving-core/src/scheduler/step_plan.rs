//! What the engine runs in one step, as rows that point into the scheduler: planning allocates nothing once warm.

use std::fmt;
use std::sync::Arc;

use crate::ids::{BlockId, ChoiceIndex, OutputIndex, TokenId};
use crate::request::{AttemptKey, Request};
use crate::scheduler::sequence::Sequence;

/// Which rows need logits; the engine's `LogitsWanted` in the core's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowLogits {
    None,
    Last,
    All,
}

/// Rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedRow {
    pub key: AttemptKey,
    pub choice: ChoiceIndex,
    pub first_position: u32,
    pub token_count: u32,
    pub logits: RowLogits,
    /// How many tokens are drawn from the last row: 0, 1, or one per choice after the last prompt chunk.
    pub draws: u32,
    /// Guessed tokens at the end of its tokens, see `drafts.rs`. One token is drawn before the first and one after each.
    pub drafts: u32,
    /// Where the sequence says what is guessed.
    pub(super) draft_start: u32,
    /// Where the scheduler finds the sequence.
    pub(super) serial: u64,
}

impl PlannedRow {
    /// Of a prompt, or of what a preempted sequence computes again: more than a newest token and guesses.
    pub(super) fn is_chunk(&self) -> bool {
        self.token_count > 1 + self.drafts
    }
}

/// Tokens of prompts, or of what preempted sequences compute again.
pub(super) fn prompt_tokens(rows: &[PlannedRow]) -> u32 {
    let chunks = rows.iter().filter(|row| row.is_chunk());
    chunks.map(|row| row.token_count).sum()
}

/// How a plan finds the sequence of a row.
pub(super) trait RowSource {
    fn sequence(&self, row: &PlannedRow) -> (&Sequence, &Arc<Request>);
}

/// One step. Row i here is sequence i of the engine's batch.
#[derive(Clone, Copy)]
pub struct StepPlan<'a> {
    pub(super) rows: &'a [PlannedRow],
    pub(super) source: &'a dyn RowSource,
}

impl fmt::Debug for StepPlan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepPlan").field("rows", &self.rows).finish()
    }
}

impl<'a> StepPlan<'a> {
    pub fn rows(&self) -> &'a [PlannedRow] {
        self.rows
    }
    /// Rows of all sequences together.
    pub fn token_count(&self) -> u32 {
        self.rows.iter().map(|row| row.token_count).sum()
    }
    /// Tokens of prompts (or of what preempted sequences compute again) among them.
    pub fn prompt_token_count(&self) -> u32 {
        prompt_tokens(self.rows)
    }
    /// Tokens to feed; they occupy positions `first_position..`, and [`StepPlan::drafts`] follow them.
    pub fn tokens(&self, row: usize) -> &'a [TokenId] {
        let planned = &self.rows[row];
        let from = planned.first_position as usize;
        let known = planned.token_count - planned.drafts;
        &self.source.sequence(planned).0.tokens[from..from + known as usize]
    }
    /// Guessed tokens to feed behind the others.
    pub fn drafts(&self, row: usize) -> &'a [TokenId] {
        let planned = &self.rows[row];
        let from = planned.draft_start as usize;
        &self.source.sequence(planned).0.tokens[from..from + planned.drafts as usize]
    }
    pub fn block_table(&self, row: usize) -> &'a [BlockId] {
        self.source.sequence(&self.rows[row]).0.table.ids()
    }
    pub fn request(&self, row: usize) -> &'a Arc<Request> {
        self.source.sequence(&self.rows[row]).1
    }
    /// The client's prompt and the outputs so far, those of earlier attempts included.
    pub fn history(&self, row: usize) -> (&'a [TokenId], &'a [TokenId]) {
        let (sequence, request) = self.source.sequence(&self.rows[row]);
        sequence.tokens.split_at(request.client_prompt_tokens as usize)
    }
    /// Index of the first output that is drawn from this row, counted over all attempts.
    pub fn output_index(&self, row: usize) -> OutputIndex {
        let (sequence, request) = self.source.sequence(&self.rows[row]);
        sequence.next_output(request.client_prompt_tokens)
    }
    /// Choices that draw from this row, in the order their tokens must be given back. With drafts it is one choice, which draws from
    /// the last token that is no draft and from each draft.
    pub fn draws(&self, row: usize) -> impl Iterator<Item = ChoiceIndex> + use<> {
        let planned = &self.rows[row];
        (planned.choice.0..planned.choice.0 + planned.draws).map(ChoiceIndex)
    }
}
