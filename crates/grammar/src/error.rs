//! Why an output cannot follow a grammar.

use std::io;

use thiserror::Error;

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// The client's mistake, or more than this server takes.
    #[error("{0}")]
    Invalid(String),
    /// The operator's: without the bytes of its tokens nothing is known of a model's text.
    #[error("the tokens of the model are not known here: {0}")]
    NoVocabulary(String),
    /// The system's, and nobody's mistake: the same grammar may be compiled a moment later.
    #[error("the system starts no thread for the compiler of grammars: {0}")]
    NoThread(io::ErrorKind),
    /// Following it failed: nobody keeps it compiled, it grew beyond the limits, or the tokens so far do not fit it.
    #[error("the grammar cannot be followed: {0}")]
    Lost(String),
}
