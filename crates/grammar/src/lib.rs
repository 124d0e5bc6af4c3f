//! Output that follows a grammar. Owns: the vocabulary as bytes, compiled grammars, and where each sequence stands in its own.
//! `llguidance` parses; a JSON schema, a regular expression and Lark rules are grammars to it.
//!
//! Never does: sampling, templates, IO.
//! Promise: which tokens may come next depends on the constraint and the output tokens so far only. So a handoff, a retry or a
//! migration moves no state, and every node gives the same answer.
//! Read first: `grammars.rs` (compiling, for coordinator and nodes), then `places.rs` (following, on a node).

#![forbid(unsafe_code)]

mod error;
mod grammars;
mod places;
mod recent;
mod vocabulary;

pub use error::GrammarError;
pub use grammars::{CompiledGrammar, Grammars};
pub use places::{Places, allows_a_first_token};
pub use vocabulary::Vocabulary;
