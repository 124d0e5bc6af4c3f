//! What the shadow of device memory says of operations of the host: copies, launches, allocations.

use ptx_vm::{Access, FindingKind, Findings, Memory};

use crate::fixture::{Array, Fixture};

const AT: u64 = 0x7000_0000_0000;

/// Operation 1 uses a range, and operation 2 another, which may have to wait for it.
fn races(first: (usize, usize, Access), second: (usize, usize, Access), is_ordered: bool) -> bool {
    let (mut memory, mut findings) = (Memory::default(), Findings::default());
    memory.add(AT, 20_001);
    memory.set_initialised(AT, 20_001);
    let mut touch = |operation: u32, ended_before: Vec<bool>, (at, bytes, access): (usize, usize, Access)| {
        memory.begin_operation(operation, ended_before);
        memory.touch(AT + at as u64, bytes, access, &mut findings);
    };
    touch(1, vec![true], first);
    touch(2, vec![true, is_ordered], second);
    findings
        .list()
        .iter()
        .all(|finding| finding.kind == FindingKind::RaceBetweenStreams)
        && !findings.is_empty()
}

#[test]
fn operations_race_where_they_overlap_and_nothing_orders_them() {
    let whole = (0, 20_001);
    let cases = [
        (whole, whole),
        (whole, (5000, 2)),
        ((5000, 2), whole),
        ((4095, 1), (4094, 4)),
        ((20_000, 1), whole),
    ];
    for (first, second) in cases {
        let write = |range: (usize, usize)| (range.0, range.1, Access::Write);
        let read = |range: (usize, usize)| (range.0, range.1, Access::Read);
        assert!(races(write(first), read(second), false), "{first:?} {second:?}");
        assert!(races(read(first), write(second), false), "{first:?} {second:?}");
        assert!(races(write(first), write(second), false), "{first:?} {second:?}");
        assert!(!races(read(first), read(second), false), "{first:?} {second:?}");
        assert!(!races(write(first), write(second), true), "{first:?} {second:?}");
    }
}

#[test]
fn operations_do_not_race_beside_each_other() {
    for (first, second) in [((0, 4096), (4096, 4096)), ((0, 4095), (4095, 2)), ((100, 3), (103, 9))] {
        let write = |range: (usize, usize)| (range.0, range.1, Access::Write);
        assert!(!races(write(first), write(second), false), "{first:?} {second:?}");
    }
}

#[test]
fn an_operation_that_ran_early_is_not_ordered() {
    let (mut memory, mut findings) = (Memory::default(), Findings::default());
    memory.add(AT, 64);
    memory.begin_operation(7, vec![true; 7]);
    memory.touch(AT, 64, Access::Write, &mut findings);
    memory.begin_operation(5, vec![true; 5]);
    memory.touch(AT, 64, Access::Write, &mut findings);
    assert_eq!(findings.list().len(), 1);
}

#[test]
fn values_are_known_byte_by_byte() {
    let mut memory = Memory::default();
    memory.add(AT, 10_000);
    assert!(!memory.is_initialised(AT, 1));
    memory.set_initialised(AT + 3, 5000);
    assert!(memory.is_initialised(AT + 3, 5000));
    assert!(!memory.is_initialised(AT + 2, 2));
    assert!(!memory.is_initialised(AT + 5002, 2));
    memory.set_initialised(AT, 10_000);
    assert!(memory.is_initialised(AT, 10_000));
    // A range that no region has whole.
    assert!(!memory.is_initialised(AT + 9999, 2));
}

#[test]
fn regions_are_found_by_any_address_and_freed_ones_are_remembered() {
    let mut memory = Memory::default();
    memory.add(AT + 0x2000, 0x1000);
    memory.add(AT, 0x1000);
    let region = memory.region(AT + 0x2fff, 1).unwrap();
    assert_eq!((region.start, region.bytes), (AT + 0x2000, 0x1000));
    assert_eq!(memory.region(AT + 0xfff, 2), None);
    assert_eq!(memory.region(u64::MAX, 2), None);
    memory.remove(AT + 0x2000);
    assert_eq!(memory.region(AT + 0x2000, 1), None);
    assert!(memory.was_freed(AT + 0x2fff) && !memory.was_freed(AT + 0x3000) && !memory.was_freed(AT));
    // A larger allocation at the place forgets it.
    memory.add(AT + 0x1000, 0x4000);
    assert!(!memory.was_freed(AT + 0x2000));
    assert_eq!(memory.region(AT + 0x2000, 16).unwrap().start, AT + 0x1000);
}

#[test]
fn a_kernel_has_to_wait_for_the_copy_of_its_input() {
    for is_ordered in [false, true] {
        let mut fixture = Fixture::of_body(
            1,
            ".loc 1 7 0\nld.global.u32 %r1, [%rd1];\nst.global.u32 [%rd1+4], %r1;",
        );
        let mut values = Array::of_u32([5, 0]);
        let at = fixture.output(&mut values);
        fixture.memory.begin_operation(1, vec![true]);
        fixture.memory.touch(at, 4, Access::Write, &mut fixture.findings);
        fixture.memory.begin_operation(2, vec![true, is_ordered]);
        fixture.launch(1, 1, &[at]).unwrap();
        let expected: &[(FindingKind, u32, u32)] = if is_ordered {
            &[]
        } else {
            &[(FindingKind::RaceBetweenStreams, 7, 0)]
        };
        assert_eq!(fixture.found(), expected);
        assert_eq!(values.u32s(), [5, 5]);
    }
}
