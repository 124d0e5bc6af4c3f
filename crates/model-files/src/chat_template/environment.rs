//! The Jinja environment of Hugging Face's `apply_chat_template`, rebuilt on minijinja.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

use super::{python_json, strftime};

/// The message of a template's `raise_exception`, carried as an error's source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct RaisedException(pub(super) String);

/// Nested blocks, macros and includes; real templates nest fewer than 10.
const RECURSION_MAX: usize = 64;

pub(super) fn hugging_face(fuel: u64) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(fuel));
    environment.set_recursion_limit(RECURSION_MAX);
    environment.set_debug(false);
    environment.set_unknown_method_callback(unknown_method);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(RaisedException(message)))
    });
    environment.add_function("strftime_now", |format: String| strftime::now(&format));
    Ok(environment)
}

/// The stock filter escapes for HTML and refuses Python's keywords. This one writes what `json.dumps` writes with
/// `ensure_ascii=False`, as Hugging Face does.
fn tojson(value: &Value, indent: Option<Value>, keywords: Kwargs) -> Result<String, Error> {
    // Key order, separators and escaping are fixed, because templates only ask for the defaults.
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _ = keywords.get::<Option<Value>>(ignored)?;
    }
    let indent = match indent {
        Some(indent) => Some(indent),
        None => keywords.get::<Option<Value>>("indent")?,
    };
    keywords.assert_all_used()?;
    let indent = indent
        .filter(|indent| !indent.is_none())
        .map(usize::try_from)
        .transpose()?;
    python_json::to_string(value, indent)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "cannot write the value as JSON").with_source(error))
}

/// Python methods on values: first those that the compatibility crate lacks, then its own.
fn unknown_method(state: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    if value.kind() == ValueKind::String
        && let Some(text) = value.as_str()
    {
        match method {
            "rsplit" => return rsplit(text, arguments),
            "zfill" => {
                let (width,): (usize,) = from_args(arguments)?;
                return zfill(text, width);
            }
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(arguments)?;
                return Ok(text.strip_prefix(prefix).unwrap_or(text).into());
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(arguments)?;
                return Ok(text.strip_suffix(suffix).unwrap_or(text).into());
            }
            _ => {}
        }
    }
    pycompat::unknown_method_callback(state, value, method, arguments)
}

fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, splits): (Option<&str>, Option<i64>) = from_args(arguments)?;
    if separator == Some("") {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    // A negative count means no limit, as in Python.
    let pieces_max = splits
        .and_then(|splits| usize::try_from(splits).ok())
        .map_or(usize::MAX, |n| n.saturating_add(1));
    let mut pieces: Vec<&str> = match separator {
        Some(separator) => text.rsplitn(pieces_max, separator).collect(),
        None => rsplit_whitespace(text, pieces_max),
    };
    pieces.reverse();
    Ok(Value::from_iter(pieces))
}

/// Words from the right; the last piece keeps its inner whitespace, and no piece is empty.
fn rsplit_whitespace(text: &str, pieces_max: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        let split = rest.rsplit_once(char::is_whitespace);
        let (before, piece) = split.filter(|_| pieces.len() + 1 < pieces_max).unwrap_or(("", rest));
        pieces.push(piece);
        rest = before.trim_end();
    }
    pieces
}

fn zfill(text: &str, width: usize) -> Result<Value, Error> {
    /// Wider than any date or counter in a template.
    const WIDTH_MAX: usize = 1_024;
    if width > WIDTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "zfill: the width is too large"));
    }
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    let zeros = width.saturating_sub(text.chars().count());
    Ok(format!("{sign}{}{digits}", "0".repeat(zeros)).into())
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, which only mark the assistant's part for training, by
/// blocks that do nothing, so that whitespace around them is trimmed as before.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag_and_rest) = rest.split_at(start);
        out.push_str(before);
        let Some(length) = tag_and_rest.find("%}").map(|end| end + "%}".len()) else {
            rest = tag_and_rest;
            break;
        };
        let (tag, after) = tag_and_rest.split_at(length);
        let inner = tag
            .trim_start_matches("{%")
            .trim_end_matches("%}")
            .trim_matches(['-', '+'])
            .trim();
        match inner {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
