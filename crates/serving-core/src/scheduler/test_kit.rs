//! What the tests of the scheduler share: small requests, and a model that draws a token from its history alone.

use std::sync::Arc;
use std::time::Duration;

use super::{Admission, NodeLimits, SampledToken, Scheduler, StepPlan, Work};
use crate::ids::{Attempt, BlockId, ChoiceIndex, NodeEpoch, RequestId, TokenId};
use crate::request::{AttemptKey, Lane, Request, SamplingParams, StopConditions};
use crate::time::Time;

pub const VOCAB: u32 = 1000;

pub fn limits(kv_blocks: u32) -> NodeLimits {
    NodeLimits {
        kv_blocks,
        block_tokens: 4,
        max_batch_tokens: 8,
        max_sequences: 4,
        max_model_tokens: 200,
        vocab_size: VOCAB,
        prefix_cache: true,
    }
}

/// Request `id` with `prompt` tokens that no other id shares and `max_tokens` outputs.
pub fn request(id: u128, prompt: u32, max_tokens: u32) -> Request {
    let first = (id as u32 * 37) % VOCAB;
    let prompt: Arc<[TokenId]> = (0..prompt).map(|i| TokenId((first + i) % VOCAB)).collect();
    Request {
        id: RequestId(id),
        client_prompt_tokens: prompt.len() as u32,
        constraint: Default::default(),
        prompt,
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 1,
        seed: 0,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(60),
    }
}

/// Lets in a request that the node computes from its prompt to its last token.
pub fn admit_whole(scheduler: &mut Scheduler, now: Time, request: Request) {
    let admission = Admission {
        request: Arc::new(request),
        attempt: Attempt(0),
        permits: 1,
        coordinator: NodeEpoch(1),
        work: Work::Whole,
    };
    scheduler.admit(now, admission).expect("it fits");
}

pub fn key(id: u128) -> AttemptKey {
    AttemptKey {
        request: RequestId(id),
        attempt: Attempt(0),
    }
}

/// The token that follows `history` in choice `choice`: any change of history, position or choice changes it.
pub fn model(history: &[TokenId], choice: ChoiceIndex) -> TokenId {
    let mixed = history.iter().fold(u64::from(choice.0) + 1, |state, token| {
        (state ^ u64::from(token.0))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23)
    });
    TokenId((mixed >> 32) as u32 % VOCAB)
}

/// The token that follows a history in a choice.
pub type Model = fn(&[TokenId], ChoiceIndex) -> TokenId;

/// A model whose text mostly says again what it said three tokens before.
pub fn repetitive(history: &[TokenId], choice: ChoiceIndex) -> TokenId {
    let fresh = model(history, choice);
    match history.len().checked_sub(3) {
        Some(before) if !fresh.0.is_multiple_of(6) => history[before],
        _ => fresh,
    }
}

/// As [`sample_by`], of [`model`].
pub fn sample(plan: &StepPlan<'_>, limits: &NodeLimits) -> Vec<SampledToken> {
    sample_by(model, plan, limits)
}

/// Draws for a whole plan. Checks on the way that the plan is one an engine would take.
pub fn sample_by(model: Model, plan: &StepPlan<'_>, limits: &NodeLimits) -> Vec<SampledToken> {
    let mut sampled = Vec::new();
    assert!(plan.token_count() <= limits.max_batch_tokens, "over the token budget");
    assert!(
        plan.rows().len() <= limits.max_sequences as usize,
        "over the sequence limit"
    );
    let mut written = std::collections::BTreeSet::new();
    for (i, row) in plan.rows().iter().enumerate() {
        let end = row.first_position + row.token_count;
        let table = plan.block_table(i);
        assert!(table.len() as u32 * limits.block_tokens >= end, "block table too short");
        let first_written = (row.first_position / limits.block_tokens) as usize;
        for block in &table[first_written..end.div_ceil(limits.block_tokens) as usize] {
            assert!(written.insert(*block), "two sequences write block {block}");
        }
        let (prompt, outputs) = plan.history(i);
        let mut history: Vec<TokenId> = prompt.iter().chain(outputs).copied().collect();
        for choice in plan.draws(i) {
            let fed = (end - row.drafts) as usize;
            assert_eq!(fed, history.len(), "a draw before the history is fed");
            for drafts in 0..=plan.drafts(i).len() {
                history.truncate(fed);
                history.extend_from_slice(&plan.drafts(i)[..drafts]);
                let token = Ok(model(&history, choice));
                sampled.push(SampledToken {
                    row: i as u32,
                    choice,
                    token,
                    logprobs: None,
                });
            }
        }
    }
    sampled
}

/// KV memory that remembers which token each slot was computed from, to catch every lost, stale or reused block.
#[derive(Debug)]
pub struct FakeKv {
    block_tokens: usize,
    slots: Vec<Option<TokenId>>,
}

impl FakeKv {
    pub fn new(limits: &NodeLimits) -> Self {
        let block_tokens = limits.block_tokens as usize;
        Self {
            block_tokens,
            slots: vec![None; block_tokens * limits.kv_blocks as usize],
        }
    }
    pub fn block(&self, block: BlockId) -> &[Option<TokenId>] {
        &self.slots[block.0 as usize * self.block_tokens..][..self.block_tokens]
    }
    pub fn fill(&mut self, block: BlockId, tokens: &[TokenId]) {
        let from = block.0 as usize * self.block_tokens;
        self.slots[from..from + self.block_tokens].fill(None);
        for (slot, token) in self.slots[from..].iter_mut().zip(tokens) {
            *slot = Some(*token);
        }
    }
    pub fn copy(&mut self, from: BlockId, to: BlockId) {
        let from = from.0 as usize * self.block_tokens;
        self.slots
            .copy_within(from..from + self.block_tokens, to.0 as usize * self.block_tokens);
    }
    /// Runs a plan's rows, as an engine would: reads what is before them, writes theirs.
    pub fn run(&mut self, plan: &StepPlan<'_>) {
        for (i, row) in plan.rows().iter().enumerate() {
            let (prompt, outputs) = plan.history(i);
            let table = plan.block_table(i);
            let history = prompt.iter().chain(outputs).chain(plan.drafts(i));
            for (position, token) in history
                .enumerate()
                .take((row.first_position + row.token_count) as usize)
            {
                let slot =
                    table[position / self.block_tokens].0 as usize * self.block_tokens + position % self.block_tokens;
                if position >= row.first_position as usize {
                    self.slots[slot] = Some(*token);
                }
                assert_eq!(
                    self.slots[slot],
                    Some(*token),
                    "{:?} reads a foreign block at position {position}",
                    row.key
                );
            }
        }
    }
}
