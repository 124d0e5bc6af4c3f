//! Owns the exported functions (`nccl.h` 2.28). Handles and enumerations are numbers here, which is the same to a caller.

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use crate::communicator::{self, Communicator, FirstGroup, State};
use crate::exchange;
use crate::group;
use crate::operation::{Direction, Operation};
use crate::outside_abi::GiveWork;
use crate::rendezvous::{self, Meeting, UniqueId, Wanted};
use crate::status::{Answer, Status, number_of, text_of};

/// Of the library that the reference machine has: 2.28.9.
const VERSION: c_int = 22_809;
const CONFIG_MAGIC: u32 = 0xcafe_beef;
const RANKS: c_int = 2;

/// The beginning of `ncclConfig_t`: what follows changes nothing here.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    bytes: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

#[cfg(not(test))]
fn driver() -> Result<GiveWork, Status> {
    crate::outside_abi::loaded_driver().ok_or(Status::UnhandledCudaError)
}

#[cfg(test)]
fn driver() -> Result<GiveWork, Status> {
    Ok(tests::give)
}

/// # Safety
/// `place` is NULL or a place for a `T`.
unsafe fn put<T>(place: *mut T, value: T) -> Answer {
    if place.is_null() {
        return Err(Status::InvalidArgument);
    }
    // SAFETY: the caller of this function promises it.
    unsafe { place.write(value) };
    Ok(())
}

fn bytes_of(kind: c_int) -> Option<usize> {
    match kind {
        // int8, uint8 and the two of float8.
        0 | 1 | 10 | 11 => Some(1),
        // float16, bfloat16.
        6 | 9 => Some(2),
        // int32, uint32, float32.
        2 | 3 | 7 => Some(4),
        // int64, uint64, float64.
        4 | 5 | 8 => Some(8),
        _ => None,
    }
}

fn is_blocking(config: Option<&Config>) -> Result<bool, Status> {
    let Some(config) = config else { return Ok(true) };
    if config.magic != CONFIG_MAGIC || config.bytes < size_of::<Config>() {
        return Err(Status::InvalidArgument);
    }
    // `NCCL_CONFIG_UNDEF_INT` stands for the default.
    Ok(config.blocking != 0)
}

/// A new communicator: its handle, and how far it is.
fn begin(ranks: c_int, id: &UniqueId, rank: c_int, is_blocking: bool) -> Result<(u64, Answer), Status> {
    driver()?;
    if ranks != RANKS || !(0..RANKS).contains(&rank) {
        return Err(Status::InvalidArgument);
    }
    let meeting = Meeting::new(id).ok_or(Status::InvalidArgument)?;
    let new = Arc::new(Communicator::new(rank, is_blocking));
    let handle = communicator::add(Arc::clone(&new));
    if is_blocking {
        return Ok((handle, new.initialise(&meeting)));
    }
    let builder = std::thread::Builder::new().name("false-nccl".to_owned());
    let started = builder.spawn(move || {
        // The state of the communicator says how it ended.
        let _ = new.initialise(&meeting);
    });
    started
        .map(|_| (handle, Err(Status::InProgress)))
        .map_err(|_| Status::SystemError)
}

/// # Safety
/// `place` is NULL or a place for a handle.
unsafe fn begin_at(place: *mut u64, made: Result<(u64, Answer), Status>) -> c_int {
    let (handle, answer) = match made {
        Ok(made) => made,
        Err(status) => return status as c_int,
    };
    // SAFETY: the caller of this function promises it.
    number_of(unsafe { put(place, handle) }.and(answer))
}

fn state_of(communicator: &Arc<Communicator>) -> Answer {
    let give = driver()?;
    communicator
        .poll()?
        .into_iter()
        .try_for_each(|post| exchange::post(give, communicator, post))
}

/// The arguments that sends and receives have.
struct Transfer {
    at: u64,
    count: usize,
    kind: c_int,
    peer: c_int,
    communicator: u64,
    stream: u64,
}

fn transfer(direction: Direction, transfer: &Transfer) -> Answer {
    let communicator = communicator::find(transfer.communicator)?;
    let width = bytes_of(transfer.kind).ok_or(Status::InvalidArgument)?;
    let bytes = transfer.count.checked_mul(width).ok_or(Status::InvalidArgument)?;
    if transfer.peer != 1 - communicator.rank || (transfer.at == 0 && bytes > 0) {
        return Err(Status::InvalidArgument);
    }
    let number = {
        let mut inner = communicator.lock();
        match inner.state {
            State::Ready => {}
            State::Failed(status) => return Err(status),
            State::Initialising | State::Finalising | State::Aborted => return Err(Status::InvalidUsage),
        }
        if matches!(inner.first_group, FirstGroup::InProgress { .. }) {
            return Err(Status::InvalidUsage);
        }
        let posted = &mut inner.posted[direction as usize];
        *posted += 1;
        *posted - 1
    };
    let operation = Operation::new(direction, (transfer.at, bytes), number);
    group::add(driver()?, communicator, transfer.stream, operation)
}

/// Makes exported functions whose bodies answer a result.
macro_rules! exported {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> c_int $body:block
    )*) => { $(
        $(#[$attribute])*
        // SAFETY: no other library that is loaded beside this one has these names.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int $body
    )* };
}

exported! {
fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller gives a place for the version.
    number_of(unsafe { put(version, VERSION) })
}

/// Opens a listener, as the real one does: it is for a pair that is wanted.
fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    let variable = |name: &str| std::env::var(name).ok();
    let wanted = Wanted { address: variable("FALSE_NCCL_ADDRESS"), interfaces: variable("NCCL_SOCKET_IFNAME") };
    let new = match rendezvous::new_id(&wanted) {
        Ok(new) => new,
        Err(error) => {
            eprintln!("false nccl: no rank can listen: {error}; correct the variables");
            return Status::SystemError as c_int;
        }
    };
    // SAFETY: the caller gives a place for the id.
    number_of(unsafe { put(id, new) })
}

fn ncclCommInitRank(place: *mut u64, ranks: c_int, id: UniqueId, rank: c_int) -> c_int {
    // SAFETY: the caller gives a place for the handle.
    unsafe { begin_at(place, begin(ranks, &id, rank, true)) }
}

fn ncclCommInitRankConfig(place: *mut u64, ranks: c_int, id: UniqueId, rank: c_int, config: *const Config) -> c_int {
    // SAFETY: the caller gives NULL or a configuration, which begins as `Config` in every version.
    let is_blocking = is_blocking(unsafe { config.as_ref() });
    // SAFETY: the caller gives a place for the handle.
    unsafe { begin_at(place, is_blocking.and_then(|is_blocking| begin(ranks, &id, rank, is_blocking))) }
}

fn ncclCommGetAsyncError(communicator: u64, state: *mut c_int) -> c_int {
    number_of(communicator::find(communicator).and_then(|communicator| {
        // SAFETY: the caller gives a place for the result.
        unsafe { put(state, number_of(state_of(&communicator))) }
    }))
}

fn ncclGroupStart() -> c_int {
    group::start();
    0
}

fn ncclGroupEnd() -> c_int {
    number_of(driver().and_then(group::end))
}

fn ncclSend(at: u64, count: usize, kind: c_int, peer: c_int, communicator: u64, stream: u64) -> c_int {
    number_of(transfer(Direction::Send, &Transfer { at, count, kind, peer, communicator, stream }))
}

fn ncclRecv(at: u64, count: usize, kind: c_int, peer: c_int, communicator: u64, stream: u64) -> c_int {
    number_of(transfer(Direction::Receive, &Transfer { at, count, kind, peer, communicator, stream }))
}

/// In progress until the kernels have ended.
fn ncclCommFinalize(communicator: u64) -> c_int {
    number_of(communicator::find(communicator).and_then(|communicator| communicator.finalise()))
}

/// Waits for nothing. Kernels that are under way go on.
fn ncclCommDestroy(communicator: u64) -> c_int {
    number_of(communicator::remove(communicator).map(|_| ()))
}

/// Ends the kernels too.
fn ncclCommAbort(communicator: u64) -> c_int {
    number_of(communicator::remove(communicator).map(|communicator| communicator.abort()))
}
}

// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: c_int) -> *const c_char {
    text_of(result).as_ptr()
}

/// What the state of the communicator says, in words.
// SAFETY: no other library has this name.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(communicator: u64) -> *const c_char {
    let state = communicator::find(communicator).map(|communicator| communicator.lock().state);
    let failed = match state {
        Ok(State::Failed(status)) => status as c_int,
        _ => 0,
    };
    text_of(failed).as_ptr()
}

#[cfg(test)]
mod tests;
