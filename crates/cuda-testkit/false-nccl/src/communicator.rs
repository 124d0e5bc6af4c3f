//! Owns the states of a communicator, and its beginning: one thread, or the caller's, meets the other rank.
//!
//! From NCCL's documents: a communicator with `blocking = 0` is in progress until a poll of its state says otherwise; nothing may be
//! posted before; after an error only an abort is left; an abort ends its kernels. In the double the first group of such a communicator
//! is in progress too, and its kernels are posted only when the state is polled, so that an event that is recorded before is seen
//! to be too early.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::operation::Post;
use crate::rendezvous::Meeting;
use crate::socket::Socket;
use crate::status::{Answer, Status};

const LOOK_EVERY: Duration = Duration::from_millis(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Initialising,
    Ready,
    /// Only an abort is left.
    Failed(Status),
    /// It ends when its kernels have.
    Finalising,
    Aborted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstGroup {
    NotYet,
    /// Its kernels wait for the first poll to see it in progress, and for the second to be posted.
    InProgress {
        is_seen: bool,
    },
    Posted,
}

pub(crate) struct Inner {
    pub(crate) state: State,
    pub(crate) socket: Option<Socket>,
    pub(crate) first_group: FirstGroup,
    pub(crate) deferred: Vec<Post>,
    /// Sends, then receives: how many were posted, and how many are over. They are done in their order.
    pub(crate) posted: [u64; 2],
    pub(crate) over: [u64; 2],
}

pub(crate) struct Communicator {
    pub(crate) rank: i32,
    pub(crate) is_blocking: bool,
    /// Kernels that the driver has.
    pub(crate) kernels: AtomicUsize,
    inner: Mutex<Inner>,
}

/// What the variables ask a communicator to do wrong.
fn is_asked_to(variable: &str, value: &str) -> bool {
    std::env::var(variable).is_ok_and(|found| found == value)
}

impl Communicator {
    pub(crate) fn new(rank: i32, is_blocking: bool) -> Self {
        let inner = Inner {
            state: State::Initialising,
            socket: None,
            first_group: if is_blocking {
                FirstGroup::Posted
            } else {
                FirstGroup::NotYet
            },
            deferred: Vec::new(),
            posted: [0; 2],
            over: [0; 2],
        };
        Self {
            rank,
            is_blocking,
            kernels: AtomicUsize::new(0),
            inner: Mutex::new(inner),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_initialising(&self) -> bool {
        self.lock().state == State::Initialising
    }

    /// Meets the other rank. It waits for ever, as the real one does: an abort ends it.
    pub(crate) fn initialise(&self, meeting: &Meeting) -> Answer {
        let mut met: Option<(Socket, bool)> = None;
        while self.is_initialising() {
            if !is_asked_to("FALSE_NCCL_HANG", "init") {
                met = met.or_else(|| meeting.step().map(|socket| (socket, false)));
                if let Some((socket, has_told)) = &mut met {
                    match greet(socket, has_told, self.rank) {
                        Ok(false) => {}
                        Ok(true) => {
                            let mut inner = self.lock();
                            inner.socket = met.map(|(socket, _)| socket);
                            if inner.state == State::Initialising {
                                inner.state = State::Ready;
                            }
                            return Ok(());
                        }
                        Err(status) => {
                            self.lock().state = State::Failed(status);
                            return Err(status);
                        }
                    }
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Err(Status::SystemError)
    }

    /// What `ncclCommGetAsyncError` says. Posts what waits for it.
    pub(crate) fn poll(&self) -> Result<Vec<Post>, Status> {
        let mut inner = self.lock();
        match inner.state {
            State::Initialising => return Err(Status::InProgress),
            State::Failed(status) => return Err(status),
            State::Aborted => return Err(Status::InvalidUsage),
            State::Finalising if self.kernels.load(Ordering::SeqCst) > 0 => return Err(Status::InProgress),
            State::Finalising | State::Ready => {}
        }
        match inner.first_group {
            FirstGroup::InProgress { is_seen: false } => {
                inner.first_group = FirstGroup::InProgress { is_seen: true };
                Err(Status::InProgress)
            }
            FirstGroup::InProgress { is_seen: true } => {
                inner.first_group = FirstGroup::Posted;
                Ok(std::mem::take(&mut inner.deferred))
            }
            FirstGroup::NotYet | FirstGroup::Posted => Ok(Vec::new()),
        }
    }

    pub(crate) fn fail(&self, status: Status) {
        let mut inner = self.lock();
        if inner.state != State::Aborted {
            inner.state = State::Failed(status);
        }
    }

    /// The peer is gone. On one host the kernel only spins; over a network the real one says so.
    pub(crate) fn lost_peer(inner: &mut Inner) {
        if is_asked_to("FALSE_NCCL_PEER_DEATH", "error") && inner.state == State::Ready {
            inner.state = State::Failed(Status::RemoteError);
        }
    }

    pub(crate) fn abort(&self) {
        while is_asked_to("FALSE_NCCL_HANG", "abort") {
            std::thread::sleep(LOOK_EVERY);
        }
        let mut inner = self.lock();
        inner.state = State::Aborted;
        inner.socket = None;
        inner.deferred.clear();
    }

    pub(crate) fn finalise(&self) -> Answer {
        {
            let mut inner = self.lock();
            if inner.state != State::Ready {
                return Err(Status::InvalidUsage);
            }
            inner.state = State::Finalising;
        }
        if !self.is_blocking {
            return Err(Status::InProgress);
        }
        while self.kernels.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

/// Tells the peer this rank, and hears the peer's. `false`: not all has gone through yet.
fn greet(socket: &mut Socket, has_told: &mut bool, rank: i32) -> Result<bool, Status> {
    let mine = [b'0' + rank as u8];
    if !*has_told {
        *has_told = socket.send(&mine).map_err(|_| Status::RemoteError)? == 1;
    }
    // The peer's byte is taken once, so only when this is all that is missing.
    if !*has_told {
        return Ok(false);
    }
    let mut theirs = [0];
    match socket.receive(&mut theirs).map_err(|_| Status::RemoteError)? {
        0 => Ok(false),
        _ if theirs == mine => Err(Status::InvalidUsage),
        _ => Ok(true),
    }
}

/// Handles are numbers, which is the same to a caller.
struct Alive {
    next: u64,
    communicators: BTreeMap<u64, Arc<Communicator>>,
}

static ALIVE: Mutex<Alive> = Mutex::new(Alive {
    next: 0x10,
    communicators: BTreeMap::new(),
});

fn alive() -> MutexGuard<'static, Alive> {
    ALIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn add(communicator: Arc<Communicator>) -> u64 {
    let mut alive = alive();
    alive.next += 0x10;
    let handle = alive.next;
    alive.communicators.insert(handle, communicator);
    handle
}

pub(crate) fn find(handle: u64) -> Result<Arc<Communicator>, Status> {
    alive()
        .communicators
        .get(&handle)
        .cloned()
        .ok_or(Status::InvalidArgument)
}

pub(crate) fn remove(handle: u64) -> Result<Arc<Communicator>, Status> {
    alive().communicators.remove(&handle).ok_or(Status::InvalidArgument)
}
