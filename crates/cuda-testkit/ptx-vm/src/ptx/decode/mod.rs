//! One instruction's text to an operation. Every modifier has to be taken by the code that knows it; what is left is refused.

mod arithmetic;
mod bit_fields;
mod comparison;
mod control;
mod conversion;
mod memory;
mod warp;

use crate::instruction::{Op, Space};
use crate::ptx::error::Refusal;
use crate::ptx::operands::Operands;

/// The function of a module for each integer type. Untyped bits count as unsigned.
macro_rules! by_integer {
    ($ty:expr, $module:ident::$f:ident) => {
        match $ty {
            Type::B16 | Type::U16 => $module::$f::<u16> as Compute,
            Type::S16 => $module::$f::<i16> as Compute,
            Type::B32 | Type::U32 => $module::$f::<u32> as Compute,
            Type::S32 => $module::$f::<i32> as Compute,
            Type::B64 | Type::U64 => $module::$f::<u64> as Compute,
            Type::S64 => $module::$f::<i64> as Compute,
            other => return Err(Refusal::Type(other)),
        }
    };
}
use by_integer;

pub(super) fn decode(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    match text.opcode() {
        "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "neg" | "abs" | "mul24" | "mad24"
        | "sad" | "addc" | "subc" | "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "dp4a"
        | "copysign" => arithmetic::decode(text),
        "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "popc" | "clz" | "brev" | "bfind" | "bfe" | "bfi"
        | "lop3" | "prmt" | "shf" => bit_fields::decode(text),
        "setp" | "set" | "selp" | "slct" | "testp" => comparison::decode(text),
        "mov" | "cvt" | "cvta" | "isspacep" => conversion::decode(text),
        "ld" | "st" | "atom" | "red" | "cp" => memory::decode(text),
        "bar" | "barrier" | "shfl" | "vote" | "redux" | "ldmatrix" | "mma" => warp::decode(text),
        "bra" | "brx" | "ret" | "exit" | "trap" | "membar" | "fence" => control::decode(text),
        other => Err(Refusal::Opcode(other.to_owned())),
    }
}

fn require(text: &mut Operands<'_>, modifier: &'static str) -> Result<(), Refusal> {
    if text.take(modifier) {
        Ok(())
    } else {
        Err(Refusal::Missing(modifier))
    }
}

/// The state space, if the instruction names one.
fn take_space(text: &mut Operands<'_>) -> Option<Space> {
    text.take_one(&[
        ("global", Space::Global),
        ("shared", Space::Shared),
        ("shared::cta", Space::Shared),
        ("local", Space::Local),
        ("param", Space::Param),
        ("param::entry", Space::Param),
        ("const", Space::Constant),
    ])
}
