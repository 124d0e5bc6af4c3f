//! The two 16-bit formats: conversion with one rounding, and arithmetic on one number or on a pair.

use std::marker::PhantomData;

/// The NaN that conversions and arithmetic give, in both formats.
const NAN: u16 = 0x7fff;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Of a format: bits of the fraction, and what is added to an exponent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    fraction_bits: u32,
    bias: i32,
}

pub(crate) const F16: Format = Format {
    fraction_bits: 10,
    bias: 15,
};
pub(crate) const BF16: Format = Format {
    fraction_bits: 7,
    bias: 127,
};

const FRACTION_BITS_F64: u32 = 52;

impl Format {
    fn infinity(self) -> u16 {
        0x7fff & (u16::MAX << self.fraction_bits)
    }

    /// Subnormal results included.
    pub(crate) fn round(self, value: f64, rounding: Rounding) -> u16 {
        let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
        if value.is_nan() {
            return NAN;
        }
        if value.is_infinite() {
            return sign | self.infinity();
        }
        let bits = value.abs().to_bits();
        let exponent = (bits >> FRACTION_BITS_F64) as i32 - 1023;
        if exponent < -1022 {
            // Zero, or far below the smallest number of either format.
            let is_away = bits != 0 && self.rounds_away(rounding, sign != 0, 1, 4);
            return sign | u16::from(is_away);
        }
        let significand = (bits & ((1 << FRACTION_BITS_F64) - 1)) | 1 << FRACTION_BITS_F64;
        let lowest_exponent = 1 - self.bias;
        let kept_exponent = exponent.max(lowest_exponent);
        let dropped_bits = FRACTION_BITS_F64 as i32 - self.fraction_bits as i32 + (kept_exponent - exponent);
        let (kept, rest, half) = if dropped_bits > 62 {
            (0, 1, 4)
        } else {
            let kept = significand >> dropped_bits;
            (kept, significand - (kept << dropped_bits), 1_u64 << (dropped_bits - 1))
        };
        let is_tie = rest == half && rounding == Rounding::Nearest;
        let is_away = if is_tie {
            kept & 1 != 0
        } else {
            self.rounds_away(rounding, sign != 0, rest, half)
        };
        // The implied bit of `kept` adds one to the exponent's field, and a carry adds another. So subnormals need no case.
        let field = (kept_exponent - lowest_exponent) as u64;
        let magnitude = (field << self.fraction_bits) + kept + u64::from(is_away);
        sign | self.within_range(magnitude, rounding, sign != 0)
    }

    fn rounds_away(self, rounding: Rounding, is_negative: bool, rest: u64, half: u64) -> bool {
        match rounding {
            Rounding::Nearest => rest > half,
            Rounding::Zero => false,
            Rounding::Down => is_negative && rest != 0,
            Rounding::Up => !is_negative && rest != 0,
        }
    }

    fn within_range(self, magnitude: u64, rounding: Rounding, is_negative: bool) -> u16 {
        let infinity = self.infinity();
        if magnitude < u64::from(infinity) {
            return magnitude as u16;
        }
        let is_infinite = match rounding {
            Rounding::Nearest => true,
            Rounding::Zero => false,
            Rounding::Down => is_negative,
            Rounding::Up => !is_negative,
        };
        if is_infinite { infinity } else { infinity - 1 }
    }

    /// Exact.
    pub(crate) fn widen(self, bits: u16) -> f32 {
        if self == BF16 {
            return f32::from_bits(u32::from(bits) << 16);
        }
        let (sign, exponent, fraction) = (
            u32::from(bits >> 15) << 31,
            (bits >> 10) & 0x1f,
            u32::from(bits & 0x3ff),
        );
        let magnitude = match exponent {
            0 => (fraction as f32 * 2.0_f32.powi(-24)).to_bits(),
            0x1f => 0x7f80_0000 | fraction << 13,
            _ => (u32::from(exponent) + 127 - 15) << 23 | fraction << 13,
        };
        f32::from_bits(sign | magnitude)
    }
}

/// A format as a type, so that each function of arithmetic exists once for each format.
pub(crate) trait Half {
    const FORMAT: Format;
}

#[derive(Debug)]
pub(crate) struct IsF16;
#[derive(Debug)]
pub(crate) struct IsBf16;

impl Half for IsF16 {
    const FORMAT: Format = F16;
}

impl Half for IsBf16 {
    const FORMAT: Format = BF16;
}

/// A function on numbers of 16 bits.
pub(crate) trait Lane {
    fn of(a: u64, b: u64, c: u64) -> u64;
}

/// The function on single numbers.
pub(crate) fn single<L: Lane>(a: u64, b: u64, c: u64) -> u64 {
    L::of(a & 0xffff, b & 0xffff, c & 0xffff)
}

/// The function on the low halves and on the high halves.
pub(crate) fn pair<L: Lane>(a: u64, b: u64, c: u64) -> u64 {
    single::<L>(a, b, c) | single::<L>(a >> 16, b >> 16, c >> 16) << 16
}

fn input<H: Half>(bits: u64) -> f64 {
    f64::from(H::FORMAT.widen(bits as u16))
}

fn output<H: Half>(value: f64) -> u64 {
    u64::from(H::FORMAT.round(value, Rounding::Nearest))
}

macro_rules! lanes {
    ($($name:ident($a:ident, $b:ident, $c:ident) $value:expr;)*) => {$(
        #[derive(Debug)]
        pub(crate) struct $name<H>(PhantomData<H>);

        impl<H: Half> Lane for $name<H> {
            fn of(a: u64, b: u64, c: u64) -> u64 {
                let ($a, $b, $c) = (input::<H>(a), input::<H>(b), input::<H>(c));
                output::<H>($value)
            }
        }
    )*};
}

// A sum, a product and a quotient in f64 have more than twice the bits of the result, so the second rounding changes nothing.
lanes! {
    Add(a, b, _c) a + b;
    Sub(a, b, _c) a - b;
    Mul(a, b, _c) a * b;
    Fma(a, b, c) sum_to_odd(a * b, c);
    Min(a, b, _c) if b.is_nan() || a < b || a == b && a.is_sign_negative() { a } else { b };
    Max(a, b, _c) if b.is_nan() || a > b || a == b && a.is_sign_positive() { a } else { b };
    Ex2(a, _b, _c) a.exp2();
    Tanh(a, _b, _c) a.tanh();
}

#[derive(Debug)]
pub(crate) struct Neg;
#[derive(Debug)]
pub(crate) struct Abs;

impl Lane for Neg {
    fn of(a: u64, _: u64, _: u64) -> u64 {
        a ^ 0x8000
    }
}

impl Lane for Abs {
    fn of(a: u64, _: u64, _: u64) -> u64 {
        a & 0x7fff
    }
}

/// A sum whose last bit is odd if it is not exact, so that rounding it again is as good as rounding the exact sum once.
/// Method: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008; error of a sum by Knuth's TwoSum.
fn sum_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return sum;
    }
    let b_part = sum - a;
    let error = (a - (sum - b_part)) + (b - b_part);
    if error == 0.0 || sum.to_bits() & 1 != 0 {
        return sum;
    }
    // Towards the exact sum: one step up or down in magnitude gives an odd last bit.
    let is_outward = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if is_outward {
        sum.to_bits() + 1
    } else {
        sum.to_bits() - 1
    })
}

/// Two f32 to a pair: the first operand becomes the high half.
pub(crate) fn pack_f32<H: Half>(a: u64, b: u64, _: u64) -> u64 {
    let half = |bits: u64| output::<H>(f64::from(f32::from_bits(bits as u32)));
    half(a) << 16 | half(b)
}
