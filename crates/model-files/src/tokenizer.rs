//! Text to token ids and back, as the model's own files say: a GGUF file's metadata, or a Hugging Face folder.

mod added;
mod byte_level;
mod control;
mod cuts;
mod encoder;
mod error;
mod export;
mod families;
mod finder;
mod folder;
mod gguf;
mod merging;
mod normalizer;
mod sentencepiece;
mod special;
mod splits;
mod words;

use std::fmt;
use std::path::PathBuf;

use serving_core::ids::TokenId;

#[cfg(any(test, feature = "testing"))]
pub(crate) use byte_level::char_of_byte;
use control::ControlTexts;
pub use control::RoleMarks;
use encoder::Encoder;
pub use error::TokenizerError;
pub use special::{SpecialTokens, TokenKind};

use crate::config;

/// Most tokens of a vocabulary.
const VOCAB_MAX: usize = config::VOCAB_MAX as usize;

/// Text to token ids and back. `Send + Sync`: share it in an `Arc`.
///
/// Encoding is that of the model's own tokenizer: control tokens written in the text (`<|im_start|>`) become their
/// ids. A vocabulary need not hold all 256 bytes (SmolLM2 has no 0x04, for example); such a byte is dropped, as
/// Hugging Face and llama.cpp do.
///
/// Decoding joins the bytes of the tokens. SentencePiece puts a space in front of a text, and decoding does not take it
/// away: an answer goes on behind a prompt, where its first space belongs to it. So a streamed text equals the text that is
/// decoded at once, and a text that is encoded and decoded may have one more space in front.
pub struct Tokenizer {
    encoder: Encoder,
    tokens: TokenTable,
    control: ControlTexts,
    special: SpecialTokens,
    content_hash: [u8; 32],
    source: Source,
}

/// Where the tokenizer came from.
enum Source {
    Gguf,
    Folder(PathBuf),
}

/// What is known of each token, indexed by id.
struct TokenTable {
    /// Raw bytes; empty for an id that no token has.
    bytes: Vec<Box<[u8]>>,
    kinds: Vec<TokenKind>,
}

impl Tokenizer {
    /// Token ids of `text`, control tokens in it parsed. `add_special` puts the begin token first where the model
    /// asks for one (`add_bos_token`); leave it off for text from a chat template, which writes its own.
    ///
    /// # Errors
    /// [`TokenizerError::PatternLimit`] for a run of more than about a million spaces; [`TokenizerError::Encode`], which no
    /// text is known to cause.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TokenizerError> {
        self.encode_at_most(text, add_special, usize::MAX)
    }

    /// As [`Tokenizer::encode`], and ends as soon as there are more than `tokens_max`.
    ///
    /// A byte-level vocabulary is encoded word by word, another one in pieces of about 8 KiB, so memory grows with the
    /// tokens that come out. Only a longer run without an end or a place to cut costs more (one letter a million times): up
    /// to 150 bytes for each of its bytes. Keep long texts off an async thread: a megabyte of prose takes 0.2 to
    /// 0.3 s.
    ///
    /// # Errors
    /// [`TokenizerError::TooManyTokens`], and those of [`Tokenizer::encode`].
    pub fn encode_at_most(
        &self,
        text: &str,
        add_special: bool,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        self.encoder.encode(text, self.begin(add_special), (tokens_max, None))
    }

    /// The text with `mark` inside each control token that is written in it, for [`Tokenizer::encode_hidden`], and inside each of
    /// `role_marks`. `None`: there is nothing to hide. `mark` must be in no text.
    ///
    /// A vocabulary whose control tokens are found after normalising finds those that only normalising makes.
    pub fn hide_control(&self, text: &str, mark: char, role_marks: Option<&RoleMarks>) -> Option<String> {
        self.control.hide(text, mark, role_marks)
    }

    /// The marks of roles among the tokens that somebody added to the vocabulary as plain text: those for which `is_role_mark` says so.
    /// White space and single characters are none.
    ///
    /// # Errors
    /// [`TokenizerError::Build`]. No tokenizer that was built is known to cause it.
    pub fn role_marks(&self, is_role_mark: &dyn Fn(&str) -> bool) -> Result<RoleMarks, TokenizerError> {
        RoleMarks::new(&self.tokens, is_role_mark)
    }

    /// As [`Tokenizer::encode_at_most`] of the text without `mark`, but no token spans a mark: a control token with one inside is
    /// plain text.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_at_most`].
    pub fn encode_hidden(
        &self,
        text: &str,
        mark: char,
        (add_special, tokens_max): (bool, usize),
    ) -> Result<Vec<TokenId>, TokenizerError> {
        self.encoder
            .encode(text, self.begin(add_special), (tokens_max, Some(mark)))
    }

    fn begin(&self, add_special: bool) -> Option<TokenId> {
        self.special.begin.filter(|_| add_special && self.special.add_begin)
    }

    /// Text of `tokens`; bytes that are not UTF-8, also an unfinished character at the end, become U+FFFD.
    /// `skip_special` leaves control tokens out. Ids outside the vocabulary are skipped.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let shown = tokens
            .iter()
            .filter(|&&token| !(skip_special && self.is_special(token)));
        let bytes: Vec<u8> = shown
            .filter_map(|&token| self.token_bytes(token))
            .flatten()
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Raw bytes of one token; `None` outside the vocabulary. They need not be whole UTF-8 characters.
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        Some(self.tokens.bytes.get(usize::try_from(token.0).ok()?)?)
    }

    /// Whether `token` is a control token: parsed from text, left out of answers.
    pub fn is_special(&self, token: TokenId) -> bool {
        let index = usize::try_from(token.0).ok();
        let kind = index.and_then(|index| self.tokens.kinds.get(index));
        matches!(kind, Some(TokenKind::Control | TokenKind::Unknown))
    }

    pub fn vocab_size(&self) -> usize {
        self.tokens.bytes.len()
    }

    /// Tokens that end a sequence: the model's end token and its end-of-turn and end-of-text tokens, ascending.
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.special.end
    }

    /// The token that begins a sequence.
    pub fn begin_token(&self) -> Option<TokenId> {
        self.special.begin
    }

    /// Whether a plain prompt gets the begin token in front.
    pub fn adds_begin(&self) -> bool {
        self.special.begin.is_some() && self.special.add_begin
    }

    /// The one end token that the model's files name first.
    pub fn main_end_token(&self) -> Option<TokenId> {
        self.special.main_end
    }

    /// Which tokens begin and end a sequence.
    pub(crate) fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// SHA-256 over everything that decides how text becomes ids: equal hashes mean equal tokenizers.
    pub fn content_hash(&self) -> [u8; 32] {
        self.content_hash
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
