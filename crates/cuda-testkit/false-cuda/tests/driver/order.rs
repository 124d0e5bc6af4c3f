//! Order between streams, and between the device and the host.

use ptx_vm::FindingKind;

use crate::kernels::{increment, write};
use crate::support::{
    Session, allocate, assert_clean, assert_found, cu, download, event, launch, make_current, ok, pinned, report,
    stream, zeros,
};

/// Copies words on one stream and uses them on another one. `mend` gets both streams.
fn copy_and_use(seed: u64, mend: impl FnOnce(u64, u64)) -> Session {
    let session = Session::seeded(seed);
    let (from, to, source) = (allocate(128), allocate(128), pinned(32));
    source.fill(41);
    let (copies, computes) = (stream(), stream());
    ok!(cuMemcpyHtoDAsync_v2(from, source.as_ptr().cast(), 128, copies));
    mend(copies, computes);
    assert_eq!(launch(increment(), 32, computes, &[from, to]), 0);
    ok!(cuCtxSynchronize());
    session
}

#[test]
fn a_missing_event_between_two_streams_is_found_for_every_seed() {
    for seed in 0..6 {
        let _session = copy_and_use(seed, |_, _| ());
        // Whether the read came first (then of nothing) is up to the seed; that nothing orders the two is always found.
        let kinds = crate::support::kinds();
        assert!(
            kinds.contains(&FindingKind::RaceBetweenStreams.to_string()),
            "{seed}: {kinds:?}"
        );
    }
}

#[test]
fn an_event_orders_two_streams() {
    for seed in 0..6 {
        let _session = copy_and_use(seed, |copies, computes| {
            let event = event();
            ok!(cuEventRecord(event, copies));
            ok!(cuStreamWaitEvent(computes, event, 0));
        });
        assert_clean();
    }
}

#[test]
fn an_event_that_is_recorded_too_early_orders_nothing() {
    let _session = Session::seeded(1);
    let (at, one, two, event) = (allocate(16), stream(), stream(), event());
    ok!(cuEventRecord(event, one));
    assert_eq!(launch(write(), 4, one, &[at, 1]), 0);
    ok!(cuStreamWaitEvent(two, event, 0));
    assert_eq!(launch(write(), 4, two, &[at, 2]), 0);
    ok!(cuCtxSynchronize());
    assert_found(FindingKind::RaceBetweenStreams);
}

#[test]
fn a_wait_of_the_host_orders_two_streams() {
    let session = copy_and_use(3, |copies, _| ok!(cuStreamSynchronize(copies)));
    assert_clean();
    drop(session);
    let _session = copy_and_use(3, |copies, _| {
        let event = event();
        ok!(cuEventRecord(event, copies));
        while cu!(cuEventQuery(event)) != 0 {}
    });
    assert_clean();
}

#[test]
fn a_stream_waits_for_an_event_even_without_work_behind_it() {
    let _session = Session::seeded(0);
    let (at, one, two, event) = (allocate(16), stream(), stream(), event());
    assert_eq!(launch(write(), 4, one, &[at, 5]), 0);
    ok!(cuEventRecord(event, one));
    ok!(cuStreamWaitEvent(two, event, 0));
    ok!(cuStreamSynchronize(two));
    assert_eq!(report().launches, 1);
    assert_clean();
}

#[test]
fn a_pinned_source_that_changes_too_early_is_found_for_every_seed() {
    for seed in 0..6 {
        for waits in [false, true] {
            let _session = Session::seeded(seed);
            let (at, source, stream) = (allocate(128), pinned(32), stream());
            source.fill(1);
            ok!(cuMemcpyHtoDAsync_v2(at, source.as_ptr().cast(), 128, stream));
            if waits {
                ok!(cuStreamSynchronize(stream));
            }
            source.fill(2);
            ok!(cuStreamSynchronize(stream));
            if waits {
                assert_clean();
                assert_eq!(download(at, 32), [1; 32]);
            } else {
                assert_found(FindingKind::PinnedSourceChanged);
            }
        }
    }
}

#[test]
fn pageable_memory_may_change_after_the_call() {
    let _session = Session::seeded(0);
    let (at, stream, mut source) = (allocate(16), stream(), [3_u32; 4]);
    ok!(cuMemcpyHtoDAsync_v2(at, source.as_ptr().cast(), 16, stream));
    source.fill(4);
    let mut back = [0_u32; 4];
    // To pageable memory the copy is over when the call returns.
    ok!(cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), at, 16, stream));
    assert_eq!((back, source), ([3; 4], [4; 4]));
    assert_clean();
}

#[test]
fn a_copy_to_pinned_memory_is_late() {
    let _session = Session::seeded(0);
    let (at, target, stream) = (zeros(16), pinned(4), stream());
    target.fill(9);
    ok!(cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), at, 16, stream));
    assert_eq!(target, [9; 4]);
    assert_eq!(cu!(cuStreamQuery(stream)), 0);
    assert_eq!(target, [0; 4]);
}

#[test]
fn a_thread_that_was_told_nothing_knows_nothing_with_separate_clocks() {
    for meets in [false, true] {
        let _session = Session::new(&[("FALSE_CUDA_HOST_CLOCKS", "separate"), ("FALSE_CUDA_SEED", "1")]);
        let (at, one, two, kernel) = (allocate(16), stream(), stream(), write());
        let (begin, begun) = std::sync::mpsc::sync_channel(0);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                make_current();
                // From here on this thread has a clock, which knows nothing of the work below.
                ok!(cuCtxGetDevice((&mut 0).into()));
                assert_eq!(cu!(cuStreamQuery(two)), 0);
                begin.send(()).unwrap();
                begin.send(()).unwrap();
                if meets {
                    false_cuda::false_cuda_meet();
                }
                assert_eq!(launch(kernel, 4, two, &[at, 2]), 0);
            });
            begun.recv().unwrap();
            assert_eq!(launch(kernel, 4, one, &[at, 1]), 0);
            ok!(cuStreamSynchronize(one));
            if meets {
                false_cuda::false_cuda_meet();
            }
            begun.recv().unwrap();
        });
        ok!(cuCtxSynchronize());
        if meets {
            assert_clean()
        } else {
            assert_found(FindingKind::RaceBetweenStreams)
        }
    }
}

#[test]
fn an_idle_device_works_by_itself() {
    let _session = Session::new(&[("FALSE_CUDA_IDLE_MS", "1"), ("FALSE_CUDA_SEED", "0")]);
    let (at, stream) = (allocate(16), stream());
    assert_eq!(launch(write(), 4, stream, &[at, 1]), 0);
    let start = std::time::Instant::now();
    while report().launches == 0 {
        assert!(start.elapsed().as_secs() < 20, "the device has not begun");
        std::thread::yield_now();
    }
}

static RAN: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);

extern "C" fn host_function(_data: *mut std::ffi::c_void) {
    RAN.store(cu!(cuCtxSynchronize()), std::sync::atomic::Ordering::SeqCst);
}

#[test]
fn a_host_function_runs_in_order_and_must_not_call_the_driver() {
    let _session = Session::seeded(1);
    let stream = stream();
    ok!(cuLaunchHostFunc(stream, Some(host_function), std::ptr::null_mut()));
    ok!(cuStreamSynchronize(stream));
    assert_eq!(RAN.load(std::sync::atomic::Ordering::SeqCst), 800);
}

#[test]
fn times_lie_between_two_events_with_timing() {
    let _session = Session::seeded(1);
    let timed = || crate::support::get(|handle| cu!(cuEventCreate(handle, 0)));
    let (start, end, stream, ms) = (timed(), timed(), stream(), &mut -1.0_f32);
    ok!(cuEventRecord(start, stream));
    assert_eq!(cu!(cuEventElapsedTime((&mut *ms).into(), start, end)), 400);
    ok!(cuEventRecordWithFlags(end, stream, 0));
    ok!(cuEventSynchronize(end));
    ok!(cuEventElapsedTime((&mut *ms).into(), start, end));
    assert!(*ms >= 0.0);
    ok!(cuEventElapsedTime_v2((&mut *ms).into(), end, start));
    assert!(*ms <= 0.0);
    let untimed = event();
    ok!(cuEventRecord(untimed, stream));
    ok!(cuEventSynchronize(untimed));
    assert_eq!(cu!(cuEventElapsedTime(ms.into(), start, untimed)), 400);
}
