//! Baton's own trace format: JSON lines, a header with the number of the format, then one request a line, without text.
//! docs/reference/trace-formats.md describes it.

use std::io::Read;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serving_core::request::Lane;
use sha2::{Digest, Sha256};

use super::reading::{Lines, nanoseconds, read_rows, tokens};
use super::{ReadLimits, Trace, TraceError, TraceRequest, Turn, block_count};

/// Goes up when an old reader would misread a new file. A key that may be left out does not raise it.
const FORMAT_NUMBER: u64 = 1;
const FORMAT_NAME: &str = "baton's trace format";

#[derive(Serialize, Deserialize)]
struct HeaderLine {
    baton_trace: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default)]
    block_tokens: u32,
}

#[derive(Serialize, Deserialize)]
struct RequestLine {
    at_ns: u64,
    prompt_tokens: u64,
    output_tokens: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    prefix_blocks: Vec<u64>,
    #[serde(default, skip_serializing_if = "LaneName::is_usual")]
    lane: LaneName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    conversation: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    turn: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    think_ns: Option<u64>,
}

#[derive(Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LaneName {
    #[default]
    Interactive,
    Batch,
}

impl LaneName {
    fn is_usual(&self) -> bool {
        *self == Self::Interactive
    }
}

/// The first line of a trace, without its line end.
fn header_line(name: Option<&str>, block_tokens: u32) -> String {
    let line = HeaderLine {
        baton_trace: FORMAT_NUMBER,
        name: name.map(str::to_owned),
        block_tokens,
    };
    serde_json::to_string(&line).expect("a header has no value that JSON lacks")
}

/// One request, without its line end. Requests are written in the order of `at`.
fn request_line(request: &TraceRequest) -> String {
    let line = RequestLine {
        at_ns: whole_nanoseconds(request.at),
        prompt_tokens: request.prompt_tokens.into(),
        output_tokens: request.output_tokens.into(),
        prefix_blocks: request.prefix_blocks.clone(),
        lane: match request.lane {
            Lane::Interactive => LaneName::Interactive,
            Lane::Batch => LaneName::Batch,
        },
        conversation: request.conversation.map(|turn| turn.conversation),
        turn: request.conversation.map(|turn| turn.turn),
        think_ns: request
            .conversation
            .map(|turn| whole_nanoseconds(turn.think_time))
            .filter(|think| *think > 0),
    };
    serde_json::to_string(&line).expect("a request has no value that JSON lacks")
}

/// A whole trace as a file's text.
pub fn write(trace: &Trace) -> String {
    let mut text = header_line(Some(&trace.name), trace.block_tokens);
    text.push('\n');
    for request in &trace.requests {
        text.push_str(&request_line(request));
        text.push('\n');
    }
    text
}

/// SHA-256 of the file that `write` would make if the trace had no name, in hexadecimal digits. Equal hashes mean equal requests.
pub fn hash(trace: &Trace) -> String {
    let mut hash = Sha256::new();
    hash.update(header_line(None, trace.block_tokens));
    for request in &trace.requests {
        hash.update("\n");
        hash.update(request_line(request));
    }
    hash.update("\n");
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads what `write` or a recorder has written. `name` is the trace's name where the header has none.
pub(super) fn read(name: &str, input: &mut dyn Read, limits: &ReadLimits) -> Result<Trace, TraceError> {
    let mut lines = Lines::new(input, limits);
    let (_, first) = lines.next_line()?.ok_or(TraceError::Empty)?;
    let header: HeaderLine = serde_json::from_slice(first).map_err(|source| TraceError::NoHeader { source })?;
    if header.baton_trace != FORMAT_NUMBER {
        return Err(TraceError::UnknownNumber {
            number: header.baton_trace,
            known: FORMAT_NUMBER,
        });
    }
    let requests = read_rows(&mut lines, |row, line| {
        let line: RequestLine = serde_json::from_slice(line).map_err(|source| TraceError::NotARow {
            row,
            format: FORMAT_NAME,
            source,
        })?;
        request(row, line, header.block_tokens)
    })?;
    Ok(Trace {
        name: header.name.unwrap_or_else(|| name.to_owned()),
        block_tokens: header.block_tokens,
        requests,
    })
}

fn request(row: usize, line: RequestLine, block_tokens: u32) -> Result<TraceRequest, TraceError> {
    let prompt_tokens = tokens(row, "prompt_tokens", line.prompt_tokens)?;
    let blocks = line.prefix_blocks.len();
    // A recorder may leave out the id of a last block that is not full: nobody can share it.
    let expected = block_count(prompt_tokens, block_tokens);
    if blocks > expected {
        return Err(TraceError::WrongBlocks {
            row,
            prompt_tokens,
            block_tokens,
            blocks,
            expected,
        });
    }
    let conversation = match (line.conversation, line.turn) {
        (Some(conversation), Some(turn)) => Some(Turn {
            conversation,
            turn,
            think_time: nanoseconds(row, "think_ns", line.think_ns.unwrap_or(0))?,
        }),
        (None, None) => None,
        _ => {
            let what = "`conversation` and `turn` belong together: one of them is missing";
            return Err(TraceError::BadRow { row, what });
        }
    };
    Ok(TraceRequest {
        at: nanoseconds(row, "at_ns", line.at_ns)?,
        prompt_tokens,
        output_tokens: tokens(row, "output_tokens", line.output_tokens)?,
        prefix_blocks: line.prefix_blocks,
        lane: match line.lane {
            LaneName::Interactive => Lane::Interactive,
            LaneName::Batch => Lane::Batch,
        },
        conversation,
    })
}

fn whole_nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Trace, TraceError> {
        read("file", &mut text.as_bytes(), &ReadLimits::default())
    }

    fn request_of(at_ns: u64) -> TraceRequest {
        TraceRequest {
            at: Duration::from_nanos(at_ns),
            prompt_tokens: 40,
            output_tokens: 7,
            prefix_blocks: vec![3, u64::MAX, 9],
            lane: Lane::Batch,
            conversation: Some(Turn {
                conversation: 12,
                turn: 1,
                think_time: Duration::from_millis(1_500),
            }),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let plain = TraceRequest {
            prefix_blocks: Vec::new(),
            lane: Lane::Interactive,
            conversation: None,
            ..request_of(5)
        };
        let trace = Trace {
            name: "a name with \"quotes\"\n".to_owned(),
            block_tokens: 16,
            requests: vec![request_of(5), plain, request_of(6)],
        };
        assert_eq!(read_text(&write(&trace)).expect("it was just written"), trace);
    }

    /// The bytes are the format: a change of them is a new number, or every recorded trace is lost.
    #[test]
    fn the_bytes_of_a_line_stay() {
        assert_eq!(
            header_line(Some("n"), 16),
            r#"{"baton_trace":1,"name":"n","block_tokens":16}"#
        );
        assert_eq!(
            request_line(&TraceRequest {
                prefix_blocks: vec![3, 4],
                ..request_of(1_000)
            }),
            r#"{"at_ns":1000,"prompt_tokens":40,"output_tokens":7,"prefix_blocks":[3,4],"lane":"batch","conversation":12,"turn":1,"think_ns":1500000000}"#
        );
    }

    #[test]
    fn keys_of_later_baton_are_passed_over() {
        let text = "{\"baton_trace\":1,\"later\":true}\n\n{\"at_ns\":0,\"prompt_tokens\":1,\"output_tokens\":1,\"later\":[1]}\r\n";
        assert_eq!(read_text(text).expect("unknown keys are allowed").requests.len(), 1);
    }

    #[test]
    fn a_wrong_file_is_refused_with_the_line() {
        let row = r#"{"at_ns":9,"prompt_tokens":40,"output_tokens":7}"#;
        let file = |rows: &[&str]| format!("{}\n{}\n", header_line(None, 16), rows.join("\n"));
        assert!(matches!(read_text(""), Err(TraceError::Empty)));
        assert!(matches!(read_text(&file(&[])), Err(TraceError::Empty)));
        assert!(matches!(read_text(row), Err(TraceError::NoHeader { .. })));
        assert!(matches!(
            read_text(r#"{"baton_trace":2}"#),
            Err(TraceError::UnknownNumber { number: 2, .. })
        ));
        assert!(matches!(
            read_text(&file(&[row, "{"])),
            Err(TraceError::NotARow { row: 3, .. })
        ));
        let early = row.replace(":9,", ":8,");
        assert!(matches!(
            read_text(&file(&[row, &early])),
            Err(TraceError::TimeGoesBack { row: 3 })
        ));
        let empty = row.replace(":7}", ":0}");
        assert!(matches!(
            read_text(&file(&[&empty])),
            Err(TraceError::NoTokens { row: 2, .. })
        ));
        let huge = row.replace(":40,", ":99999999999,");
        assert!(matches!(
            read_text(&file(&[&huge])),
            Err(TraceError::TooHigh { row: 2, .. })
        ));
        let blocks = row.replace("7}", "7,\"prefix_blocks\":[1,2,3,4]}");
        assert!(matches!(
            read_text(&file(&[&blocks])),
            Err(TraceError::WrongBlocks { expected: 3, .. })
        ));
        let half = row.replace("7}", "7,\"turn\":0}");
        assert!(matches!(
            read_text(&file(&[&half])),
            Err(TraceError::BadRow { row: 2, .. })
        ));
    }
}
