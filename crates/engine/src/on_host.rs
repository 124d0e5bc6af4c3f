//! Makes an engine whose logits come to the host a whole [`Engine`]: rows in, drawn tokens and prompt logprobs out.

use std::sync::Arc;

use serving_core::ids::ChoiceIndex;
use serving_core::request::{AttemptKey, TokenLogprobs};
use serving_core::scheduler::{SampledToken, SamplingFailed};

use crate::{
    CompletedStep, Draws, Engine, EngineLimits, HostEngine, KvMemory, LogitsSink, LogitsWanted, ModelFacts,
    PromptLogprobsChunk, SampleError, Sampler, SequenceRows, Step, StepOutput, prompt_logprob,
};

/// An engine with its sampler. A step has completed when `submit` returns. The buffers of a step are used again: a step
/// allocates only what it reports.
pub struct OnHost<E> {
    engine: E,
    sampler: Sampler,
    batch: Vec<SequenceRows<'static>>,
    /// One row of logits, for prompts that several choices draw from.
    scratch: Vec<f32>,
    completed: Option<CompletedStep>,
}

impl<E: HostEngine> std::fmt::Debug for OnHost<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OnHost")
            .field("model", self.engine.model())
            .finish_non_exhaustive()
    }
}

impl<E: HostEngine> OnHost<E> {
    /// # Errors
    /// A vocabulary that is too large to sample from.
    pub fn new(engine: E) -> Result<Self, SampleError> {
        let vocab_size = engine.model().vocab_size;
        let sequences = engine.limits().max_sequences as usize;
        Ok(Self {
            sampler: Sampler::new(vocab_size)?,
            engine,
            batch: Vec::with_capacity(sequences),
            scratch: Vec::with_capacity(vocab_size as usize),
            completed: None,
        })
    }
}

impl<E: HostEngine> Engine for OnHost<E> {
    fn model(&self) -> &ModelFacts {
        self.engine.model()
    }
    fn limits(&self) -> EngineLimits {
        self.engine.limits()
    }
    fn kv(&self) -> &Arc<KvMemory> {
        self.engine.kv()
    }
    fn checks_guesses(&self) -> bool {
        true
    }

    fn submit(&mut self, step: Step) {
        let mut output = StepOutput::default();
        let mut batch = recycle(std::mem::take(&mut self.batch));
        batch.extend(step.rows().iter().map(|row| step.sequence(row)));
        let mut sink = Draw {
            step: &step,
            sampler: &mut self.sampler,
            scratch: &mut self.scratch,
            output: &mut output,
        };
        let ran = self.engine.step(&batch, &mut sink);
        self.batch = recycle(batch);
        let result = ran.map(|()| output);
        self.completed = Some(CompletedStep { step, result });
    }

    fn complete(&mut self) -> Option<CompletedStep> {
        self.completed.take()
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

/// Draws what a step asks for from rows of logits.
pub struct Draw<'a> {
    pub step: &'a Step,
    pub sampler: &'a mut Sampler,
    /// One row of logits, for prompts that several choices draw from.
    pub scratch: &'a mut Vec<f32>,
    pub output: &'a mut StepOutput,
}

impl std::fmt::Debug for Draw<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Draw").field("step", self.step).finish_non_exhaustive()
    }
}

impl LogitsSink for Draw<'_> {
    fn row(&mut self, sequence: usize, position: u32, logits: &mut [f32]) {
        let Some(row) = self.step.rows().get(sequence) else {
            return;
        };
        if row.logits == LogitsWanted::All {
            self.score_prompt(sequence, position, logits);
        }
        let after = (row.first_position + row.token_count()).saturating_sub(position + 1);
        if let Some(draws) = row.draws.as_ref().and_then(|draws| draws.before_last(after)) {
            self.draw(sequence, &draws, logits);
        }
    }
}

impl Draw<'_> {
    /// The row at `position` predicts the token after it.
    fn score_prompt(&mut self, sequence: usize, position: u32, logits: &[f32]) {
        let row = &self.step.rows()[sequence];
        let request = &row.request;
        let prompt = &request.prompt[..request.client_prompt_tokens as usize];
        let Some(next) = prompt.get(position as usize + 1).copied() else {
            return;
        };
        match prompt_logprob(logits, next, request.prompt_logprobs.unwrap_or(0)) {
            Ok(logprobs) => self.report(row.key, position + 1, logprobs),
            Err(_) => self.output.unscored.push(row.key),
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

    fn draw(&mut self, sequence: usize, draws: &Draws, logits: &mut [f32]) {
        let row = &self.step.rows()[sequence];
        if draws.choices.len() > 1 {
            self.scratch.clear();
            self.scratch.extend_from_slice(logits);
        }
        for choice in draws.choices.clone() {
            if choice > draws.choices.start {
                logits.copy_from_slice(self.scratch);
            }
            let choice = ChoiceIndex(choice);
            let input = self.step.sample_input(row, draws, choice);
            let (token, logprobs) = match self.sampler.sample(&input, logits) {
                Ok(sampled) => (Ok(sampled.token), sampled.logprobs),
                Err(SampleError::NothingLeft) => (Err(SamplingFailed::RuledOut), None),
                Err(_) => (Err(SamplingFailed::NotFinite), None),
            };
            self.output.sampled.push(SampledToken {
                row: u32::try_from(sequence).unwrap_or(u32::MAX),
                choice,
                token,
                logprobs,
            });
        }
    }
}

#[cfg(test)]
#[path = "on_host_tests.rs"]
mod tests;
