//! JSON as Python's `json.dumps` writes it: `", "` and `": "` as separators, and no escaping of printable characters.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Widest indentation; templates use 2 or 4.
const INDENT_MAX: usize = 32;

pub(super) fn to_string(value: &impl Serialize, indent: Option<usize>) -> serde_json::Result<String> {
    let mut out = Vec::new();
    match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced))?,
        Some(width) => {
            let spaces = [b' '; INDENT_MAX];
            let formatter = PrettyFormatter::with_indent(&spaces[..width.min(INDENT_MAX)]);
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
        }
    }
    String::from_utf8(out).map_err(serde::ser::Error::custom)
}

/// One line, a space after every comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
