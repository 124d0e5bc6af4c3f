//! Where each running sequence stands in its grammar, and so which tokens it may draw next.

use std::sync::Arc;

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use serving_core::ids::{Attempt, ChoiceIndex, RequestId, TokenId};
use serving_core::request::{AttemptKey, OutputConstraint, OutputGrammar};

use crate::recent::Recent;
use crate::{GrammarError, Grammars};

const WORD_BITS: u32 = u32::BITS;
/// Tokens that are followed, and asked for alone, on the allowance of one mask.
const REPLAYED_TOKENS: usize = 64;

/// The places of one engine's sequences. A place is only a shortcut: without it the outputs are followed from the first one.
/// A place may take tens of megabytes, so whoever knows that a request has ended says so ([`Places::forget`]).
#[derive(Debug)]
pub struct Places {
    grammars: Arc<Grammars>,
    vocab_size: u32,
    places: Recent<(AttemptKey, ChoiceIndex), Place>,
    /// One bit for each token.
    allowed: Vec<u32>,
}

struct Place {
    matcher: Matcher,
    /// Outputs that the matcher has taken.
    taken: usize,
    /// Tokens that it has taken or been asked for since the last mask.
    since_mask: usize,
}

impl Place {
    /// Takes the outputs that are new, and says what may come next. Each mask refills what following may cost, so many new tokens,
    /// as after a migration, are taken in parts with a mask after each.
    fn follow(&mut self, outputs: &[TokenId]) -> Result<SimpleVob, GrammarError> {
        if self.since_mask > 0 {
            // What is kept of the last mask would stand in for a new one, and refill nothing.
            self.matcher.invalidate_bias_cache();
        }
        let new: Vec<u32> = outputs[self.taken..].iter().map(|token| token.0).collect();
        let lost = |error: &dyn std::fmt::Display| GrammarError::Lost(error.to_string());
        let (mut parts, matcher) = (new.chunks(REPLAYED_TOKENS).peekable(), &mut self.matcher);
        while let Some(part) = parts.next() {
            matcher.consume_tokens(part).map_err(|error| lost(&error))?;
            if parts.peek().is_some() {
                matcher.invalidate_bias_cache();
                matcher.compute_mask_or_eos().map_err(|error| lost(&error))?;
            }
        }
        (self.taken, self.since_mask) = (outputs.len(), 0);
        matcher.compute_mask_or_eos().map_err(|error| lost(&error))
    }

    /// Takes the outputs that are new, and says whether this token may follow them. `None`: a mask has to tell.
    fn allows(&mut self, outputs: &[TokenId], token: TokenId) -> Option<bool> {
        // A model may have rows for more tokens than its tokenizer knows.
        let known = self.matcher.tok_env().ok()?.tok_trie().vocab_size();
        if token.0 as usize >= known {
            return Some(false);
        }
        let new: Vec<u32> = outputs[self.taken..].iter().map(|token| token.0).collect();
        if self.since_mask + new.len() >= REPLAYED_TOKENS {
            return None;
        }
        self.since_mask += new.len() + 1;
        self.matcher.consume_tokens(&new).ok()?;
        self.taken = outputs.len();
        if self.matcher.is_stopped() {
            return None;
        }
        Some(self.matcher.validate_tokens(&[token.0]).ok()? > 0)
    }
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Place")
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}

impl Places {
    /// `sequences_max`: how many run at a time.
    pub fn new(grammars: Arc<Grammars>, vocab_size: u32, sequences_max: usize) -> Self {
        Self {
            grammars,
            vocab_size,
            places: Recent::new(sequences_max),
            allowed: Vec::new(),
        }
    }

    /// The tokens that may follow `outputs`, those of earlier attempts included: bit `token % 32` of word `token / 32`.
    ///
    /// # Errors
    /// The grammar is not compiled here, or cannot be followed.
    pub fn allowed(
        &mut self,
        sequence: (AttemptKey, ChoiceIndex),
        constraint: &OutputConstraint,
        outputs: &[TokenId],
    ) -> Result<&[u32], GrammarError> {
        let words = self.vocab_size.div_ceil(WORD_BITS) as usize;
        self.allowed.clear();
        match &constraint.grammar {
            Some(grammar) => self.follow(sequence, grammar, outputs)?,
            None => self.allowed.resize(words, u32::MAX),
        }
        self.allowed.resize(words, 0);
        if !constraint.allowed_tokens.is_empty() {
            keep_only(&mut self.allowed, &constraint.allowed_tokens);
        }
        for word in &constraint.bad_words {
            // The last token of a word is forbidden where the others stand before it.
            if let Some((last, before)) = word.split_last()
                && outputs.ends_with(before)
                && let Some(word) = self.allowed.get_mut((last.0 / WORD_BITS) as usize)
            {
                *word &= !(1 << (last.0 % WORD_BITS));
            }
        }
        Ok(&self.allowed)
    }

    /// Whether this token may follow `outputs`: what [`Self::allowed`] says of it, for much less work. `None`: only that tells, as
    /// after a migration, or where the grammar has been followed for long without it.
    pub fn allows(
        &mut self,
        sequence: (AttemptKey, ChoiceIndex),
        constraint: &OutputConstraint,
        (outputs, token): (&[TokenId], TokenId),
    ) -> Option<bool> {
        if token.0 >= self.vocab_size {
            return Some(false);
        }
        let allows_words = constraint.bad_words.iter().all(|word| {
            let last = word.split_last();
            last.is_none_or(|(last, before)| *last != token || !outputs.ends_with(before))
        });
        let is_listed = constraint.allowed_tokens.is_empty() || constraint.allowed_tokens.contains(&token);
        if !allows_words || !is_listed {
            return Some(false);
        }
        let Some(grammar) = &constraint.grammar else {
            return Some(true);
        };
        let place = self.place(sequence, grammar, outputs).ok()?;
        let allows = place.allows(outputs, token);
        if allows.is_none() && place.matcher.is_error() {
            self.places.remove(&sequence);
        }
        allows
    }

    /// Frees the places of a request that has ended.
    pub fn forget(&mut self, request: AttemptKey) {
        self.places.retain(|(key, _)| *key != request);
    }

    /// Where the sequence stands, at `outputs` or before.
    fn place(
        &mut self,
        sequence: (AttemptKey, ChoiceIndex),
        grammar: &OutputGrammar,
        outputs: &[TokenId],
    ) -> Result<&mut Place, GrammarError> {
        let is_known = self
            .places
            .get(&sequence)
            .is_some_and(|place| place.taken <= outputs.len());
        if !is_known {
            let compiled = self.grammars.find(grammar);
            let compiled = compiled.ok_or_else(|| GrammarError::Lost("it is not compiled here".to_owned()))?;
            let place = Place {
                matcher: compiled.start(),
                taken: 0,
                since_mask: 0,
            };
            self.places.insert(sequence, place);
        }
        let place = self.places.get(&sequence);
        place.ok_or_else(|| GrammarError::Lost("it has no place".to_owned()))
    }

    fn follow(
        &mut self,
        sequence: (AttemptKey, ChoiceIndex),
        grammar: &OutputGrammar,
        outputs: &[TokenId],
    ) -> Result<(), GrammarError> {
        let place = self.place(sequence, grammar, outputs)?;
        let was_asked_alone = place.since_mask > 0;
        match place.follow(outputs) {
            Ok(next) => {
                self.allowed.extend_from_slice(next.as_slice());
                Ok(())
            }
            Err(error) => {
                self.places.remove(&sequence);
                // The questions since the last mask may have used up what it allowed. A new place has asked nothing.
                match was_asked_alone {
                    true => self.follow(sequence, grammar, outputs),
                    false => Err(error),
                }
            }
        }
    }
}

/// Whether a constraint lets an output begin. Its grammar must be compiled.
pub fn allows_a_first_token(grammars: &Arc<Grammars>, constraint: &OutputConstraint, vocab_size: u32) -> bool {
    if constraint.is_none() {
        return true;
    }
    let nobody = AttemptKey {
        request: RequestId(0),
        attempt: Attempt(0),
    };
    let mut places = Places::new(grammars.clone(), vocab_size, 1);
    let allowed = places.allowed((nobody, ChoiceIndex(0)), constraint, &[]);
    allowed.is_ok_and(|words| words.iter().any(|word| *word != 0))
}

fn keep_only(allowed: &mut [u32], tokens: &[TokenId]) {
    let mut kept = vec![0; allowed.len()];
    for token in tokens {
        if let Some(word) = kept.get_mut((token.0 / WORD_BITS) as usize) {
            *word |= 1 << (token.0 % WORD_BITS);
        }
    }
    for (word, kept) in allowed.iter_mut().zip(kept) {
        *word &= kept;
    }
}

#[cfg(test)]
#[path = "places_tests.rs"]
mod tests;
