//! A model's tokens as bytes, in the form in which the parser walks them.

use std::fmt;
use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use serving_core::ids::TokenId;

use crate::GrammarError;

/// Bytes of the longest token that the parser's tree of all tokens holds. It panics at a longer one.
const WORD_BYTES_MAX: usize = 1_024;

/// The bytes of every token. Control tokens and end tokens are no text: a grammar takes the end tokens where it may end, and others
/// only where rules name them.
#[derive(Clone)]
pub struct Vocabulary {
    pub(crate) tokens: TokEnv,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.tokens.tok_trie().vocab_size();
        f.debug_struct("Vocabulary")
            .field("size", &size)
            .finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// `bytes` gives a token's bytes, and whether it is a control token; `None` for an id that stands for nothing.
    ///
    /// # Errors
    /// A model without an end token: an output could not end.
    pub fn new<'a>(
        size: u32,
        end_tokens: &[TokenId],
        bytes: impl Fn(TokenId) -> Option<(&'a [u8], bool)>,
    ) -> Result<Self, GrammarError> {
        let Some(first_end) = end_tokens.first() else {
            return Err(GrammarError::NoVocabulary("it has no end token".to_owned()));
        };
        // Some model files call an end token a word. It ends the output all the same, so it must not stand inside a text.
        let is_text = |id, is_control: bool| !is_control && !end_tokens.contains(&TokenId(id));
        let word = |id| match bytes(TokenId(id)) {
            Some((bytes, is_control)) if is_text(id, is_control) => bytes.to_vec(),
            Some((name, _)) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat(),
            None => Vec::new(),
        };
        // A token without bytes stands in no text, so one that is too long is not drawn under a grammar.
        let fitting = |word: Vec<u8>| if word.len() <= WORD_BYTES_MAX { word } else { Vec::new() };
        let words: Vec<Vec<u8>> = (0..size).map(word).map(fitting).collect();
        let tree = TokTrie::from(&TokRxInfo::new(size, first_end.0), &words);
        let ends: Vec<u32> = end_tokens.iter().map(|token| token.0).collect();
        Ok(Self {
            tokens: Arc::new(ApproximateTokEnv::new(tree.with_eos_tokens(&ends))),
        })
    }
}
