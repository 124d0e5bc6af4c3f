//! Reads Mooncake's JSON lines (Qin et al., "Mooncake", USENIX FAST 2025): times in steps of about 3 s, lengths, and one id for
//! each 512 tokens of the prompt.

use std::io::Read;
use std::time::Duration;

use serde::Deserialize;
use serving_core::request::Lane;

use super::reading::{Lines, TIME_NS_MAX, read_rows, tokens};
use super::{ReadLimits, Trace, TraceError, TraceRequest, block_count};

const BLOCK_TOKENS: u32 = 512;
/// The latest time of a row, in milliseconds as the column has it.
const TIMESTAMP_MAX: u64 = TIME_NS_MAX / 1_000_000;

#[derive(Deserialize)]
struct Row {
    /// Milliseconds from the start.
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// An id stands for the whole prefix up to its block's end, which is what `TraceRequest::prefix_blocks` asks for.
pub(super) fn read(name: &str, input: &mut dyn Read, limits: &ReadLimits) -> Result<Trace, TraceError> {
    let requests = read_rows(&mut Lines::new(input, limits), |row, line| {
        let line = serde_json::from_slice(line).map_err(|source| TraceError::NotARow {
            row,
            format: "a Mooncake trace",
            source,
        })?;
        request(row, line)
    })?;
    Ok(Trace {
        name: name.to_owned(),
        block_tokens: BLOCK_TOKENS,
        requests,
    })
}

fn request(row: usize, line: Row) -> Result<TraceRequest, TraceError> {
    let prompt_tokens = tokens(row, "input_length", line.input_length)?;
    let (blocks, expected) = (line.hash_ids.len(), block_count(prompt_tokens, BLOCK_TOKENS));
    if blocks != expected {
        return Err(TraceError::WrongBlocks {
            row,
            prompt_tokens,
            block_tokens: BLOCK_TOKENS,
            blocks,
            expected,
        });
    }
    if line.timestamp > TIMESTAMP_MAX {
        return Err(TraceError::TooHigh {
            row,
            column: "timestamp",
            value: line.timestamp,
            max: TIMESTAMP_MAX,
        });
    }
    Ok(TraceRequest {
        at: Duration::from_millis(line.timestamp),
        prompt_tokens,
        output_tokens: tokens(row, "output_length", line.output_length)?,
        prefix_blocks: line.hash_ids,
        lane: Lane::Interactive,
        conversation: None,
    })
}

/// The steps that `StepSpread` spreads: Mooncake's times are whole steps of about this length.
pub const STEP: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Trace, TraceError> {
        read("file", &mut text.as_bytes(), &ReadLimits::default())
    }

    #[test]
    fn a_row_is_read() {
        let text = r#"{"timestamp": 27482, "input_length": 1025, "output_length": 52, "hash_ids": [46, 47, 48]}"#;
        let trace = read_text(text).expect("a row of the published file's form");
        let request = &trace.requests[0];
        assert_eq!(request.at, Duration::from_millis(27_482));
        assert_eq!((request.prompt_tokens, request.output_tokens), (1_025, 52));
        assert_eq!(request.prefix_blocks, [46, 47, 48]);
    }

    #[test]
    fn a_wrong_number_of_blocks_or_a_missing_column_is_refused() {
        let text = r#"{"timestamp": 0, "input_length": 1024, "output_length": 52, "hash_ids": [46, 47, 48]}"#;
        assert!(matches!(
            read_text(text),
            Err(TraceError::WrongBlocks {
                row: 1,
                blocks: 3,
                expected: 2,
                ..
            })
        ));
        let text = r#"{"timestamp": 0, "input_length": 1024, "output_length": 52}"#;
        assert!(matches!(read_text(text), Err(TraceError::NotARow { row: 1, .. })));
    }

    /// A message in another unit than the file's would send its reader to look for a figure that is not there.
    #[test]
    fn a_time_that_is_too_late_is_refused_in_milliseconds() {
        let at = |timestamp: u64| {
            let head = format!("{{\"timestamp\": {timestamp}, ");
            read_text(&(head + r#""input_length": 1, "output_length": 1, "hash_ids": [0]}"#))
        };
        assert!(at(TIMESTAMP_MAX).is_ok());
        for late in [TIMESTAMP_MAX + 1, u64::MAX] {
            let Err(TraceError::TooHigh { row: 1, value, max, .. }) = at(late) else {
                panic!("{late} ms is taken");
            };
            assert_eq!((value, max), (late, TIMESTAMP_MAX));
        }
    }
}
