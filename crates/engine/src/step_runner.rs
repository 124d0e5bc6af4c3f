//! Runs a scheduler's plan on an engine: rows in, drawn tokens and prompt logprobs out. The loop of every node uses it.

use serving_core::ids::TokenId;
use serving_core::request::{AttemptKey, TokenLogprobs};
use serving_core::scheduler::{PlannedRow, RowLogits, SampledToken, SamplingFailed, StepPlan};

use crate::{
    Engine, EngineError, LogitsSink, LogitsWanted, SampleError, SampleInput, Sampler, SequenceRows, prompt_logprob,
};

/// An engine with its sampler and the buffers of a step, which are reused: a step allocates only what it reports.
pub struct StepRunner {
    engine: Box<dyn Engine>,
    sampler: Sampler,
    batch: Vec<SequenceRows<'static>>,
    /// One row of logits, for prompts that several choices draw from.
    scratch: Vec<f32>,
    output: StepOutput,
}

/// What a step brought. Emptied by whoever uses it.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// In the order of the plan's draws, as `step_done` wants them.
    pub sampled: Vec<SampledToken>,
    pub prompt_logprobs: Vec<PromptLogprobsChunk>,
    /// Requests whose prompt could not be scored (logits that are not numbers): fail them after `step_done`.
    pub unscored: Vec<AttemptKey>,
}

/// Logprobs of the prompt tokens from `first_position` on, as far as one chunk gives them.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobsChunk {
    pub key: AttemptKey,
    pub first_position: u32,
    pub tokens: Vec<TokenLogprobs>,
}

impl std::fmt::Debug for StepRunner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StepRunner")
            .field("model", self.engine.model())
            .finish_non_exhaustive()
    }
}

impl StepRunner {
    /// # Errors
    /// A vocabulary that is too large to sample from.
    pub fn new(engine: Box<dyn Engine>) -> Result<Self, SampleError> {
        let vocab_size = engine.model().vocab_size;
        let sequences = engine.limits().max_sequences as usize;
        Ok(Self {
            sampler: Sampler::new(vocab_size)?,
            engine,
            batch: Vec::with_capacity(sequences),
            scratch: Vec::with_capacity(vocab_size as usize),
            output: StepOutput::default(),
        })
    }

    pub fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// Runs one step; the result is in `output`.
    ///
    /// # Errors
    /// The engine's: nothing was written.
    pub fn run(&mut self, plan: &StepPlan<'_>) -> Result<(), EngineError> {
        self.output.sampled.clear();
        self.output.prompt_logprobs.clear();
        self.output.unscored.clear();
        let mut batch = recycle(std::mem::take(&mut self.batch));
        batch.extend(plan.rows().iter().enumerate().map(|(i, row)| rows_of(plan, i, row)));
        let mut draws = Draws {
            plan,
            sampler: &mut self.sampler,
            scratch: &mut self.scratch,
            output: &mut self.output,
        };
        let ran = self.engine.step(&batch, &mut draws);
        self.batch = recycle(batch);
        ran
    }

    pub fn output(&mut self) -> &mut StepOutput {
        &mut self.output
    }
}

fn rows_of<'a>(plan: &StepPlan<'a>, i: usize, row: &PlannedRow) -> SequenceRows<'a> {
    SequenceRows {
        tokens: plan.tokens(i),
        first_position: row.first_position,
        block_table: plan.block_table(i),
        logits: match row.logits {
            RowLogits::None => LogitsWanted::None,
            RowLogits::Last => LogitsWanted::Last,
            RowLogits::All => LogitsWanted::All,
        },
    }
}

/// Empties a buffer and gives it another lifetime; collecting in place keeps the allocation.
fn recycle<'b>(mut batch: Vec<SequenceRows<'_>>) -> Vec<SequenceRows<'b>> {
    batch.clear();
    let emptied = batch.into_iter().map(|rows| SequenceRows {
        tokens: &[],
        first_position: rows.first_position,
        block_table: &[],
        logits: rows.logits,
    });
    emptied.collect()
}

struct Draws<'a, 'p> {
    plan: &'a StepPlan<'p>,
    sampler: &'a mut Sampler,
    scratch: &'a mut Vec<f32>,
    output: &'a mut StepOutput,
}

impl LogitsSink for Draws<'_, '_> {
    fn row(&mut self, sequence: usize, position: u32, logits: &mut [f32]) {
        let Some(row) = self.plan.rows().get(sequence) else {
            return;
        };
        if row.logits == RowLogits::All {
            self.score_prompt(sequence, position, logits);
        }
        let is_last = position + 1 == row.first_position + row.token_count;
        if is_last && row.draws > 0 {
            self.draw(sequence, row.draws, logits);
        }
    }
}

impl Draws<'_, '_> {
    /// The row at `position` predicts the token after it.
    fn score_prompt(&mut self, sequence: usize, position: u32, logits: &[f32]) {
        let request = self.plan.request(sequence);
        let (prompt, _) = self.plan.history(sequence);
        let Some(next) = prompt.get(position as usize + 1).copied() else {
            return;
        };
        let key = self.plan.rows()[sequence].key;
        match prompt_logprob(logits, next, request.prompt_logprobs.unwrap_or(0)) {
            Ok(logprobs) => self.report(key, position + 1, logprobs),
            Err(_) => self.output.unscored.push(key),
        }
    }

    fn report(&mut self, key: AttemptKey, position: u32, logprobs: TokenLogprobs) {
        let chunks = &mut self.output.prompt_logprobs;
        match chunks.last_mut().filter(|chunk| chunk.key == key) {
            Some(chunk) => chunk.tokens.push(logprobs),
            None => chunks.push(PromptLogprobsChunk {
                key,
                first_position: position,
                tokens: vec![logprobs],
            }),
        }
    }

    fn draw(&mut self, sequence: usize, draws: u32, logits: &mut [f32]) {
        let request = self.plan.request(sequence);
        let (prompt, outputs) = self.plan.history(sequence);
        if draws > 1 {
            self.scratch.clear();
            self.scratch.extend_from_slice(logits);
        }
        for (i, choice) in self.plan.draws(sequence).enumerate() {
            if i > 0 {
                logits.copy_from_slice(self.scratch);
            }
            let input = SampleInput {
                params: &request.sampling,
                stop: &request.stop,
                seed: request.seed,
                choice,
                output_index: self.plan.output_index(sequence),
                prompt,
                outputs,
                logprobs: request.logprobs,
            };
            let (token, logprobs) = match self.sampler.sample(&input, logits) {
                Ok(sampled) => (Ok::<TokenId, _>(sampled.token), sampled.logprobs),
                Err(_) => (Err(SamplingFailed), None),
            };
            let row = u32::try_from(sequence).unwrap_or(u32::MAX);
            self.output.sampled.push(SampledToken {
                row,
                choice,
                token,
                logprobs,
            });
        }
    }
}

#[cfg(test)]
#[path = "step_runner_tests.rs"]
mod tests;
