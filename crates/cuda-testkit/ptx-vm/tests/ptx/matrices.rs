//! Fragments of matrices against a plain product.

use crate::fixture::{Array, Fixture, SEEDS};

/// Copies A (16 x 16) and B (16 x 8) to shared memory, loads fragments by `ldmatrix`, adds A x B to ones, and stores C.
const PRODUCT: &str = "
.shared .align 16 .b8 a[512];
.shared .align 16 .b8 b[256];
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 4;
cvt.u64.u32 %rd4, %r2;
add.s64 %rd5, %rd1, %rd4;
ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd5];
mov.u32 %r7, a;
mov.u32 %r9, b;
add.u32 %r8, %r7, %r2;
st.shared.v4.b32 [%r8], {%r3, %r4, %r5, %r6};
setp.ge.u32 %p1, %r1, 16;
@%p1 bra $COPIED;
add.s64 %rd6, %rd2, %rd4;
ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd6];
add.u32 %r10, %r9, %r2;
st.shared.v4.b32 [%r10], {%r3, %r4, %r5, %r6};
$COPIED:
bar.sync 0;
and.b32 %r11, %r1, 15;
shl.b32 %r12, %r11, 5;
shr.u32 %r13, %r1, 4;
shl.b32 %r14, %r13, 4;
add.u32 %r15, %r7, %r12;
add.u32 %r15, %r15, %r14;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r16, %r17, %r18, %r19}, [%r15];
shl.b32 %r20, %r11, 4;
add.u32 %r20, %r9, %r20;
ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {%r21, %r22}, [%r20];
mov.f32 %f1, 0f3F800000;
mov.f32 %f2, %f1;
mov.f32 %f3, %f1;
mov.f32 %f4, %f1;
mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {%f1, %f2, %f3, %f4}, {%r16, %r17, %r18, %r19}, {%r21, %r22}, {%f1, %f2, %f3, %f4};
";

/// Stores the lane's part of C (16 x 8) at %rd3.
const STORE: &str = "
shr.u32 %r23, %r1, 2;
and.b32 %r24, %r1, 3;
shl.b32 %r25, %r23, 5;
shl.b32 %r26, %r24, 3;
add.u32 %r27, %r25, %r26;
cvt.u64.u32 %rd7, %r27;
add.s64 %rd8, %rd3, %rd7;
st.global.v2.f32 [%rd8], {%f1, %f2};
st.global.v2.f32 [%rd8+256], {%f3, %f4};
";

/// A (16 x 8) and B (8 x 8, a column after the other) are loaded as the fragments are laid out.
const SHALLOW_PRODUCT: &str = "
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
cvt.u64.u32 %rd4, %r2;
add.s64 %rd5, %rd1, %rd4;
add.s64 %rd6, %rd2, %rd4;
ld.global.b32 %r3, [%rd5];
ld.global.b32 %r4, [%rd5+128];
ld.global.b32 %r5, [%rd6];
mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r3, %r4}, {%r5}, {0f3F800000, 0f3F800000, 0f3F800000, 0f3F800000};
";

/// Small integers, which both formats hold exactly.
fn integers(count: usize, factor: usize) -> Vec<i32> {
    (0..count).map(|index| (index * factor % 17) as i32 - 8).collect()
}

fn to_f16(value: i32) -> u16 {
    let sign = if value < 0 { 0x8000 } else { 0 };
    let magnitude = value.unsigned_abs();
    if magnitude == 0 {
        return 0;
    }
    let exponent = magnitude.ilog2();
    sign | ((exponent + 15) << 10) as u16 | ((magnitude << (10 - exponent)) & 0x3ff) as u16
}

fn to_bf16(value: i32) -> u16 {
    ((value as f32).to_bits() >> 16) as u16
}

/// A x B + 1, with B given a row after the other.
fn product(a: &[i32], b: &[i32], depth: usize) -> Vec<f32> {
    let element = |row: usize, column: usize| (0..depth).map(|k| a[row * depth + k] * b[8 * k + column]).sum::<i32>();
    (0..128)
        .map(|index| (1 + element(index / 8, index % 8)) as f32)
        .collect()
}

#[track_caller]
fn assert_product(body: &str, arrays: [&mut Array; 2], expected: &[f32]) {
    let [a, b] = arrays;
    for seed in SEEDS {
        let mut fixture = Fixture::of_body(3, body);
        fixture.seed = seed;
        let mut c = Array::new(512);
        let args = [fixture.input(a), fixture.input(b), fixture.output(&mut c)];
        fixture.launch(1, 32, &args).unwrap_or_else(|fault| panic!("{fault}"));
        fixture.assert_clean();
        assert_eq!(c.f32s(), expected, "seed {seed}");
    }
}

#[test]
fn fragments_that_ldmatrix_loads_multiply_as_the_matrices_do() {
    let (a, b) = (integers(256, 5), integers(128, 7));
    let expected = product(&a, &b, 16);
    type ToBits = fn(i32) -> u16;
    let formats: [(&str, ToBits); 2] = [("f16", to_f16), ("bf16", to_bf16)];
    for (name, to_bits) in formats {
        let body = format!("{}{STORE}", PRODUCT.replace("TYPE", name));
        let (mut a, mut b) = (
            Array::of_u16(a.iter().copied().map(to_bits)),
            Array::of_u16(b.iter().copied().map(to_bits)),
        );
        assert_product(&body, [&mut a, &mut b], &expected);
    }
}

#[test]
fn products_of_depth_eight_have_half_the_registers() {
    let (a, b) = (integers(128, 5), integers(64, 3));
    let expected = product(&a, &b, 8);
    let columns = (0..64).map(|index| to_f16(b[index % 8 * 8 + index / 8]));
    let (mut a, mut b) = (Array::of_u16(a.iter().copied().map(to_f16)), Array::of_u16(columns));
    assert_product(&format!("{SHALLOW_PRODUCT}{STORE}"), [&mut a, &mut b], &expected);
}

#[test]
fn one_matrix_is_loaded_from_the_addresses_of_eight_lanes() {
    // Lanes from 8 on give no address that could be used.
    let body = "
.shared .align 16 .b8 s[128];
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
mov.u32 %r3, s;
add.u32 %r4, %r3, %r2;
st.shared.u32 [%r4], %r1;
bar.warp.sync -1;
setp.lt.u32 %p1, %r1, 8;
shl.b32 %r5, %r1, 4;
add.u32 %r6, %r3, %r5;
selp.u32 %r6, %r6, 1, %p1;
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r7}, [%r6];
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
st.global.u32 [%rd3], %r7;
";
    let mut fixture = Fixture::of_body(1, body);
    let mut out = Array::new(128);
    let at = fixture.output(&mut out);
    fixture.launch(1, 32, &[at]).unwrap();
    fixture.assert_clean();
    // A lane's register is the pair of values at its own number, row by row.
    assert_eq!(out.u32s(), (0..32).collect::<Vec<_>>());
}
