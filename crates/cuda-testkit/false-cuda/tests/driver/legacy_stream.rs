//! The legacy default stream: it and the streams made without CU_STREAM_NON_BLOCKING wait for each other.

use ptx_vm::FindingKind;

use crate::kernels::write;
use crate::support::{Session, allocate, assert_clean, assert_found, cu, download, get, launch, ok, stream};

fn blocking() -> u64 {
    get(|handle| cu!(cuStreamCreate(handle, 0)))
}

#[test]
fn the_legacy_stream_orders_blocking_streams() {
    for seed in 0..4 {
        let _session = Session::seeded(seed);
        let (at, one, two, kernel) = (allocate(16), blocking(), blocking(), write());
        assert_eq!(launch(kernel, 4, one, &[at, 1]), 0);
        assert_eq!(launch(kernel, 4, 0, &[at, 2]), 0);
        assert_eq!(launch(kernel, 4, two, &[at, 3]), 0);
        assert_eq!(download(at, 4), [3; 4]);
        assert_clean();
    }
}

#[test]
fn the_legacy_stream_does_not_order_non_blocking_streams() {
    let _session = Session::seeded(1);
    let (at, one, kernel) = (allocate(16), stream(), write());
    assert_eq!(launch(kernel, 4, one, &[at, 1]), 0);
    assert_eq!(launch(kernel, 4, 0, &[at, 2]), 0);
    ok!(cuCtxSynchronize());
    assert_found(FindingKind::RaceBetweenStreams);
}

#[test]
fn a_wait_for_the_legacy_stream_is_one_for_the_blocking_streams() {
    let _session = Session::seeded(0);
    let (at, one, two, kernel) = (allocate(16), blocking(), stream(), write());
    assert_eq!(launch(kernel, 4, one, &[at, 1]), 0);
    ok!(cuStreamSynchronize(0));
    assert_eq!(launch(kernel, 4, two, &[at, 2]), 0);
    ok!(cuCtxSynchronize());
    assert_clean();
}

#[test]
fn the_per_thread_stream_is_refused() {
    let _session = Session::seeded(1);
    assert_eq!(cu!(cuStreamSynchronize(2)), 400);
    assert_found(FindingKind::HostMisuse);
}
