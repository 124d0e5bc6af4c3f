//! One communicator: made, used and ended without waiting.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::time::{Duration, Instant};

use super::{Nccl, NcclError, UniqueId, failed};
use crate::device::{Device, DevicePtr, Stream};
use crate::loader::nccl_table::{Comm, Config, IN_PROGRESS, NcclTable, RawId, SUCCESS, UINT8};

/// Between looks of [`Communicator::wait_until`].
const PAUSE: Duration = Duration::from_millis(1);

/// The life of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The ranks look for each other.
    Initialising,
    /// A group may be posted.
    Ready,
    /// A group is being given to its stream. Only afterwards does an event on the stream come after the group.
    Launching,
    /// It says goodbye to its peers.
    Closing,
    /// Only an abort is left.
    Failed {
        code: i32,
    },
    Aborted,
    Closed,
}

/// What a look found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Pending,
    Done,
}

/// A rank of a new communicator.
#[derive(Clone, Copy, Debug)]
pub struct Membership {
    pub id: UniqueId,
    pub rank: u32,
    pub ranks: u32,
    /// Thread blocks that may move bytes. `None`: NCCL chooses.
    pub ctas_max: Option<u32>,
}

/// What follows from NCCL's answer to a look. Pure.
fn next(state: State, code: c_int) -> (State, Result<Progress, ()>) {
    match (state, code) {
        (State::Initialising | State::Launching | State::Ready, SUCCESS) => (State::Ready, Ok(Progress::Done)),
        (State::Closing, SUCCESS) => (State::Closed, Ok(Progress::Done)),
        (State::Initialising | State::Launching | State::Ready | State::Closing, IN_PROGRESS) => {
            (state, Ok(Progress::Pending))
        }
        (State::Failed { .. } | State::Aborted | State::Closed, _) => (state, Err(())),
        (_, code) => (State::Failed { code }, Err(())),
    }
}

/// This process's rank. One that is dropped before it was aborted or closed is aborted by a thread of its own, which may hang for
/// ever: NCCL's abort may wait for the peer.
pub struct Communicator {
    table: NcclTable,
    /// Null after the end.
    raw: *mut c_void,
    device: Device,
    state: State,
}

// SAFETY: NCCL allows calls of one communicator from any thread, one at a time; this value is used by one at a time.
unsafe impl Send for Communicator {}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Nccl {
    /// Begins to make a communicator of the given ranks, and returns at once. [`Communicator::poll`] tells when it is there.
    ///
    /// # Errors
    /// NCCL refuses: a wrong id, or a driver that is too old for it.
    pub fn begin(&self, device: &Device, membership: &Membership) -> Result<Communicator, NcclError> {
        device.context().enter()?;
        let number = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
        let (ranks, rank) = (number(membership.ranks), number(membership.rank));
        let mut config = Config::polled(membership.ctas_max);
        let id = RawId(membership.id.0);
        let mut raw: Comm = std::ptr::null_mut();
        // SAFETY: NCCL writes one handle, and has copied the configuration when it returns.
        let code = unsafe { (self.table.init)(&raw mut raw, ranks, id, rank, &raw mut config) };
        // What NCCL made before it failed is ended by the drop.
        let mut communicator = Communicator {
            table: self.table,
            raw,
            device: device.clone(),
            state: State::Initialising,
        };
        match code {
            SUCCESS | IN_PROGRESS => Ok(communicator),
            code => Err(communicator.fail("ncclCommInitRankConfig", code)),
        }
    }
}

impl Communicator {
    pub fn state(&self) -> State {
        self.state
    }

    fn fail(&mut self, call: &'static str, code: c_int) -> NcclError {
        self.state = State::Failed { code };
        failed(&self.table, call, code)
    }

    fn misuse(&self, call: &'static str) -> NcclError {
        let state = self.state;
        NcclError::Misuse { call, state }
    }

    /// Looks how far NCCL is. An error of a peer or of the network comes here, too.
    ///
    /// # Errors
    /// The communicator has failed, or has ended before.
    pub fn poll(&mut self) -> Result<Progress, NcclError> {
        const CALL: &str = "ncclCommGetAsyncError";
        if matches!(self.state, State::Failed { .. } | State::Aborted | State::Closed) {
            return Err(self.misuse(CALL));
        }
        let mut answer: c_int = SUCCESS;
        // SAFETY: the communicator is alive, and NCCL writes one code.
        let code = unsafe { (self.table.async_error)(self.raw, &raw mut answer) };
        let answer = if code == SUCCESS { answer } else { code };
        let (state, progress) = next(self.state, answer);
        let Ok(progress) = progress else {
            return Err(self.fail(CALL, answer));
        };
        self.state = state;
        if self.state == State::Closed {
            let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
            // SAFETY: it has said goodbye, so this frees what is local and waits for nobody. The handle is not used again.
            let code = unsafe { (self.table.destroy)(raw) };
            if !matches!(code, SUCCESS | IN_PROGRESS) {
                return Err(self.fail("ncclCommDestroy", code));
            }
        }
        Ok(progress)
    }

    /// Polls until NCCL is at rest. **This waits**, at most until the deadline.
    ///
    /// # Errors
    /// Those of [`poll`](Self::poll), and [`NcclError::Deadline`]: the communicator is as it was then, and the caller aborts it.
    pub fn wait_until(&mut self, deadline: Instant) -> Result<(), NcclError> {
        loop {
            if self.poll()? == Progress::Done {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = match self.state {
                    State::Initialising => "the making of a communicator",
                    State::Closing => "the end of a communicator",
                    _ => "the launch of a group",
                };
                return Err(NcclError::Deadline { what });
            }
            std::thread::sleep(PAUSE.min(left));
        }
    }

    /// Posts sends and receives as one group to a stream. The peer posts the same, the other way round. After
    /// [`Progress::Pending`] poll before an event is recorded: the group is not on the stream yet.
    ///
    /// # Errors
    /// The communicator is not ready, or NCCL refuses. After an error of `post`, too, the communicator has failed: what was
    /// posted before cannot be taken back.
    pub fn group(
        &mut self,
        stream: &Stream,
        post: impl FnOnce(&Group<'_>) -> Result<(), NcclError>,
    ) -> Result<Progress, NcclError> {
        if self.state != State::Ready {
            return Err(self.misuse("ncclGroupStart"));
        }
        self.device.context().enter()?;
        // SAFETY: it takes nothing. The group is ended below, or by the drop of its value.
        let code = unsafe { (self.table.group_start)() };
        if code != SUCCESS {
            return Err(self.fail("ncclGroupStart", code));
        }
        let group = Group {
            communicator: self,
            stream,
        };
        let posted = post(&group);
        let ended = group.end();
        if let Err(error) = posted {
            let code = match &error {
                NcclError::Failed { code, .. } => *code,
                _ => ended,
            };
            self.state = State::Failed { code };
            return Err(error);
        }
        match ended {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => {
                self.state = State::Launching;
                Ok(Progress::Pending)
            }
            code => Err(self.fail("ncclGroupEnd", code)),
        }
    }

    /// Begins to say goodbye. [`poll`](Self::poll) ends it and frees the communicator. The peers close, too.
    ///
    /// # Errors
    /// The communicator is not ready, or NCCL refuses.
    pub fn close(&mut self) -> Result<(), NcclError> {
        if self.state != State::Ready {
            return Err(self.misuse("ncclCommFinalize"));
        }
        self.device.context().enter()?;
        // SAFETY: the communicator is alive.
        match unsafe { (self.table.finalize)(self.raw) } {
            SUCCESS | IN_PROGRESS => {
                self.state = State::Closing;
                Ok(())
            }
            code => Err(self.fail("ncclCommFinalize", code)),
        }
    }

    /// Ends everything, whatever runs. **This may wait for ever** (nccl issues 549, 863, 1013): call it on a thread that may be
    /// given up. Memory that the communicator may use is freed only after it has returned.
    ///
    /// # Errors
    /// NCCL could not end it; nothing more can be done.
    pub fn abort(mut self) -> Result<(), NcclError> {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        self.state = State::Aborted;
        abort(&self.table, raw, &self.device)
    }
}

fn abort(table: &NcclTable, raw: *mut c_void, device: &Device) -> Result<(), NcclError> {
    if raw.is_null() {
        return Ok(());
    }
    // After a lost context NCCL still ends its threads.
    let entered = device.context().enter();
    // SAFETY: the communicator is alive, and the caller forgets it.
    match unsafe { (table.abort)(raw) } {
        SUCCESS | IN_PROGRESS => entered.map_err(NcclError::Cuda),
        code => Err(failed(table, "ncclCommAbort", code)),
    }
}

/// What is left of a communicator, on its way to the thread that aborts it.
struct Left(*mut c_void);

// SAFETY: as for the communicator, which is gone.
unsafe impl Send for Left {}

impl Left {
    /// The whole value goes to the thread, not its field alone.
    fn raw(self) -> *mut c_void {
        self.0
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        tracing::warn!(state = ?self.state, "a communicator was dropped before its end: a thread aborts it");
        let left = Left(std::mem::replace(&mut self.raw, std::ptr::null_mut()));
        let (table, device) = (self.table, self.device.clone());
        let named = std::thread::Builder::new().name("nccl-abort".to_owned());
        let started = named.spawn(move || match abort(&table, left.raw(), &device) {
            Ok(()) => tracing::info!("a dropped communicator is aborted"),
            Err(error) => tracing::error!(%error, "a dropped communicator could not be aborted"),
        });
        if let Err(error) = started {
            let error = NcclError::Thread(error);
            tracing::error!(%error, "a communicator is kept for the rest of the process");
        }
    }
}

/// A group that is open: NCCL launches its parts together, so that two ranks may post them in different orders.
#[derive(Debug)]
pub struct Group<'a> {
    communicator: &'a Communicator,
    stream: &'a Stream,
}

impl Group<'_> {
    /// Sends memory of the device to a rank. It is read until the stream has passed the group.
    ///
    /// # Errors
    /// NCCL refuses.
    pub fn send(&self, from: DevicePtr, bytes: usize, peer: u32) -> Result<(), NcclError> {
        let (at, table) = (address(from), &self.communicator.table);
        let (raw, stream) = (self.communicator.raw, self.stream.raw().0);
        // SAFETY: both handles are alive. The caller answers for the memory.
        let code = unsafe { (table.send)(at.cast_const(), bytes, UINT8, rank(peer), raw, stream) };
        self.posted("ncclSend", code)
    }

    /// Receives from a rank into memory of the device.
    ///
    /// # Errors
    /// NCCL refuses.
    pub fn recv(&self, to: DevicePtr, bytes: usize, peer: u32) -> Result<(), NcclError> {
        let (at, table) = (address(to), &self.communicator.table);
        let (raw, stream) = (self.communicator.raw, self.stream.raw().0);
        // SAFETY: both handles are alive. The caller answers for the memory.
        let code = unsafe { (table.recv)(at, bytes, UINT8, rank(peer), raw, stream) };
        self.posted("ncclRecv", code)
    }

    fn posted(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(failed(&self.communicator.table, call, code)),
        }
    }

    fn end(self) -> c_int {
        // SAFETY: this thread has one group open, which is this one; the drop does not end it again.
        let code = unsafe { (self.communicator.table.group_end)() };
        std::mem::forget(self);
        code
    }
}

/// After a panic in the middle: an open group would catch all later calls of this thread.
impl Drop for Group<'_> {
    fn drop(&mut self) {
        // SAFETY: as in `end`.
        let _ = unsafe { (self.communicator.table.group_end)() };
    }
}

/// No rank is as large; NCCL refuses it.
fn rank(peer: u32) -> c_int {
    c_int::try_from(peer).unwrap_or(c_int::MAX)
}

/// An address of the device, as NCCL takes it.
fn address(pointer: DevicePtr) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(pointer.0).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_communicator_becomes_ready_when_its_ranks_have_met() {
        assert_eq!(
            next(State::Initialising, IN_PROGRESS),
            (State::Initialising, Ok(Progress::Pending))
        );
        assert_eq!(next(State::Initialising, SUCCESS), (State::Ready, Ok(Progress::Done)));
    }

    #[test]
    fn a_group_is_on_its_stream_only_when_nccl_is_at_rest() {
        assert_eq!(
            next(State::Launching, IN_PROGRESS),
            (State::Launching, Ok(Progress::Pending))
        );
        assert_eq!(next(State::Launching, SUCCESS), (State::Ready, Ok(Progress::Done)));
    }

    #[test]
    fn a_communicator_that_closes_is_closed_when_nccl_is_at_rest() {
        assert_eq!(
            next(State::Closing, IN_PROGRESS),
            (State::Closing, Ok(Progress::Pending))
        );
        assert_eq!(next(State::Closing, SUCCESS), (State::Closed, Ok(Progress::Done)));
    }

    #[test]
    fn an_error_ends_every_state_for_good() {
        for state in [State::Initialising, State::Ready, State::Launching, State::Closing] {
            assert_eq!(next(state, 6), (State::Failed { code: 6 }, Err(())));
        }
        for state in [State::Failed { code: 6 }, State::Aborted, State::Closed] {
            assert_eq!(next(state, SUCCESS), (state, Err(())));
        }
    }
}
