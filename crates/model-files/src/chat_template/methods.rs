//! Methods of Python's `str`, `dict` and `list` that minijinja's own compatibility crate lacks, does otherwise or does not bound.

use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, State};
use minijinja_contrib::pycompat;

use super::budget::{pay_for_items, wrong};
use super::filters::{centre, check_format, is_list, joined, pad, replace, trim};
use super::python::is_space;

/// Heap for a piece of a text and its place in a list.
const PIECE_BYTES: usize = 64;

pub(super) fn unknown_method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        return text_method(state, text, method, arguments);
    }
    match method {
        "copy" if value.kind() == ValueKind::Map || is_list(value) => Ok(value.clone()),
        "index" if is_list(value) => {
            let (item,): (&Value,) = from_args(arguments)?;
            let at = value.try_iter()?.position(|other| other == *item);
            at.map(Value::from).ok_or_else(|| wrong("the list has no such item"))
        }
        _ => pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

fn text_method(state: &mut State, text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let mut python = |text: &str, method, arguments: &[Value]| {
        pycompat::unknown_method_callback(state, &text.into(), method, arguments)
    };
    Ok(match method {
        "split" => {
            let (separator, splits) = split_arguments(text, arguments)?;
            python(text, method, &[separator, splits.into()])?
        }
        "rsplit" => rsplit(text, arguments)?,
        "splitlines" => {
            pay_for_pieces(text, Some("\n"))?;
            python(text, method, arguments)?
        }
        "partition" | "rpartition" => partition(text, method, arguments)?,
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(arguments)?;
            trim(text, characters, [method != "rstrip", method != "lstrip"]).into()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "find" | "rfind" | "count" | "startswith" | "endswith" if arguments.len() > 1 => {
            let (what, start, end): (&Value, Option<i64>, Option<i64>) = from_args(arguments)?;
            let (start, part) = part(text, start, end);
            let found = python(part, method, std::slice::from_ref(what))?;
            let is_place = method.ends_with("find") && found.as_usize().is_some();
            if is_place {
                Value::from(start + found.as_usize().unwrap_or(0))
            } else {
                found
            }
        }
        "index" | "rindex" => {
            let at = text_method(state, text, &method.replace("index", "find"), arguments)?;
            at.as_usize()
                .map(Value::from)
                .ok_or_else(|| wrong("substring not found"))?
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(arguments)?;
            replace(text, old, new, count.and_then(|count| usize::try_from(count).ok()))?.into()
        }
        "join" => {
            let (items,): (&Value,) = from_args(arguments)?;
            joined(text, items.try_iter()?)?.into()
        }
        "format" => {
            check_format(text, arguments)?;
            python(text, method, arguments)?
        }
        "zfill" | "ljust" | "rjust" | "center" => padded(text, method, arguments)?.into(),
        "title" => title(text).into(),
        _ => python(text, method, arguments)?,
    })
}

fn partition(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(arguments)?;
    let is_first = method == "partition";
    let parts = if is_first {
        text.split_once(separator)
    } else {
        text.rsplit_once(separator)
    };
    let parts = match parts {
        Some((before, after)) => [before, separator, after],
        None if is_first => [text, "", ""],
        None => ["", "", text],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

fn padded(text: &str, method: &str, arguments: &[Value]) -> Result<String, Error> {
    let (width, fill): (usize, Option<&str>) = from_args(arguments)?;
    let (missing, fill) = (width.saturating_sub(text.chars().count()), fill.unwrap_or(" "));
    // As in Python. An empty text would be written as often as the width says, and would fill nothing.
    if fill.chars().count() != 1 {
        return Err(wrong("the fill character must be exactly one character long"));
    }
    match method {
        "zfill" => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            Ok(sign.to_owned() + &pad(digits, missing, 0, "0")?)
        }
        "ljust" => pad(text, 0, missing, fill),
        "rjust" => pad(text, missing, 0, fill),
        _ => centre(text, width, fill, false),
    }
}

/// Pays for the pieces of a text between its separators, or for its words.
fn pay_for_pieces(text: &str, separator: Option<&str>) -> Result<(), Error> {
    let pieces = match separator {
        Some(separator) => text.matches(separator).count() + 1,
        None => text.split(is_space).filter(|word| !word.is_empty()).count(),
    };
    pay_for_items(pieces, PIECE_BYTES)
}

/// The separator, and how often to split; a negative number means no limit. The pieces are paid for.
fn split_arguments(text: &str, arguments: &[Value]) -> Result<(Value, Option<i64>), Error> {
    let (separator, splits, keywords): (Option<Value>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = separator.or(keywords.get("sep")?).unwrap_or(Value::from(()));
    let splits = splits.or(keywords.get("maxsplit")?);
    keywords.assert_all_used()?;
    if separator.as_str() == Some("") {
        return Err(wrong("empty separator"));
    }
    pay_for_pieces(text, separator.as_str())?;
    Ok((separator, splits))
}

fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, splits) = split_arguments(text, arguments)?;
    let pieces_max = splits
        .and_then(|splits| usize::try_from(splits).ok())
        .map_or(usize::MAX, |n| n.saturating_add(1));
    let mut pieces: Vec<&str> = match separator.as_str() {
        Some(separator) => text.rsplitn(pieces_max, separator).collect(),
        None => rsplit_whitespace(text, pieces_max),
    };
    pieces.reverse();
    Ok(Value::from_iter(pieces))
}

/// Words from the right; the last piece keeps its inner whitespace, and no piece is empty.
fn rsplit_whitespace(text: &str, pieces_max: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let split = rest.rsplit_once(is_space);
        let (before, piece) = split.filter(|_| pieces.len() + 1 < pieces_max).unwrap_or(("", rest));
        pieces.push(piece);
        rest = before.trim_end_matches(is_space);
    }
    pieces
}

/// `text[start:end]` in characters, and where it starts.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, &str) {
    let length = text.chars().count();
    let place = |at: i64| {
        let distance = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
        if at < 0 {
            length.saturating_sub(distance)
        } else {
            distance.min(length)
        }
    };
    let (start, end) = (start.map_or(0, place), end.map_or(length, place));
    let byte = |at| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    (start, &text[byte(start)..byte(end.max(start))])
}

/// Python starts a word behind every character that is no letter.
fn title(text: &str) -> String {
    let mut out = String::new();
    let mut is_inside = false;
    for character in text.chars() {
        if is_inside {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        is_inside = character.is_alphabetic();
    }
    out
}
