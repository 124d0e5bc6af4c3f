//! Numbers and outside text as the report shows them.

use std::fmt::Write as _;

/// Longest name or error that a table shows. Longer ones are cut, with a mark.
const SHOWN_CHARS_MAX: usize = 160;

/// Text for HTML and SVG, in elements and in quoted attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            // Other controls, and marks that turn the direction of the text around them, are shown as what they are.
            c if c.is_control() || is_direction_mark(c) => {
                let _ = write!(out, "\u{fffd}");
            }
            c => out.push(c),
        }
    }
    out
}

fn is_direction_mark(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// An outside text that is short enough for a table.
pub fn short(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Three significant digits, thousands apart. What is no number is a dash.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        "–".to_owned()
    } else if size >= 1e15 {
        format!("{value:.2e}")
    } else if size >= 999.5 {
        grouped(value)
    } else if size >= 99.95 {
        format!("{value:.0}")
    } else if size >= 9.995 {
        format!("{value:.1}")
    } else if size >= 0.9995 {
        format!("{value:.2}")
    } else if size >= 0.000_5 {
        format!("{value:.3}")
    } else if size == 0.0 {
        "0".to_owned()
    } else {
        format!("{value:.1e}")
    }
}

pub fn maybe(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), number)
}

/// A number for an axis: no digits that say nothing.
pub fn tick(value: f64) -> String {
    let text = number(value);
    match text.contains('.') && !text.contains('e') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut out = String::new();
    if value < 0.0 {
        out.push('-');
    }
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

pub fn percent(share: f64) -> String {
    match share.is_finite() {
        true => format!("{:.1} %", share * 100.0),
        false => "–".to_owned(),
    }
}

pub fn bytes(count: f64) -> String {
    match count {
        c if c >= 1e9 => format!("{} GB", number(c / 1e9)),
        c if c >= 1e6 => format!("{} MB", number(c / 1e6)),
        c if c >= 1e3 => format!("{} kB", number(c / 1e3)),
        c => format!("{} B", number(c)),
    }
}

/// A JSON value as a table shows it: text without quotes.
pub fn value(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Null => "–".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_are_shown_whatever_the_size() {
        let shown = [
            0.0,
            0.012_34,
            0.9,
            1.0,
            12.34,
            123.4,
            1_234.5,
            1_234_567.0,
            2.5e-7,
            f64::NAN,
            -4_321.0,
        ]
        .map(number);
        let wanted = [
            "0",
            "0.012",
            "0.900",
            "1.00",
            "12.3",
            "123",
            "1,234",
            "1,234,567",
            "2.5e-7",
            "–",
            "-4,321",
        ];
        assert_eq!(shown, wanted);
        assert_eq!([0.5, 10.0, 250.0, 1_000.0].map(tick), ["0.5", "10", "250", "1,000"]);
    }

    #[test]
    fn markup_controls_and_direction_marks_lose_their_power() {
        assert_eq!(
            escape("<a href='x'>&\"\u{0}\u{202e}"),
            "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\u{fffd}\u{fffd}"
        );
        assert_eq!(short(&"ü".repeat(500)).chars().count(), SHOWN_CHARS_MAX + 1);
    }
}
