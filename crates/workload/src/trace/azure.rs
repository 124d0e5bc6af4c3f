//! Reads the CSV files of Azure's public traces (Patel et al., "Splitwise", ISCA 2024): wall-clock times and lengths, no prefixes.

use std::io::Read;
use std::time::Duration;

use csv::StringRecord;
use serde::Deserialize;
use serving_core::request::Lane;

use super::reading::{Lines, read_rows, tokens};
use super::{ReadLimits, Trace, TraceError, TraceRequest};

#[derive(Deserialize)]
struct Row<'a> {
    #[serde(rename = "TIMESTAMP")]
    timestamp: &'a str,
    #[serde(rename = "ContextTokens")]
    context_tokens: u64,
    #[serde(rename = "GeneratedTokens")]
    generated_tokens: u64,
}

pub(super) fn read(name: &str, input: &mut dyn Read, limits: &ReadLimits) -> Result<Trace, TraceError> {
    let mut lines = Lines::new(input, limits);
    let (row, first) = lines.next_line()?.ok_or(TraceError::Empty)?;
    let header = fields(row, first)?;
    let mut first_at = None;
    let requests = read_rows(&mut lines, |row, line| {
        let record = fields(row, line)?;
        let line: Row = record
            .deserialize(Some(&header))
            .map_err(|source| TraceError::NotCsv { row, source })?;
        let at = wall_clock(line.timestamp).ok_or(TraceError::BadRow {
            row,
            what: "TIMESTAMP is no time of the form 2023-11-16 18:15:46.6805900",
        })?;
        let first_at = *first_at.get_or_insert(at);
        Ok(TraceRequest {
            at: at.checked_sub(first_at).ok_or(TraceError::TimeGoesBack { row })?,
            prompt_tokens: tokens(row, "ContextTokens", line.context_tokens)?,
            output_tokens: tokens(row, "GeneratedTokens", line.generated_tokens)?,
            prefix_blocks: Vec::new(),
            lane: Lane::Interactive,
            conversation: None,
        })
    })?;
    Ok(Trace {
        name: name.to_owned(),
        block_tokens: 0,
        requests,
    })
}

/// Lines are bounded before they come here, so this file is taken line by line: none of its fields has a line break.
fn fields(row: usize, line: &[u8]) -> Result<StringRecord, TraceError> {
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .buffer_capacity(line.len().max(1))
        .from_reader(line);
    let mut record = StringRecord::new();
    reader
        .read_record(&mut record)
        .map_err(|source| TraceError::NotCsv { row, source })?;
    Ok(record)
}

/// Time since the start of the year 1, for differences. Takes `T` for the blank and a time zone of zero, as the file of 2024 has.
fn wall_clock(text: &str) -> Option<Duration> {
    let text = text.strip_suffix("+00:00").or(text.strip_suffix('Z')).unwrap_or(text);
    let (date, time) = text.split_once([' ', 'T'])?;
    let [year, month, day] = three_numbers(date, '-')?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = three_numbers(clock, ':')?;
    let is_time = hour < 24 && minute < 60 && second < 60;
    let is_fraction = (1..=9).contains(&fraction.len()) && fraction.bytes().all(|byte| byte.is_ascii_digit());
    if !is_time || !is_fraction {
        return None;
    }
    let nanoseconds = format!("{fraction:0<9}").parse().ok()?;
    let seconds = days(year, month, day)? * 86_400 + hour * 3_600 + minute * 60 + second;
    Some(Duration::new(seconds, nanoseconds))
}

fn three_numbers(text: &str, between: char) -> Option<[u64; 3]> {
    let mut parts = text.split(between).map(|part| match part.len() {
        1..=4 if part.bytes().all(|byte| byte.is_ascii_digit()) => part.parse().ok(),
        _ => None,
    });
    let numbers = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(numbers)
}

/// Days since the first day of the year 1, in the Gregorian calendar. `None`: the calendar has no such day.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    const OF_MONTH: [u64; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let at = usize::try_from(month.checked_sub(1)?).ok()?;
    let of_month = OF_MONTH.get(at)?;
    let before_month: u64 = OF_MONTH[..at].iter().sum();
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let years = year.checked_sub(1)?;
    let longest = of_month + u64::from(is_leap && month == 2);
    if !(1..=longest).contains(&day) {
        return None;
    }
    let leap_day = u64::from(is_leap && month > 2);
    Some(years * 365 + years / 4 - years / 100 + years / 400 + before_month + leap_day + day - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Trace, TraceError> {
        read("file", &mut text.as_bytes(), &ReadLimits::default())
    }

    #[test]
    fn columns_are_found_by_name_and_times_count_from_the_first_row() {
        let text = "\u{feff}GeneratedTokens,TIMESTAMP,ContextTokens\r\n44,2023-12-31 23:59:59.6805900,374\r\n109,2024-01-01 00:00:00.9951690,396";
        let trace = read_text(text).expect("the published form, columns in another order");
        let second = &trace.requests[1];
        assert_eq!(trace.requests[0].at, Duration::ZERO);
        assert_eq!(second.at, Duration::from_nanos(1_314_579_000));
        assert_eq!((second.prompt_tokens, second.output_tokens), (396, 109));
    }

    /// 1 January 1970 is day 719,162 counted from 1 January of the year 1.
    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(days(1970, 1, 1), Some(719_162));
        assert_eq!(days(2024, 3, 1).zip(days(2024, 2, 28)).map(|(a, b)| a - b), Some(2));
        assert_eq!(days(2100, 3, 1).zip(days(2100, 2, 28)).map(|(a, b)| a - b), Some(1));
        assert_eq!(days(2024, 13, 1), None);
    }

    #[test]
    fn days_that_the_calendar_does_not_have_are_refused() {
        assert!(days(2024, 2, 29).is_some() && days(2000, 2, 29).is_some() && days(2023, 12, 31).is_some());
        for (year, month, day) in [
            (2023, 2, 29),
            (2100, 2, 29),
            (2024, 2, 30),
            (2023, 4, 31),
            (2023, 11, 31),
            (2023, 1, 0),
        ] {
            assert_eq!(days(year, month, day), None, "{year}-{month}-{day}");
        }
    }

    #[test]
    fn a_wrong_row_is_refused_with_its_line() {
        let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        let read = |row: &str| read_text(&format!("{header}{row}"));
        assert!(matches!(
            read("2023-11-16 18:15,374,44"),
            Err(TraceError::BadRow { row: 2, .. })
        ));
        assert!(matches!(
            read("2023-11-16 18:15:46.1,374"),
            Err(TraceError::NotCsv { row: 2, .. })
        ));
        assert!(matches!(
            read("2023-11-16 18:15:46.1,-1,44"),
            Err(TraceError::NotCsv { row: 2, .. })
        ));
        assert!(matches!(
            read("2023-11-16 18:15:46.1,1,0"),
            Err(TraceError::NoTokens { row: 2, .. })
        ));
        let back = "2023-11-16 18:15:46.1,1,1\n2023-11-16 18:15:46.0,1,1";
        assert!(matches!(read(back), Err(TraceError::TimeGoesBack { row: 3 })));
        assert!(matches!(read(""), Err(TraceError::Empty)));
    }
}
