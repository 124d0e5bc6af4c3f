//! Values as Python prints them, into texts of a bounded size.

use std::fmt::{self, Write};

use minijinja::Error;
use minijinja::value::{Value, ValueKind};

use super::budget::{DEPTH_MAX, pay, text_bytes_max, too_long};

/// A text that refuses to grow past the longest that a rendering may make.
#[derive(Default)]
pub(super) struct Text(String);

impl Text {
    pub(super) fn of(write: impl FnOnce(&mut Text) -> fmt::Result) -> Result<String, Error> {
        let mut text = Text::default();
        write(&mut text).map_err(|_| too_long())?;
        Ok(text.0)
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > text_bytes_max() {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// What a template prints, or captures into a variable: each byte is paid for.
pub(super) struct Paid<W>(pub(super) W);

impl<W: Write> Write for Paid<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        pay(text.len()).map_err(|_| fmt::Error)?;
        self.0.write_str(text)
    }
}

/// Writes `text` so many times.
pub(super) fn repeat(out: &mut dyn Write, text: &str, times: usize) -> fmt::Result {
    (0..times).try_for_each(|_| out.write_str(text))
}

/// Writes `str(value)`; nothing for an undefined value, as Jinja does.
pub(super) fn print(out: &mut dyn Write, value: &Value) -> fmt::Result {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => out.write_str(text),
        (None, ValueKind::Undefined) => Ok(()),
        _ => represent(out, value, 0),
    }
}

/// Writes `repr(value)`.
fn represent(out: &mut dyn Write, value: &Value, depth: usize) -> fmt::Result {
    if depth > DEPTH_MAX {
        return Err(fmt::Error);
    }
    if let Some(text) = value.as_str() {
        return quote(out, text);
    }
    if let Some(number) = float(value) {
        return out.write_str(&float_text(number));
    }
    match value.kind() {
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::Map => {
            out.write_char('{')?;
            for (at, key) in value.try_iter().map_err(|_| fmt::Error)?.enumerate() {
                out.write_str(if at > 0 { ", " } else { "" })?;
                represent(out, &key, depth + 1)?;
                out.write_str(": ")?;
                represent(out, &value.get_item(&key).map_err(|_| fmt::Error)?, depth + 1)?;
            }
            out.write_char('}')
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.write_char(open)?;
            for (at, item) in value.try_iter().map_err(|_| fmt::Error)?.enumerate() {
                out.write_str(if at > 0 { ", " } else { "" })?;
                represent(out, &item, depth + 1)?;
            }
            let is_single = value.is_tuple() && value.len() == Some(1);
            out.write_str(if is_single { "," } else { "" })?;
            out.write_char(close)
        }
        _ => write!(out, "{value}"),
    }
}

/// The number, if the value is a float.
pub(super) fn float(value: &Value) -> Option<f64> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// Rust has Python's shortest digits and its thresholds for exponents, but writes the exponents themselves otherwise.
pub(super) fn float_text(number: f64) -> String {
    let text = format!("{number:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => format!("{digits}e{:+03}", exponent.parse::<i32>().unwrap_or_default()),
        None => text.to_lowercase(),
    }
}

fn quote(out: &mut dyn Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.write_char(quote)?;
    for character in text.chars() {
        match character {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            _ if character == quote => write!(out, "\\{quote}")?,
            _ if is_printable(character) => out.write_char(character)?,
            _ => match u32::from(character) {
                code @ ..0x100 => write!(out, "\\x{code:02x}")?,
                code @ ..0x1_0000 => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_char(quote)
}

/// Rust escapes the same characters as Python, and combining ones at a text's start.
fn is_printable(character: char) -> bool {
    let text: String = ['a', character].iter().collect();
    matches!(character, '\'' | '"') || text.escape_debug().count() == 2
}

/// Python counts four separators as white space that Unicode does not.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}
