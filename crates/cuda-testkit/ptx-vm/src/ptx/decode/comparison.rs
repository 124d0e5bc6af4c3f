//! Comparisons, selections and tests.

use crate::instruction::{CompareAnd, Compute, Op};
use crate::number::bits;
use crate::number::compare::{Comparison, function};
use crate::number::float::{Test, test};
use crate::ptx::error::Refusal;
use crate::ptx::operands::Operands;
use crate::types::Type;

pub(super) fn decode(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    match text.opcode() {
        "setp" => set_predicate(text),
        "set" => set_value(text),
        "selp" => {
            let ty = text.take_type()?;
            text.compute(bits::select, &[ty, ty, Type::Pred])
        }
        "slct" => select_by_sign(text),
        _ => test_number(text),
    }
}

type Combine = fn(bool, bool) -> bool;
const COMBINE: [(&str, Combine); 3] = [("and", |a, b| a && b), ("or", |a, b| a || b), ("xor", |a, b| a != b)];

/// A comparison, but for its type and its operands.
struct Parts {
    comparison: Comparison,
    combine: Option<Combine>,
    is_flushed: bool,
}

fn take_parts(text: &mut Operands<'_>) -> Result<Parts, Refusal> {
    let comparison = text
        .take_one(&Comparison::NAMES)
        .ok_or(Refusal::Missing("its comparison"))?;
    Ok(Parts {
        comparison,
        combine: text.take_one(&COMBINE),
        is_flushed: text.take("ftz"),
    })
}

fn set_predicate(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let parts = take_parts(text)?;
    let ty = text.take_type()?;
    let f = function(parts.comparison, ty, parts.is_flushed).ok_or(Refusal::Type(ty))?;
    let (to, to_opposite) = text.register_pair(0)?;
    let from = [text.source(1, ty)?, text.source(2, ty)?];
    if parts.combine.is_none() && to_opposite.is_none() {
        text.finish(3)?;
        return Ok(Op::Compare { f, to, from });
    }
    combined(
        text,
        &parts,
        CompareAnd {
            f,
            from,
            combine: None,
            to,
            to_opposite,
            truth: 1,
        },
    )
}

fn set_value(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let parts = take_parts(text)?;
    let (to_type, ty) = (text.take_type()?, text.take_type()?);
    let truth = match to_type {
        Type::F32 => u64::from(1.0_f32.to_bits()),
        Type::U32 | Type::S32 => u64::from(u32::MAX),
        other => return Err(Refusal::Type(other)),
    };
    let f = function(parts.comparison, ty, parts.is_flushed).ok_or(Refusal::Type(ty))?;
    let from = [text.source(1, ty)?, text.source(2, ty)?];
    let compare = CompareAnd {
        f,
        from,
        combine: None,
        to: text.register(0)?,
        to_opposite: None,
        truth,
    };
    combined(text, &parts, compare)
}

/// Adds the predicate of `.and` and its like, if there is one.
fn combined(text: &Operands<'_>, parts: &Parts, mut compare: CompareAnd) -> Result<Op, Refusal> {
    text.finish(if parts.combine.is_some() { 4 } else { 3 })?;
    if let Some(combine) = parts.combine {
        compare.combine = Some((combine, text.predicate(3)?));
    }
    Ok(Op::CompareAnd(Box::new(compare)))
}

fn select_by_sign(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let is_flushed = text.take("ftz");
    let (ty, by) = (text.take_type()?, text.take_type()?);
    let f: Compute = match by {
        Type::S32 if !is_flushed => bits::select_not_negative,
        Type::F32 if is_flushed => bits::select_not_negative_f32::<true>,
        Type::F32 => bits::select_not_negative_f32::<false>,
        other => return Err(Refusal::Type(other)),
    };
    text.compute(f, &[ty, ty, by])
}

/// `testp` as a function of an operand's bits.
macro_rules! by_type {
    ($ty:expr, $test:ident) => {
        match $ty {
            Type::F32 => |a, _, _| {
                let value = f32::from_bits(a as u32);
                u64::from(test(Test::$test, f64::from(value), value.is_subnormal()))
            },
            Type::F64 => |a, _, _| {
                let value = f64::from_bits(a);
                u64::from(test(Test::$test, value, value.is_subnormal()))
            },
            other => return Err(Refusal::Type(other)),
        }
    };
}

fn test_number(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let ty = text.take_type()?;
    let tests = [
        ("finite", Test::Finite),
        ("infinite", Test::Infinite),
        ("number", Test::Number),
        ("notanumber", Test::NotANumber),
        ("normal", Test::Normal),
        ("subnormal", Test::Subnormal),
    ];
    let f: Compute = match text.take_one(&tests).ok_or(Refusal::Missing("its test"))? {
        Test::Finite => by_type!(ty, Finite),
        Test::Infinite => by_type!(ty, Infinite),
        Test::Number => by_type!(ty, Number),
        Test::NotANumber => by_type!(ty, NotANumber),
        Test::Normal => by_type!(ty, Normal),
        Test::Subnormal => by_type!(ty, Subnormal),
    };
    text.compute(f, &[ty])
}
