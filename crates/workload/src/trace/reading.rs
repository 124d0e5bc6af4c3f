//! What all readers of traces share: limits on what is read, lines that cannot grow without end, and errors that name the row.

use std::io::{self, BufRead, BufReader, Read};
use std::time::Duration;

use super::TraceRequest;

/// Tokens of a prompt or of an answer. Far above every model's context, and far below what a sum of rows could overflow.
const TOKENS_MAX: u64 = 16 << 20;
/// A century: a later time is a wrong unit or a broken row.
pub(crate) const TIME_NS_MAX: u64 = 100 * 366 * 86_400 * 1_000_000_000;

/// Spreadsheets and scripts on Windows begin a file with it.
pub(crate) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What a reader takes at most. A row costs about 150 bytes of memory and 8 for each block id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    pub rows_max: usize,
    pub line_bytes_max: usize,
    /// Of the whole file.
    pub bytes_max: u64,
}

impl Default for ReadLimits {
    fn default() -> Self {
        Self {
            rows_max: 2_000_000,
            line_bytes_max: 1 << 20,
            bytes_max: 1 << 30,
        }
    }
}

/// A trace that cannot be read. `row` counts the lines of the file from 1, or the entries of a list.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("row {row} of the trace cannot be read: {source}")]
    Read { row: usize, source: io::Error },
    #[error("row {row} of the trace is longer than {bytes_max} bytes. Is this a trace?")]
    LineTooLong { row: usize, bytes_max: usize },
    #[error("the trace has more than {rows_max} requests. Cut the file")]
    TooManyRows { rows_max: usize },
    #[error("the trace is larger than {bytes_max} bytes. Cut the file")]
    TooLarge { bytes_max: u64 },
    #[error(
        "row {row} is no row of {format}: {}. If it is the last one, it may have been cut: delete it",
        without_place(source)
    )]
    NotARow {
        row: usize,
        format: &'static str,
        source: serde_json::Error,
    },
    #[error(
        "row {row} is no row of an Azure trace: {source}. Its columns are TIMESTAMP, ContextTokens and GeneratedTokens"
    )]
    NotCsv { row: usize, source: csv::Error },
    #[error("row {row}: {column} is {value}, at most {max} is possible. Is its unit another one? Or delete the row")]
    TooHigh {
        row: usize,
        column: &'static str,
        value: u64,
        max: u64,
    },
    #[error(
        "row {row}: {column} is 0. A request has at least one token in its prompt and one in its answer: delete the row"
    )]
    NoTokens { row: usize, column: &'static str },
    #[error("row {row} is earlier than the row before it. Sort the file by time")]
    TimeGoesBack { row: usize },
    #[error(
        "row {row}: a prompt of {prompt_tokens} tokens has {blocks} block ids, but {expected} blocks of {block_tokens} tokens. \
         The block size is wrong, or the row is"
    )]
    WrongBlocks {
        row: usize,
        prompt_tokens: u32,
        block_tokens: u32,
        blocks: usize,
        expected: usize,
    },
    #[error("row {row}: {what}")]
    BadRow { row: usize, what: &'static str },
    #[error(
        "the file does not begin with a header line like {{\"baton_trace\":1,\"block_tokens\":16}}, and is neither a Mooncake nor an Azure trace: {}",
        without_place(source)
    )]
    NoHeader { source: serde_json::Error },
    #[error(
        "the trace has format number {number}, and this baton reads number {known}. Use the baton that recorded it, or record again"
    )]
    UnknownNumber { number: u64, known: u64 },
    #[error("the file is no list of conversations in the form of ShareGPT: {source}")]
    NotAList { source: serde_json::Error },
    #[error("the trace has no requests")]
    Empty,
}

/// The parser sees single lines, so its "at line 1" would mislead.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_owned()
}

/// The lines of a file, none longer than the limit, and their numbers.
pub(crate) struct Lines<'a> {
    input: BufReader<io::Take<&'a mut dyn Read>>,
    limits: ReadLimits,
    line: Vec<u8>,
    row: usize,
}

impl<'a> Lines<'a> {
    pub(crate) fn new(input: &'a mut dyn Read, limits: &ReadLimits) -> Self {
        Self {
            // One byte more than allowed, so that a file of the allowed length can be told from a longer one.
            input: BufReader::new(input.take(limits.bytes_max.saturating_add(1))),
            limits: *limits,
            line: Vec::new(),
            row: 0,
        }
    }

    /// The next line that is not blank, without its end, and its number. `None` at the end of the file.
    pub(crate) fn next_line(&mut self) -> Result<Option<(usize, &[u8])>, TraceError> {
        loop {
            self.row += 1;
            let row = self.row;
            self.line.clear();
            let bytes_max = self.limits.line_bytes_max;
            let at_most = u64::try_from(bytes_max).unwrap_or(u64::MAX).saturating_add(1);
            let mut line = (&mut self.input).take(at_most);
            line.read_until(b'\n', &mut self.line)
                .map_err(|source| TraceError::Read { row, source })?;
            if self.input.get_ref().limit() == 0 {
                let bytes_max = self.limits.bytes_max;
                return Err(TraceError::TooLarge { bytes_max });
            }
            if self.line.is_empty() {
                return Ok(None);
            }
            if self.line.last() == Some(&b'\n') {
                self.line.pop();
            }
            if self.line.len() > bytes_max {
                return Err(TraceError::LineTooLong { row, bytes_max });
            }
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        let line = self.line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&self.line);
        Ok(Some((self.row, line.trim_ascii())))
    }
}

/// All rows that are left, in the order of time.
pub(crate) fn read_rows(
    lines: &mut Lines<'_>,
    mut parse: impl FnMut(usize, &[u8]) -> Result<TraceRequest, TraceError>,
) -> Result<Vec<TraceRequest>, TraceError> {
    let rows_max = lines.limits.rows_max;
    let mut requests: Vec<TraceRequest> = Vec::new();
    while let Some((row, line)) = lines.next_line()? {
        if requests.len() == rows_max {
            return Err(TraceError::TooManyRows { rows_max });
        }
        let request = parse(row, line)?;
        if requests.last().is_some_and(|before| before.at > request.at) {
            return Err(TraceError::TimeGoesBack { row });
        }
        requests.push(request);
    }
    match requests.is_empty() {
        true => Err(TraceError::Empty),
        false => Ok(requests),
    }
}

/// A count of tokens from a file.
pub(crate) fn tokens(row: usize, column: &'static str, value: u64) -> Result<u32, TraceError> {
    match u32::try_from(value) {
        Ok(0) => Err(TraceError::NoTokens { row, column }),
        Ok(tokens) if value <= TOKENS_MAX => Ok(tokens),
        _ => {
            let max = TOKENS_MAX;
            Err(TraceError::TooHigh {
                row,
                column,
                value,
                max,
            })
        }
    }
}

/// A number of nanoseconds from a file.
pub(crate) fn nanoseconds(row: usize, column: &'static str, value: u64) -> Result<Duration, TraceError> {
    let max = TIME_NS_MAX;
    match value <= max {
        true => Ok(Duration::from_nanos(value)),
        false => Err(TraceError::TooHigh {
            row,
            column,
            value,
            max,
        }),
    }
}
