//! A compiled template in which everything that makes a text or a list pays for it first or right after (`budget`). minijinja counts
//! instructions, but has no bound on what they make, so calls of the functions below are put between its instructions.

use std::sync::Arc;

use minijinja::machinery::{CompiledTemplate, Instruction, Instructions, Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::budget::{ITEMS_MAX, built, made, parts, pay, pay_for_items, refuse_owner, text_bytes_max, too_long, wrong};

/// Filters that make a number, a part of what they get, or a text that they bound themselves.
const LIGHT_FILTERS: &[&str] = &[
    "abs",
    "attr",
    "bool",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "first",
    "float",
    "format",
    "indent",
    "int",
    "last",
    "length",
    "lower",
    "max",
    "min",
    "pprint",
    "replace",
    "round",
    "safe",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "upper",
    "wordcount",
];
/// Filters whose list has no more in it than the list that they get.
const CHOOSING_FILTERS: &[&str] = &[
    "list",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "sort",
    "unique",
];
/// Filters that write one character as several.
const ESCAPING_FILTERS: &[&str] = &["e", "escape", "forceescape"];
const ESCAPE_BYTES_MAX: usize = 6;
/// Heap for an item that a filter or method makes of a part of its input.
const PART_BYTES: usize = 64;

/// A function that a template cannot name, because its name is no identifier.
#[derive(Clone, Copy, Debug)]
enum Meter {
    /// `made(value)`, `built(value)` and `stored(value)` give the value back.
    Made,
    Built,
    Stored,
    /// Pays for a macro's variables, and gives nothing.
    Enclosed,
    /// `times(a, b)` is `a * b`.
    Times,
    /// `filter(value, arguments.., name)` and `method(value, arguments.., name)`.
    Filter,
    Method,
}

impl Meter {
    const ALL: [Meter; 7] = [
        Meter::Made,
        Meter::Built,
        Meter::Stored,
        Meter::Enclosed,
        Meter::Times,
        Meter::Filter,
        Meter::Method,
    ];

    fn name(self) -> &'static str {
        match self {
            Meter::Made => "(made)",
            Meter::Built => "(built)",
            Meter::Stored => "(stored)",
            Meter::Enclosed => "(enclosed)",
            Meter::Times => "(times)",
            Meter::Filter => "(filter)",
            Meter::Method => "(method)",
        }
    }

    fn call<'a>(self, arguments: u16) -> Instruction<'a> {
        Instruction::CallFunction(self.name(), Some(arguments))
    }
}

impl Object for Meter {
    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        match (**self, arguments) {
            (Meter::Made, [value]) => made(value.clone()),
            (Meter::Built, [value]) => built(value.clone()),
            (Meter::Stored, [value]) => refuse_owner(value).map(|()| value.clone()),
            (Meter::Enclosed, []) => pay(PART_BYTES).map(|()| Value::UNDEFINED),
            (Meter::Times, [left, right]) => times(left, right),
            (Meter::Filter, [arguments @ .., name]) => filter(state, name.as_str().unwrap_or_default(), arguments),
            (Meter::Method, [value, arguments @ .., name]) => {
                method(state, value, name.as_str().unwrap_or_default(), arguments)
            }
            _ => Err(wrong("wrong arguments")),
        }
    }
}

pub(super) fn add_to(environment: &mut Environment<'static>) {
    for meter in Meter::ALL {
        environment.add_global(meter.name(), Value::from_object(meter));
    }
    environment.add_global("one__", 1);
    // It prints all that there is.
    environment.remove_global("debug");
}

/// The source with `a * b` as `a * one__ * b`, where `one__` is a variable: else minijinja multiplies constants as it compiles, and
/// `'a' * 10 ** 8` stands in the compiled template with all its bytes.
pub(super) fn without_constant_products(source: &str, syntax: SyntaxConfig) -> String {
    let mut out = String::with_capacity(source.len());
    let (mut copied, mut is_operand) = (0, false);
    for token in tokenize(source, false, syntax) {
        // A source that has no tokens does not compile, and the compiler says where.
        let Ok((token, span)) = token else { break };
        if matches!(token, Token::Mul) && is_operand {
            let end = span.end_offset as usize;
            out.push_str(source.get(copied..end).unwrap_or_default());
            out.push_str(" one__ *");
            copied = end;
        }
        // Behind these `*` takes a list apart.
        is_operand = !matches!(token, Token::ParenOpen | Token::Comma);
    }
    out.push_str(source.get(copied..).unwrap_or_default());
    out
}

/// # Errors
/// The line, and what the template uses that cannot be metered.
pub(super) fn metered(mut template: CompiledTemplate<'static>) -> Result<CompiledTemplate<'static>, (u32, String)> {
    template.instructions = rewritten(&template.instructions)?;
    for block in template.blocks.values_mut() {
        *block = rewritten(block)?;
    }
    Ok(template)
}

fn rewritten(old: &Instructions<'static>) -> Result<Instructions<'static>, (u32, String)> {
    let all: Vec<&Instruction<'static>> = (0..).map_while(|at| old.get(at)).collect();
    let mut groups = Vec::with_capacity(all.len());
    let mut starts = Vec::with_capacity(all.len() + 1);
    let mut count = 0;
    for (at, instruction) in (0u32..).zip(&all) {
        let line = || old.get_line(at).and_then(|line| u32::try_from(line).ok()).unwrap_or(1);
        let group = with_meters(instruction).map_err(|what| (line(), what.to_owned()))?;
        starts.push(count);
        count += u32::try_from(group.len()).unwrap_or(0);
        groups.push(group);
    }
    starts.push(count);
    let moved = |target: &mut u32| *target = starts.get(*target as usize).copied().unwrap_or(count);
    let mut new = Instructions::new(old.name(), old.source());
    for (at, group) in (0u32..).zip(groups) {
        let (span, line) = (
            old.get_span(at),
            old.get_line(at).and_then(|line| u16::try_from(line).ok()),
        );
        for mut instruction in group {
            match &mut instruction {
                Instruction::Iterate(target)
                | Instruction::Jump(target)
                | Instruction::JumpIfFalse(target)
                | Instruction::JumpIfFalseOrPop(target)
                | Instruction::JumpIfTrueOrPop(target)
                | Instruction::BuildMacro(_, target, _) => moved(target),
                _ => {}
            }
            match (span, line) {
                (Some(span), _) => new.add_with_span(instruction, span),
                (None, Some(line)) => new.add_with_line(instruction, line),
                (None, None) => new.add(instruction),
            };
        }
    }
    Ok(new)
}

/// What stands for one instruction.
fn with_meters(instruction: &Instruction<'static>) -> Result<Vec<Instruction<'static>>, &'static str> {
    let same = instruction.clone();
    let named = |meter: Meter, name: &'static str, arguments: Option<u16>| -> Result<_, &'static str> {
        let arguments = arguments.and_then(|count| count.checked_add(1)).ok_or(SPREAD)?;
        Ok(vec![Instruction::LoadConst(Value::from(name)), meter.call(arguments)])
    };
    Ok(match *instruction {
        // So that the formatter sees all that is written.
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(text)), Instruction::Emit],
        Instruction::StringConcat | Instruction::Slice => vec![same, Meter::Made.call(1)],
        Instruction::Add | Instruction::BuildList(_) | Instruction::BuildTuple(_) | Instruction::BuildMap(_) => {
            vec![same, Meter::Built.call(1)]
        }
        Instruction::BuildMacro(..) => vec![same, Meter::Made.call(1)],
        Instruction::Enclose(_) => vec![same, Meter::Enclosed.call(0), Instruction::DiscardTop],
        Instruction::SetAttr(_) => vec![Instruction::Swap, Meter::Stored.call(1), Instruction::Swap, same],
        Instruction::Mul => vec![Meter::Times.call(2)],
        Instruction::ApplyFilter(name, arguments, _) => named(Meter::Filter, name, arguments)?,
        Instruction::CallMethod(name, arguments) => named(Meter::Method, name, arguments)?,
        Instruction::UnpackLists(_) | Instruction::MergeKwargs(_) => return Err(SPREAD),
        Instruction::Include(_) | Instruction::LoadBlocks => {
            return Err("it uses another template, and a model has none");
        }
        _ => vec![same],
    })
}

const SPREAD: &str = "it spreads a list over the arguments of a call, which is not built";

fn times(left: &Value, right: &Value) -> Result<Value, Error> {
    let is_whole = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    let whole = |value: &Value| is_whole(value).then(|| i128::try_from(value.clone()).ok()).flatten();
    let (repeated, count) = if left.as_str().is_some() || super::filters::is_list(left) {
        (left, right)
    } else {
        (right, left)
    };
    let is_text = repeated.as_str().is_some();
    if is_text || super::filters::is_list(repeated) {
        let count = count
            .as_usize()
            .ok_or_else(|| wrong("a text or a list is multiplied by what is no number"))?;
        if let Some(text) = repeated.as_str() {
            if text.len().saturating_mul(count) > text_bytes_max() {
                return Err(wrong("repeated string is too large"));
            }
            return made(text.repeat(count).into());
        }
        if parts(repeated).saturating_mul(count) > ITEMS_MAX {
            return Err(wrong("repeated list is too large"));
        }
        let items: Vec<Value> = repeated.try_iter()?.collect();
        // An empty list stays empty, however often it is repeated. So the repeats are not gone through.
        let count = if items.is_empty() { 0 } else { count };
        let repeats = std::iter::repeat_n(items, count).flatten();
        return built(Value::from(repeats.collect::<Vec<_>>()));
    }
    if let (Some(left), Some(right)) = (whole(left), whole(right)) {
        let product = left.checked_mul(right).ok_or_else(|| wrong("a product is too large"))?;
        return Ok(i64::try_from(product).map_or_else(|_| Value::from(product), Value::from));
    }
    let number = |value: &Value| f64::try_from(value.clone());
    match (left.kind(), right.kind()) {
        (ValueKind::Number | ValueKind::Bool, ValueKind::Number | ValueKind::Bool) => {
            Ok((number(left)? * number(right)?).into())
        }
        (left, right) => Err(wrong(format!(
            "tried to use * operator on unsupported types {left} and {right}"
        ))),
    }
}

fn filter(state: &mut State<'_, '_>, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let ("map", [value, mapped, rest @ ..]) = (name, arguments)
        && let Some(mapped) = mapped.as_str()
    {
        return map(state, value, mapped, rest);
    }
    let value = arguments.first().cloned().unwrap_or_default();
    if ESCAPING_FILTERS.contains(&name) {
        let bytes = match value.as_str() {
            Some(text) => text.len(),
            None => super::filters::text(&value)?.len(),
        };
        pay(bytes.saturating_mul(ESCAPE_BYTES_MAX))?;
    } else if !LIGHT_FILTERS.contains(&name) {
        for argument in arguments.iter().filter(|argument| !argument.is_kwargs()) {
            // The second argument of `split`, `join` and their like is short, and none is taken apart.
            if argument.as_str().is_none() || *argument == value {
                pay_for_items(parts(argument), PART_BYTES)?;
            }
        }
    }
    let result = state
        .apply_filter(name, arguments)
        .map_err(|error| match error.kind() {
            ErrorKind::UnknownFilter if error.detail().is_none() => {
                Error::new(ErrorKind::UnknownFilter, format!("filter {name} is unknown"))
            }
            _ => error,
        })?;
    if CHOOSING_FILTERS.contains(&name) || LIGHT_FILTERS.contains(&name) {
        made(result)
    } else {
        built(result)
    }
}

/// Each item pays for what the mapped filter makes of it.
fn map(state: &mut State<'_, '_>, value: &Value, mapped: &str, rest: &[Value]) -> Result<Value, Error> {
    if mapped == "map" {
        return Err(wrong("`map` cannot be mapped"));
    }
    pay_for_items(parts(value), PART_BYTES)?;
    let items = value.try_iter()?.map(|item| {
        let arguments: Vec<Value> = std::iter::once(item).chain(rest.iter().cloned()).collect();
        filter(state, mapped, &arguments)
    });
    built(Value::from(items.collect::<Result<Vec<_>, _>>()?))
}

fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    if value.as_object().is_some() && matches!(name, "items" | "keys" | "values") {
        pay_for_items(parts(value), 2 * PART_BYTES)?;
    }
    if name == "changed" {
        // A loop keeps them. Names for arguments would hide them, and Python refuses those.
        for argument in arguments {
            refuse_owner(argument)?;
            if argument.is_kwargs() {
                return Err(wrong("`changed` has no names for its arguments"));
            }
        }
    }
    // A macro of a namespace or a map is called here, too; what it wrote is paid for.
    let result = value.call_method(state, name, arguments)?;
    if result.as_str().is_some_and(|text| text.len() > text_bytes_max()) {
        return Err(too_long());
    }
    if name == "get" { Ok(result) } else { made(result) }
}
