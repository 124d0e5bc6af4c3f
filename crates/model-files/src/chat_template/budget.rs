//! How much one rendering may make: every text and list that a template makes is paid for by its bytes, whether it is kept or not.

use std::cell::Cell;

use minijinja::value::{Tuple, Value, ValueIter, ValueKind};
use minijinja::{Error, ErrorKind};

/// What a rendering may make besides `MADE_FACTOR` times what it was given. All that is alive at once is a part of it.
const MADE_BYTES_EXTRA: usize = 24 << 20;
const MADE_FACTOR: usize = 4;
/// The longest text, besides as much as the rendering was given. Prompts are shorter.
const TEXT_BYTES_EXTRA: usize = 4 << 20;
/// As many items as minijinja's `range` has.
pub(super) const ITEMS_MAX: usize = 100_000;
/// Lists inside of lists, made or printed. JSON from a client has at most 128 levels.
pub(super) const DEPTH_MAX: usize = 200;
/// Heap of a small text or number with its place in a list, of an item, of a map's entry, and of any other object.
const SMALL_BYTES: usize = 48;
const ITEM_BYTES: usize = 24;
const ENTRY_BYTES: usize = 200;
const OBJECT_BYTES: usize = 512;

/// The error of a call that would make more than the rendering may.
pub(super) fn too_long() -> Error {
    Error::new(ErrorKind::WriteFailure, "a text is too long")
}

/// The error of a call with arguments that Python refuses, too.
pub(super) fn wrong(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

#[derive(Clone, Copy)]
struct Budget {
    left: usize,
    text_bytes_max: usize,
}

thread_local! {
    /// Of the rendering that runs on this thread.
    static BUDGET: Cell<Budget> = const { Cell::new(Budget { left: MADE_BYTES_EXTRA, text_bytes_max: TEXT_BYTES_EXTRA }) };
}

/// Begins a rendering that was given so many bytes.
pub(super) fn begin(given: usize) {
    BUDGET.set(Budget {
        left: given.saturating_mul(MADE_FACTOR).saturating_add(MADE_BYTES_EXTRA),
        text_bytes_max: given.saturating_add(TEXT_BYTES_EXTRA),
    });
}

pub(super) fn text_bytes_max() -> usize {
    BUDGET.get().text_bytes_max
}

/// Pays for `bytes` that will be made.
pub(super) fn pay(bytes: usize) -> Result<(), Error> {
    let budget = BUDGET.get();
    let left = budget.left.checked_sub(bytes).ok_or_else(too_long)?;
    BUDGET.set(Budget { left, ..budget });
    Ok(())
}

/// Pays for so many items of a list, and refuses more than a list may have.
pub(super) fn pay_for_items(count: usize, bytes_each: usize) -> Result<(), Error> {
    if count > ITEMS_MAX {
        return Err(too_long());
    }
    pay(count.saturating_mul(bytes_each))
}

/// Items of a list, entries of a map, characters of a text; at most one more than a list may have.
pub(super) fn parts(value: &Value) -> usize {
    if let Some(text) = value.as_str() {
        return text.chars().take(ITEMS_MAX + 1).count();
    }
    let counted = || value.try_iter().map_or(0, |items| items.take(ITEMS_MAX + 1).count());
    value.as_object().map_or(0, |_| value.len().unwrap_or_else(counted))
}

/// Pays for a value that was made from values which were paid for. A lazy list is made whole, so that lists which read each other cannot
/// grow into a deep chain.
pub(super) fn made(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        if text.len() > text_bytes_max() {
            return Err(too_long());
        }
        pay(SMALL_BYTES + text.len())?;
        return Ok(value);
    }
    match value.kind() {
        ValueKind::Map => pay_for_items(parts(&value), ENTRY_BYTES)?,
        ValueKind::Seq | ValueKind::Iterable => {
            pay_for_items(parts(&value), ITEM_BYTES)?;
            let is_whole =
                value.downcast_object_ref::<Vec<Value>>().is_some() || value.downcast_object_ref::<Tuple>().is_some();
            if !is_whole {
                pay(OBJECT_BYTES)?;
                return Ok(Value::from(value.try_iter()?.collect::<Vec<_>>()));
            }
        }
        _ => {}
    }
    pay(if value.as_object().is_some() {
        OBJECT_BYTES
    } else {
        SMALL_BYTES
    })?;
    Ok(value)
}

/// [`made`] for a list or a map that may hold one value many times: what it would be in print is bounded as a text is, and its depth.
pub(super) fn built(value: Value) -> Result<Value, Error> {
    let value = made(value)?;
    let (mut bytes, mut values) = (0usize, 0usize);
    let mut open: Vec<(Value, ValueIter)> = Vec::new();
    let mut next = Some(value.clone());
    while let Some(current) = next {
        values += 1;
        bytes += 1 + current.as_str().map_or(0, str::len);
        if bytes > text_bytes_max() || open.len() > DEPTH_MAX {
            return Err(too_long());
        }
        refuse_owner(&current)?;
        if let (Some(_), Ok(items)) = (current.as_object(), current.try_iter()) {
            open.push((current, items));
        }
        next = None;
        while let (None, Some((parent, items))) = (&next, open.last_mut()) {
            match items.next() {
                Some(key) if parent.kind() == ValueKind::Map => {
                    bytes += key.as_str().map_or(0, str::len);
                    next = Some(parent.get_item(&key)?);
                }
                Some(item) => next = Some(item),
                None => drop(open.pop()),
            }
        }
    }
    pay(values)?;
    Ok(value)
}

/// Refuses what can be changed to hold other values, a namespace or the `loop` of a loop: inside of itself it would never be freed.
pub(super) fn refuse_owner(value: &Value) -> Result<(), Error> {
    let type_name = value.as_object().map_or("", |object| object.type_name());
    if type_name.ends_with("::Namespace") || type_name.ends_with("::Loop") {
        return Err(wrong("a namespace or `loop` cannot be kept inside of a value"));
    }
    Ok(())
}
