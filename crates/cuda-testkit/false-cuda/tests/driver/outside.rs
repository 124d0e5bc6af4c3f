//! Work of other test libraries on a stream.

use std::sync::atomic::{AtomicI32, Ordering};

use false_cuda::{OutsideAccess, OutsideWork, false_cuda_outside};
use ptx_vm::FindingKind;

use crate::kernels::write;
use crate::support::{Session, allocate, assert_clean, assert_found, cu, download, launch, ok, stream};

/// What `poll` answers, how often it was asked, and how often the work was released. One test at a time uses them.
static ANSWER: AtomicI32 = AtomicI32::new(0);
static POLLS: AtomicI32 = AtomicI32::new(0);
static RELEASES: AtomicI32 = AtomicI32::new(0);

/// Writes 9 to the word that the context is the address of, when it ends.
unsafe extern "C" fn poll(context: u64) -> i32 {
    POLLS.fetch_add(1, Ordering::SeqCst);
    let answer = ANSWER.load(Ordering::SeqCst);
    if answer == 1 {
        // SAFETY: the work declares this word.
        unsafe { *(context as *mut u32) = 9 };
    }
    answer
}

unsafe extern "C" fn release(_context: u64) {
    RELEASES.fetch_add(1, Ordering::SeqCst);
}

fn give(stream: u64, at: u64, is_repeatable: i32) -> i32 {
    let access = OutsideAccess {
        at,
        bytes: 4,
        is_write: 1,
    };
    let work = OutsideWork {
        name: c"outside".as_ptr(),
        poll,
        release,
        context: at,
        accesses: &access,
        access_count: 1,
        is_repeatable,
    };
    // SAFETY: the work is whole, and its pointers are good during the call.
    unsafe { false_cuda_outside(stream, &work) }
}

fn session(answer: i32) -> Session {
    let session = Session::seeded(1);
    ANSWER.store(answer, Ordering::SeqCst);
    POLLS.store(0, Ordering::SeqCst);
    RELEASES.store(0, Ordering::SeqCst);
    session
}

#[test]
fn outside_work_ends_when_it_says_so() {
    let _session = session(0);
    let (at, one, two) = (allocate(4), stream(), stream());
    assert_eq!(give(one, at, 0), 0);
    assert_eq!(cu!(cuStreamQuery(one)), 600);
    // Other streams go on meanwhile.
    let other = allocate(4);
    assert_eq!(launch(write(), 1, two, &[other, 1]), 0);
    ok!(cuStreamSynchronize(two));
    assert!(POLLS.load(Ordering::SeqCst) > 0 && RELEASES.load(Ordering::SeqCst) == 0);
    ANSWER.store(1, Ordering::SeqCst);
    ok!(cuStreamSynchronize(one));
    assert_eq!((download(at, 1), RELEASES.load(Ordering::SeqCst)), (vec![9], 1));
    assert_clean();
}

#[test]
fn outside_work_takes_part_in_races() {
    let _session = session(1);
    let (at, one, two) = (allocate(4), stream(), stream());
    assert_eq!(launch(write(), 1, two, &[at, 1]), 0);
    assert_eq!(give(one, at, 0), 0);
    ok!(cuCtxSynchronize());
    assert_found(FindingKind::RaceBetweenStreams);
}

#[test]
fn outside_work_that_gives_up_has_done_nothing() {
    let _session = session(2);
    let (at, one, two) = (allocate(4), stream(), stream());
    assert_eq!(give(one, at, 0), 0);
    assert_eq!(launch(write(), 1, two, &[at, 1]), 0);
    ok!(cuCtxSynchronize());
    assert_clean();
}

#[test]
fn refused_work_is_released() {
    let _session = session(1);
    let (at, one) = (allocate(4), stream());
    assert_eq!(give(0x77, at, 0), 400);
    assert_eq!(give(one, at + 1, 0), 1);
    ok!(cuStreamBeginCapture_v2(one, 2));
    assert_eq!(give(one, at, 0), 900);
    assert_eq!(cu!(cuStreamEndCapture(one, (&mut 0).into())), 901);
    assert_eq!(RELEASES.load(Ordering::SeqCst), 3);
}

#[test]
fn repeatable_work_can_be_captured() {
    let _session = session(1);
    let (at, one) = (allocate(4), stream());
    ok!(cuStreamBeginCapture_v2(one, 2));
    assert_eq!(give(one, at, 1), 0);
    let graph = crate::support::get(|graph| cu!(cuStreamEndCapture(one, graph)));
    let executable = crate::support::get(|made| cu!(cuGraphInstantiateWithFlags(made, graph, 0)));
    for _ in 0..2 {
        ok!(cuGraphLaunch(executable, one));
    }
    ok!(cuStreamSynchronize(one));
    assert_eq!((POLLS.load(Ordering::SeqCst), RELEASES.load(Ordering::SeqCst)), (2, 0));
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    assert_eq!(RELEASES.load(Ordering::SeqCst), 1);
    assert_clean();
}

#[test]
fn other_threads_call_while_one_waits() {
    let _session = session(0);
    let (at, one) = (allocate(4), stream());
    assert_eq!(give(one, at, 0), 0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            crate::support::make_current();
            cu!(cuStreamSynchronize(one))
        });
        while POLLS.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        // The other thread is in its wait. It would hold the driver for ever if it did not let others in.
        assert_eq!(cu!(cuStreamQuery(one)), 600);
        ANSWER.store(1, Ordering::SeqCst);
        assert_eq!(waiting.join().unwrap(), 0);
    });
    assert_clean();
}

#[test]
fn a_wait_that_takes_too_long_is_ended() {
    let _session = Session::new(&[("FALSE_CUDA_WAIT_MS_MAX", "20")]);
    ANSWER.store(0, Ordering::SeqCst);
    let (at, one) = (allocate(4), stream());
    assert_eq!(give(one, at, 0), 0);
    assert_eq!(cu!(cuStreamSynchronize(one)), 702);
    assert_found(FindingKind::HostMisuse);
}
