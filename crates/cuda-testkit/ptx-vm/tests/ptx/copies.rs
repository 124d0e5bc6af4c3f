//! `cp.async`: what lands, when it lands, and what is found when nobody waits.

use ptx_vm::FindingKind;

use crate::fixture::{Array, Fixture, SEEDS};

/// Thread i copies 16 bytes at 16 i. %r3 is its place in shared memory, %rd6 its place in the result.
const COPY: &str = "
.shared .align 16 .b8 s[1024];
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 4;
mov.u32 %r3, s;
add.u32 %r3, %r3, %r2;
cvt.u64.u32 %rd4, %r2;
add.s64 %rd5, %rd1, %rd4;
add.s64 %rd6, %rd2, %rd4;
.loc 1 10 0
cp.async.cg.shared.global [%r3], [%rd5], 16, BYTES;
cp.async.commit_group;
";

fn run(body: &str, threads: u32, seed: u64) -> (Fixture, Vec<u32>) {
    let mut fixture = Fixture::of_body(2, body);
    fixture.seed = seed;
    let words = 4 * threads;
    let (mut input, mut out) = (Array::of_u32(1..=words), Array::new(4 * words as usize));
    let args = [fixture.input(&mut input), fixture.output(&mut out)];
    fixture
        .launch(1, threads, &args)
        .unwrap_or_else(|fault| panic!("{fault}"));
    let values = out.u32s();
    (fixture, values)
}

fn read_back(wait: &str, bytes: u32) -> String {
    let copy = COPY.replace("BYTES", &bytes.to_string());
    format!(
        "{copy}.loc 1 11 0\n{wait};\n.loc 1 12 0\nld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3];\n\
         st.global.v4.b32 [%rd6], {{%r4, %r5, %r6, %r7}};"
    )
}

#[test]
fn what_is_not_real_becomes_zero() {
    let (fixture, values) = run(&read_back("cp.async.wait_group 0", 8), 2, 0);
    fixture.assert_clean();
    assert_eq!(values, [1, 2, 0, 0, 5, 6, 0, 0]);
    let (fixture, values) = run(&read_back("cp.async.wait_all", 16), 1, 0);
    fixture.assert_clean();
    assert_eq!(values, [1, 2, 3, 4]);
    let (_, values) = run(&read_back("cp.async.wait_all", 0), 1, 0);
    assert_eq!(values, [0; 4]);
}

#[test]
fn a_missing_wait_is_found_and_the_values_are_nan() {
    let (fixture, values) = run(&read_back("cp.async.wait_group 1", 16), 1, 0);
    assert_eq!(
        fixture.found(),
        [
            (FindingKind::ReadBeforeAsyncWait, 12, 10),
            (FindingKind::AsyncCopyNotAwaited, 10, 0)
        ]
    );
    assert_eq!(values, [u32::MAX; 4]);
}

#[test]
fn a_wait_for_all_but_one_group_lands_the_oldest() {
    // The second group goes to the upper half of shared memory.
    let second = "add.u32 %r8, %r3, 512;\n.loc 1 20 0\ncp.async.ca.shared.global [%r8], [%rd5], 4;\n\
                  cp.async.commit_group;\n";
    let copy = format!("{}{second}", COPY.replace("BYTES", "16"));
    let reads = |wait: &str| {
        format!(
            "{copy}cp.async.wait_group {wait};\n.loc 1 21 0\nld.shared.b32 %r4, [%r3];\n.loc 1 22 0\n\
             ld.shared.b32 %r5, [%r8];\ncp.async.wait_group 0;\nst.global.v2.b32 [%rd6], {{%r4, %r5}};"
        )
    };
    let (fixture, values) = run(&reads("1"), 1, 0);
    assert_eq!(fixture.found(), [(FindingKind::ReadBeforeAsyncWait, 22, 20)]);
    assert_eq!(values[..2], [1, u32::MAX]);
    let (fixture, values) = run(&reads("0"), 1, 0);
    fixture.assert_clean();
    assert_eq!(values[..2], [1, 1]);
}

#[test]
fn a_wait_is_no_barrier_for_other_threads() {
    // Each thread reads what its neighbour has copied.
    let reads = |barrier: &str| {
        format!(
            "{}cp.async.wait_group 0;\n{barrier}\nxor.b32 %r2, %r2, 512;\nmov.u32 %r3, s;\nadd.u32 %r3, %r3, %r2;\n\
             .loc 1 12 0\nld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3];\n\
             st.global.v4.b32 [%rd6], {{%r4, %r5, %r6, %r7}};",
            COPY.replace("BYTES", "16")
        )
    };
    for seed in SEEDS {
        let (fixture, values) = run(&reads("bar.sync 0;"), 64, seed);
        fixture.assert_clean();
        assert_eq!(values[..4], [129, 130, 131, 132]);
        let (fixture, _) = run(&reads(""), 64, seed);
        let races = fixture
            .found()
            .into_iter()
            .filter(|found| found.0 == FindingKind::RaceShared);
        let lines: Vec<(u32, u32)> = races
            .map(|(_, line, other)| (line.min(other), line.max(other)))
            .collect();
        assert!(
            !lines.is_empty() && lines.iter().all(|lines| *lines == (10, 12)),
            "seed {seed}: {lines:?}"
        );
    }
}
