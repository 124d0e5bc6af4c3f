//! JSON as Python's `json.dumps` writes it.

use std::fmt::{self, Write};

use minijinja::value::{Value, ValueKind};

use super::python::{self, float, float_text};

/// Deeper values than a client can send are the template's own.
const DEPTH_MAX: usize = 200;

/// The keywords of `json.dumps` that templates use.
pub(super) struct Style {
    /// One line without it.
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) is_ascii: bool,
    pub(super) sorts_keys: bool,
}

impl Style {
    pub(super) fn write(&self, out: &mut dyn Write, value: &Value, depth: usize) -> fmt::Result {
        if depth > DEPTH_MAX {
            return Err(fmt::Error);
        }
        if let Some(text) = value.as_str() {
            return self.quote(out, text);
        }
        match value.kind() {
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter().map_err(|_| fmt::Error)?.collect();
                if self.sorts_keys {
                    keys.sort();
                }
                self.block(
                    out,
                    ['{', '}'],
                    depth,
                    keys.into_iter().map(|key| {
                        let field = value.get_item(&key).unwrap_or_default();
                        (Some(key), field)
                    }),
                )
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter().map_err(|_| fmt::Error)?;
                self.block(out, ['[', ']'], depth, items.map(|item| (None, item)))
            }
            _ => out.write_str(&scalar(value)),
        }
    }

    fn block(
        &self,
        out: &mut dyn Write,
        brackets: [char; 2],
        depth: usize,
        items: impl Iterator<Item = (Option<Value>, Value)>,
    ) -> fmt::Result {
        let line = |out: &mut dyn Write, depth| match &self.indent {
            Some(indent) => out.write_char('\n').and_then(|()| python::repeat(out, indent, depth)),
            None => Ok(()),
        };
        out.write_char(brackets[0])?;
        let mut is_empty = true;
        for (key, item) in items {
            out.write_str(if is_empty { "" } else { &self.item_separator })?;
            is_empty = false;
            line(out, depth + 1)?;
            if let Some(key) = key {
                self.quote(out, key.as_str().unwrap_or(&scalar(&key)))?;
                out.write_str(&self.key_separator)?;
            }
            self.write(out, &item, depth + 1)?;
        }
        if !is_empty {
            line(out, depth)?;
        }
        out.write_char(brackets[1])
    }

    fn quote(&self, out: &mut dyn Write, text: &str) -> fmt::Result {
        out.write_char('"')?;
        for character in text.chars() {
            match character {
                '"' | '\\' => write!(out, "\\{character}")?,
                '\n' => out.write_str("\\n")?,
                '\r' => out.write_str("\\r")?,
                '\t' => out.write_str("\\t")?,
                '\x08' => out.write_str("\\b")?,
                '\x0c' => out.write_str("\\f")?,
                ..' ' => write!(out, "\\u{:04x}", u32::from(character))?,
                ' '..='\x7e' => out.write_char(character)?,
                _ if self.is_ascii => {
                    let mut units = [0; 2];
                    let mut units = character.encode_utf16(&mut units).iter();
                    units.try_for_each(|unit| write!(out, "\\u{unit:04x}"))?;
                }
                _ => out.write_char(character)?,
            }
        }
        out.write_char('"')
    }
}

fn scalar(value: &Value) -> String {
    match (float(value), value.kind()) {
        (Some(number), _) if number.is_nan() => "NaN".to_owned(),
        (Some(number), _) => float_text(number).replace("inf", "Infinity"),
        (None, ValueKind::Bool) => value.is_true().to_string(),
        (None, ValueKind::Number) => value.to_string(),
        _ => "null".to_owned(),
    }
}
