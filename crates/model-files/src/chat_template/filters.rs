//! Filters whose minijinja version differs from Jinja's or has no bound on the text that it makes.

use std::collections::HashSet;

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, filters};

use super::budget::{pay_for_items, text_bytes_max, too_long, wrong};
use super::python::{self, Text};
use super::python_json::Style;

/// Heap of a short list and its place in another.
const LIST_BYTES: usize = 128;

pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| text(value));
    environment.add_filter("pprint", |value: &Value| {
        Text::of(|out| std::fmt::Write::write_fmt(out, format_args!("{value:#?}")))
    });
    environment.add_filter("indent", indent);
    environment.add_filter("truncate", truncate);
    environment.add_filter("join", join);
    environment.add_filter("forceescape", |state: &mut State, value: &Value| {
        filters::escape(state, value)
    });
    environment.add_filter(
        "replace",
        |value: &Value, old: &str, new: &str, count: Option<usize>| replace(&text(value)?, old, new, count),
    );
    environment.add_filter("center", |value: &Value, width: Option<usize>| {
        centre(&text(value)?, width.unwrap_or(80), " ", true)
    });
    environment.add_filter("trim", |value: &Value, characters: Option<&str>| -> Result<_, Error> {
        Ok(trim(&text(value)?, characters, [true, true]).to_owned())
    });
    environment.add_filter("wordcount", |value: &str| {
        let words = value.split(|character: char| !character.is_alphanumeric() && character != '_');
        words.filter(|word| !word.is_empty()).count()
    });
    environment.add_filter("format", |value: &Value, arguments: Rest<ValueOrKwargs>| {
        let arguments = arguments.into_values();
        check_format(&text(value)?, &arguments)?;
        formatting::format(FormatStyle::Printf, &text(value)?, &arguments)
    });
    environment.add_filter(
        "slice",
        |state: &State, value: Value, count: usize, fill: Option<Value>| {
            few(count).and_then(|()| filters::slice(state, value, count, fill))
        },
    );
    environment.add_filter(
        "batch",
        |state: &State, value: Value, count: usize, fill: Option<Value>| {
            few(count).and_then(|()| filters::batch(state, value, count, fill))
        },
    );
    environment.add_filter("dictsort", |value: &Value, is_exact: Option<bool>, keywords: Kwargs| {
        let exact = is_exact.map(|is_exact| ("case_sensitive", Value::from(is_exact)));
        let given = keywords.args().map(|name| Ok((name, keywords.get::<Value>(name)?)));
        let keywords: Kwargs = exact.into_iter().map(Ok).chain(given).collect::<Result<_, Error>>()?;
        filters::dictsort(value, keywords)
    });
    add_lenient_to(environment);
}

/// An undefined value is an empty list, and what is no number is the given one, or zero.
fn add_lenient_to(environment: &mut Environment<'static>) {
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| {
            if value.is_undefined() {
                Ok(0)
            } else {
                filters::length(value)
            }
        });
    }
    environment.add_filter("items", |value: &Value| {
        if value.is_undefined() {
            Ok(Value::from(Vec::<Value>::new()))
        } else {
            filters::items(value)
        }
    });
    environment.add_filter(
        "int",
        |state: &State, value: &Value, otherwise: Option<Value>, base: Option<u32>, keywords: Kwargs| {
            let otherwise = either(otherwise, &keywords, "default")?;
            let number = filters::int(state, value, None, base, keywords);
            Ok::<_, Error>(number.unwrap_or(if otherwise.is_undefined() { 0.into() } else { otherwise }))
        },
    );
    environment.add_filter(
        "float",
        |state: &State, value: &Value, otherwise: Option<Value>, keywords: Kwargs| {
            let otherwise = either(otherwise, &keywords, "default")?;
            let number = filters::float(state, value, None, keywords);
            Ok::<_, Error>(number.unwrap_or(if otherwise.is_undefined() {
                0.0.into()
            } else {
                otherwise
            }))
        },
    );
}

/// As many lists, or items to fill one, as a list may have.
fn few(count: usize) -> Result<(), Error> {
    pay_for_items(count, LIST_BYTES)
}

/// An argument that may be given by its place or by its name; undefined without both.
fn either(given: Option<Value>, keywords: &Kwargs, name: &str) -> Result<Value, Error> {
    match given {
        Some(given) => Ok(given),
        None => Ok(keywords.get::<Option<Value>>(name)?.unwrap_or_default()),
    }
}

/// `str(value)`.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    Text::of(|out| python::print(out, value))
}

/// As transformers' own `tojson`: without escapes for HTML, with the keywords of `json.dumps`.
fn tojson(value: &Value, is_ascii: Option<bool>, indent: Option<Value>, keywords: Kwargs) -> Result<String, Error> {
    if value.is_undefined() {
        return Err(wrong("an undefined value is no JSON"));
    }
    let indent = either(indent, &keywords, "indent")?;
    let indent = match indent.as_str() {
        Some(text) => Some(text.to_owned()),
        None if indent.is_none() || indent.is_undefined() => None,
        None => Some(Text::of(|out| {
            python::repeat(out, " ", indent.as_usize().unwrap_or(0))
        })?),
    };
    let separators: Option<(String, String)> = keywords.get::<Option<Value>>("separators")?.and_then(|pair| {
        let part = |at| Some(pair.get_item_by_index(at).ok()?.as_str()?.to_owned());
        Some((part(0)?, part(1)?))
    });
    let comma = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = separators.unwrap_or((comma.to_owned(), ": ".to_owned()));
    let is_set = |name| Ok::<_, Error>(keywords.get::<Option<bool>>(name)?.unwrap_or(false));
    let style = Style {
        indent,
        item_separator,
        key_separator,
        is_ascii: is_ascii.unwrap_or(is_set("ensure_ascii")?),
        sorts_keys: is_set("sort_keys")?,
    };
    keywords.assert_all_used()?;
    Text::of(|out| style.write(out, value, 0))
}

fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    keywords: Kwargs,
) -> Result<String, Error> {
    let width = either(width, &keywords, "width")?;
    let width = match width.as_str() {
        Some(text) => text.to_owned(),
        None if width.is_undefined() => " ".repeat(4),
        None => Text::of(|out| python::repeat(out, " ", width.as_usize().unwrap_or(0)))?,
    };
    let first = first.unwrap_or(either(None, &keywords, "first")?.is_true());
    let blank = blank.unwrap_or(either(None, &keywords, "blank")?.is_true());
    let text = text(value)?;
    Text::of(|out| {
        use std::fmt::Write;
        for (at, line) in text.split('\n').enumerate() {
            out.write_str(if at > 0 { "\n" } else { "" })?;
            let is_indented = if at == 0 { first } else { blank || !line.is_empty() };
            out.write_str(if is_indented { &width } else { "" })?;
            out.write_str(line)?;
        }
        Ok(())
    })
}

fn truncate(
    value: &Value,
    length: Option<usize>,
    cuts_words: Option<bool>,
    end: Option<String>,
    keywords: Kwargs,
) -> Result<String, Error> {
    let length = length.or(keywords.get("length")?).unwrap_or(255);
    let cuts_words = cuts_words.or(keywords.get("killwords")?).unwrap_or(false);
    let end = end.or(keywords.get("end")?).unwrap_or("...".to_owned());
    let leeway: usize = keywords.get::<Option<usize>>("leeway")?.unwrap_or(5);
    let text = text(value)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let words = if cuts_words { None } else { kept.rsplit_once(' ') };
    Ok(words.map_or(&kept[..], |(words, _)| words).to_owned() + &end)
}

fn join(value: &Value, separator: Option<&str>, attribute: Option<&str>, keywords: Kwargs) -> Result<String, Error> {
    let attribute = attribute.or(keywords.get("attribute")?);
    let separator = separator.or(keywords.get("d")?).unwrap_or("");
    let item = |item: Value| match attribute {
        Some(path) => path.split('.').try_fold(item, |item, name| item.get_attr(name)),
        None => Ok(item),
    };
    let items = value.try_iter()?.map(item).collect::<Result<Vec<_>, Error>>()?;
    joined(separator, items.into_iter())
}

pub(super) fn joined(separator: &str, items: impl Iterator<Item = Value>) -> Result<String, Error> {
    Text::of(|out| {
        use std::fmt::Write;
        for (at, item) in items.enumerate() {
            out.write_str(if at > 0 { separator } else { "" })?;
            python::print(out, &item)?;
        }
        Ok(())
    })
}

pub(super) fn replace(text: &str, old: &str, new: &str, count: Option<usize>) -> Result<String, Error> {
    let count = text.matches(old).take(count.unwrap_or(usize::MAX)).count();
    if count.saturating_mul(new.len()).saturating_add(text.len()) > text_bytes_max() {
        return Err(too_long());
    }
    Ok(text.replacen(old, new, count))
}

/// Python's method puts an odd space on another side than the filter.
pub(super) fn centre(text: &str, width: usize, fill: &str, is_filter: bool) -> Result<String, Error> {
    let spaces = width.saturating_sub(text.chars().count());
    let odd = usize::from(spaces % 2 == 1 && width % 2 == 1 && !is_filter);
    pad(text, spaces / 2 + odd, spaces - spaces / 2 - odd, fill)
}

pub(super) fn pad(text: &str, left: usize, right: usize, fill: &str) -> Result<String, Error> {
    use std::fmt::Write;
    Text::of(|out| {
        python::repeat(out, fill, left)?;
        out.write_str(text)?;
        python::repeat(out, fill, right)
    })
}

pub(super) fn trim<'a>(text: &'a str, characters: Option<&str>, [left, right]: [bool; 2]) -> &'a str {
    let cut: Option<HashSet<char>> = characters.map(|cut| cut.chars().collect());
    let is_cut = |character: char| match &cut {
        Some(cut) => cut.contains(&character),
        None => python::is_space(character),
    };
    let text = if left { text.trim_start_matches(is_cut) } else { text };
    if right { text.trim_end_matches(is_cut) } else { text }
}

/// minijinja pads to any width and repeats arguments as often as they are named, so a format is refused that names a width of
/// five digits, or whose fields with their widest or longest argument would make too long a text.
pub(super) fn check_format(format: &str, arguments: &[Value]) -> Result<(), Error> {
    let mut widest = 0;
    for width in format.split(|character: char| !character.is_ascii_digit()) {
        if width.len() > 4 {
            return Err(too_long());
        }
        widest = widest.max(width.parse().unwrap_or(0));
    }
    for argument in arguments {
        widest = widest.max(match argument.as_str() {
            Some(text) => text.len(),
            None => text(argument)?.len(),
        });
    }
    if format.matches(['%', '{']).count().saturating_mul(widest) > text_bytes_max() {
        return Err(too_long());
    }
    Ok(())
}

/// Whether a value is a list, a tuple or something else with an order.
pub(super) fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}
