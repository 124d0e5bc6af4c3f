//! Owns what a stream can be given to do, as data. `execute.rs` does it.

use std::ffi::c_void;
use std::sync::Arc;

use ptx_vm::Kernel;

use crate::outside_abi::{OUTSIDE_ENDED, OUTSIDE_GAVE_UP, OutsideAccess};
use crate::shared_page::SharedPage;

/// One end of a copy.
#[derive(Clone, Debug)]
pub(crate) enum Side {
    Device(u64),
    Host(u64),
    /// Pageable memory, read when the copy was asked for.
    Staged(Arc<[u8]>),
}

#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) to: Side,
    pub(crate) from: Side,
    pub(crate) bytes: usize,
}

/// `count` values of `width` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    pub(crate) at: u64,
    pub(crate) value: u32,
    pub(crate) width: usize,
    pub(crate) count: usize,
}

pub(crate) struct KernelLaunch {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared_bytes: usize,
    /// Taken by value at the call.
    pub(crate) params: Vec<u8>,
}

pub(crate) enum Poll {
    Runs,
    Ended,
    GaveUp,
}

/// A kernel of another library: `outside_abi.rs` has its contract.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) name: String,
    pub(crate) poll: unsafe extern "C" fn(u64) -> i32,
    pub(crate) release: unsafe extern "C" fn(u64),
    pub(crate) context: u64,
    pub(crate) accesses: Vec<OutsideAccess>,
    pub(crate) is_repeatable: bool,
}

impl Outside {
    pub(crate) fn poll(&self) -> Poll {
        // SAFETY: who gave the work promised that `poll` takes `context` until `release` got it, and only `drop` releases.
        match unsafe { (self.poll)(self.context) } {
            OUTSIDE_ENDED => Poll::Ended,
            OUTSIDE_GAVE_UP => Poll::GaveUp,
            _ => Poll::Runs,
        }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        // SAFETY: as in `poll`; nobody can poll after this.
        unsafe { (self.release)(self.context) };
    }
}

pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

#[derive(Clone)]
pub(crate) enum Work {
    /// Only its place in the order counts.
    Nothing,
    Copy(Copy),
    Fill(Fill),
    Launch(Arc<KernelLaunch>),
    /// Of memory from `cuMemAllocAsync`.
    Free(u64),
    Record {
        event: u64,
        ticket: u64,
        page: Option<Arc<SharedPage>>,
    },
    /// Waits for what another process recorded.
    AwaitProcess {
        page: Arc<SharedPage>,
        ticket: u64,
    },
    HostFunction {
        function: HostFunction,
        data: u64,
    },
    Outside(Arc<Outside>),
}

impl Work {
    /// Whether it has a place in the order of accesses to device memory.
    pub(crate) fn uses_memory(&self) -> bool {
        match self {
            Work::Copy(_) | Work::Fill(_) | Work::Launch(_) | Work::Free(_) | Work::Outside(_) => true,
            Work::Nothing | Work::Record { .. } | Work::AwaitProcess { .. } | Work::HostFunction { .. } => false,
        }
    }
}
