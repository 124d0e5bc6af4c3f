//! Floating-point arithmetic: rounding, NaN, zeros, subnormals.

use crate::fixture::{assert_values, evaluate, f32_bits};

const NAN: u64 = 0x7fff_ffff;

#[test]
fn f32_results_are_rounded_once_and_nan_has_one_form() {
    let (infinity, one) = (f32_bits(f32::INFINITY), f32_bits(1.0));
    assert_values(&[
        ("add.rn.f32 %r0, %r1, %r2;", &[one, f32_bits(0.5)], f32_bits(1.5)),
        ("add.f32 %r0, %r1, %r2;", &[infinity, f32_bits(f32::NEG_INFINITY)], NAN),
        ("sub.f32 %r0, %r1, 0f3F800000;", &[one], 0),
        ("mul.f32 %r0, %r1, %r2;", &[0xffc0_1234, one], NAN),
        ("div.rn.f32 %r0, %r1, %r2;", &[one, 0], infinity),
        ("rcp.approx.ftz.f32 %r0, %r1;", &[f32_bits(2.0)], f32_bits(0.5)),
        ("sqrt.rn.f32 %r0, %r1;", &[f32_bits(-1.0)], NAN),
        ("rsqrt.approx.ftz.f32 %r0, %r1;", &[f32_bits(4.0)], f32_bits(0.5)),
        ("ex2.approx.ftz.f32 %r0, %r1;", &[f32_bits(3.0)], f32_bits(8.0)),
        ("ex2.approx.ftz.f32 %r0, %r1;", &[f32_bits(f32::NEG_INFINITY)], 0),
        ("lg2.approx.f32 %r0, %r1;", &[f32_bits(8.0)], f32_bits(3.0)),
        ("neg.f32 %r0, %r1;", &[one], f32_bits(-1.0)),
        ("abs.f32 %r0, %r1;", &[f32_bits(-1.0)], one),
        (
            "copysign.f32 %r0, %r1, %r2;",
            &[f32_bits(-1.0), f32_bits(2.0)],
            f32_bits(-2.0),
        ),
    ]);
    let (a, b, c) = (1.000_1_f32, 1.000_2_f32, -1.000_3_f32);
    let fused = evaluate(
        "fma.rn.f32 %r0, %r1, %r2, %r3;",
        &[f32_bits(a), f32_bits(b), f32_bits(c)],
    );
    assert_eq!(fused, f32_bits(a.mul_add(b, c)));
    assert_ne!(fused, f32_bits(a * b + c));
}

#[test]
fn minimum_and_maximum_leave_nan_out_unless_asked() {
    let (nan, one, zero, minus_zero) = (f32_bits(f32::NAN), f32_bits(1.0), 0, f32_bits(-0.0));
    assert_values(&[
        ("min.f32 %r0, %r1, %r2;", &[nan, one], one),
        ("max.f32 %r0, %r1, %r2;", &[one, nan], one),
        ("max.f32 %r0, %r1, %r2;", &[nan, nan], NAN),
        ("max.NaN.f32 %r0, %r1, %r2;", &[nan, one], NAN),
        ("min.f32 %r0, %r1, %r2;", &[zero, minus_zero], minus_zero),
        ("max.f32 %r0, %r1, %r2;", &[minus_zero, zero], zero),
        (
            "min.f64 %rd0, %rd1, %rd2;",
            &[f64::NAN.to_bits(), 2.0_f64.to_bits()],
            2.0_f64.to_bits(),
        ),
        ("max.f16 %rs0, %rs1, %rs2;", &[0x7e00, 0x3c00], 0x3c00),
    ]);
}

#[test]
fn subnormals_are_flushed_and_results_clamped_only_where_it_says_so() {
    assert_values(&[
        ("add.f32 %r0, %r1, %r2;", &[1, 0], 1),
        ("add.ftz.f32 %r0, %r1, %r2;", &[1, 0], 0),
        ("mul.ftz.f32 %r0, %r1, %r2;", &[0x8000_0001, f32_bits(1.0)], 0x8000_0000),
        // The result alone is subnormal.
        ("mul.ftz.f32 %r0, %r1, %r2;", &[0x0080_0000, f32_bits(0.5)], 0),
        (
            "add.sat.f32 %r0, %r1, %r2;",
            &[f32_bits(1.0), f32_bits(1.0)],
            f32_bits(1.0),
        ),
        ("add.sat.f32 %r0, %r1, %r2;", &[f32_bits(-5.0), f32_bits(1.0)], 0),
        (
            "mul.ftz.sat.f32 %r0, %r1, %r2;",
            &[f32_bits(f32::NAN), f32_bits(1.0)],
            0,
        ),
    ]);
}

#[test]
fn kinds_of_numbers_are_told_apart() {
    assert_values(&[
        ("testp.subnormal.f32 %p0, %r1;", &[1], 1),
        ("testp.normal.f32 %p0, %r1;", &[1], 0),
        ("testp.normal.f32 %p0, %r1;", &[f32_bits(1.0)], 1),
        ("testp.notanumber.f32 %p0, %r1;", &[f32_bits(f32::NAN)], 1),
        ("testp.infinite.f64 %p0, %rd1;", &[f64::INFINITY.to_bits()], 1),
        ("testp.finite.f64 %p0, %rd1;", &[f64::INFINITY.to_bits()], 0),
    ]);
}

#[test]
fn f64_has_its_own_arithmetic() {
    let bits = |value: f64| value.to_bits();
    assert_values(&[
        ("add.f64 %rd0, %rd1, %rd2;", &[bits(1.0), bits(1e-16)], bits(1.0)),
        (
            "fma.rn.f64 %rd0, %rd1, %rd2, %rd3;",
            &[bits(3.0), bits(4.0), bits(0.5)],
            bits(12.5),
        ),
        ("div.rn.f64 %rd0, %rd1, %rd2;", &[bits(1.0), bits(3.0)], bits(1.0 / 3.0)),
        ("mul.f64 %rd0, %rd1, 0d4000000000000000;", &[bits(1.5)], bits(3.0)),
        ("neg.f64 %rd0, %rd1;", &[bits(1.5)], bits(-1.5)),
    ]);
}

#[test]
fn sixteen_bit_formats_compute_alone_and_in_pairs() {
    assert_values(&[
        ("add.rn.f16 %rs0, %rs1, %rs2;", &[0x3c00, 0x3c00], 0x4000),
        ("mul.rn.f16 %rs0, %rs1, %rs2;", &[0x7bff, 0x4000], 0x7c00),
        ("add.rn.f16x2 %r0, %r1, %r2;", &[0x3c00_4000, 0x3c00_3c00], 0x4000_4200),
        ("sub.rn.bf16 %rs0, %rs1, %rs2;", &[0x3f80, 0x3f80], 0),
        (
            "fma.rn.bf16x2 %r0, %r1, %r2, %r3;",
            &[0x3f80_4000, 0x4000_4000, 0x3f80_3f80],
            0x4040_40a0,
        ),
        ("neg.bf16x2 %r0, %r1;", &[0x3f80_bf80], 0xbf80_3f80),
        ("abs.f16 %rs0, %rs1;", &[0xbc00], 0x3c00),
    ]);
}

#[test]
fn a_fused_bf16_sum_is_rounded_once() {
    // 1.0234375 * 1.5 lies in the middle of two numbers: what is far below decides.
    assert_values(&[
        ("fma.rn.bf16 %rs0, %rs1, %rs2, %rs3;", &[0x3f83, 0x3fc0, 0], 0x3fc4),
        ("fma.rn.bf16 %rs0, %rs1, %rs2, %rs3;", &[0x3f83, 0x3fc0, 0x0d80], 0x3fc5),
        ("fma.rn.bf16 %rs0, %rs1, %rs2, %rs3;", &[0x3f83, 0x3fc0, 0x8d80], 0x3fc4),
    ]);
}
