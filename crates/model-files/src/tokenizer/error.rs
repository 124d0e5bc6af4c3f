//! Why a file's tokenizer cannot be used.

use crate::gguf::GgufError;

/// All but [`TokenizerError::Encode`] are the model file's fault and come up when it is loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("the folder has no tokenizer.json; download the folder again, or choose another model")]
    Missing,
    #[error("the tokenizer is of kind \"{found}\"; this build reads byte-level BPE (\"gpt2\"): choose another model")]
    UnsupportedModel { found: String },
    #[error(
        "the tokenizer splits words as \"{found}\"; this build knows smollm, starcoder, refact, command-r and gpt-2: \
         choose another model"
    )]
    UnsupportedPreTokenizer { found: String },
    #[error("the metadata key \"{key}\" is set; this build does not do that: choose another model")]
    UnsupportedSetting { key: &'static str },
    #[error("the vocabulary has {found} tokens, expected 1 to {max}; the file is damaged: download it again")]
    VocabularySize { found: usize, max: usize },
    #[error("{types} token types for {tokens} tokens; the file is damaged: download it again")]
    TokenTypeCount { types: usize, tokens: usize },
    #[error("token {id} has the unknown type {number}; the file is damaged: download or convert it again")]
    UnknownTokenType { id: usize, number: i32 },
    #[error("token {id} (\"{token}\") is in the vocabulary twice; the file is damaged: download or convert it again")]
    DuplicateToken { id: usize, token: String },
    #[error("merge {rank} (\"{merge}\") does not join two tokens to a token; the file is damaged: download it again")]
    BadMerge { rank: usize, merge: String },
    #[error(
        "the metadata key \"{key}\" names token {id} of a vocabulary of {vocab_size}; the file is damaged: download it again"
    )]
    SpecialIdOutsideVocabulary {
        key: &'static str,
        id: u32,
        vocab_size: usize,
    },
    #[error("the tokenizer cannot be built: {cause}; choose another model")]
    Build {
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the text has more than {max} tokens; shorten it")]
    TooManyTokens { max: usize },
    #[error("the text cannot be tokenised: {cause}; change the text, retrying will not help")]
    Encode {
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
}
