//! `cvt` and the moves that take registers apart.

use crate::fixture::{assert_values, f32_bits, s32};

const NAN: u64 = 0x7fff_ffff;

#[test]
fn floats_become_integers_by_the_named_rounding_and_saturate() {
    let nan = f32_bits(f32::NAN);
    assert_values(&[
        ("cvt.rni.s32.f32 %r0, %r1;", &[f32_bits(2.5)], 2),
        ("cvt.rni.s32.f32 %r0, %r1;", &[f32_bits(3.5)], 4),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[f32_bits(-2.7)], s32(-2)),
        ("cvt.rmi.s32.f32 %r0, %r1;", &[f32_bits(-2.1)], s32(-3)),
        ("cvt.rpi.s32.f32 %r0, %r1;", &[f32_bits(2.1)], 3),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[f32_bits(3e9)], s32(i32::MAX)),
        ("cvt.rzi.u32.f32 %r0, %r1;", &[f32_bits(-5.0)], 0),
        ("cvt.rzi.u64.f32 %rd0, %r1;", &[f32_bits(1.844_674_4e19)], u64::MAX),
        ("cvt.rzi.u8.f32 %rs0, %r1;", &[f32_bits(300.0)], 255),
        ("cvt.rzi.s32.f32 %r0, %r1;", &[nan], 0),
        ("cvt.rzi.u64.f32 %rd0, %r1;", &[nan], 1 << 63),
        ("cvt.rzi.s32.f64 %r0, %rd1;", &[f64::NAN.to_bits()], 1 << 31),
        ("cvt.rni.f32.f32 %r0, %r1;", &[f32_bits(2.5)], f32_bits(2.0)),
        ("cvt.sat.f32.f32 %r0, %r1;", &[nan], 0),
    ]);
}

#[test]
fn integers_are_cut_extended_or_saturated() {
    assert_values(&[
        ("cvt.s32.s8 %r0, %rs1;", &[0x80], 0xffff_ff80),
        ("cvt.s8.s32 %r0, %r1;", &[0x1ff], 0xffff_ffff),
        ("cvt.u8.u32 %r0, %r1;", &[0x1ff], 0xff),
        ("cvt.sat.u8.s32 %r0, %r1;", &[s32(-3)], 0),
        ("cvt.sat.s8.s32 %r0, %r1;", &[300], 127),
        ("cvt.s64.s32 %rd0, %r1;", &[s32(-1)], u64::MAX),
        ("cvt.u64.u32 %rd0, %r1;", &[s32(-1)], 0xffff_ffff),
        ("cvt.rn.f32.u32 %r0, %r1;", &[0xffff_ffff], f32_bits(4_294_967_296.0)),
        ("cvt.rn.f32.s32 %r0, %r1;", &[s32(-3)], f32_bits(-3.0)),
        ("cvt.rn.f64.s64 %rd0, %rd1;", &[u64::MAX], (-1.0_f64).to_bits()),
        ("cvt.rn.f16.s32 %rs0, %r1;", &[2049], 0x6800),
    ]);
}

#[test]
fn sixteen_bit_formats_round_ties_to_even_and_keep_subnormals() {
    let power = |exponent: i32| 2.0_f32.powi(exponent);
    assert_values(&[
        ("cvt.rn.f16.f32 %rs0, %r1;", &[f32_bits(65_519.0)], 0x7bff),
        ("cvt.rn.f16.f32 %rs0, %r1;", &[f32_bits(65_520.0)], 0x7c00),
        ("cvt.rz.f16.f32 %rs0, %r1;", &[f32_bits(65_520.0)], 0x7bff),
        ("cvt.rn.f16.f32 %rs0, %r1;", &[f32_bits(power(-25))], 0),
        ("cvt.rn.f16.f32 %rs0, %r1;", &[f32_bits(1.5 * power(-25))], 1),
        ("cvt.rp.f16.f32 %rs0, %r1;", &[f32_bits(power(-60))], 1),
        ("cvt.rn.f16.f32 %rs0, %r1;", &[f32_bits(1.0 + power(-11))], 0x3c00),
        ("cvt.rn.f16.f32 %rs0, %r1;", &[f32_bits(1.0 + 3.0 * power(-11))], 0x3c02),
        ("cvt.rn.f16.f32 %rs0, %r1;", &[f32_bits(-0.0)], 0x8000),
        ("cvt.rn.f16.f32 %rs0, %r1;", &[f32_bits(f32::NAN)], 0x7fff),
        ("cvt.f32.f16 %r0, %rs1;", &[1], f32_bits(power(-24))),
        ("cvt.f32.f16 %r0, %rs1;", &[0xfc00], f32_bits(f32::NEG_INFINITY)),
        ("cvt.f32.f16 %r0, %rs1;", &[0x7e00], NAN),
        ("cvt.f32.f16 %r0, %rs1;", &[0x3555], f32_bits(0.333_251_95)),
        ("cvt.rn.bf16.f32 %rs0, %r1;", &[f32_bits(1.0 + power(-8))], 0x3f80),
        ("cvt.rn.bf16.f32 %rs0, %r1;", &[f32_bits(1.0 + 3.0 * power(-8))], 0x3f82),
        ("cvt.rn.bf16.f32 %rs0, %r1;", &[f32_bits(f32::MAX)], 0x7f80),
        ("cvt.rn.bf16.f32 %rs0, %r1;", &[0x0001_8000], 2),
        ("cvt.f32.bf16 %r0, %rs1;", &[0xbfc0], f32_bits(-1.5)),
        (
            "cvt.rn.bf16x2.f32 %r0, %r1, %r2;",
            &[f32_bits(1.0), f32_bits(2.0)],
            0x3f80_4000,
        ),
        (
            "cvt.rn.f16x2.f32 %r0, %r1, %r2;",
            &[f32_bits(1.0), f32_bits(2.0)],
            0x3c00_4000,
        ),
        (
            "cvt.rn.f32.f64 %r0, %rd1;",
            &[1e300_f64.to_bits()],
            f32_bits(f32::INFINITY),
        ),
        ("cvt.f64.f32 %rd0, %r1;", &[f32_bits(1.5)], 1.5_f64.to_bits()),
    ]);
}

#[test]
fn every_f16_survives_the_way_through_f32() {
    let mut text = String::new();
    for index in 0..64 {
        // One value of each exponent and sign.
        text += &format!(
            "cvt.f32.f16 %r5, {:#x};\ncvt.rn.f16.f32 %rs5, %r5;\n",
            index * 1024 + 341
        );
        text += &format!(
            "setp.ne.u16 %p5, %rs5, {:#x};\n@%p5 add.u32 %r0, %r0, 1;\n",
            index * 1024 + 341
        );
    }
    // The exponents of NaN do not come back as they were.
    let text = format!("mov.u32 %r0, 0;\n{text}");
    assert_values(&[(text.as_str(), &[0], 2)]);
}

#[test]
fn registers_are_packed_and_taken_apart_lowest_first() {
    assert_values(&[
        ("mov.b64 %rd0, {%r1, %r2};", &[1, 2], 0x2_0000_0001),
        ("mov.b64 {%r3, %r0}, %rd1;", &[0x2_0000_0001], 2),
        ("mov.b64 {_, %r0}, %rd1;", &[0x7_0000_0001], 7),
        ("mov.b32 %r0, {%rs1, %rs2};", &[1, 2], 0x2_0001),
        ("mov.b32 {%rs3, %rs0}, %r1;", &[0x7_0001], 7),
        (
            "mov.b64 %rd0, {%rs1, %rs2, %rs1, %rs2};",
            &[1, 2],
            0x0002_0001_0002_0001,
        ),
    ]);
}
