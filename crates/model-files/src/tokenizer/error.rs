//! Why a model's tokenizer cannot be used.

use std::path::PathBuf;

use crate::gguf::GgufError;

/// An error of a library, whose own type is kept out of ours.
pub(super) type Cause = Box<dyn std::error::Error + Send + Sync>;

/// All but [`TokenizerError::Encode`], [`TokenizerError::TooManyTokens`] and [`TokenizerError::PatternLimit`] are the model
/// files' fault and come up when they are loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{}: {cause}; check the path and its permissions", path.display())]
    Io { path: PathBuf, cause: std::io::Error },
    #[error(
        "{} has no tokenizer.json; download it, or make it with transformers \
         (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))",
        folder.display()
    )]
    NoTokenizerJson { folder: PathBuf },
    #[error("{} is larger than {max_bytes} bytes; it is no file of a tokenizer: download it again", path.display())]
    TooLarge { path: PathBuf, max_bytes: u64 },
    #[error("{} is not what a tokenizer's file holds: {cause}; download it again", path.display())]
    Json { path: PathBuf, cause: serde_json::Error },
    #[error(
        "the tokenizer is of kind \"{found}\"; this build reads BPE (byte-level, or SentencePiece's): choose another model"
    )]
    UnsupportedModel { found: String },
    #[error("the tokenizer splits words as \"{found}\"; this build knows {known}: choose another model")]
    UnsupportedPreTokenizer { found: String, known: String },
    #[error("tokenizer.json has the {part} \"{found}\"; this build knows {known}: choose another model")]
    UnsupportedPart {
        /// `normalizer`, `pre_tokenizer`, `decoder` or `post_processor`.
        part: &'static str,
        found: String,
        known: &'static str,
    },
    #[error("the setting \"{key}\" asks for what this build does not do: choose another model")]
    UnsupportedSetting { key: &'static str },
    #[error("the vocabulary has {found} tokens, expected 1 to {max}; the file is damaged: download it again")]
    VocabularySize { found: usize, max: usize },
    #[error("{types} token types or scores for {tokens} tokens; the file is damaged: download it again")]
    TokenTypeCount { types: usize, tokens: usize },
    #[error("token {id} has the unknown type {number}; the file is damaged: download or convert it again")]
    UnknownTokenType { id: usize, number: i32 },
    #[error("the score of token {id} is not a number; the file is damaged: download or convert it again")]
    BadScore { id: usize },
    #[error("token {id} is marked as a byte and has another text; the file is damaged: download or convert it again")]
    BadByteToken { id: usize },
    #[error(
        "the vocabulary has neither all 256 bytes nor the token for unknown characters that it names; the file is damaged: \
         download or convert it again"
    )]
    NoUnknownToken,
    #[error("token {id} (\"{token}\") is in the vocabulary twice; the file is damaged: download or convert it again")]
    DuplicateToken { id: usize, token: String },
    #[error("merge {rank} (\"{merge}\") does not join two tokens to a token; the file is damaged: download it again")]
    BadMerge { rank: usize, merge: String },
    #[error("\"{key}\" names token {id} of a vocabulary of {vocab_size}; the file is damaged: download it again")]
    SpecialIdOutsideVocabulary {
        key: &'static str,
        id: u64,
        vocab_size: usize,
    },
    #[error(
        "\"{key}\" names the token \"{token}\", which the vocabulary lacks; the file is damaged: download it again"
    )]
    SpecialTokenUnknown { key: &'static str, token: String },
    #[error("the pattern \"{pattern}\" that cuts words cannot be used: {cause}; choose another model")]
    BadPattern { pattern: String, cause: Cause },
    #[error("the tokenizer cannot be built: {cause}; choose another model")]
    Build { cause: Cause },
    #[error("the tokenizer's files cannot be written: {}: {cause}; check the folder and its permissions", path.display())]
    Write { path: PathBuf, cause: std::io::Error },
    #[error("the text has more than {max} tokens; shorten it")]
    TooManyTokens { max: usize },
    /// The machine that matches the model's pattern has limits on its steps and its stack.
    #[error("the text is too much for the pattern with which this model cuts words: {cause}; shorten its longest run")]
    PatternLimit { cause: Cause },
    #[error("the text cannot be tokenised: {cause}; change the text, retrying will not help")]
    Encode { cause: Cause },
}
