//! Each detector: a kernel with a bug, whose lines are named, and its mended twin, with no finding.

use ptx_vm::FindingKind;

use crate::fixture::{Array, Fixture, SEEDS, kernel};
use crate::memory::OWN_WORD;

/// Runs a body with one output for each of the seeds. `{}` of the body is where the mending goes.
#[track_caller]
fn assert_found(grid: u32, block: u32, body: &str, mending: &str, expected: (FindingKind, [u32; 2])) {
    let (kind, [line, other]) = expected;
    for seed in SEEDS {
        let run = |mending: &str| {
            let mut fixture = Fixture::of_body(1, &format!("{OWN_WORD}{}", body.replace("MENDING", mending)));
            fixture.seed = seed;
            let mut out = Array::new(4096);
            let at = fixture.output(&mut out);
            fixture
                .launch(grid, block, &[at])
                .unwrap_or_else(|fault| panic!("{fault}"));
            fixture
        };
        let found = run("").found();
        // Which of the two comes first depends on the order of threads.
        let is_expected = |found: &(FindingKind, u32, u32)| {
            found.0 == kind && [[line, other], [other, line]].contains(&[found.1, found.2])
        };
        assert!(found.iter().any(is_expected), "seed {seed}: {found:?}");
        run(mending).assert_clean();
    }
}

#[test]
fn a_missing_barrier_between_warps_is_a_race() {
    let body = "
.shared .align 4 .b8 s[256];
mov.u32 %r2, s;
shl.b32 %r3, %r1, 2;
add.u32 %r4, %r2, %r3;
.loc 1 20 0
st.shared.u32 [%r4], %r1;
MENDING
xor.b32 %r5, %r3, 128;
add.u32 %r5, %r2, %r5;
.loc 1 22 0
ld.shared.u32 %r6, [%r5];
st.global.u32 [%rd11], %r6;
";
    assert_found(1, 64, body, "bar.sync 0;", (FindingKind::RaceShared, [22, 20]));
}

#[test]
fn a_write_after_a_read_needs_a_barrier_too() {
    let body = "
.shared .align 4 .b8 s[256];
mov.u32 %r2, s;
shl.b32 %r3, %r1, 2;
add.u32 %r4, %r2, %r3;
st.shared.u32 [%r4], %r1;
bar.sync 0;
xor.b32 %r5, %r3, 128;
add.u32 %r5, %r2, %r5;
.loc 1 30 0
ld.shared.u32 %r6, [%r5];
MENDING
.loc 1 31 0
st.shared.u32 [%r4], %r6;
st.global.u32 [%rd11], %r6;
";
    assert_found(1, 64, body, "bar.sync 0;", (FindingKind::RaceShared, [31, 30]));
}

#[test]
fn a_shuffle_is_no_fence_between_lanes() {
    let body = "
.shared .align 4 .b8 s[128];
mov.u32 %r2, s;
shl.b32 %r3, %r1, 2;
add.u32 %r4, %r2, %r3;
.loc 1 40 0
st.shared.u32 [%r4], %r1;
shfl.sync.bfly.b32 %r7, %r1, 1, 31, -1;
MENDING
xor.b32 %r5, %r3, 4;
add.u32 %r5, %r2, %r5;
.loc 1 42 0
ld.shared.u32 %r6, [%r5];
st.global.u32 [%rd11], %r6;
";
    assert_found(
        1,
        32,
        body,
        "bar.warp.sync 0xffffffff;",
        (FindingKind::RaceShared, [42, 40]),
    );
}

#[test]
fn blocks_of_a_launch_are_never_ordered() {
    // The mending gives each block its own word.
    let body = "
mov.u32 %r2, %ctaid.x;
mov.u64 %rd2, 0;
MENDING
add.s64 %rd3, %rd11, %rd2;
.loc 1 50 0
st.global.u32 [%rd3], %r2;
bar.sync 0;
.loc 1 51 0
ld.global.u32 %r3, [%rd3];
";
    assert_found(
        3,
        32,
        body,
        "mul.wide.u32 %rd2, %r2, 128;",
        (FindingKind::RaceGlobal, [50, 50]),
    );
}

#[test]
fn neighbouring_bytes_of_two_threads_do_not_race() {
    // Threads 0 and 1 write one byte each; with the bug, the same byte.
    let body = "
mov.u64 %rd2, 0;
MENDING
add.s64 %rd3, %rd1, %rd2;
.loc 1 60 0
st.global.u8 [%rd3], %r1;
";
    assert_found(
        1,
        2,
        body,
        "cvt.u64.u32 %rd2, %r1;",
        (FindingKind::RaceGlobal, [60, 60]),
    );
}

#[test]
fn reads_of_what_nobody_wrote_are_found_in_every_space() {
    let shared = "
.shared .align 4 .b8 s[4];
MENDING
bar.sync 0;
.loc 1 70 0
ld.shared.u32 %r2, [s];
";
    let mending = "setp.eq.u32 %p1, %r1, 0;\n@%p1 st.shared.u32 [s], 1;";
    assert_found(1, 2, shared, mending, (FindingKind::UninitialisedShared, [70, 0]));
    let global = "MENDING\n.loc 1 71 0\nld.global.u32 %r2, [%rd11];";
    assert_found(
        1,
        2,
        global,
        "st.global.u32 [%rd11], 1;",
        (FindingKind::UninitialisedGlobal, [71, 0]),
    );
    let local = ".local .align 4 .b8 depot[8];\nMENDING\n.loc 1 72 0\nld.local.u32 %r2, [depot+4];";
    assert_found(
        1,
        2,
        local,
        "st.local.v2.u32 [depot], {1, 2};",
        (FindingKind::UninitialisedLocal, [72, 0]),
    );
}

#[test]
fn a_half_written_value_is_not_initialised() {
    let body = "
st.global.u8 [%rd11], 1;
MENDING
.loc 1 75 0
ld.global.u16 %rs1, [%rd11];
";
    assert_found(
        1,
        1,
        body,
        "st.global.u8 [%rd11+1], 1;",
        (FindingKind::UninitialisedGlobal, [75, 0]),
    );
}

#[test]
fn atomics_of_two_blocks_have_no_fixed_order() {
    // In the mended kernel each block has a word of its own, which its thread 0 sets.
    let body = "
mov.u32 %r2, %ctaid.x;
mov.u64 %rd2, 0;
mov.u32 %r3, 1;
MENDING
add.s64 %rd3, %rd1, %rd2;
setp.eq.u32 %p1, %r3, 0;
@%p1 st.global.f32 [%rd3], 0f00000000;
bar.sync 0;
.loc 1 80 0
red.global.add.f32 [%rd3], 0f3F800000;
";
    let mending = "mul.wide.u32 %rd2, %r2, 4;\nmov.u32 %r3, %r1;";
    assert_found(2, 32, body, mending, (FindingKind::AtomicBetweenBlocks, [80, 80]));
}

#[test]
fn an_atomic_races_with_a_plain_read() {
    let body = "
.shared .align 4 .b8 s[4];
setp.eq.u32 %p1, %r1, 0;
@%p1 st.shared.u32 [s], 0;
bar.sync 0;
.loc 1 90 0
red.shared.add.u32 [s], 1;
MENDING
.loc 1 91 0
ld.shared.u32 %r2, [s];
";
    assert_found(1, 64, body, "bar.sync 0;", (FindingKind::RaceShared, [91, 90]));
}

#[test]
fn the_read_only_path_may_not_see_what_the_launch_writes() {
    let body = "
st.global.u32 [%rd11+1024], 7;
.loc 1 95 0
st.global.u32 [%rd11], 7;
MENDING
.loc 1 96 0
ld.global.nc.u32 %r2, [%rd11];
";
    // The mended kernel never comes to the load.
    assert_found(1, 2, body, "ret;", (FindingKind::RaceGlobal, [96, 95]));
}

#[test]
fn findings_are_counted_and_name_the_kernel_and_who_took_part() {
    let body = format!("{OWN_WORD}.loc 1 5 0\nst.global.u32 [%rd1], %r1;");
    let mut fixture = Fixture::new(&kernel(1, &body));
    let mut out = Array::new(4);
    let at = fixture.output(&mut out);
    fixture.launch(1, 3, &[at]).unwrap();
    let list = fixture.findings.list();
    // Threads 1 and 2.
    assert_eq!((list.len(), list[0].count, list[0].kernel.as_str()), (1, 2, "k"));
    assert!(
        list[0].first.contains("thread 1") && list[0].first.contains("thread 0"),
        "{}",
        list[0].first
    );
}

#[test]
fn a_line_is_that_of_the_ptx_where_nothing_names_another() {
    let body = "ld.global.u32 %r1, [%rd1];";
    let mut fixture = Fixture::of_body(1, body);
    let mut out = Array::new(4);
    let at = fixture.output(&mut out);
    fixture.launch(1, 1, &[at]).unwrap();
    // Three lines of the header, seven of the fixture, one that loads the parameter.
    assert_eq!(fixture.found(), [(FindingKind::UninitialisedGlobal, 12, 0)]);
}
