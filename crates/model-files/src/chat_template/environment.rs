//! The Jinja environment of Hugging Face's `apply_chat_template`, rebuilt on minijinja.

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, functions};

use super::budget::{built, parts, pay, pay_for_items, too_long, wrong};
use super::filters::{self, is_list};
use super::python::{self, Paid};
use super::{metered, methods, strftime};

/// The message of a template's `raise_exception`, carried as an error's source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct RaisedException(pub(super) String);

/// Nested blocks, macros and includes; real templates nest fewer than 10.
const RECURSION_MAX: usize = 64;
/// What one letter of a format of the clock becomes: `%c` has 24 characters.
const FIELD_BYTES_MAX: usize = 12;
/// Heap for a pair in a list of pairs.
const PAIR_BYTES: usize = 64;

pub(super) fn hugging_face(fuel: u64) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(fuel));
    environment.set_recursion_limit(RECURSION_MAX);
    environment.set_debug(false);
    environment.set_unknown_method_callback(methods::unknown_method);
    environment.set_formatter(|out, _, value| python::print(&mut Paid(out), value).map_err(|_| too_long()));
    filters::add_to(&mut environment);
    metered::add_to(&mut environment);
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = filters::text(message)?;
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(RaisedException(message)))
    });
    environment.add_function("dict", dict);
    environment.add_function("namespace", |value: Option<Value>, keywords: Kwargs| {
        let (values,) = from_args(&[dict(value, keywords)?])?;
        // It pays as the map that it is made of does; its values may change, so it is not looked into.
        functions::namespace(Some(values))
    });
    for name in ["iterable", "sequence"] {
        environment.add_test(name, |value: &Value| !value.is_none() && value.try_iter().is_ok());
    }
    environment.add_test("callable", |value: &Value| {
        let is_object = value.as_object().is_some();
        value.is_undefined() || is_object && value.try_iter().is_err()
    });
    Ok(environment)
}

pub(super) fn strftime(format: &str, now: SystemTime) -> Result<String, Error> {
    // The longest name of a month or a day for each of the two letters of a field.
    pay(format.len().saturating_mul(FIELD_BYTES_MAX))?;
    strftime::format_at(format, now).map_err(wrong)
}

/// Python's `dict` also takes pairs.
fn dict(value: Option<Value>, keywords: Kwargs) -> Result<Value, Error> {
    let pairs = match value {
        Some(value) if is_list(&value) => {
            pay_for_items(parts(&value), PAIR_BYTES)?;
            let pair =
                |pair: Value| -> Result<_, Error> { Ok((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?)) };
            let pairs = value.try_iter()?.map(pair).collect::<Result<Vec<_>, _>>()?;
            Some(Value::from_pairs(pairs))
        }
        value => value,
    };
    built(functions::dict(pairs, keywords)?)
}

/// The source as minijinja takes it: newlines as Jinja reads them, and `{% generation %}` and `{% endgeneration %}`, which
/// only mark the assistant's part for training, as a block that does nothing, so that whitespace around them is trimmed as
/// before.
pub(super) fn prepared(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
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
