//! Arithmetic in f32 and f64, rounded to nearest. NaN results have the one form that NVIDIA's hardware gives for f32.
//!
//! `FLUSH` is `.ftz`: a subnormal operand or result becomes a zero of its sign. `CLAMP` is `.sat`: the result lies in 0 to 1,
//! and NaN becomes 0. Approximations (`.approx`, `.full`) are computed exactly and rounded once. Hardware differs in the last
//! bits, so a test must not rest on them.

/// PTX ISA, "Floating Point Instructions": single precision gives this NaN.
pub(crate) const NAN_F32: u32 = 0x7fff_ffff;

pub(crate) fn flushed<const FLUSH: bool>(value: f32) -> f32 {
    if FLUSH && value.is_subnormal() {
        0.0_f32.copysign(value)
    } else {
        value
    }
}

fn input<const FLUSH: bool>(bits: u64) -> f32 {
    flushed::<FLUSH>(f32::from_bits(bits as u32))
}

pub(crate) fn output<const FLUSH: bool, const CLAMP: bool>(value: f32) -> u64 {
    if CLAMP {
        return u64::from(clamped(value).to_bits());
    }
    let bits = if value.is_nan() {
        NAN_F32
    } else {
        flushed::<FLUSH>(value).to_bits()
    };
    u64::from(bits)
}

/// In 0 to 1; NaN and -0 become 0.
pub(crate) fn clamped(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

macro_rules! in_f32 {
    ($($name:ident($a:ident, $b:ident, $c:ident) $value:expr;)*) => {$(
        pub(crate) fn $name<const FLUSH: bool, const CLAMP: bool>(a: u64, b: u64, c: u64) -> u64 {
            let ($a, $b, $c) = (input::<FLUSH>(a), input::<FLUSH>(b), input::<FLUSH>(c));
            output::<FLUSH, CLAMP>($value)
        }
    )*};
}

in_f32! {
    add(a, b, _c) a + b;
    sub(a, b, _c) a - b;
    mul(a, b, _c) a * b;
    div(a, b, _c) a / b;
    fma(a, b, c) a.mul_add(b, c);
    min(a, b, _c) smaller(a, b);
    max(a, b, _c) larger(a, b);
    min_nan(a, b, _c) if a.is_nan() || b.is_nan() { f32::NAN } else { smaller(a, b) };
    max_nan(a, b, _c) if a.is_nan() || b.is_nan() { f32::NAN } else { larger(a, b) };
    rcp(a, _b, _c) 1.0 / a;
    sqrt(a, _b, _c) a.sqrt();
    rsqrt(a, _b, _c) (1.0 / f64::from(a).sqrt()) as f32;
    ex2(a, _b, _c) f64::from(a).exp2() as f32;
    lg2(a, _b, _c) f64::from(a).log2() as f32;
    sin(a, _b, _c) f64::from(a).sin() as f32;
    cos(a, _b, _c) f64::from(a).cos() as f32;
    tanh(a, _b, _c) f64::from(a).tanh() as f32;
}

/// -0 is smaller than 0. One NaN is left out.
fn smaller(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    }
}

fn larger(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_negative() {
                b
            } else {
                a
            }
        }
        _ => {
            if a > b {
                a
            } else {
                b
            }
        }
    }
}

/// Sign changes keep NaN as it is.
pub(crate) fn neg<const FLUSH: bool, const CLAMP: bool>(a: u64, _: u64, _: u64) -> u64 {
    u64::from((-input::<FLUSH>(a)).to_bits())
}

pub(crate) fn abs<const FLUSH: bool, const CLAMP: bool>(a: u64, _: u64, _: u64) -> u64 {
    u64::from(input::<FLUSH>(a).abs().to_bits())
}

/// The magnitude of the second operand with the sign of the first.
pub(crate) fn copysign(a: u64, b: u64, _: u64) -> u64 {
    const SIGN: u64 = 1 << 31;
    (a & SIGN) | (b & !SIGN)
}

pub(crate) fn copysign_f64(a: u64, b: u64, _: u64) -> u64 {
    const SIGN: u64 = 1 << 63;
    (a & SIGN) | (b & !SIGN)
}

/// `testp`: what kind of number it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Test {
    Finite,
    Infinite,
    Number,
    NotANumber,
    Normal,
    Subnormal,
}

pub(crate) fn test(test: Test, value: f64, is_subnormal: bool) -> bool {
    match test {
        Test::Finite => value.is_finite(),
        Test::Infinite => value.is_infinite(),
        Test::Number => !value.is_nan(),
        Test::NotANumber => value.is_nan(),
        Test::Normal => value.is_finite() && value != 0.0 && !is_subnormal,
        Test::Subnormal => is_subnormal,
    }
}

macro_rules! in_f64 {
    ($($name:ident($a:ident, $b:ident, $c:ident) $value:expr;)*) => {$(
        pub(crate) fn $name(a: u64, b: u64, c: u64) -> u64 {
            let ($a, $b, $c) = (f64::from_bits(a), f64::from_bits(b), f64::from_bits(c));
            output_f64($value)
        }
    )*};
}

/// A quiet NaN without a sign, so that results do not depend on the CPU.
pub(crate) fn output_f64(value: f64) -> u64 {
    if value.is_nan() {
        0x7ff8_0000_0000_0000
    } else {
        value.to_bits()
    }
}

in_f64! {
    add_f64(a, b, _c) a + b;
    sub_f64(a, b, _c) a - b;
    mul_f64(a, b, _c) a * b;
    div_f64(a, b, _c) a / b;
    fma_f64(a, b, c) a.mul_add(b, c);
    min_f64(a, b, _c) if b.is_nan() || a < b || a == b && a.is_sign_negative() { a } else { b };
    max_f64(a, b, _c) if b.is_nan() || a > b || a == b && a.is_sign_positive() { a } else { b };
    rcp_f64(a, _b, _c) 1.0 / a;
    sqrt_f64(a, _b, _c) a.sqrt();
}

pub(crate) fn neg_f64(a: u64, _: u64, _: u64) -> u64 {
    a ^ (1 << 63)
}

pub(crate) fn abs_f64(a: u64, _: u64, _: u64) -> u64 {
    a & !(1 << 63)
}
