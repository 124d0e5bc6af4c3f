//! Allocation, free, copies out of bounds, leaks, and memory that the host must not touch.

use std::os::unix::process::ExitStatusExt;

use ptx_vm::FindingKind;

use crate::kernels::write;
use crate::processes::{is_other_process, other_process};
use crate::support::{
    Session, allocate, assert_clean, assert_found, cu, event, get, launch, ok, pinned, report, stream, zeros,
};

#[test]
fn what_is_not_given_back_is_counted() {
    let _session = Session::seeded(1);
    let (at, stream, event) = (allocate(1000), stream(), event());
    let host = pinned(1).as_mut_ptr();
    let leaks = report().leaks;
    assert_eq!((leaks.allocations, leaks.bytes, leaks.pinned), (1, 1000, 1));
    assert_eq!((leaks.streams, leaks.events, leaks.contexts), (1, 1, 1));
    ok!(cuMemFree_v2(at));
    ok!(cuMemFreeHost(host.cast()));
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(report().leaks, Default::default());
    assert_clean();
}

#[test]
fn a_device_has_so_much_memory_and_no_more() {
    let _session = Session::new(&[("FALSE_CUDA_MEMORY_BYTES", "100000")]);
    let at = allocate(60_000);
    let mut place = 0;
    assert_eq!(cu!(cuMemAlloc_v2((&mut place).into(), 40_001)), 2);
    ok!(cuMemFree_v2(at));
    allocate(100_000);
    let (mut free, mut total) = (1, 1);
    ok!(cuMemGetInfo_v2((&mut free).into(), (&mut total).into()));
    assert_eq!((free, total), (0, 100_000));
}

#[test]
fn a_free_waits_for_the_work_that_uses_the_memory() {
    for seed in 0..4 {
        let _session = Session::seeded(seed);
        let (at, stream) = (allocate(16), stream());
        assert_eq!(launch(write(), 4, stream, &[at, 1]), 0);
        ok!(cuMemFree_v2(at));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(report().launches, 1);
        assert_clean();
    }
}

#[test]
fn a_use_after_the_free_ends_the_context() {
    let _session = Session::seeded(1);
    let (at, stream) = (allocate(16), stream());
    ok!(cuMemFree_v2(at));
    assert_eq!(launch(write(), 4, stream, &[at, 1]), 0);
    assert_eq!(cu!(cuStreamSynchronize(stream)), 700);
}

#[test]
fn a_free_in_order_is_behind_the_uses_that_an_event_orders() {
    for seed in 0..4 {
        let _session = Session::seeded(seed);
        let (one, two, event) = (stream(), stream(), event());
        let at = get(|at| cu!(cuMemAllocAsync(at, 16, one)));
        assert_eq!(launch(write(), 4, two, &[at, 1]), 0);
        ok!(cuEventRecord(event, two));
        ok!(cuStreamWaitEvent(one, event, 0));
        ok!(cuMemFreeAsync(at, one));
        ok!(cuCtxSynchronize());
        assert_clean();
        assert_eq!(report().leaks.allocations, 0);
    }
}

#[test]
fn a_free_in_order_beside_a_use_is_a_race_or_an_illegal_address() {
    for seed in 0..6 {
        let _session = Session::seeded(seed);
        let (one, two) = (stream(), stream());
        let at = get(|at| cu!(cuMemAllocAsync(at, 16, one)));
        assert_eq!(launch(write(), 4, two, &[at, 1]), 0);
        let freed = cu!(cuMemFreeAsync(at, one));
        // The device does either of them first.
        let ended = cu!(cuCtxSynchronize());
        let is_race = crate::support::kinds() == [FindingKind::RaceBetweenStreams.to_string()];
        assert!(
            (freed, ended) == (0, 0) && is_race || ended == 700,
            "{seed}: {freed} {ended}"
        );
    }
}

#[test]
fn a_range_outside_an_allocation_is_refused() {
    let _session = Session::seeded(1);
    let at = zeros(100);
    let host = pinned(64);
    assert_eq!(cu!(cuMemcpyHtoDAsync_v2(at, host.as_ptr().cast(), 101, 0)), 1);
    assert_eq!(cu!(cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), at + 99, 2, 0)), 1);
    assert_eq!(cu!(cuMemcpyHtoDAsync_v2(at, at as *const _, 8, 0)), 1);
    assert_eq!(cu!(cuMemFree_v2(at + 8)), 1);
    assert_found(FindingKind::HostMisuse);
    assert_eq!(cu!(cuMemsetD32Async(at + 2, 1, 1, 0)), 1);
    ok!(cuMemsetD32Async(at, 0x0102_0304, 2, 0));
    assert_eq!(crate::support::download(at, 3), [0x0102_0304, 0x0102_0304, 0]);
}

#[test]
fn a_copy_of_memory_without_a_value_is_found() {
    let _session = Session::seeded(1);
    let (from, to) = (allocate(64), allocate(64));
    ok!(cuMemcpyDtoDAsync_v2(to, from, 64, 0));
    ok!(cuCtxSynchronize());
    assert_found(FindingKind::UninitialisedGlobal);
}

#[test]
fn registered_memory_is_pinned() {
    let _session = Session::seeded(0);
    let (at, stream, mut source) = (allocate(4096), stream(), vec![1_u32; 1024]);
    let host = source.as_mut_ptr();
    ok!(cuMemHostRegister_v2(host.cast(), 4096, 0));
    assert_eq!(cu!(cuMemHostRegister_v2(host.cast(), 8, 0)), 712);
    ok!(cuMemcpyHtoDAsync_v2(at, host.cast(), 4096, stream));
    source[7] = 2;
    ok!(cuStreamSynchronize(stream));
    assert_found(FindingKind::PinnedSourceChanged);
    assert_eq!(cu!(cuMemFreeHost(host.cast())), 1);
    ok!(cuMemHostUnregister(host.cast()));
    assert_eq!(cu!(cuMemHostUnregister(host.cast())), 713);
}

#[test]
fn a_pointer_says_where_it_belongs() {
    let _session = Session::seeded(1);
    let (at, host) = (allocate(64), pinned(1).as_ptr() as u64);
    let kind = |at| {
        let mut kind = 0_u32;
        (cu!(cuPointerGetAttribute((&raw mut kind).cast(), 2, at)), kind)
    };
    assert_eq!((kind(at + 63), kind(host), kind(0x10)), ((0, 2), (0, 1), (1, 0)));
    let mut start = 0_u64;
    ok!(cuPointerGetAttribute((&raw mut start).cast(), 11, at + 5));
    assert_eq!(start, at);
}

/// Run by the test below in a process of its own, which it ends.
#[test]
fn read_device_memory() {
    if !is_other_process() {
        return;
    }
    let _session = Session::seeded(1);
    let at = zeros(8);
    // SAFETY: it is not: this is what the double has to stop.
    let value = unsafe { *(at as *const u64) };
    println!("read {value}");
}

#[test]
fn the_host_cannot_read_device_memory() {
    let ended = other_process("memory::read_device_memory", &[])
        .wait_with_output()
        .unwrap();
    assert_eq!(
        ended.status.signal(),
        Some(libc_sigsegv()),
        "{}",
        String::from_utf8_lossy(&ended.stdout)
    );
}

/// SIGSEGV, the same on every Linux.
fn libc_sigsegv() -> i32 {
    11
}
