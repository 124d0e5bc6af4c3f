//! NCCL: bytes between the GPUs of different processes and hosts. Communicators are polled; no call here waits for a peer but
//! those that say so. Not run on hardware.
//!
//! Rules that users of NCCL learned: all kernels are loaded and run once before the first
//! communicator; device memory is freed only after every communicator that may use it was aborted; a local end of a send does not
//! prove arrival.

mod communicator;

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use thiserror::Error;

pub use self::communicator::{Communicator, Group, Membership, Progress, State};
use crate::error::CudaError;
use crate::loader::nccl_table::{ID_BYTES, NcclTable, RawId, SUCCESS, name_of};
use crate::loader::{Libraries, LibraryDecision, Version};

/// Names one communicator. It holds the address of a listener of the process that made it, so it is not printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; ID_BYTES]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UniqueId").finish_non_exhaustive()
    }
}

/// Why something of NCCL failed. After any but `NoLibrary` and `Misuse` the communicator is only good to be aborted.
#[derive(Debug, Error)]
pub enum NcclError {
    #[error("there is no NCCL: {0}")]
    NoLibrary(LibraryDecision),
    #[error("{call} answers {name} ({code}): {said}; the peer, the network or NCCL failed, the pair starts again")]
    Failed {
        call: &'static str,
        code: i32,
        name: &'static str,
        /// NCCL's last words, perhaps of an earlier error.
        said: String,
    },
    #[error("{what} is not over at the deadline; the peer or the network does not answer")]
    Deadline { what: &'static str },
    #[error("{call} was called in the state {state:?}: a bug of baton")]
    Misuse { call: &'static str, state: State },
    #[error("no thread could be started to abort a communicator: {0}")]
    Thread(std::io::Error),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The library.
#[derive(Clone, Copy, Debug)]
pub struct Nccl {
    table: NcclTable,
    version: Version,
}

impl Nccl {
    /// # Errors
    /// It was not found, or is too old.
    pub fn open(libraries: &Libraries) -> Result<Self, NcclError> {
        let table = libraries.nccl().map_err(NcclError::NoLibrary)?;
        let version = libraries.report().nccl.version();
        let version = version.ok_or_else(|| NcclError::NoLibrary(libraries.report().nccl.clone()))?;
        Ok(Self { table, version })
    }

    /// All ranks of a communicator need the same.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Makes the name of a new communicator. **This opens a listener on the network**, on the interface that
    /// `NCCL_SOCKET_IFNAME` names, so call it only for a pair that is wanted.
    ///
    /// # Errors
    /// There is no interface.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = RawId([0; ID_BYTES]);
        // SAFETY: NCCL writes one id.
        let code = unsafe { (self.table.unique_id)(&raw mut id) };
        match code {
            SUCCESS => Ok(UniqueId(id.0)),
            code => Err(failed(&self.table, "ncclGetUniqueId", code)),
        }
    }
}

fn failed(table: &NcclTable, call: &'static str, code: c_int) -> NcclError {
    // SAFETY: without a communicator NCCL answers with its last words of any, as a text that it keeps.
    let said = text(unsafe { (table.last_error)(std::ptr::null_mut()) });
    let said = match said.is_empty() {
        // SAFETY: NCCL answers any number with a text that it keeps.
        true => text(unsafe { (table.error_string)(code) }),
        false => said,
    };
    NcclError::Failed {
        call,
        code,
        name: name_of(code),
        said,
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the callers pass texts of NCCL, which have an end and are not changed while this thread is here.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}
