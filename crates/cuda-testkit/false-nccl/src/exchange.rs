//! Owns what a kernel of sends and receives does while it spins: all of its operations go on together, each behind the earlier ones of
//! its direction.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::communicator::{Communicator, Inner, State};
use crate::operation::{Direction, Operation, Post, Trouble};
use crate::outside_abi::{GiveWork, OUTSIDE_ENDED, OUTSIDE_GAVE_UP, OUTSIDE_RUNS, OutsideAccess, OutsideWork};
use crate::status::{Answer, Status};

struct Kernel {
    communicator: Arc<Communicator>,
    operations: Vec<Operation>,
}

impl Kernel {
    fn spin(&mut self) -> c_int {
        let mut inner = self.communicator.lock();
        let inner = &mut *inner;
        match inner.state {
            State::Aborted => return OUTSIDE_GAVE_UP,
            State::Failed(_) | State::Initialising => return OUTSIDE_RUNS,
            State::Ready | State::Finalising => {}
        }
        for operation in self.operations.iter_mut().filter(|operation| !operation.is_over()) {
            let Inner {
                socket: Some(socket),
                over,
                ..
            } = inner
            else {
                return OUTSIDE_RUNS;
            };
            let over = &mut over[operation.direction as usize];
            if *over != operation.number {
                continue;
            }
            match operation.step(socket) {
                Ok(()) if operation.is_over() => *over += 1,
                Ok(()) => {}
                Err(Trouble::PeerIsGone) => Communicator::lost_peer(inner),
                Err(Trouble::RanksDisagree) => inner.state = State::Failed(Status::InternalError),
            }
        }
        if self.operations.iter().all(Operation::is_over) {
            OUTSIDE_ENDED
        } else {
            OUTSIDE_RUNS
        }
    }
}

/// Gives a kernel to the driver. If the driver refuses, the communicator has failed.
pub(crate) fn post(give: GiveWork, communicator: &Arc<Communicator>, post: Post) -> Answer {
    let access = |operation: &Operation| OutsideAccess {
        at: operation.at,
        bytes: operation.bytes,
        is_write: (operation.direction == Direction::Receive).into(),
    };
    let accesses: Vec<OutsideAccess> = post.operations.iter().map(access).collect();
    let kernel = Kernel {
        communicator: Arc::clone(communicator),
        operations: post.operations,
    };
    communicator.kernels.fetch_add(1, Ordering::SeqCst);
    let work = OutsideWork {
        name: c"nccl send and receive".as_ptr(),
        poll: spin,
        release: forget,
        context: Box::into_raw(Box::new(kernel)) as u64,
        accesses: accesses.as_ptr(),
        access_count: accesses.len(),
        is_repeatable: 0,
    };
    // SAFETY: the work is as `outside_abi.rs` wants it, and its pointers are good until the call has returned.
    if unsafe { give(post.stream, &work) } == 0 {
        return Ok(());
    }
    communicator.fail(Status::UnhandledCudaError);
    Err(Status::UnhandledCudaError)
}

unsafe extern "C" fn spin(context: u64) -> c_int {
    // SAFETY: the context is the box that `post` made; the driver polls it from one thread at a time, and has not released it.
    unsafe { &mut *(context as *mut Kernel) }.spin()
}

unsafe extern "C" fn forget(context: u64) {
    // SAFETY: the driver calls this once, and uses the context no more.
    let kernel = unsafe { Box::from_raw(context as *mut Kernel) };
    kernel.communicator.kernels.fetch_sub(1, Ordering::SeqCst);
}
