//! Integers, bits and comparisons.

use crate::fixture::{Case, assert_values, f32_bits, s32};

const ONES: u64 = u64::MAX;
const ONES_32: u64 = 0xffff_ffff;

#[test]
fn sums_and_products_wrap_at_their_width() {
    assert_values(&[
        ("add.s32 %r0, %r1, %r2;", &[ONES_32, 1], 0),
        ("add.s64 %rd0, %rd1, -1;", &[5], 4),
        ("add.u16 %rs0, %rs1, %rs2;", &[0xffff, 2], 1),
        ("sub.u32 %r0, %r1, %r2;", &[0, 1], ONES_32),
        ("mul.lo.s32 %r0, %r1, %r2;", &[0x8000_0000, 2], 0),
        ("mul.lo.u64 %rd0, %rd1, %rd2;", &[1 << 63, 3], 1 << 63),
        ("mul.hi.u32 %r0, %r1, %r2;", &[ONES_32, ONES_32], 0xffff_fffe),
        ("mul.hi.s32 %r0, %r1, %r2;", &[s32(-1), s32(-1)], 0),
        ("mul.hi.u64 %rd0, %rd1, %rd2;", &[ONES, ONES], ONES - 1),
        ("mul.hi.s64 %rd0, %rd1, %rd2;", &[ONES, 1], ONES),
        ("mul.wide.s32 %rd0, %r1, %r2;", &[s32(-2), 3], ONES - 5),
        ("mul.wide.u32 %rd0, %r1, %r2;", &[ONES_32, 2], 0x1_ffff_fffe),
        ("mul.wide.u16 %r0, %rs1, %rs2;", &[0xffff, 0xffff], 0xfffe_0001),
        ("mul.wide.s16 %r0, %rs1, %rs2;", &[0xffff, 2], 0xffff_fffe),
        ("mad.lo.s32 %r0, %r1, %r2, %r3;", &[s32(-3), 4, 2], s32(-10)),
        ("mad.hi.u32 %r0, %r1, %r2, %r3;", &[0x8000_0000, 4, 1], 3),
        ("mad.wide.s32 %rd0, %r1, %r2, %rd3;", &[s32(-1), 4, 10], 6),
        ("mul24.lo.s32 %r0, %r1, %r2;", &[0x00ff_ffff, 5], s32(-5)),
        ("mad24.lo.u32 %r0, %r1, %r2, %r3;", &[0xff00_0002, 3, 1], 7),
        ("sad.u32 %r0, %r1, %r2, %r3;", &[3, 10, 1], 8),
    ]);
}

#[test]
fn division_rounds_to_zero_and_never_traps() {
    assert_values(&[
        ("div.s32 %r0, %r1, %r2;", &[s32(-7), 2], s32(-3)),
        ("rem.s32 %r0, %r1, %r2;", &[s32(-7), 2], s32(-1)),
        ("div.s32 %r0, %r1, %r2;", &[s32(i32::MIN), s32(-1)], s32(i32::MIN)),
        ("div.u32 %r0, %r1, %r2;", &[s32(-7), 2], 0x7fff_fffc),
        ("div.u32 %r0, %r1, %r2;", &[7, 0], ONES_32),
        ("rem.u64 %rd0, %rd1, %rd2;", &[7, 0], 7),
    ]);
}

#[test]
fn signs_are_those_of_the_type() {
    assert_values(&[
        ("min.s32 %r0, %r1, %r2;", &[s32(-1), 1], ONES_32),
        ("min.u32 %r0, %r1, %r2;", &[s32(-1), 1], 1),
        ("max.s64 %rd0, %rd1, %rd2;", &[ONES, 1], 1),
        ("abs.s32 %r0, %r1;", &[s32(i32::MIN)], s32(i32::MIN)),
        ("neg.s16 %rs0, %rs1;", &[1], 0xffff),
        ("slct.b32.s32 %r0, %r1, %r2, %r3;", &[7, 8, s32(-1)], 8),
        ("slct.b32.f32 %r0, %r1, %r2, %r3;", &[7, 8, f32_bits(-0.0)], 7),
        ("slct.b32.f32 %r0, %r1, %r2, %r3;", &[7, 8, f32_bits(f32::NAN)], 8),
        ("selp.b32 %r0, %r1, %r2, %p3;", &[7, 8, 0], 8),
    ]);
}

#[test]
fn shifts_by_the_width_or_more_leave_nothing_but_the_sign() {
    assert_values(&[
        ("shl.b32 %r0, %r1, 31;", &[3], 1 << 31),
        ("shl.b32 %r0, %r1, %r2;", &[1, 32], 0),
        ("shl.b32 %r0, %r1, %r2;", &[1, ONES_32], 0),
        ("shl.b16 %rs0, %rs1, 1;", &[0x8001], 2),
        ("shl.b64 %rd0, %rd1, %r2;", &[1, 63], 1 << 63),
        ("shr.u32 %r0, %r1, %r2;", &[1 << 31, 31], 1),
        ("shr.u32 %r0, %r1, %r2;", &[1 << 31, 32], 0),
        ("shr.s32 %r0, %r1, %r2;", &[1 << 31, 40], ONES_32),
        ("shr.s64 %rd0, %rd1, 4;", &[1 << 63], 0xf800_0000_0000_0000),
        ("shf.l.wrap.b32 %r0, %r1, %r2, 33;", &[0x8000_0001, 1], 3),
        ("shf.r.clamp.b32 %r0, %r1, %r2, 40;", &[1, 2], 2),
        ("shf.r.wrap.b32 %r0, %r1, %r2, 33;", &[1, 3], 0x8000_0000),
    ]);
}

#[test]
fn bit_fields_are_cut_at_the_width() {
    assert_values(&[
        ("bfe.u32 %r0, %r1, 8, 8;", &[0xabcd_1234], 0x12),
        ("bfe.s32 %r0, %r1, 8, 8;", &[0x8000], 0xffff_ff80),
        ("bfe.u32 %r0, %r1, 28, 8;", &[0xf000_0000], 0xf),
        ("bfe.s32 %r0, %r1, 28, 8;", &[0xf000_0000], ONES_32),
        ("bfe.s32 %r0, %r1, 40, 8;", &[0x8000_0000], ONES_32),
        ("bfe.s32 %r0, %r1, 0, 0;", &[ONES_32], 0),
        ("bfe.u64 %rd0, %rd1, 0, 64;", &[ONES], ONES),
        ("bfi.b32 %r0, %r1, %r2, 8, 4;", &[0xff, 0xffff_0000], 0xffff_0f00),
        ("bfi.b32 %r0, %r1, %r2, 32, 4;", &[0xff, 5], 5),
        ("bfi.b64 %rd0, %rd1, %rd2, 60, 8;", &[0xff, 1], 0xf000_0000_0000_0001),
        ("popc.b32 %r0, %r1;", &[0xf0f0_0001], 9),
        ("popc.b64 %r0, %rd1;", &[ONES], 64),
        ("clz.b32 %r0, %r1;", &[0], 32),
        ("clz.b64 %r0, %rd1;", &[1], 63),
        ("brev.b32 %r0, %r1;", &[1], 1 << 31),
        ("bfind.u32 %r0, %r1;", &[0x100], 8),
        ("bfind.u32 %r0, %r1;", &[0], ONES_32),
        ("bfind.s32 %r0, %r1;", &[s32(-1)], ONES_32),
        ("bfind.s32 %r0, %r1;", &[s32(-5)], 2),
    ]);
}

#[test]
fn logic_takes_any_function_of_three_operands() {
    assert_values(&[
        // With these operands the low byte is the table itself.
        ("lop3.b32 %r0, %r1, %r2, %r3, 0x96;", &[0xf0, 0xcc, 0xaa], 0x96),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0xca;", &[0xf0, 0xcc, 0xaa], 0xca),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0x01;", &[0xf0, 0xcc, 0xaa], 0xffff_ff01),
        ("not.b32 %r0, %r1;", &[1], 0xffff_fffe),
        ("not.pred %p0, %p1;", &[1], 0),
        ("xor.pred %p0, %p1, %p2;", &[5, 9], 0),
        ("cnot.b32 %r0, %r1;", &[0], 1),
        (
            "prmt.b32 %r0, %r1, %r2, 0x7531;",
            &[0x3322_1100, 0x7766_5544],
            0x7755_3311,
        ),
        ("prmt.b32 %r0, %r1, %r2, 0x8;", &[0xf0, 0], 0xf0f0_f0ff),
        ("dp4a.s32.u32 %r0, %r1, %r2, %r3;", &[0xff, 2, 10], 8),
        ("dp4a.u32.u32 %r0, %r1, %r2, %r3;", &[0x0101_0101, 0x0102_0304, 0], 10),
    ]);
}

#[test]
fn carries_go_from_one_word_to_the_next() {
    assert_values(&[
        (
            "add.cc.u32 %r5, %r1, %r2;\naddc.u32 %r0, %r3, %r4;",
            &[ONES_32, 1, 5, 0],
            6,
        ),
        (
            "add.cc.u32 %r5, %r1, %r2;\naddc.u32 %r0, %r3, %r4;",
            &[ONES_32, 0, 5, 0],
            5,
        ),
        (
            "add.cc.u64 %rd5, %rd1, %rd2;\naddc.cc.u64 %rd6, %rd3, %rd3;\naddc.u64 %rd0, 0, 0;",
            &[ONES, 1, 1 << 63],
            1,
        ),
        ("sub.cc.u32 %r5, %r1, %r2;\nsubc.u32 %r0, %r3, %r4;", &[0, 1, 5, 2], 2),
    ]);
}

#[test]
fn comparisons_know_signs_and_nan() {
    let nan = f32_bits(f32::NAN);
    let cases: &[Case<'_>] = &[
        ("setp.lt.s32 %p0, %r1, %r2;", &[s32(-1), 1], 1),
        ("setp.lt.u32 %p0, %r1, %r2;", &[s32(-1), 1], 0),
        ("setp.lo.u32 %p0, %r1, %r2;", &[1, 2], 1),
        ("setp.ge.s64 %p0, %rd1, %rd2;", &[ONES, 0], 0),
        ("setp.ne.f32 %p0, %r1, %r2;", &[nan, nan], 0),
        ("setp.neu.f32 %p0, %r1, %r2;", &[nan, nan], 1),
        ("setp.ltu.f32 %p0, %r1, %r2;", &[nan, f32_bits(1.0)], 1),
        ("setp.le.f32 %p0, %r1, %r2;", &[nan, f32_bits(1.0)], 0),
        ("setp.eq.f32 %p0, %r1, %r2;", &[f32_bits(0.0), f32_bits(-0.0)], 1),
        ("setp.num.f32 %p0, %r1, %r2;", &[nan, 0], 0),
        ("setp.nan.f32 %p0, %r1, %r2;", &[nan, 0], 1),
        ("setp.gt.f32 %p0, %r1, %r2;", &[1, 0], 1),
        ("setp.gt.ftz.f32 %p0, %r1, %r2;", &[1, 0], 0),
        ("setp.gt.f16 %p0, %rs1, %rs2;", &[0x3c00, 0xbc00], 1),
        ("setp.lt.bf16 %p0, %rs1, %rs2;", &[0xbf80, 0x3f80], 1),
        ("setp.lt.and.s32 %p0|%p4, %r1, %r2, !%p3;", &[1, 2, 0], 1),
        ("setp.lt.and.s32 %p4|%p0, %r1, %r2, !%p3;", &[1, 2, 0], 0),
        ("setp.lt.or.s32 %p4|%p0, %r1, %r2, %p3;", &[1, 2, 1], 1),
        ("setp.lt.xor.s32 %p0, %r1, %r2, %p3;", &[1, 2, 1], 0),
        ("set.lt.u32.s32 %r0, %r1, %r2;", &[1, 2], ONES_32),
        (
            "set.gt.f32.f32 %r0, %r1, %r2;",
            &[f32_bits(2.0), f32_bits(1.0)],
            f32_bits(1.0),
        ),
    ];
    assert_values(cases);
}
