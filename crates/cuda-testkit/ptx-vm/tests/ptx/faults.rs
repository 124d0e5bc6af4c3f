//! What ends a launch, and what the fault says.

use ptx_vm::{AddressState, Fault};

use crate::fixture::{Array, Fixture, SEEDS};
use crate::memory::OWN_WORD;

/// The fault of a body with one array of 128 bytes, in the natural order.
#[track_caller]
fn fault_of(block: u32, body: &str) -> Fault {
    let mut fixture = Fixture::of_body(1, &format!("{OWN_WORD}.loc 1 9 0\n{body}"));
    let mut array = Array::new(128);
    let at = fixture.input(&mut array);
    fixture.launch(1, block, &[at]).unwrap_err()
}

#[test]
fn an_access_outside_memory_names_its_line_and_thread() {
    let fault = fault_of(33, "ld.global.u32 %r2, [%rd11];");
    let Fault::IllegalAddress {
        place,
        bytes: 4,
        state: AddressState::Outside,
        ..
    } = &fault
    else {
        panic!("{fault}");
    };
    assert_eq!((place.kernel.as_str(), place.line, place.thread), ("k", 9, 32));
    assert!(fault.to_string().contains("line 9"), "{fault}");
}

#[test]
fn memory_that_was_freed_is_told_apart() {
    let mut fixture = Fixture::of_body(1, "ld.global.u32 %r1, [%rd1];");
    let mut array = Array::new(64);
    let at = fixture.input(&mut array);
    fixture.memory.remove(at);
    let fault = fixture.launch(1, 1, &[at]).unwrap_err();
    assert!(
        matches!(
            fault,
            Fault::IllegalAddress {
                state: AddressState::Freed,
                ..
            }
        ),
        "{fault}"
    );
}

#[test]
fn every_space_has_its_end() {
    let bodies = [
        ".shared .align 4 .b8 s[8];\nld.shared.u32 %r2, [s+8];",
        ".local .align 4 .b8 depot[8];\nst.local.u32 [depot+8], 1;",
        "ld.param.u32 %r2, [k_param_0+8];",
        "ld.const.u32 %r2, [%rd1];",
        "ld.global.u32 %r2, [0];",
        "cvta.to.shared.u64 %rd2, %rd1;",
        ".shared .align 4 .b8 s[8];\nmov.u64 %rd2, s;\ncvta.shared.u64 %rd3, %rd2;\nld.global.u32 %r2, [%rd3];",
    ];
    for body in bodies {
        let fault = fault_of(1, body);
        assert!(matches!(fault, Fault::IllegalAddress { .. }), "{body}: {fault}");
    }
}

#[test]
fn a_misaligned_access_is_a_fault() {
    let bodies = [
        "ld.global.u32 %r2, [%rd1+2];",
        "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1+8];",
        ".shared .align 16 .b8 s[32];\ncp.async.ca.shared.global [s+4], [%rd1], 8;",
        ".shared .align 16 .b8 s[32];\ncp.async.ca.shared.global [s], [%rd1+4], 8, 4;",
    ];
    for body in bodies {
        let fault = fault_of(1, body);
        assert!(matches!(fault, Fault::Misaligned { .. }), "{body}: {fault}");
    }
    let row = ".shared .align 16 .b8 s[520];\nmov.u32 %r2, s;\nmad.lo.u32 %r3, %r1, 16, %r2;\n\
               ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3+8];";
    assert!(matches!(fault_of(32, row), Fault::Misaligned { .. }));
}

#[test]
fn lanes_that_exchange_in_different_branches_diverge() {
    let body = "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $LOW;\n.loc 1 11 0\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n\
                bra $OUT;\n$LOW:\n.loc 1 12 0\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n$OUT:";
    let fault = fault_of(32, body);
    assert!(
        matches!(&fault, Fault::Divergence { what, .. } if what.contains("line 11") && what.contains("line 12")),
        "{fault}"
    );
}

#[test]
fn a_lane_may_not_read_from_a_lane_that_does_not_take_part() {
    let bodies = [
        "shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1;",
        "setp.ge.u32 %p1, %r1, 8;\n@%p1 ret;\nshfl.sync.idx.b32 %r2, %r1, 9, 31, -1;",
        // A lane that is not in its own mask.
        "bar.warp.sync 0xfffe;",
    ];
    for body in bodies {
        let fault = fault_of(16, body);
        assert!(matches!(fault, Fault::Divergence { .. }), "{body}: {fault}");
    }
}

#[test]
fn matrices_need_all_lanes() {
    let body = ".shared .align 16 .b8 s[128];\nsetp.eq.u32 %p1, %r1, 31;\n@%p1 ret;\n\
                ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [s];";
    assert!(matches!(fault_of(32, body), Fault::Divergence { .. }));
    let body = ".shared .align 16 .b8 s[128];\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [s];";
    assert!(matches!(fault_of(40, body), Fault::Divergence { .. }));
}

#[test]
fn a_barrier_needs_every_thread_of_the_block() {
    let ended = "setp.ge.u32 %p1, %r1, 40;\n@%p1 ret;\nbar.sync 0;";
    assert!(matches!(fault_of(64, ended), Fault::Divergence { .. }));
    let divided = "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $LOW;\nbar.sync 0;\nbra $OUT;\n$LOW:\nbar.sync 0;\n$OUT:";
    assert!(matches!(fault_of(64, divided), Fault::Divergence { .. }));
    // Whole warps may wait at different barriers.
    let mut fixture = Fixture::of_body(0, &divided.replace("%p1, %r1, 5", "%p1, %tid.x, 32"));
    fixture.launch(1, 64, &[]).unwrap();
}

#[test]
fn threads_that_wait_for_each_other_are_a_deadlock() {
    let bodies = [
        // Lane 0 waits for lane 1, which waits for the block.
        "setp.eq.u32 %p1, %r1, 0;\n@%p1 bra $FIRST;\nbar.sync 0;\nbra $OUT;\n$FIRST:\nbar.warp.sync 3;\nbar.sync 0;\n$OUT:",
        // The lanes name different masks.
        "shl.b32 %r3, %r1, 2;\nor.b32 %r3, %r3, 3;\nbar.warp.sync %r3;",
    ];
    for body in bodies {
        let fault = fault_of(2, body);
        assert!(matches!(fault, Fault::Deadlock { .. }), "{body}: {fault}");
    }
}

#[test]
fn a_loop_without_an_end_meets_the_limit_of_steps() {
    for seed in SEEDS {
        let mut fixture = Fixture::of_body(0, "$LOOP:\n.loc 1 3 0\nbra $LOOP;");
        (fixture.seed, fixture.steps_max) = (seed, 1000);
        let fault = fixture.launch(1, 1, &[]).unwrap_err();
        assert!(
            matches!(&fault, Fault::StepLimit { steps_max: 1000, place } if place.line == 3),
            "{fault}"
        );
    }
}

#[test]
fn traps_and_wild_branches_end_the_launch() {
    assert!(matches!(fault_of(1, "trap;"), Fault::Trap { .. }));
    let table = "$TABLE: .branchtargets $A;\nbrx.idx 7, $TABLE;\n$A:";
    assert!(matches!(fault_of(1, table), Fault::Unsupported { .. }));
    let generic = "mov.u64 %rd2, k_param_0;\ncvta.param.u64 %rd3, %rd2;\nst.u32 [%rd3], 1;";
    assert!(matches!(fault_of(1, generic), Fault::Unsupported { .. }));
}

#[test]
fn a_launch_that_the_kernel_does_not_allow_is_refused() {
    let mut fixture = Fixture::new(".visible .entry k(.param .u32 n)\n.reqntid 64, 1, 1\n{\nret;\n}");
    fixture.launch(1, 64, &[1]).unwrap();
    for (grid, block) in [(0, 64), (1, 0), (1, 65), (1, 32)] {
        let fault = fixture.launch(grid, block, &[1]).unwrap_err();
        assert!(matches!(fault, Fault::InvalidLaunch { .. }), "{grid} {block}: {fault}");
    }
    fixture.dynamic_shared_bytes = 300_000;
    assert!(matches!(fixture.launch(1, 64, &[1]), Err(Fault::InvalidLaunch { .. })));
}

#[test]
fn the_steps_of_a_launch_are_those_of_its_threads() {
    let mut fixture = Fixture::of_body(0, "mov.u32 %r1, 1;\nbar.sync 0;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 trap;");
    // Four instructions and `ret`, for each thread of each block.
    assert_eq!(fixture.launch(3, 40, &[]).unwrap(), 3 * 40 * 5);
}
