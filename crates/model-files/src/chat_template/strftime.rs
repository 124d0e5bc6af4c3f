//! `strftime_now` for chat templates that print today's date. UTC, English names, the directives templates use.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// From the weekday of 1 January 1970.
const WEEKDAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];
const SECONDS_PER_DAY: u64 = 86_400;
/// Longest format string; bounds the output too.
const FORMAT_BYTES_MAX: usize = 1_024;

pub(super) fn now(format: &str) -> Result<String, Error> {
    // A clock before 1970 is broken, so 1970 is a sufficient answer.
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs());
    format_at(format, seconds)
}

fn format_at(format: &str, unix_seconds: u64) -> Result<String, Error> {
    if format.len() > FORMAT_BYTES_MAX {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "strftime_now: the format is too long",
        ));
    }
    let date = Date::at(unix_seconds);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let directive = characters.next().unwrap_or('%');
        out.push_str(&date.field(directive).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidOperation,
                format!("strftime_now: %{directive} is not supported"),
            )
        })?);
    }
    Ok(out)
}

struct Date {
    year: u64,
    /// 0 is January.
    month: usize,
    day: u64,
    /// 0 is 1 January.
    day_of_year: u64,
    days: u64,
    second_of_day: u64,
}

impl Date {
    fn at(unix_seconds: u64) -> Date {
        let days = unix_seconds / SECONDS_PER_DAY;
        let (mut year, mut left) = (1970, days);
        while left >= days_in_year(year) {
            left -= days_in_year(year);
            year += 1;
        }
        let (day_of_year, mut month) = (left, 0);
        while left >= days_in_month(year, month) {
            left -= days_in_month(year, month);
            month += 1;
        }
        Date {
            year,
            month,
            day: left + 1,
            day_of_year,
            days,
            second_of_day: unix_seconds % SECONDS_PER_DAY,
        }
    }

    fn field(&self, directive: char) -> Option<String> {
        let month = MONTHS.get(self.month)?;
        let weekday = WEEKDAYS.get((self.days % 7) as usize)?;
        let hour = self.second_of_day / 3_600;
        let (minute, second) = (self.second_of_day / 60 % 60, self.second_of_day % 60);
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month + 1),
            'd' => format!("{:02}", self.day),
            'j' => format!("{:03}", self.day_of_year + 1),
            'B' => (*month).to_owned(),
            'b' | 'h' => month.chars().take(3).collect(),
            'A' => (*weekday).to_owned(),
            'a' => weekday.chars().take(3).collect(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_in_month(year: u64, month: usize) -> u64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_as_date_u_prints_them() {
        // Seconds and texts from `date -u -d @N "+%A %d %B %Y %H:%M:%S %j %I%p"`.
        let cases = [
            (0, "Thursday 01 January 1970 00:00:00 001 12AM"),
            (951_782_399, "Monday 28 February 2000 23:59:59 059 11PM"),
            (951_782_400, "Tuesday 29 February 2000 00:00:00 060 12AM"),
            (4_107_542_399, "Sunday 28 February 2100 23:59:59 059 11PM"),
            (4_107_542_400, "Monday 01 March 2100 00:00:00 060 12AM"),
            (1_798_761_599, "Thursday 31 December 2026 23:59:59 365 11PM"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(format_at("%A %d %B %Y %H:%M:%S %j %I%p", seconds).unwrap(), expected);
        }
        assert_eq!(format_at("%d %b %Y, 100%%", 86_400).unwrap(), "02 Jan 1970, 100%");
        assert!(format_at("%Q", 0).is_err());
        assert!(now("%Y").unwrap().parse::<u32>().unwrap() >= 2025);
    }
}
