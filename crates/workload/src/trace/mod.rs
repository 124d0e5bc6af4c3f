//! A trace: which requests arrive when, without their content. A trace never has text.
//!
//! `read` takes each format that baton knows (docs/reference/trace-formats.md). `own_format.rs` also writes baton's own.

mod azure;
pub mod facts;
pub mod mooncake;
pub mod own_format;
pub(crate) mod reading;
pub mod scaling;

pub use reading::{ReadLimits, TraceError};

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serving_core::request::Lane;

/// Requests in the order of their arrival.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Where it comes from, for reports: a file's name, or the words of the generator.
    pub name: String,
    /// Tokens that one id of `TraceRequest::prefix_blocks` stands for. 0: the trace knows no prefixes.
    pub block_tokens: u32,
    pub requests: Vec<TraceRequest>,
}

impl Trace {
    /// The same requests, the first one at the start. A file that was cut out of the middle of a trace begins at a late time, until
    /// which a run would wait.
    #[must_use]
    pub fn begun_at_zero(mut self) -> Self {
        let first = self.requests.first().map_or(Duration::ZERO, |request| request.at);
        for request in &mut self.requests {
            request.at = request.at.saturating_sub(first);
        }
        self
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceRequest {
    /// Time from the start of the trace.
    pub at: Duration,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// One id for each block of the prompt; the last block may be partial. Equal ids mean that the prompts are equal up to
    /// the end of that block. Empty: the prompt shares nothing with another one.
    pub prefix_blocks: Vec<u64>,
    pub lane: Lane,
    /// The conversation it belongs to. A turn is sent when the answer of the turn before it has ended, and not before `at`.
    pub conversation: Option<Turn>,
}

/// Blocks of a prompt, a partial one included. 0 where the trace knows no blocks.
pub fn block_count(prompt_tokens: u32, block_tokens: u32) -> usize {
    match block_tokens {
        0 => 0,
        _ => usize::try_from(prompt_tokens.div_ceil(block_tokens)).expect("a usize has 32 bits at least"),
    }
}

/// A place in a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    pub conversation: u64,
    /// The first turn is 0.
    pub turn: u32,
    /// Time between the end of the answer before it and this turn.
    pub think_time: Duration,
}

/// Reads a trace in any format that baton knows; the first bytes tell which. `name` is the file's name, for reports.
pub fn read(name: &str, input: &mut dyn Read, limits: &ReadLimits) -> Result<Trace, TraceError> {
    let mut input = BufReader::new(input);
    let start = input.fill_buf().map_err(|source| TraceError::Read { row: 1, source })?;
    // The readers pass over blank lines.
    let mut lines = start.split(|byte| *byte == b'\n');
    let first_line = lines.find(|line| !line.trim_ascii().is_empty()).unwrap_or_default();
    let has = |word: &str| first_line.windows(word.len()).any(|window| window == word.as_bytes());
    if has("\"hash_ids\"") || has("\"input_length\"") {
        mooncake::read(name, &mut input, limits)
    } else if has("ContextTokens") {
        azure::read(name, &mut input, limits)
    } else {
        own_format::read(name, &mut input, limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_before_the_first_row_hide_no_format() {
        let mooncake = r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#;
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,374,44";
        let own = "{\"baton_trace\":1}\n{\"at_ns\":0,\"prompt_tokens\":1,\"output_tokens\":1}";
        for text in [mooncake, azure, own] {
            let file = format!("\r\n \n{text}\n");
            let trace = read("file", &mut file.as_bytes(), &ReadLimits::default()).expect(text);
            assert_eq!(trace.requests.len(), 1, "{text}");
        }
    }
}
