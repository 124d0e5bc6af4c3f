//! Perplexity as `llama-perplexity` counts it: the text cut into chunks of n tokens, each scored alone from an empty
//! cache, only the second half of each chunk counted, a short last chunk dropped.

use engine::{EngineError, HostEngine, LogitsWanted, SequenceRows, prompt_logprob};
use serving_core::ids::{BlockId, TokenId};

/// Rows of a step; does not change the result.
pub const STEP_ROWS: usize = 256;

/// Sum of the negative log-likelihoods, and how many tokens it is over.
#[derive(Clone, Copy, Debug, Default)]
pub struct Score {
    pub sum: f64,
    pub tokens: u64,
}

impl Score {
    pub fn perplexity(self) -> f64 {
        (self.sum / self.tokens as f64).exp()
    }
}

/// Scores one chunk into `score`.
pub fn score_chunk(engine: &mut dyn HostEngine, chunk: &[TokenId], score: &mut Score) -> Result<(), EngineError> {
    let table: Vec<BlockId> = (0..chunk.len().div_ceil(16) as u32).map(BlockId).collect();
    let first_counted = chunk.len() / 2;
    let mut start = 0;
    while start < chunk.len() {
        let limit = if start < first_counted {
            first_counted
        } else {
            chunk.len()
        };
        let end = (start + STEP_ROWS).min(limit);
        let logits = if start < first_counted {
            LogitsWanted::None
        } else {
            LogitsWanted::All
        };
        let rows = SequenceRows {
            tokens: &chunk[start..end],
            first_position: start as u32,
            block_table: &table,
            logits,
        };
        engine.step(&[rows], &mut |_: usize, position: u32, row: &mut [f32]| {
            if let Some(next) = chunk.get(position as usize + 1) {
                // A row that is not finite counts as impossible, so that it cannot pass unseen.
                let logprob = prompt_logprob(row, *next, 0).map_or(f64::NEG_INFINITY, |found| f64::from(found.logprob));
                score.sum -= logprob;
                score.tokens += 1;
            }
        })?;
        start = end;
    }
    Ok(())
}
