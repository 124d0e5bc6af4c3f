//! Token kinds, and which tokens begin and end a sequence.

use serving_core::ids::TokenId;

use super::error::TokenizerError;
use super::families;
use crate::gguf::{GgufFile, optional};

/// Texts of tokens that end a turn or a document. Files often name only one end token, although chat models are trained to
/// end with any of these. So all that the vocabulary has as control tokens count (llama.cpp does so too).
pub(super) const END_TEXTS: [&str; 13] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<EOT>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
];
/// Keys of single end ids.
const END_KEYS: [&str; 3] = [
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
];

/// What a vocabulary entry is (llama.cpp's `llama_token_type`, the numbers of `tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TokenKind {
    Normal,
    Unknown,
    /// Controls the model. It is parsed from text, and never part of an answer's text.
    Control,
    /// Plain text that is always one token.
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    pub(super) fn from_number(number: i32) -> Option<TokenKind> {
        match number {
            1 => Some(TokenKind::Normal),
            2 => Some(TokenKind::Unknown),
            3 => Some(TokenKind::Control),
            4 => Some(TokenKind::UserDefined),
            5 => Some(TokenKind::Unused),
            6 => Some(TokenKind::Byte),
            _ => None,
        }
    }

    /// Whether the token's text in a prompt is this token before any splitting.
    pub(super) fn is_parsed_whole(self) -> bool {
        matches!(self, TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined)
    }
}

/// Which tokens begin and end a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialTokens {
    pub begin: Option<TokenId>,
    /// The model wants `begin` in front of plain prompts.
    pub add_begin: bool,
    /// Ascending, without duplicates.
    pub end: Vec<TokenId>,
    /// The one end token that the files name first.
    pub(super) main_end: Option<TokenId>,
}

impl SpecialTokens {
    /// `named`: what the files call end tokens, the main one first. `tokens`: text and kind of each id; those with a known
    /// end text are added.
    pub(super) fn new<'a>(
        (begin, add_begin): (Option<TokenId>, bool),
        named: Vec<TokenId>,
        tokens: impl Iterator<Item = (&'a str, TokenKind)>,
    ) -> Self {
        let main_end = named.first().copied();
        let is_end = |(text, kind): (&str, TokenKind)| match kind {
            TokenKind::Control => END_TEXTS.contains(&text),
            // Some converters write `<end_of_turn>` of Gemma so. Its `</s>` is a tag of HTML.
            TokenKind::UserDefined => text != "</s>" && END_TEXTS.contains(&text),
            _ => false,
        };
        let known = tokens.enumerate().filter(|(_, token)| is_end(*token));
        let known = known.map(|(id, _)| TokenId(id as u32));
        let mut end: Vec<_> = named.into_iter().chain(known).collect();
        end.sort_unstable();
        end.dedup();
        SpecialTokens {
            begin,
            add_begin,
            end,
            main_end,
        }
    }

    /// Reads the ids from the metadata and looks the known end texts up in the vocabulary.
    ///
    /// # Errors
    /// [`TokenizerError`]: a key has the wrong type or names an id outside the vocabulary.
    pub fn from_gguf(file: &GgufFile) -> Result<SpecialTokens, TokenizerError> {
        let tokens = file.str_array("tokenizer.ggml.tokens")?;
        let kinds = optional(file.i32_array("tokenizer.ggml.token_type"))?.unwrap_or_default();
        if optional(file.bool("tokenizer.ggml.add_eos_token"))? == Some(true) {
            return Err(TokenizerError::UnsupportedSetting {
                key: "tokenizer.ggml.add_eos_token",
            });
        }
        let id = |key: &'static str| match optional(file.u32(key))? {
            Some(id) if id as usize >= tokens.len() => Err(TokenizerError::SpecialIdOutsideVocabulary {
                key,
                id: id.into(),
                vocab_size: tokens.len(),
            }),
            other => Ok(other.map(TokenId)),
        };
        let mut named = Vec::new();
        for key in END_KEYS {
            named.extend(id(key)?);
        }
        let kinds = kinds
            .into_iter()
            .map(|kind| TokenKind::from_number(kind).unwrap_or(TokenKind::Normal));
        let with_kinds = tokens.iter().copied().zip(kinds);
        let begin = id("tokenizer.ggml.bos_token_id")?;
        let add_begin = match optional(file.bool("tokenizer.ggml.add_bos_token"))? {
            Some(add_begin) => add_begin,
            None => adds_begin_by_default(file)?,
        };
        Ok(SpecialTokens::new((begin, add_begin), named, with_kinds))
    }
}

/// What a file means that does not say whether the begin token is added: SentencePiece and Llama 3 add it.
fn adds_begin_by_default(file: &GgufFile) -> Result<bool, TokenizerError> {
    if optional(file.str("tokenizer.ggml.model"))? == Some("llama") {
        return Ok(true);
    }
    let name = optional(file.str("tokenizer.ggml.pre"))?;
    Ok(name.and_then(families::find).is_some_and(|family| family.adds_begin))
}
