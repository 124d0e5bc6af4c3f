//! The date and the time now, in UTC.

use std::time::SystemTime;

/// `YYYY-MM-DD`.
pub(crate) fn today() -> String {
    let [year, month, day, _] = fields(&now());
    format!("{year}-{month}-{day}")
}

/// `YYYYMMDD-HHMMSS`.
pub(crate) fn digits() -> String {
    let [year, month, day, time] = fields(&now());
    format!("{year}{month}{day}-{}", time.replace(':', ""))
}

fn now() -> String {
    httpdate::fmt_http_date(SystemTime::now())
}

/// The year, the month, the day and the time of `Sun, 06 Nov 1994 08:49:37 GMT`.
fn fields(date: &str) -> [String; 4] {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let words: Vec<&str> = date.split(' ').collect();
    let [_, day, month, year, time, _] = words[..] else {
        return Default::default();
    };
    let month = MONTHS
        .iter()
        .position(|name| *name == month)
        .map_or(0, |index| index + 1);
    [year.to_owned(), format!("{month:02}"), day.to_owned(), time.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_digits_that_sort() {
        assert_eq!(
            fields("Sun, 06 Nov 1994 08:49:37 GMT"),
            ["1994", "11", "06", "08:49:37"]
        );
        assert_eq!((today().len(), digits().len()), (10, 15));
    }
}
