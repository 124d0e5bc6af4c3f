//! cuBLASLt: fast products of bf16 matrices. Which bits come out depends on the whole shape, so it is not for
//! `numerics = invariant`. Not run on hardware.

mod plan;

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

pub use self::plan::{GemmPlan, GemmShape, Operands, Output, WeightLayout, Workspace};

use crate::device::Device;
use crate::error::CudaError;
use crate::loader::cublaslt_table::{CublasLtTable, Handle, SUCCESS, name_of};
use crate::loader::{Libraries, LibraryDecision};

/// Why a product was not planned or launched. The own kernel does the same product.
#[derive(Debug, Error)]
pub enum GemmError {
    #[error("there is no cuBLASLt: {0}")]
    NoLibrary(LibraryDecision),
    #[error("{call} answers {name} ({code}) for {shape}")]
    Failed {
        call: &'static str,
        code: i32,
        name: &'static str,
        shape: String,
    },
    #[error("cuBLASLt has no way to compute {shape} in {workspace_bytes} bytes of workspace")]
    NoAlgorithm { shape: String, workspace_bytes: u64 },
    #[error("{what} of {shape}: a bug of baton")]
    Misuse { what: &'static str, shape: String },
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The library on one device. Cheap to clone; plans hold it.
#[derive(Clone, Debug)]
pub struct CublasLt {
    open: Arc<Open>,
}

struct Open {
    table: CublasLtTable,
    handle: Handle,
    device: Device,
}

// SAFETY: the library allows its handle to be used by several threads (cuBLAS documentation, thread safety of cuBLASLt).
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CublasLt")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl CublasLt {
    /// Loads code onto the device, so it is done before anything is served.
    ///
    /// # Errors
    /// The library was not found, or does not support the device.
    pub fn open(libraries: &Libraries, device: &Device) -> Result<Self, GemmError> {
        let table = libraries.cublaslt().map_err(GemmError::NoLibrary)?;
        device.context().enter()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: a context is current, and the library writes one handle.
        let code = unsafe { (table.create)(&raw mut handle) };
        checked(("cublasLtCreate", code), || device.facts().name.clone())?;
        let device = device.clone();
        let open = Arc::new(Open { table, handle, device });
        Ok(Self { open })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.device.context().enter().is_ok() {
            // SAFETY: no plan is left, because each holds this value.
            let _ = unsafe { (self.table.destroy)(self.handle) };
        }
    }
}

fn checked((call, code): (&'static str, c_int), shape: impl FnOnce() -> String) -> Result<(), GemmError> {
    match code {
        SUCCESS => Ok(()),
        code => Err(GemmError::Failed {
            call,
            code,
            name: name_of(code),
            shape: shape(),
        }),
    }
}

/// A value for an attribute, with its size.
fn bytes_of<T>(value: &T) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<T>())
}
