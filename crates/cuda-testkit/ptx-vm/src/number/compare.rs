//! Comparisons. One that is ordered is false for NaN, one that is not ordered (`equ`, `ltu`) is true.

use std::cmp::Ordering;

use crate::number::float::flushed;
use crate::number::half::{BF16, F16};
use crate::types::Type;

/// The names that PTX gives, with what they ask. `lo` to `hs` are the unsigned names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    EqualOrNan,
    NotEqualOrNan,
    LessOrNan,
    LessOrEqualOrNan,
    GreaterOrNan,
    GreaterOrEqualOrNan,
    Numbers,
    AnyNan,
}

impl Comparison {
    pub(crate) const NAMES: [(&'static str, Comparison); 18] = [
        ("eq", Comparison::Equal),
        ("ne", Comparison::NotEqual),
        ("lt", Comparison::Less),
        ("lo", Comparison::Less),
        ("le", Comparison::LessOrEqual),
        ("ls", Comparison::LessOrEqual),
        ("gt", Comparison::Greater),
        ("hi", Comparison::Greater),
        ("ge", Comparison::GreaterOrEqual),
        ("hs", Comparison::GreaterOrEqual),
        ("equ", Comparison::EqualOrNan),
        ("neu", Comparison::NotEqualOrNan),
        ("ltu", Comparison::LessOrNan),
        ("leu", Comparison::LessOrEqualOrNan),
        ("gtu", Comparison::GreaterOrNan),
        ("geu", Comparison::GreaterOrEqualOrNan),
        ("num", Comparison::Numbers),
        ("nan", Comparison::AnyNan),
    ];
}

/// What is compared: an order of two operands' bits, `None` if one is NaN.
pub(crate) trait Ordered {
    fn order(a: u64, b: u64) -> Option<Ordering>;
}

macro_rules! ordered {
    ($($name:ident($bits:ident) $value:expr;)*) => {$(
        #[derive(Debug)]
        pub(crate) struct $name;

        impl Ordered for $name {
            fn order(a: u64, b: u64) -> Option<Ordering> {
                let value = |$bits: u64| $value;
                value(a).partial_cmp(&value(b))
            }
        }
    )*};
}

ordered! {
    Unsigned(bits) bits;
    Signed16(bits) bits as i16;
    Signed32(bits) bits as i32;
    Signed64(bits) bits as i64;
    InF16(bits) F16.widen(bits as u16);
    InBf16(bits) BF16.widen(bits as u16);
    InF32(bits) f32::from_bits(bits as u32);
    InF32Flushed(bits) flushed::<true>(f32::from_bits(bits as u32));
    InF64(bits) f64::from_bits(bits);
}

type Test = fn(u64, u64) -> bool;

fn test_of<T: Ordered>(comparison: Comparison) -> Test {
    match comparison {
        Comparison::Equal => |a, b| T::order(a, b).is_some_and(Ordering::is_eq),
        Comparison::NotEqual => |a, b| T::order(a, b).is_some_and(Ordering::is_ne),
        Comparison::Less => |a, b| T::order(a, b).is_some_and(Ordering::is_lt),
        Comparison::LessOrEqual => |a, b| T::order(a, b).is_some_and(Ordering::is_le),
        Comparison::Greater => |a, b| T::order(a, b).is_some_and(Ordering::is_gt),
        Comparison::GreaterOrEqual => |a, b| T::order(a, b).is_some_and(Ordering::is_ge),
        Comparison::EqualOrNan => |a, b| T::order(a, b).is_none_or(Ordering::is_eq),
        Comparison::NotEqualOrNan => |a, b| T::order(a, b).is_none_or(Ordering::is_ne),
        Comparison::LessOrNan => |a, b| T::order(a, b).is_none_or(Ordering::is_lt),
        Comparison::LessOrEqualOrNan => |a, b| T::order(a, b).is_none_or(Ordering::is_le),
        Comparison::GreaterOrNan => |a, b| T::order(a, b).is_none_or(Ordering::is_gt),
        Comparison::GreaterOrEqualOrNan => |a, b| T::order(a, b).is_none_or(Ordering::is_ge),
        Comparison::Numbers => |a, b| T::order(a, b).is_some(),
        Comparison::AnyNan => |a, b| T::order(a, b).is_none(),
    }
}

/// The function that compares two operands of a type. `None`: the type is not compared.
pub(crate) fn function(comparison: Comparison, ty: Type, is_flushed: bool) -> Option<Test> {
    Some(match ty {
        Type::B16 | Type::U16 | Type::B32 | Type::U32 | Type::B64 | Type::U64 => test_of::<Unsigned>(comparison),
        Type::S16 => test_of::<Signed16>(comparison),
        Type::S32 => test_of::<Signed32>(comparison),
        Type::S64 => test_of::<Signed64>(comparison),
        Type::F16 => test_of::<InF16>(comparison),
        Type::Bf16 => test_of::<InBf16>(comparison),
        Type::F32 if is_flushed => test_of::<InF32Flushed>(comparison),
        Type::F32 => test_of::<InF32>(comparison),
        Type::F64 => test_of::<InF64>(comparison),
        _ => return None,
    })
}
