//! The primary context of a device, and what could not be freed when its owner was dropped.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;

use super::capturing;
use super::facts::DeviceFacts;
use super::handle::{Raw, RawEvent};
use crate::calls;
use crate::error::{Cause, CudaError, check};
use crate::loader::Libraries;

/// What is left of an owner.
pub(super) enum Garbage {
    Memory {
        at: u64,
    },
    Imported {
        at: u64,
    },
    Module {
        raw: Raw<sys::CUmod_st>,
    },
    /// Memory of the host that copies of these events may still use.
    Pinned {
        at: Raw<c_void>,
        uses: Vec<RawEvent>,
    },
}

impl Garbage {
    fn may_be_used(&self) -> bool {
        match self {
            Garbage::Memory { .. } | Garbage::Imported { .. } | Garbage::Module { .. } => false,
            Garbage::Pinned { uses, .. } => uses.iter().any(RawEvent::may_run),
        }
    }
}

/// What became of a piece of garbage.
enum Freed {
    Yes,
    Later(Garbage),
}

pub(crate) struct Context {
    device: sys::CUdevice,
    context: Raw<sys::CUctx_st>,
    facts: DeviceFacts,
    /// Freed at the next chance. It has as many entries as owners were dropped during a capture or a copy, or after the device was
    /// given up.
    garbage: Mutex<Vec<Garbage>>,
    /// The device may never end its work: it is called no more, and nothing of it is freed.
    is_given_up: AtomicBool,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("facts", &self.facts)
            .finish_non_exhaustive()
    }
}

impl Context {
    pub fn open(libraries: &Libraries, ordinal: u32) -> Result<Self, CudaError> {
        libraries.check_driver()?;
        let (device, facts) = DeviceFacts::read(ordinal)?;
        let mut context: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the driver has this device and writes one handle.
        let retained = unsafe { calls::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check("cuDevicePrimaryCtxRetain", retained, || facts.to_string())?;
        Ok(Self {
            device,
            context: Raw(context),
            facts,
            garbage: Mutex::default(),
            is_given_up: AtomicBool::new(false),
        })
    }

    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Makes the context current for this thread. The driver keeps it in a variable of the thread, so this takes tens of
    /// nanoseconds.
    pub fn enter(&self) -> Result<(), CudaError> {
        if self.is_given_up() {
            return Err(CudaError {
                call: "cuCtxSetCurrent",
                cause: Cause::GivenUp,
                context: self.facts.name.clone(),
            });
        }
        // SAFETY: the context is retained as long as this value lives.
        let entered = unsafe { calls::cuCtxSetCurrent(self.context.0) };
        check("cuCtxSetCurrent", entered, || self.facts.name.clone())
    }

    /// As [`Device::give_up`](super::Device::give_up) says.
    pub fn give_up(&self) {
        if !self.is_given_up.swap(true, Ordering::Relaxed) {
            tracing::error!(
                device = %self.facts,
                "a device does not end its work: what this process has there stays until the process ends"
            );
        }
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }

    /// For calls that a capture of this thread would not survive: they are refused before the driver sees them.
    pub fn enter_outside_capture(&self, call: &'static str) -> Result<(), CudaError> {
        if capturing::is_capturing() {
            let what = "it is not allowed while this thread captures a graph";
            return Err(CudaError::misuse(call, what, ""));
        }
        self.enter()?;
        self.collect();
        Ok(())
    }

    /// Frees what an owner had, or keeps it for later. Never panics, and logs what it cannot free.
    pub(super) fn discard(&self, garbage: Garbage) {
        let freed = match capturing::is_capturing() || self.enter().is_err() {
            true => Freed::Later(garbage),
            false => free(garbage),
        };
        if let Freed::Later(garbage) = freed {
            self.kept().push(garbage);
        }
    }

    /// Frees what was kept, as far as it can be freed now. The context is current.
    pub fn collect(&self) {
        let mut kept = self.kept();
        if kept.is_empty() {
            return;
        }
        let before = std::mem::take(&mut *kept);
        let later = before.into_iter().filter_map(|garbage| match free(garbage) {
            Freed::Yes => None,
            Freed::Later(garbage) => Some(garbage),
        });
        *kept = later.collect();
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Vec<Garbage>> {
        self.garbage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frees a piece, unless a copy may still use it. What the driver refuses to free is lost: that happens after an error that
/// ends the context, and then nothing has to be freed.
fn free(garbage: Garbage) -> Freed {
    if garbage.may_be_used() {
        return Freed::Later(garbage);
    }
    let (call, result) = match garbage {
        // SAFETY: the owner is gone, so nobody frees it again.
        Garbage::Memory { at } => ("cuMemFree", unsafe { calls::cuMemFree_v2(at) }),
        // SAFETY: as above.
        Garbage::Imported { at } => ("cuIpcCloseMemHandle", unsafe { calls::cuIpcCloseMemHandle(at) }),
        // SAFETY: as above, and no function of it is left.
        Garbage::Module { raw } => ("cuModuleUnload", unsafe { calls::cuModuleUnload(raw.0) }),
        Garbage::Pinned { at, uses } => {
            uses.iter().for_each(RawEvent::destroy);
            // SAFETY: as above, and no copy uses it any more.
            ("cuMemFreeHost", unsafe { calls::cuMemFreeHost(at.0) })
        }
    };
    if let Err(error) = check(call, result, || "after its owner was dropped".to_owned()) {
        tracing::warn!(%error, "what a dropped owner had was not freed");
    }
    Freed::Yes
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_given_up() {
            // The driver would wait for the device.
            return;
        }
        if self.enter().is_ok() {
            self.collect();
        }
        let kept = self.kept().len();
        if kept > 0 {
            tracing::warn!(
                kept,
                "a device was closed while copies used its memory: it is not freed"
            );
        }
        // SAFETY: it was retained once by this value. No object of the context is left: each holds this value.
        let released = unsafe { calls::cuDevicePrimaryCtxRelease_v2(self.device) };
        if let Err(error) = check("cuDevicePrimaryCtxRelease", released, || self.facts.name.clone()) {
            tracing::debug!(%error, "a context was not released");
        }
    }
}
