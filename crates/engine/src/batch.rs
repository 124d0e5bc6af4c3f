//! The limits of a step and the one check of a batch against them, used by every engine.

use crate::kv_geometry::KvGeometry;
use crate::{EngineError, SequenceRows};

/// Sizes fixed when an engine is opened, so that a step allocates nothing. A larger batch is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Rows of all sequences together.
    pub max_batch_tokens: u32,
    pub max_sequences: u32,
}

/// Limits the scratch memory: 65,536 rows of the largest model in reach need a few GB.
const MOST_BATCH_TOKENS: u32 = 65_536;

impl EngineLimits {
    /// # Errors
    /// No token, no sequence, or more than any engine takes.
    pub fn check(self) -> Result<(), EngineError> {
        let allowed = 1..=MOST_BATCH_TOKENS;
        if allowed.contains(&self.max_batch_tokens) && allowed.contains(&self.max_sequences) {
            return Ok(());
        }
        Err(EngineError::BadLimits {
            max_batch_tokens: self.max_batch_tokens,
            max_sequences: self.max_sequences,
            most: MOST_BATCH_TOKENS,
        })
    }
}

/// The figures that a batch is checked against.
#[derive(Clone, Copy, Debug)]
pub struct BatchBounds {
    pub limits: EngineLimits,
    pub vocab_size: u32,
    pub context_length: u32,
    pub geometry: KvGeometry,
}

impl BatchBounds {
    /// Checks everything except the block ids, which the claim checks.
    ///
    /// # Errors
    /// What is wrong with the batch: a bug of the caller.
    pub fn check(&self, batch: &[SequenceRows<'_>]) -> Result<(), EngineError> {
        let tokens = batch
            .iter()
            .fold(0usize, |sum, rows| sum.saturating_add(rows.tokens.len()));
        if batch.len() > self.limits.max_sequences as usize || tokens > self.limits.max_batch_tokens as usize {
            return Err(EngineError::BatchTooLarge {
                tokens,
                sequences: batch.len(),
                max_tokens: self.limits.max_batch_tokens,
                max_sequences: self.limits.max_sequences,
            });
        }
        for (sequence, rows) in batch.iter().enumerate() {
            if rows.tokens.is_empty() {
                return Err(EngineError::EmptySequence { sequence });
            }
            if let Some(token) = rows.tokens.iter().find(|token| token.0 >= self.vocab_size) {
                return Err(EngineError::TokenOutOfVocabulary {
                    sequence,
                    token: token.0,
                    vocab_size: self.vocab_size,
                });
            }
            let end = rows.end_position();
            if end > self.context_length {
                return Err(EngineError::BeyondContext {
                    sequence,
                    end,
                    context_length: self.context_length,
                });
            }
            let needed = self.geometry.blocks_for(end) as usize;
            if rows.block_table.len() < needed {
                return Err(EngineError::BlockTableTooShort {
                    sequence,
                    needed,
                    got: rows.block_table.len(),
                });
            }
        }
        Ok(())
    }
}
