//! Loads and stores in every space, variables, atomics, branches.

use crate::fixture::{Array, Fixture, SEEDS, f32_bits, kernel};

/// Puts the address of the thread's word of the first array into %rd11. The thread is in %r1.
pub const OWN_WORD: &str = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd10, %r1, 4;\nadd.s64 %rd11, %rd1, %rd10;\n";

/// Runs a body that stores one word for each thread, with every seed, and gives the words.
#[track_caller]
pub fn words_of(threads: u32, body: &str) -> Vec<u32> {
    let mut first = None;
    for seed in SEEDS {
        let mut fixture = Fixture::of_body(1, &format!("{OWN_WORD}{body}"));
        fixture.seed = seed;
        let mut out = Array::new(4 * threads as usize);
        let at = fixture.output(&mut out);
        fixture
            .launch(1, threads, &[at])
            .unwrap_or_else(|fault| panic!("{fault}"));
        fixture.assert_clean();
        let words = out.u32s();
        assert_eq!(first.get_or_insert_with(|| words.clone()), &words, "seed {seed}");
    }
    first.unwrap()
}

#[test]
fn vectors_and_narrow_values_are_loaded_and_stored() {
    let mut fixture = Fixture::of_body(
        2,
        "ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];\nadd.u32 %r1, %r1, %r4;\n\
         st.global.v2.u32 [%rd2], {%r1, %r2};\nld.global.s8 %r5, [%rd1+4];\nst.global.u32 [%rd2+8], %r5;\n\
         ld.volatile.global.u8 %rs1, [%rd1+4];\ncvt.u32.u16 %r6, %rs1;\nst.global.u32 [%rd2+12], %r6;\n\
         st.global.u8 [%rd2+16], %r2;\nst.global.b16 [%rd2+18], 0x1234;\nadd.s64 %rd3, %rd2, 32;\n\
         ld.global.b64 %rd4, [%rd3+-32];\nst.global.b64 [%rd3+-8], %rd4;",
    );
    let (mut input, mut out) = (Array::of_u32([1, 0x180, 3, 4]), Array::new(32));
    let args = [fixture.input(&mut input), fixture.output(&mut out)];
    fixture.launch(1, 1, &args).unwrap();
    fixture.assert_clean();
    assert_eq!(out.u32s(), [5, 0x180, 0xffff_ff80, 0x80, 0x1234_0080, 0, 5, 0x180]);
}

#[test]
fn variables_of_the_module_have_their_initial_values() {
    let variables = ".global .align 4 .u32 table[4] = {10, 20, 30, 40};\n.const .align 4 .f32 scale = 0f40000000;\n";
    let body = "mov.u64 %rd2, table;\nld.global.u32 %r1, [%rd2+8];\nld.global.nc.u32 %r2, [table+4];\n\
                cvta.global.u64 %rd3, %rd2;\nld.u32 %r3, [%rd3];\nld.const.f32 %f1, [scale];\n\
                st.global.v2.u32 [%rd1], {%r1, %r2};\nst.global.u32 [%rd1+8], %r3;\nst.global.f32 [%rd1+12], %f1;";
    let mut fixture = Fixture::new(&format!("{variables}{}", kernel(1, body)));
    let mut out = Array::new(16);
    let at = fixture.output(&mut out);
    fixture.launch(1, 1, &[at]).unwrap();
    assert_eq!(out.u32s(), [30, 20, 10, f32_bits(2.0) as u32]);
}

#[test]
fn dynamic_shared_memory_begins_behind_the_variables_of_the_body() {
    let body = ".shared .align 4 .b8 fixed[20];\nmov.u32 %r1, dynamic;\nmov.u32 %r2, fixed;\nst.shared.u32 [%r2+16], 7;\n\
                st.shared::cta.u32 [dynamic+12], 9;\nld.shared.u32 %r3, [fixed+16];\nld.shared.u32 %r4, [%r1+12];\n\
                st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};";
    let mut fixture = Fixture::new(&format!(
        ".extern .shared .align 16 .b8 dynamic[];\n{}",
        kernel(1, body)
    ));
    fixture.dynamic_shared_bytes = 16;
    let mut out = Array::new(16);
    let at = fixture.output(&mut out);
    fixture.launch(1, 1, &[at]).unwrap();
    assert_eq!(out.u32s(), [32, 0, 7, 9]);
}

#[test]
fn generic_addresses_reach_shared_and_local_memory() {
    let words = words_of(
        40,
        ".shared .align 4 .b8 s[160];\n.local .align 8 .b8 depot[16];\n.reg .b64 %SP;\n.reg .b64 %SPL;\n\
         mov.u64 %SPL, depot;\ncvta.local.u64 %SP, %SPL;\nst.local.u32 [%SPL+4], %r1;\nld.u32 %r2, [%SP+4];\n\
         mov.u64 %rd2, s;\ncvta.shared.u64 %rd3, %rd2;\nadd.s64 %rd3, %rd3, %rd10;\nst.u32 [%rd3], %r2;\n\
         cvta.to.shared.u64 %rd4, %rd3;\nld.shared.u32 %r3, [%rd4];\nisspacep.shared %p1, %rd3;\n\
         isspacep.global %p2, %rd1;\nisspacep.local %p3, %rd1;\nselp.u32 %r4, 100, 0, %p1;\n\
         selp.u32 %r5, 1000, 0, %p2;\nselp.u32 %r6, 10000, 0, %p3;\nadd.u32 %r3, %r3, %r4;\n\
         add.u32 %r3, %r3, %r5;\nadd.u32 %r3, %r3, %r6;\nst.global.u32 [%rd11], %r3;",
    );
    assert_eq!(words, (1100..1140).collect::<Vec<_>>());
}

#[test]
fn a_structure_is_a_parameter_by_value() {
    let text = ".visible .entry k(.param .align 8 .b8 s[16], .param .u32 n, .param .u64 out)\n{\n.reg .b32 %r<9>;\n\
                .reg .b64 %rd<9>;\nld.param.u64 %rd1, [out];\nld.param.b32 %r1, [s+4];\nmov.b64 %rd2, s;\n\
                ld.param.v2.b32 {%r2, %r3}, [%rd2];\nld.param.u32 %r4, [n];\n\
                st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};\nret;\n}";
    let mut fixture = Fixture::new(text);
    let mut out = Array::new(16);
    let at = fixture.output(&mut out);
    fixture.launch(1, 1, &[0x6_0000_0005, 8, at]).unwrap();
    assert_eq!(out.u32s(), [6, 5, 6, 8]);
}

#[test]
fn atomics_of_one_block_add_up_without_a_finding() {
    let words = words_of(
        64,
        ".shared .align 4 .b8 s[12];\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra $READY;\nst.shared.u32 [s], 0;\n\
         st.shared.u32 [s+4], -1;\nst.shared.u32 [s+8], 0;\n$READY:\nbar.sync 0;\natom.shared.add.u32 %r2, [s], 2;\n\
         red.relaxed.cta.shared.max.s32 [s+4], %r1;\natom.shared.cas.b32 %r3, [s+8], 0, 5;\n\
         atom.shared.cas.b32 %r3, [s+8], 5, 6;\nbar.sync 0;\nld.shared.u32 %r4, [s];\nld.shared.u32 %r5, [s+4];\n\
         ld.shared.u32 %r6, [s+8];\nmad.lo.u32 %r4, %r5, 1000, %r4;\nmad.lo.u32 %r4, %r6, 100000, %r4;\n\
         st.global.u32 [%rd11], %r4;",
    );
    assert_eq!(words, [663_128; 64]);
}

#[test]
fn an_atomic_gives_the_old_value() {
    let mut fixture = Fixture::of_body(
        1,
        "atom.global.exch.b32 %r1, [%rd1], 9;\natom.global.add.f32 %f1, [%rd1+4], 0f3F800000;\n\
         st.global.u32 [%rd1+8], %r1;\nst.global.f32 [%rd1+12], %f1;",
    );
    let mut values = Array::of_u32([3, f32_bits(1.5) as u32, 0, 0]);
    let at = fixture.input(&mut values);
    fixture.launch(1, 1, &[at]).unwrap();
    fixture.assert_clean();
    assert_eq!(values.u32s(), [9, f32_bits(2.5) as u32, 3, f32_bits(1.5) as u32]);
}

#[test]
fn threads_take_their_own_branches() {
    let words = words_of(
        70,
        "mov.u32 %r2, 0;\nmov.u32 %r3, 0;\n$LOOP:\nsetp.ge.u32 %p1, %r2, %r1;\n@%p1 bra $DONE;\n\
         add.u32 %r3, %r3, %r2;\nadd.u32 %r2, %r2, 1;\nbra.uni $LOOP;\n$DONE:\nst.global.u32 [%rd11], %r3;",
    );
    assert_eq!(
        words,
        (0..70)
            .map(|thread: u32| thread * thread.saturating_sub(1) / 2)
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_branch_table_chooses_its_label() {
    let words = words_of(
        3,
        "$TABLE: .branchtargets $A, $B, $C;\nbrx.idx %r1, $TABLE;\n$A:\nmov.u32 %r2, 7;\nbra $OUT;\n$B:\n\
         mov.u32 %r2, 8;\nbra $OUT;\n$C:\nmov.u32 %r2, 9;\n$OUT:\nst.global.u32 [%rd11], %r2;",
    );
    assert_eq!(words, [7, 8, 9]);
}

#[test]
fn registers_of_braces_are_their_own() {
    let words = words_of(
        1,
        "// begin inline asm\n{ .reg .b32 t; mov.u32 t, 5; add.u32 %r2, t, 0; }\n// end inline asm\n\
         { .reg .pred t; setp.eq.u32 t, %r2, 5; selp.u32 %r3, 1, 2, t; }\nst.global.u32 [%rd11], %r3;",
    );
    assert_eq!(words, [1]);
}

#[test]
fn special_registers_say_who_a_thread_is() {
    let words = words_of(
        64,
        "mov.u32 %r2, %laneid;\nmov.u32 %r3, %warpid;\nmov.u32 %r4, %nwarpid;\nmov.u32 %r5, %lanemask_lt;\n\
         popc.b32 %r5, %r5;\nsub.u32 %r5, %r5, %r2;\nmov.u32 %r6, %ntid.x;\nmad.lo.u32 %r2, %r3, 100, %r2;\n\
         mad.lo.u32 %r2, %r4, 1000, %r2;\nmad.lo.u32 %r2, %r6, 10000, %r2;\nadd.u32 %r2, %r2, %r5;\n\
         st.global.u32 [%rd11], %r2;",
    );
    assert_eq!(
        words,
        (0..64)
            .map(|thread| 642_000 + thread / 32 * 100 + thread % 32)
            .collect::<Vec<u32>>()
    );
}
