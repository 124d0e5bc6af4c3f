//! Owns how another library for tests (cuBLASLt, NCCL) gives the false driver a kernel of its own: host code that the driver calls
//! when the stream has come to it, with the memory that it uses declared, so that races are seen. The file is compiled into these
//! libraries too: they find the driver that the process has loaded, and never link it.

use std::ffi::{c_char, c_void};

/// The work goes on; the driver asks again.
pub const OUTSIDE_RUNS: i32 = 0;
/// The work has ended, and the accesses that it declared have happened.
pub const OUTSIDE_ENDED: i32 = 1;
/// The work has ended without them.
pub const OUTSIDE_GAVE_UP: i32 = 2;

/// A range of device memory that the work reads (0) or writes (else).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct OutsideAccess {
    pub at: u64,
    pub bytes: usize,
    pub is_write: i32,
}

/// `poll` may use the declared ranges by their addresses. It gets `context`, has to return soon, and must not call the driver.
/// `release` gets `context` once, when the driver will not poll again; the driver calls it even if it refuses the work.
#[repr(C)]
#[derive(Debug)]
pub struct OutsideWork {
    pub name: *const c_char,
    pub poll: unsafe extern "C" fn(u64) -> i32,
    pub release: unsafe extern "C" fn(u64),
    pub context: u64,
    pub accesses: *const OutsideAccess,
    pub access_count: usize,
    /// Not 0: a graph may hold the work, and run it many times.
    pub is_repeatable: i32,
}

/// `false_cuda_outside`: the stream, the work. Answers a code of the driver.
pub type GiveWork = unsafe extern "C" fn(u64, *const OutsideWork) -> i32;

/// `None`: the process has loaded no false driver.
pub(crate) fn loaded_driver() -> Option<GiveWork> {
    // SAFETY: the name is a C string, and RTLD_NOLOAD runs no code of a library.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the handle is open, and the name is a C string.
    let function = unsafe { libc::dlsym(library, c"false_cuda_outside".as_ptr()) };
    // SAFETY: only the false driver exports this name, and with this type. NULL is `None` of an optional function pointer.
    unsafe { std::mem::transmute::<*mut c_void, Option<GiveWork>>(function) }
}
