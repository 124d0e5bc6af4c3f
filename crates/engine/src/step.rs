//! One step, detached from the scheduler that planned it: the scheduler can go on while an engine computes.

use std::ops::Range;
use std::sync::Arc;

use serving_core::ids::{BlockId, ChoiceIndex, OutputIndex, TokenId};
use serving_core::request::{AttemptKey, Request, TokenLogprobs};
use serving_core::scheduler::{RowLogits, SampledToken, StepPlan};

use crate::{Allowed, AllowedTokens, EngineError, LogitsWanted, SampleInput, SequenceRows};

/// The rows of a step with everything that computing them and drawing from them needs. Its buffers are used again by the next
/// step.
#[derive(Debug, Default)]
pub struct Step {
    rows: Vec<StepRow>,
    /// Tokens to feed, and outputs that penalties look at. The rows' ranges point into it.
    tokens: Vec<TokenId>,
    blocks: Vec<BlockId>,
    /// Which tokens may be drawn, for the rows that do not allow all.
    allowed: Option<Arc<dyn AllowedTokens>>,
}

/// Rows of one sequence: a chunk of its prompt, or its newest token and guesses.
#[derive(Debug)]
pub struct StepRow {
    /// Its place in the step.
    index: usize,
    pub key: AttemptKey,
    pub request: Arc<Request>,
    pub first_position: u32,
    pub logits: LogitsWanted,
    /// What is drawn from the last row, and from those before guesses; `None` before the end of a prompt.
    pub draws: Option<Draws>,
    tokens: Range<usize>,
    blocks: Range<usize>,
}

/// The tokens to draw from one row of logits.
#[derive(Debug)]
pub struct Draws {
    pub choices: Range<u32>,
    /// Counted over all attempts of the request.
    pub output_index: OutputIndex,
    /// The outputs so far, those of earlier attempts included. Empty when neither a penalty nor a constraint looks at them.
    outputs: Range<usize>,
    /// Guessed tokens at the end of the row. One token is drawn before the first and one after each.
    drafts: u32,
}

/// What a step brought.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// In the order of the step's draws.
    pub sampled: Vec<SampledToken>,
    pub prompt_logprobs: Vec<PromptLogprobsChunk>,
    /// Requests whose prompt could not be scored (logits that are not numbers): they fail.
    pub unscored: Vec<AttemptKey>,
}

/// Logprobs of the prompt tokens from `first_position` on, as far as one chunk gives them.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobsChunk {
    pub key: AttemptKey,
    pub first_position: u32,
    pub tokens: Vec<TokenLogprobs>,
}

/// A step that is over, and whose blocks are free again.
#[derive(Debug)]
pub struct CompletedStep {
    /// For its buffers.
    pub step: Step,
    /// An error means that nothing was written.
    pub result: Result<StepOutput, EngineError>,
}

impl Step {
    /// Forgets the requests and what they draw from. The buffers stay for the next step.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.tokens.clear();
        self.blocks.clear();
        self.allowed = None;
    }

    /// Takes a plan over. What the step held before is forgotten.
    pub fn fill(&mut self, plan: &StepPlan<'_>) {
        self.clear();
        for (i, row) in plan.rows().iter().enumerate() {
            let request = plan.request(i);
            let tokens = append(&mut self.tokens, plan.tokens(i));
            let tokens = tokens.start..append(&mut self.tokens, plan.drafts(i)).end;
            let blocks = append(&mut self.blocks, plan.block_table(i));
            let draws = (row.draws > 0).then(|| Draws {
                choices: row.choice.0..row.choice.0 + row.draws,
                output_index: plan.output_index(i),
                outputs: match looks_back(request) {
                    true => append(&mut self.tokens, plan.history(i).1),
                    false => 0..0,
                },
                drafts: row.drafts,
            });
            if looks_back(request) {
                append(&mut self.tokens, plan.drafts(i));
            }
            self.rows.push(StepRow {
                index: i,
                key: row.key,
                request: request.clone(),
                first_position: row.first_position,
                logits: match row.logits {
                    RowLogits::None => LogitsWanted::None,
                    RowLogits::Last => LogitsWanted::Last,
                    RowLogits::All => LogitsWanted::All,
                },
                draws,
                tokens,
                blocks,
            });
        }
    }

    pub fn rows(&self) -> &[StepRow] {
        &self.rows
    }

    /// A row as an engine takes it.
    pub fn sequence(&self, row: &StepRow) -> SequenceRows<'_> {
        SequenceRows {
            tokens: &self.tokens[row.tokens.clone()],
            first_position: row.first_position,
            block_table: &self.blocks[row.blocks.clone()],
            logits: row.logits,
        }
    }

    /// The rows whose draws are constrained, with their places and their outputs so far.
    pub fn constrained(&self) -> impl Iterator<Item = (usize, &StepRow, &[TokenId])> {
        let rows = self.rows.iter().filter(|row| row.is_constrained());
        rows.filter_map(|row| {
            let outputs = &self.tokens[row.draws.as_ref()?.outputs.clone()];
            Some((row.index, row, outputs))
        })
    }

    /// From now on the constrained rows draw what this allows. Without it they draw nothing.
    pub fn restrict(&mut self, allowed: Arc<dyn AllowedTokens>) {
        self.allowed = Some(allowed);
    }

    /// Everything that determines one draw except the logits.
    pub fn sample_input<'a>(&'a self, row: &'a StepRow, draws: &Draws, choice: ChoiceIndex) -> SampleInput<'a> {
        let request = &row.request;
        SampleInput {
            params: &request.sampling,
            stop: &request.stop,
            seed: request.seed,
            choice,
            output_index: draws.output_index,
            prompt: &request.prompt[..request.client_prompt_tokens as usize],
            outputs: &self.tokens[draws.outputs.clone()],
            logprobs: request.logprobs,
            allowed: row.is_constrained().then(|| match &self.allowed {
                Some(allowed) => Allowed::OfRow(allowed.as_ref(), row.index),
                None => Allowed::Words(&[]),
            }),
        }
    }
}

impl Draws {
    /// What is drawn where so many `rows` of the sequence follow. `None`: nothing.
    pub(crate) fn before_last(&self, rows: u32) -> Option<Self> {
        let drafts = self.drafts.checked_sub(rows)?;
        let outputs = match self.outputs.is_empty() {
            true => 0..0,
            // The guesses follow the outputs.
            false => self.outputs.start..self.outputs.end + drafts as usize,
        };
        Some(Self {
            choices: self.choices.clone(),
            output_index: OutputIndex(self.output_index.0 + drafts),
            outputs,
            drafts,
        })
    }
}

impl StepRow {
    /// Whether the request says what the output has to be.
    pub fn is_constrained(&self) -> bool {
        !self.request.constraint.is_none()
    }

    pub fn token_count(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
}

fn append<T: Copy>(buffer: &mut Vec<T>, items: &[T]) -> Range<usize> {
    let start = buffer.len();
    buffer.extend_from_slice(items);
    start..buffer.len()
}

/// Whether a draw depends on the outputs before it.
fn looks_back(request: &Request) -> bool {
    let params = &request.sampling;
    let is_penalised =
        params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
    is_penalised || !request.constraint.is_none()
}
