//! Logic, shifts, bit fields and permutations.

use super::by_integer;
use crate::instruction::{Compute, Op};
use crate::number::{bits, integer};
use crate::ptx::error::Refusal;
use crate::ptx::operands::Operands;
use crate::types::Type;

pub(super) fn decode(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let opcode = text.opcode();
    if opcode == "shf" {
        return funnel(text);
    }
    let ty = text.take_type()?;
    if !ty.is_integer() && ty != Type::Pred {
        return Err(Refusal::Type(ty));
    }
    match opcode {
        "and" => text.compute(bits::and, &[ty, ty]),
        "or" => text.compute(bits::or, &[ty, ty]),
        "xor" => text.compute(bits::xor, &[ty, ty]),
        "not" if ty == Type::Pred => text.compute(bits::not_predicate, &[ty]),
        "not" => text.compute(by_integer!(ty, bits::not), &[ty]),
        "cnot" => text.compute(bits::is_zero, &[ty]),
        "shl" => text.compute(by_integer!(ty, integer::shl), &[ty, Type::U32]),
        "shr" => text.compute(by_integer!(ty, integer::shr), &[ty, Type::U32]),
        "popc" => text.compute(bits::count_ones, &[ty]),
        "clz" => text.compute(by_integer!(ty, bits::leading_zeros), &[ty]),
        "brev" => text.compute(by_integer!(ty, bits::reversed), &[ty]),
        "bfind" => text.compute(by_integer!(ty, bits::highest_bit), &[ty]),
        "bfe" => text.compute(by_integer!(ty, bits::extract), &[ty, Type::U32, Type::U32]),
        "prmt" => text.compute(bits::permute, &[Type::B32, Type::B32, Type::B32]),
        "bfi" if ty.bits() == 32 => four(text, bits::insert::<u32>, [ty, ty, Type::U32, Type::U32]),
        "bfi" if ty.bits() == 64 => four(text, bits::insert::<u64>, [ty, ty, Type::U32, Type::U32]),
        "lop3" if ty.bits() == 32 => four(text, bits::lookup, [ty, ty, ty, Type::B32]),
        _ => Err(Refusal::Type(ty)),
    }
}

fn four(text: &Operands<'_>, f: fn([u64; 4]) -> u64, types: [Type; 4]) -> Result<Op, Refusal> {
    text.finish(5)?;
    let [a, b, c, d] = types;
    let from = [
        text.source(1, a)?,
        text.source(2, b)?,
        text.source(3, c)?,
        text.source(4, d)?,
    ];
    Ok(Op::Compute4 {
        f,
        to: text.register(0)?,
        from: Box::new(from),
    })
}

/// `shf.l.wrap.b32` and its like.
fn funnel(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let is_left = text
        .take_one(&[("l", true), ("r", false)])
        .ok_or(Refusal::Missing("l or r"))?;
    let wraps = text
        .take_one(&[("wrap", true), ("clamp", false)])
        .ok_or(Refusal::Missing("wrap or clamp"))?;
    super::require(text, "b32")?;
    let f: Compute = match (is_left, wraps) {
        (true, true) => bits::funnel_left::<true>,
        (true, false) => bits::funnel_left::<false>,
        (false, true) => bits::funnel_right::<true>,
        (false, false) => bits::funnel_right::<false>,
    };
    text.compute(f, &[Type::B32, Type::B32, Type::U32])
}
