//! The tokens that a constrained row may draw: asked one by one, or all at once.

use std::fmt;

use serving_core::ids::TokenId;

/// Knows what the constrained rows of a step may draw. All tokens of a row take a walk over the vocabulary, one takes microseconds.
pub trait AllowedTokens: fmt::Debug + Send + Sync {
    /// Whether a row may draw this token. `None`: only all of its tokens tell.
    fn allows(&self, row: usize, token: TokenId) -> Option<bool>;

    /// Bit `token % 32` of word `token / 32` says whether the row may draw a token. It may not draw tokens beyond the words. Waits
    /// where another thread works them out just now.
    fn all(&self, row: usize) -> &[u32];
}

/// The tokens that one row may draw.
#[derive(Clone, Copy, Debug)]
pub enum Allowed<'a> {
    /// In the form of [`AllowedTokens::all`].
    Words(&'a [u32]),
    /// Those of a row of a step.
    OfRow(&'a dyn AllowedTokens, usize),
}

impl<'a> Allowed<'a> {
    /// `None`: only all tokens tell.
    pub fn allows(self, token: TokenId) -> Option<bool> {
        match self {
            Self::Words(words) => Some(is_set(words, token)),
            Self::OfRow(of, row) => of.allows(row, token),
        }
    }

    pub fn words(self) -> &'a [u32] {
        match self {
            Self::Words(words) => words,
            Self::OfRow(of, row) => of.all(row),
        }
    }
}

/// Whether the words, in the form of [`AllowedTokens::all`], have the token.
pub fn is_set(words: &[u32], token: TokenId) -> bool {
    let word = words.get((token.0 / u32::BITS) as usize);
    word.is_some_and(|word| word & (1 << (token.0 % u32::BITS)) != 0)
}
