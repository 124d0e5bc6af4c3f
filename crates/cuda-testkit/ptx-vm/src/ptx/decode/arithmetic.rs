//! Integer and floating-point arithmetic. The one rounding that is built is to nearest.

use super::by_integer;
use crate::instruction::{Carry, Compute, Op};
use crate::number::half::{self, IsBf16, IsF16};
use crate::number::{float, integer};
use crate::ptx::error::Refusal;
use crate::ptx::operands::Operands;
use crate::types::Type;

pub(super) fn decode(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let opcode = text.opcode();
    if opcode == "addc" || opcode == "subc" || text.has("cc") {
        return with_carry(text);
    }
    let ty = text.take_type()?;
    match ty {
        _ if opcode == "dp4a" => dot(text, ty),
        Type::F32 => in_f32(text),
        Type::F64 => in_f64(text),
        Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 => in_half(text, ty),
        _ => in_integers(text, ty),
    }
}

fn not_built(text: &Operands<'_>, ty: Type) -> Refusal {
    Refusal::Opcode(format!("{} of {ty}", text.opcode()))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Low,
    High,
    Wide,
}

fn in_integers(text: &mut Operands<'_>, ty: Type) -> Result<Op, Refusal> {
    let part = text.take_one(&[("lo", Part::Low), ("hi", Part::High), ("wide", Part::Wide)]);
    if part == Some(Part::Wide) && ty.bits() == 64 {
        return Err(Refusal::Type(ty));
    }
    let is_24_bit = text.opcode().ends_with("24");
    if is_24_bit && !matches!(ty, Type::U32 | Type::S32) {
        return Err(Refusal::Type(ty));
    }
    let (f, operands) = match (text.opcode(), part) {
        ("add", None) => (by_integer!(ty, integer::add), 2),
        ("sub", None) => (by_integer!(ty, integer::sub), 2),
        ("mul", Some(Part::Low)) => (by_integer!(ty, integer::mul_low), 2),
        ("mul", Some(Part::High)) => (by_integer!(ty, integer::mul_high), 2),
        ("mul", Some(Part::Wide)) => (by_integer!(ty, integer::mul_wide), 2),
        ("mad", Some(Part::Low)) => (by_integer!(ty, integer::mad_low), 3),
        ("mad", Some(Part::High)) => (by_integer!(ty, integer::mad_high), 3),
        ("mad", Some(Part::Wide)) => (by_integer!(ty, integer::mad_wide), 3),
        ("mul24", Some(Part::Low)) => (in_24_bits(ty, integer::mul24_low::<u32>, integer::mul24_low::<i32>), 2),
        ("mad24", Some(Part::Low)) => (in_24_bits(ty, integer::mad24_low::<u32>, integer::mad24_low::<i32>), 3),
        ("div", None) => (by_integer!(ty, integer::div), 2),
        ("rem", None) => (by_integer!(ty, integer::rem), 2),
        ("min", None) => (by_integer!(ty, integer::min), 2),
        ("max", None) => (by_integer!(ty, integer::max), 2),
        ("sad", None) => (by_integer!(ty, integer::sad), 3),
        ("neg", None) => (by_integer!(ty, integer::neg), 1),
        ("abs", None) => (by_integer!(ty, integer::abs), 1),
        _ => return Err(not_built(text, ty)),
    };
    let third = match (part, ty.bits()) {
        (Some(Part::Wide), 16) => Type::B32,
        (Some(Part::Wide), _) => Type::B64,
        _ => ty,
    };
    text.compute(f, &[ty, ty, third][..operands])
}

fn in_24_bits(ty: Type, unsigned: Compute, signed: Compute) -> Compute {
    if ty.is_signed() { signed } else { unsigned }
}

/// `.ftz` and `.sat` choose one of four functions.
macro_rules! by_mode {
    ($text:expr, $f:ident) => {
        match ($text.take("ftz"), $text.take("sat")) {
            (false, false) => float::$f::<false, false> as Compute,
            (false, true) => float::$f::<false, true> as Compute,
            (true, false) => float::$f::<true, false> as Compute,
            (true, true) => float::$f::<true, true> as Compute,
        }
    };
}

fn in_f32(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let opcode = text.opcode();
    text.take("rn");
    if matches!(
        opcode,
        "div" | "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh"
    ) {
        text.take_hints(&["approx", "full"]);
    }
    let (f, operands) = match opcode {
        "add" => (by_mode!(text, add), 2),
        "sub" => (by_mode!(text, sub), 2),
        "mul" => (by_mode!(text, mul), 2),
        "div" => (by_mode!(text, div), 2),
        // On sm_20 and later `mad` rounds once, too.
        "fma" | "mad" => (by_mode!(text, fma), 3),
        "min" if text.take("NaN") => (by_mode!(text, min_nan), 2),
        "max" if text.take("NaN") => (by_mode!(text, max_nan), 2),
        "min" => (by_mode!(text, min), 2),
        "max" => (by_mode!(text, max), 2),
        "neg" => (by_mode!(text, neg), 1),
        "abs" => (by_mode!(text, abs), 1),
        "rcp" => (by_mode!(text, rcp), 1),
        "sqrt" => (by_mode!(text, sqrt), 1),
        "rsqrt" => (by_mode!(text, rsqrt), 1),
        "ex2" => (by_mode!(text, ex2), 1),
        "lg2" => (by_mode!(text, lg2), 1),
        "sin" => (by_mode!(text, sin), 1),
        "cos" => (by_mode!(text, cos), 1),
        "tanh" => (by_mode!(text, tanh), 1),
        "copysign" => (float::copysign as Compute, 2),
        _ => return Err(not_built(text, Type::F32)),
    };
    text.compute(f, &[Type::F32; 3][..operands])
}

fn in_f64(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    text.take("rn");
    let (f, operands): (Compute, usize) = match text.opcode() {
        "add" => (float::add_f64, 2),
        "sub" => (float::sub_f64, 2),
        "mul" => (float::mul_f64, 2),
        "div" => (float::div_f64, 2),
        "fma" | "mad" => (float::fma_f64, 3),
        "min" => (float::min_f64, 2),
        "max" => (float::max_f64, 2),
        "neg" => (float::neg_f64, 1),
        "abs" => (float::abs_f64, 1),
        "rcp" => (float::rcp_f64, 1),
        "sqrt" => (float::sqrt_f64, 1),
        "copysign" => (float::copysign_f64, 2),
        _ => return Err(not_built(text, Type::F64)),
    };
    text.compute(f, &[Type::F64; 3][..operands])
}

/// A function on one number of a 16-bit format, or on a pair.
macro_rules! by_half {
    ($ty:expr, $f:ident) => {
        match $ty {
            Type::F16 => half::single::<half::$f<IsF16>> as Compute,
            Type::F16x2 => half::pair::<half::$f<IsF16>> as Compute,
            Type::Bf16 => half::single::<half::$f<IsBf16>> as Compute,
            _ => half::pair::<half::$f<IsBf16>> as Compute,
        }
    };
}

fn in_half(text: &mut Operands<'_>, ty: Type) -> Result<Op, Refusal> {
    text.take("rn");
    let is_pair = matches!(ty, Type::F16x2 | Type::Bf16x2);
    let (f, operands): (Compute, usize) = match text.opcode() {
        "add" => (by_half!(ty, Add), 2),
        "sub" => (by_half!(ty, Sub), 2),
        "mul" => (by_half!(ty, Mul), 2),
        "fma" => (by_half!(ty, Fma), 3),
        "min" => (by_half!(ty, Min), 2),
        "max" => (by_half!(ty, Max), 2),
        "ex2" if text.take("approx") => (by_half!(ty, Ex2), 1),
        "tanh" if text.take("approx") => (by_half!(ty, Tanh), 1),
        "neg" if is_pair => (half::pair::<half::Neg>, 1),
        "abs" if is_pair => (half::pair::<half::Abs>, 1),
        "neg" => (half::single::<half::Neg>, 1),
        "abs" => (half::single::<half::Abs>, 1),
        _ => return Err(not_built(text, ty)),
    };
    text.compute(f, &[ty; 3][..operands])
}

/// `add.cc`, `addc`, `addc.cc` and the same of `sub`.
fn with_carry(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let opcode = text.opcode();
    let (reads_carry, writes_carry) = (opcode.ends_with('c'), text.take("cc"));
    let ty = text.take_type()?;
    let f: fn(u64, u64, u64) -> (u64, u64) = match (opcode, ty) {
        ("add" | "addc", Type::U32 | Type::S32) => integer::add_carry::<u32>,
        ("add" | "addc", Type::U64 | Type::S64) => integer::add_carry::<u64>,
        ("sub" | "subc", Type::U32 | Type::S32) => integer::sub_borrow::<u32>,
        ("sub" | "subc", Type::U64 | Type::S64) => integer::sub_borrow::<u64>,
        _ => return Err(not_built(text, ty)),
    };
    text.finish(3)?;
    let from = [text.source(1, ty)?, text.source(2, ty)?];
    Ok(Op::Carry(Box::new(Carry {
        f,
        to: text.register(0)?,
        from,
        reads_carry,
        writes_carry,
    })))
}

fn dot(text: &mut Operands<'_>, a: Type) -> Result<Op, Refusal> {
    let b = text.take_type()?;
    let f: Compute = match (a, b) {
        (Type::U32, Type::U32) => integer::dot4::<u8, u8>,
        (Type::U32, Type::S32) => integer::dot4::<u8, i8>,
        (Type::S32, Type::U32) => integer::dot4::<i8, u8>,
        (Type::S32, Type::S32) => integer::dot4::<i8, i8>,
        _ => return Err(Refusal::Type(b)),
    };
    text.compute(f, &[Type::B32; 3])
}
