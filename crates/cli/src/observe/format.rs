//! Numbers and text from outside, in the form in which people read them.

/// Text from a server goes to a terminal: control characters, which could move the cursor or worse, become `?`.
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The columns that a text takes. Names of nodes, stages and requests are narrow characters.
pub fn width(text: &str) -> usize {
    text.chars().count()
}

/// At most `width` columns. A cut is marked.
pub fn fit(text: &str, width_max: usize) -> String {
    if width(text) <= width_max {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width_max.saturating_sub(1)).collect();
    if width_max > 0 {
        cut.push('~');
    }
    cut
}

/// `281.0`. Seconds and longer times stay in milliseconds, so that columns can be compared.
pub fn ms(value: f64) -> String {
    format!("{value:.1}")
}

/// At most `width` columns, with both ends of the text: names that begin alike differ at their ends. A cut is marked.
pub fn fit_middle(text: &str, width_max: usize) -> String {
    let width = width(text);
    if width <= width_max {
        return text.to_owned();
    }
    let kept = width_max.saturating_sub(1);
    let (head, tail) = (kept.div_ceil(2), kept / 2);
    let begin: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(width - tail).collect();
    match width_max {
        0 => String::new(),
        _ => format!("{begin}~{end}"),
    }
}

pub fn ms_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), ms)
}

pub fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// `11.8 MB`, in powers of ten as in networks.
pub fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 1000.0 {
            return if unit == "B" {
                format!("{count} B")
            } else {
                format!("{value:.1} {unit}")
            };
        }
        value /= 1000.0;
    }
    format!("{value:.1} TB")
}

/// `13 min 32 s`.
pub fn seconds(value: f64) -> String {
    // A cast of a float saturates, so odd values show as 0 or as a very long time.
    let s = value as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} d {} h", s / 86400, s / 3600 % 24),
    }
}

/// `12:03:11.482`, UTC.
pub fn time_of_day(unix_ms: f64) -> String {
    let ms = unix_ms as u64 % 86_400_000;
    let (s, ms) = (ms / 1000, ms % 1000);
    format!("{:02}:{:02}:{:02}.{ms:03}", s / 3600, s / 60 % 60, s % 60)
}

/// Joins parts in lines of at most `width_max` columns, as far as the parts allow. A separator that begins with a blank (`
/// + `) begins the next line; any other (`, `) ends its line.
pub fn wrap(parts: &[String], separator: &str, width_max: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        match lines.last_mut() {
            Some(line) if width(line) + width(separator) + width(part) < width_max => {
                line.push_str(separator);
                line.push_str(part);
            }
            Some(_) if separator.starts_with(' ') => lines.push(format!("{}{part}", separator.trim_start())),
            Some(line) => {
                line.push_str(separator.trim_end());
                lines.push(part.clone());
            }
            None => lines.push(part.clone()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_to_its_columns_and_loses_its_control_characters() {
        assert_eq!(fit("prefill-0", 9), "prefill-0");
        assert_eq!(fit("prefill-0", 5), "pref~");
        assert_eq!(fit("x", 0), "");
        assert_eq!(fit_middle("prefill-0", 9), "prefill-0");
        assert_eq!(fit_middle("decode-node-of-rack-17", 10), "decod~k-17");
        let cut = [2, 1, 0].map(|width_max| fit_middle("abc", width_max));
        assert_eq!(cut, ["a~", "~", ""]);
        assert_eq!(clean("a\x1b[2Jb\n"), "a?[2Jb?");
    }

    #[test]
    fn numbers_keep_their_unit_and_odd_ones_do_not_panic() {
        assert_eq!(bytes(11_796_480), "11.8 MB");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(u64::MAX), "18446744.1 TB");
        assert_eq!(seconds(812.0), "13 min 32 s");
        assert_eq!(seconds(-1.0), "0 s");
        assert_eq!(seconds(f64::MAX), "213503982334601 d 7 h");
        assert_eq!(time_of_day(1_795_337_856_123.4), "08:57:36.123");
        assert_eq!(time_of_day(f64::NAN), "00:00:00.000");
    }

    #[test]
    fn a_wrapped_list_keeps_every_part_and_its_width() {
        let parts: Vec<String> = (0..30).map(|at| format!("stage{at} 1.0")).collect();
        let lines = wrap(&parts, " + ", 40);
        assert!(
            lines.len() > 5 && lines.iter().all(|line| width(line) <= 40),
            "{lines:?}"
        );
        assert_eq!(lines.concat().matches("stage").count(), 30);
    }
}
