//! Two ranks in one process, on a driver of which each kernel is a thread.

use std::time::{Duration, Instant};

use super::*;
use crate::outside_abi::{OUTSIDE_RUNS, OutsideWork};

const UINT8: c_int = 1;
const IN_PROGRESS: c_int = Status::InProgress as c_int;
const DEADLINE: Duration = Duration::from_secs(20);

/// A driver that gives each kernel a thread of its own.
pub(super) unsafe extern "C" fn give(_stream: u64, work: *const OutsideWork) -> c_int {
    // SAFETY: `exchange::post` gives a work.
    let (poll, release, context) = unsafe { ((*work).poll, (*work).release, (*work).context) };
    std::thread::spawn(move || {
        // SAFETY: this stands for the driver: polls, then one release.
        unsafe {
            while poll(context) == OUTSIDE_RUNS {
                std::thread::yield_now();
            }
            release(context);
        }
    });
    0
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < DEADLINE, "{what}");
        std::thread::yield_now();
    }
}

fn new_id() -> UniqueId {
    rendezvous::new_id(&Wanted::default()).unwrap()
}

fn non_blocking() -> Config {
    Config {
        bytes: 80,
        magic: CONFIG_MAGIC,
        version: 22_809,
        blocking: 0,
    }
}

fn state(communicator: u64) -> c_int {
    let mut state = -1;
    // SAFETY: the place is on this stack.
    assert_eq!(unsafe { ncclCommGetAsyncError(communicator, &mut state) }, 0);
    state
}

fn init(id: UniqueId, rank: c_int) -> u64 {
    let mut communicator = 0;
    // SAFETY: the place and the configuration are on this stack.
    let answer = unsafe { ncclCommInitRankConfig(&mut communicator, 2, id, rank, &non_blocking()) };
    assert_eq!(answer, IN_PROGRESS);
    communicator
}

fn pair() -> [u64; 2] {
    let id = new_id();
    let pair = [init(id, 0), init(id, 1)];
    wait_until("the ranks meet", || pair.iter().all(|one| state(*one) == 0));
    pair
}

fn transfer(direction: Direction, bytes: &mut [u8], peer: c_int, communicator: u64) -> c_int {
    let at = bytes.as_mut_ptr() as u64;
    let call = match direction {
        Direction::Send => ncclSend,
        Direction::Receive => ncclRecv,
    };
    // SAFETY: the test keeps the bytes until the kernels have ended.
    unsafe { call(at, bytes.len(), UINT8, peer, communicator, 0) }
}

/// Groups of one communicator: in progress once, and posted by polls.
fn in_group(communicator: u64, operations: impl FnOnce()) {
    // SAFETY: the calls have no requirement.
    assert_eq!(unsafe { ncclGroupStart() }, 0);
    operations();
    // SAFETY: as above.
    let answer = unsafe { ncclGroupEnd() };
    assert!(answer == 0 || answer == IN_PROGRESS);
    wait_until("the group is posted", || state(communicator) != IN_PROGRESS);
}

fn kernels(communicator: u64) -> usize {
    communicator::find(communicator)
        .unwrap()
        .kernels
        .load(std::sync::atomic::Ordering::SeqCst)
}

fn abort(communicator: u64) {
    // SAFETY: the call has no requirement.
    assert_eq!(unsafe { ncclCommAbort(communicator) }, 0);
}

#[test]
fn both_ranks_send_more_than_a_socket_holds_in_one_group() {
    const BYTES: usize = 4 << 20;
    let [one, two] = pair();
    let (mut from_one, mut from_two) = (vec![1_u8; BYTES], vec![2_u8; BYTES]);
    let (mut at_one, mut at_two) = (vec![0_u8; BYTES], vec![0_u8; BYTES]);
    in_group(one, || {
        assert_eq!(transfer(Direction::Send, &mut from_one, 1, one), 0);
        assert_eq!(transfer(Direction::Receive, &mut at_one, 1, one), 0);
    });
    in_group(two, || {
        assert_eq!(transfer(Direction::Send, &mut from_two, 0, two), 0);
        assert_eq!(transfer(Direction::Receive, &mut at_two, 0, two), 0);
    });
    wait_until("the kernels end", || kernels(one) + kernels(two) == 0);
    assert!(at_one == from_two && at_two == from_one);
    // SAFETY: the calls have no requirement.
    let ended = unsafe { (ncclCommFinalize(one), state(one), ncclCommDestroy(one)) };
    assert_eq!(ended, (IN_PROGRESS, 0, 0));
    abort(two);
}

#[test]
fn the_first_group_is_posted_by_polls() {
    let [one, two] = pair();
    // A receive, as it cannot end.
    let mut bytes = [0_u8; 4];
    assert_eq!(transfer(Direction::Receive, &mut bytes, 1, one), IN_PROGRESS);
    assert_eq!(kernels(one), 0);
    assert_eq!(
        transfer(Direction::Receive, &mut bytes, 1, one),
        Status::InvalidUsage as c_int
    );
    assert_eq!((state(one), kernels(one)), (IN_PROGRESS, 0));
    assert_eq!((state(one), kernels(one)), (0, 1));
    let kernel = communicator::find(one).unwrap();
    abort(one);
    abort(two);
    wait_until("the kernel ends", || {
        kernel.kernels.load(std::sync::atomic::Ordering::SeqCst) == 0
    });
}

#[test]
fn an_abort_ends_a_kernel_whose_peer_does_nothing() {
    let [one, two] = pair();
    let mut bytes = [0_u8; 4];
    in_group(one, || assert_eq!(transfer(Direction::Receive, &mut bytes, 1, one), 0));
    assert_eq!(kernels(one), 1);
    let kernel = communicator::find(one).unwrap();
    abort(one);
    wait_until("the kernel ends", || {
        kernel.kernels.load(std::sync::atomic::Ordering::SeqCst) == 0
    });
    abort(two);
}

#[test]
fn ranks_that_name_a_transfer_differently_are_found() {
    let [one, two] = pair();
    let (mut four, mut five) = ([1_u8; 4], [0_u8; 5]);
    in_group(one, || assert_eq!(transfer(Direction::Send, &mut four, 1, one), 0));
    in_group(two, || assert_eq!(transfer(Direction::Receive, &mut five, 0, two), 0));
    wait_until("the receiver fails", || state(two) == Status::InternalError as c_int);
    let kernel = communicator::find(two).unwrap();
    abort(one);
    abort(two);
    wait_until("the kernel ends", || {
        kernel.kernels.load(std::sync::atomic::Ordering::SeqCst) == 0
    });
}

#[test]
fn a_peer_that_is_gone_only_hangs() {
    let [one, two] = pair();
    let mut bytes = [0_u8; 4];
    in_group(one, || assert_eq!(transfer(Direction::Receive, &mut bytes, 1, one), 0));
    abort(two);
    for _ in 0..100 {
        assert_eq!((state(one), kernels(one)), (0, 1));
        std::thread::yield_now();
    }
    let kernel = communicator::find(one).unwrap();
    abort(one);
    wait_until("the kernel ends", || {
        kernel.kernels.load(std::sync::atomic::Ordering::SeqCst) == 0
    });
}

#[test]
fn an_initialisation_without_a_peer_is_in_progress_until_it_is_aborted() {
    let one = init(new_id(), 0);
    assert_eq!(state(one), IN_PROGRESS);
    let mut bytes = [0_u8; 4];
    assert_eq!(
        transfer(Direction::Send, &mut bytes, 1, one),
        Status::InvalidUsage as c_int
    );
    abort(one);
    let mut state = 0;
    // SAFETY: the place is on this stack.
    let answer = unsafe { ncclCommGetAsyncError(one, &mut state) };
    assert_eq!(answer, Status::InvalidArgument as c_int);
}

#[test]
fn two_ranks_of_one_number_fail() {
    let id = new_id();
    let pair = [init(id, 0), init(id, 0)];
    wait_until("both fail", || {
        pair.iter().all(|one| state(*one) == Status::InvalidUsage as c_int)
    });
    for one in pair {
        abort(one);
    }
}

#[test]
fn bad_arguments_are_refused() {
    let refused = |ranks, id, rank, config: &Config| {
        let mut place = 0;
        // SAFETY: the place and the configuration are on this stack.
        unsafe { ncclCommInitRankConfig(&mut place, ranks, id, rank, config) }
    };
    let argument = Status::InvalidArgument as c_int;
    assert_eq!(refused(3, new_id(), 0, &non_blocking()), argument);
    assert_eq!(refused(2, new_id(), 2, &non_blocking()), argument);
    assert_eq!(
        refused(2, UniqueId { internal: [0; 128] }, 0, &non_blocking()),
        argument
    );
    assert_eq!(
        refused(
            2,
            new_id(),
            0,
            &Config {
                magic: 0,
                ..non_blocking()
            }
        ),
        argument
    );
    // SAFETY: the call has no requirement.
    assert_eq!(unsafe { ncclGroupEnd() }, Status::InvalidUsage as c_int);
}
