//! The elementary functions of this crate, written out so that they give the same bits on every machine.
//!
//! `f32::exp` and `f64::ln` call the platform's math library, whose last bit differs between systems. Rust never contracts
//! `a * b + c` into a fused operation. So every CPU computes exactly what is written here, vectorised or not.

/// Adding and subtracting this rounds an f32 below 2^22 to an integer, halves to even; the sum's low bits then hold
/// that integer in two's complement.
pub(crate) const ROUND_F32: f32 = 12_582_912.0; // 1.5 * 2^23

/// Below this the result is 0, so there are no subnormal results, which some CPUs compute slowly.
pub(crate) const EXP_LOWEST: f32 = -87.0;
/// Above this the result stays at `exp(88)`. It is finite, so `1 / (1 + exp(x))` needs no special case.
pub(crate) const EXP_HIGHEST: f32 = 88.0;
/// ln 2 in two parts; the first has 10 significant bits, so its product with an 8-bit integer is exact.
pub(crate) const LN_2_HIGH: f32 = 355.0 / 512.0;
pub(crate) const LN_2_LOW: f32 = -2.121_944_4e-4;

/// e^x: argument reduction to |r| <= ln(2)/2, then the Taylor polynomial of degree 6 (truncation error 1.2e-7).
/// `exp(0)` is exactly 1. Branch-free, so that it vectorises when inlined into a loop.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = if x > EXP_HIGHEST { EXP_HIGHEST } else { x };
    let clamped = if clamped < EXP_LOWEST { EXP_LOWEST } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND_F32;
    let n = shifted - ROUND_F32;
    let r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut p = 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    let y = (p * (r * r) + r) + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let result = y * scale;
    if x < EXP_LOWEST { 0.0 } else { result }
}

/// Natural logarithm of a positive, normal f64: `2 atanh((m - 1) / (m + 1))` of the mantissa, by its series.
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let z = s * s;
    let mut series = 0.0;
    // |s| <= 0.1716, so the first dropped term is below 1e-18.
    for odd in (1..=21).rev().step_by(2) {
        series = series * z + 1.0 / f64::from(odd);
    }
    2.0 * s * series + exponent as f64 * std::f64::consts::LN_2
}

/// e^x in f64 for |x| < 700, by a Taylor series after reduction. For tables made at load.
pub(crate) fn exp_f64(x: f64) -> f64 {
    let n = (x * std::f64::consts::LOG2_E).round();
    // ln 2 in two parts: the high one has 32 significant bits, so `n * high` is exact.
    const HIGH: f64 = 0.693_147_180_369_123_8;
    const LOW: f64 = 1.908_214_929_270_587_7e-10;
    let r = (x - n * HIGH) - n * LOW;
    let mut sum = 1.0;
    for k in (1..=18).rev() {
        sum = sum * r / f64::from(k) + 1.0;
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// Sine and cosine in f64 for 0 <= x < 2^20, by Taylor series after reduction to |r| <= pi/4. For tables made at load.
pub(crate) fn sin_cos_f64(x: f64) -> (f64, f64) {
    let n = (x * std::f64::consts::FRAC_2_PI).round();
    // pi/2 in three parts of at most 33 significant bits, so that the products with n < 2^20 are exact.
    const P1: f64 = 1.570_796_326_734_125_6;
    const P2: f64 = 6.077_100_506_303_966e-11;
    const P3: f64 = 2.022_266_248_795_950_6e-21;
    let r = ((x - n * P1) - n * P2) - n * P3;
    let z = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in (1..=10).rev() {
        let k = f64::from(k);
        sin = 1.0 - sin * z / (2.0 * k * (2.0 * k + 1.0));
        cos = 1.0 - cos * z / (2.0 * k * (2.0 * k - 1.0));
    }
    sin *= r;
    match n as i64 & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-87.5), 0.0);
        assert!(exp(1e30).is_finite());
        assert!(exp(f32::NAN).is_nan());
        let mut worst = 0.0f64;
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let right = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / right - 1.0).abs());
        }
        assert!(worst < 4e-7, "worst relative error {worst:e}");
    }

    #[test]
    fn double_precision_functions_match_the_platform() {
        for i in 0..200_000 {
            let x = f64::from(i) * 0.0419 + 1e-3;
            let (sin, cos) = sin_cos_f64(x);
            assert!((sin - x.sin()).abs() < 1e-14 && (cos - x.cos()).abs() < 1e-14, "{x}");
            assert!((ln(x) - x.ln()).abs() < 1e-14 * (1.0 + x.ln().abs()), "{x}");
            let e = x * 0.08 - 300.0;
            assert!((exp_f64(e) / e.exp() - 1.0).abs() < 1e-13, "{e}");
        }
    }
}
