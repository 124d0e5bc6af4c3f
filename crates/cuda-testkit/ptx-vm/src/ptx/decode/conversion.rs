//! Moves, conversions of numbers and of addresses.

use super::{require, take_space};
use crate::instruction::{Compute, Op, Space};
use crate::number::bits;
use crate::number::convert::Conversion;
use crate::number::half::{IsBf16, IsF16, Rounding, pack_f32};
use crate::ptx::error::Refusal;
use crate::ptx::operands::Operands;
use crate::types::Type;
use crate::windows;

pub(super) fn decode(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    match text.opcode() {
        "mov" => mov(text),
        "cvt" => cvt(text),
        "cvta" => cvta(text),
        _ => isspacep(text),
    }
}

fn mov(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let ty = text.take_type()?;
    text.finish(2)?;
    if text.text(0)?.starts_with('{') {
        let to = text.register_list(0)?;
        let part = part_type(ty, to.len())?;
        return Ok(Op::Unpack {
            to: to.into(),
            from: text.source(1, ty)?,
            part_bits: part.bits(),
        });
    }
    if text.text(1)?.starts_with('{') {
        let part = part_type(ty, text.list(1)?.len())?;
        let from = text.source_list(1, part)?;
        return Ok(Op::Pack {
            to: text.register(0)?,
            from: from.into(),
            part_bits: part.bits(),
        });
    }
    text.compute(bits::identity, &[ty])
}

/// What a register of the type is made of when it has so many parts.
fn part_type(ty: Type, parts: usize) -> Result<Type, Refusal> {
    match (ty.bytes(), parts) {
        (2, 2) | (4, 4) => Ok(Type::B8),
        (4, 2) | (8, 4) => Ok(Type::B16),
        (8, 2) => Ok(Type::B32),
        _ => Err(Refusal::Type(ty)),
    }
}

const TO_INTEGRAL: [(&str, Rounding); 4] = [
    ("rni", Rounding::Nearest),
    ("rzi", Rounding::Zero),
    ("rmi", Rounding::Down),
    ("rpi", Rounding::Up),
];
const ROUNDING: [(&str, Rounding); 4] = [
    ("rn", Rounding::Nearest),
    ("rz", Rounding::Zero),
    ("rm", Rounding::Down),
    ("rp", Rounding::Up),
];

fn cvt(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let to_integral = text.take_one(&TO_INTEGRAL);
    let rounding = text.take_one(&ROUNDING);
    let (is_flushed, is_saturated) = (text.take("ftz"), text.take("sat"));
    let (to, from) = (text.take_type()?, text.take_type()?);
    if matches!(to, Type::F16x2 | Type::Bf16x2) {
        let is_plain = to_integral.is_none() && rounding == Some(Rounding::Nearest) && !is_flushed && !is_saturated;
        if !is_plain || from != Type::F32 {
            return Err(Refusal::Missing(
                "cvt.rn.f16x2.f32 or cvt.rn.bf16x2.f32 is the only conversion to a pair",
            ));
        }
        let f: Compute = if to == Type::F16x2 {
            pack_f32::<IsF16>
        } else {
            pack_f32::<IsBf16>
        };
        return text.compute(f, &[Type::F32, Type::F32]);
    }
    let conversion = Conversion {
        from,
        to,
        rounding: rounding.unwrap_or(Rounding::Nearest),
        to_integral,
        is_flushed,
        is_saturated,
    };
    check(&conversion, rounding)?;
    text.finish(2)?;
    Ok(Op::Convert {
        to: text.target(0)?,
        from: text.source(1, from)?,
        conversion,
    })
}

/// Refuses modifiers that the conversion of these types does not have, or that are not built.
fn check(conversion: &Conversion, rounding: Option<Rounding>) -> Result<(), Refusal> {
    let Conversion {
        from,
        to,
        to_integral,
        is_flushed,
        is_saturated,
        ..
    } = *conversion;
    for ty in [from, to] {
        if !ty.is_float() && !ty.is_integer() {
            return Err(Refusal::Type(ty));
        }
    }
    if is_flushed && from != Type::F32 && to != Type::F32 {
        return Err(Refusal::Modifier("ftz".to_owned()));
    }
    let is_right = match (from.is_float(), to.is_float()) {
        (false, false) => to_integral.is_none() && rounding.is_none(),
        (true, false) => to_integral.is_some() && rounding.is_none(),
        (false, true) => {
            // A 64-bit integer would be rounded twice on its way to 16 bits.
            let is_exact_in_f64 = to.bytes() > 2 || from.bytes() < 8;
            to_integral.is_none() && rounding == Some(Rounding::Nearest) && !is_saturated && is_exact_in_f64
        }
        (true, true) => {
            let is_rounding_built = match to {
                _ if from == to => rounding.is_none(),
                Type::F16 | Type::Bf16 => rounding.is_some(),
                Type::F32 if from == Type::F64 => rounding == Some(Rounding::Nearest),
                _ => rounding.is_none(),
            };
            is_rounding_built && (to_integral.is_none() || from == to) && (!is_saturated || to == Type::F32)
        }
    };
    if is_right {
        Ok(())
    } else {
        Err(Refusal::Missing(
            "the rounding or saturation of this pair of types is not built",
        ))
    }
}

fn cvta(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let is_to_space = text.take("to");
    let space = take_space(text).ok_or(Refusal::Missing("its state space"))?;
    require(text, "u64")?;
    let window = match space {
        Space::Shared => windows::SHARED,
        Space::Local => windows::LOCAL,
        Space::Param => windows::PARAM,
        // The same address means the same bytes in both spaces.
        _ => return text.compute(bits::identity, &[Type::U64]),
    };
    if is_to_space {
        text.finish(2)?;
        return Ok(Op::FromGeneric {
            to: text.register(0)?,
            from: text.source(1, Type::U64)?,
            window,
        });
    }
    let f: Compute = match space {
        Space::Shared => |offset, _, _| windows::SHARED.wrapping_add(offset),
        Space::Local => |offset, _, _| windows::LOCAL.wrapping_add(offset),
        _ => |offset, _, _| windows::PARAM.wrapping_add(offset),
    };
    text.compute(f, &[Type::U64])
}

fn isspacep(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let f: Compute = match take_space(text) {
        Some(Space::Global) => windows::is_global,
        Some(Space::Shared) => windows::is_shared,
        Some(Space::Local) => windows::is_local,
        _ => return Err(Refusal::Missing("global, shared or local")),
    };
    text.compute(f, &[Type::U64])
}
