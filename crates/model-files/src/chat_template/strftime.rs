//! `strftime_now` for chat templates that print today's date. UTC, English names, the directives templates use.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: &str = "January February March April May June July August September October November December";
const WEEKDAYS: &str = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday";
/// Longest format string; bounds the output too.
const FORMAT_BYTES_MAX: usize = 1_024;

pub(super) fn format_at(format: &str, time: SystemTime) -> Result<String, String> {
    let refused = |why: String| format!("strftime_now: {why}");
    if format.len() > FORMAT_BYTES_MAX {
        return Err(refused("the format is too long".to_owned()));
    }
    // A clock before 1970 is broken, so 1970 is a sufficient answer.
    let time = time.max(UNIX_EPOCH);
    // `Tue, 29 Feb 2000 00:00:00 GMT`: the calendar of HTTP's headers is the one that templates mean.
    let date = httpdate::fmt_http_date(time);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let directive = characters.next().unwrap_or('%');
        // `%-d` is `%d` without the zero in front.
        let is_short = directive == '-';
        let directive = if is_short {
            characters.next().unwrap_or('-')
        } else {
            directive
        };
        let field = field(&date, directive).ok_or_else(|| refused(format!("%{directive} is not supported")))?;
        let short = field.trim_start_matches('0');
        out.push_str(match (is_short, short) {
            (true, "") => "0",
            (true, short) => short,
            (false, _) => &field,
        });
    }
    Ok(out)
}

/// `date` is the date of an HTTP header.
fn field(date: &str, directive: char) -> Option<String> {
    let parts: Vec<&str> = date.split([' ', ',', ':']).filter(|part| !part.is_empty()).collect();
    let [weekday, day, month, year, hour, minute, second, _] = parts[..] else {
        return None;
    };
    let whole = |names: &'static str, start: &str| names.split(' ').find(|name| name.starts_with(start));
    let month_number = MONTHS.split(' ').position(|name| name.starts_with(month))? + 1;
    let hour_number: u32 = hour.parse().ok()?;
    Some(match directive {
        'Y' => year.to_owned(),
        'y' => year.get(2..)?.to_owned(),
        'm' => format!("{month_number:02}"),
        'd' => day.to_owned(),
        'j' => format!("{:03}", day_of_year(year, month_number, day)?),
        'B' => whole(MONTHS, month)?.to_owned(),
        'b' | 'h' => month.to_owned(),
        'A' => whole(WEEKDAYS, weekday)?.to_owned(),
        'a' => weekday.to_owned(),
        'H' => hour.to_owned(),
        'I' => format!("{:02}", (hour_number + 11) % 12 + 1),
        'p' => if hour_number < 12 { "AM" } else { "PM" }.to_owned(),
        'M' => minute.to_owned(),
        'S' => second.to_owned(),
        'F' => format!("{year}-{month_number:02}-{day}"),
        'T' | 'X' => format!("{hour}:{minute}:{second}"),
        'R' => format!("{hour}:{minute}"),
        'D' | 'x' => format!("{month_number:02}/{day}/{}", year.get(2..)?),
        'e' => format!("{:>2}", day.trim_start_matches('0')),
        'f' => "000000".to_owned(),
        'Z' => "UTC".to_owned(),
        'z' => "+0000".to_owned(),
        '%' => "%".to_owned(),
        _ => return None,
    })
}

/// 1 is 1 January; so is the month's number.
fn day_of_year(year: &str, month: usize, day: &str) -> Option<u32> {
    const DAYS_BEFORE_MONTH: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let (year, day): (u32, u32) = (year.parse().ok()?, day.parse().ok()?);
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    Some(DAYS_BEFORE_MONTH.get(month - 1)? + u32::from(is_leap && month > 2) + day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_as_date_u_prints_them() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
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
            assert_eq!(
                format_at("%A %d %B %Y %H:%M:%S %j %I%p", at(seconds)).unwrap(),
                expected
            );
        }
        assert_eq!(format_at("%d %b %Y, 100%%", at(86_400)).unwrap(), "02 Jan 1970, 100%");
        assert!(format_at("%Q", at(0)).is_err());
    }
}
