//! Errors of the driver and of its use: what happened, whose fault it is, and what to do.

use std::ffi::c_int;
use std::fmt;

use cudarc::driver::sys::CUresult;
use thiserror::Error;

use crate::calls;

/// Who can do something about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A bug of baton, or of a kernel.
    Baton,
    /// The GPU, its driver, or another process on it.
    Machine,
    /// How the machine is set up: drivers, libraries, visible devices.
    Setup,
    /// Too much was asked of the memory.
    Memory,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Cause {
    #[error("{name} ({code})")]
    Driver { code: i32, name: String },
    #[error("{0}")]
    NoDriver(String),
    /// The call was never made.
    #[error("{0}")]
    Misuse(&'static str),
    /// As above: see [`Device::give_up`](crate::Device::give_up).
    #[error("the device did not end its work in time and was given up")]
    GivenUp,
}

/// A failed call of the CUDA driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The driver's function, as NVIDIA's documentation names it.
    pub call: &'static str,
    pub cause: Cause,
    /// What it was called for, with sizes and names.
    pub context: String,
}

/// After these the context runs nothing any more, and a new one in the same process does not help (CUDA driver API 13.0,
/// `CUresult`: "leaves the process in an inconsistent state"; 214 and 220 are errors of the hardware).
const STICKY: [CUresult; 15] = [
    CUresult::CUDA_ERROR_DEINITIALIZED,
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_CONTAINED,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
    CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
];

impl CudaError {
    pub(crate) fn misuse(call: &'static str, what: &'static str, context: impl Into<String>) -> Self {
        let cause = Cause::Misuse(what);
        let context = context.into();
        Self { call, cause, context }
    }

    /// The driver's number of the error; `None` if the driver was not asked.
    pub fn code(&self) -> Option<i32> {
        match self.cause {
            Cause::Driver { code, .. } => Some(code),
            Cause::NoDriver(_) | Cause::Misuse(_) | Cause::GivenUp => None,
        }
    }

    fn is(&self, result: CUresult) -> bool {
        self.code() == Some(result as i32)
    }

    /// The device runs nothing of this process any more. Only a new process helps.
    pub fn is_sticky(&self) -> bool {
        STICKY.iter().any(|result| self.is(*result))
    }

    pub fn is_out_of_memory(&self) -> bool {
        self.is(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    pub fn fault(&self) -> Fault {
        let code = match &self.cause {
            Cause::NoDriver(_) => return Fault::Setup,
            Cause::Misuse(_) => return Fault::Baton,
            Cause::GivenUp => return Fault::Machine,
            Cause::Driver { code, .. } => *code,
        };
        match code {
            _ if self.is_out_of_memory() => Fault::Memory,
            // No device, stub, licence, device that cannot be used; wrong images; MPS, permissions, driver versions.
            34 | 36 | 46 | 100..=102 | 209 | 218 | 221..=224 | 800..=812 => Fault::Setup,
            // Hardware, a time limit of the display driver, a driver that went away, an unknown error.
            4 | 214 | 220 | 226 | 304 | 702 | 714 | 909 | 911 | 999 => Fault::Machine,
            _ => Fault::Baton,
        }
    }

    /// What a user does about it.
    pub fn advice(&self) -> &'static str {
        match self.fault() {
            Fault::Memory if self.call == "cuMemHostAlloc" => {
                "the host has no memory that can be pinned: raise `ulimit -l`, or free memory"
            }
            Fault::Memory => "lower --kv-cache-memory, or end other processes on this GPU",
            Fault::Setup => "run `baton doctor --gpu`, which shows what was found and what is missing",
            Fault::Machine => "restart the node; if it comes back, look at the kernel's log for `NVRM: Xid`",
            Fault::Baton if self.is_sticky() => "a bug of baton: restart the node and report this line",
            Fault::Baton => "a bug of baton: report this line",
        }
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.call, self.cause)?;
        if !self.context.is_empty() {
            write!(f, " ({})", self.context)?;
        }
        write!(f, "; {}", self.advice())
    }
}

impl std::error::Error for CudaError {}

/// The answer of a call of the driver. `context` is made only for an error.
pub(crate) fn check(call: &'static str, status: c_int, context: impl FnOnce() -> String) -> Result<(), CudaError> {
    match status {
        calls::SUCCESS => Ok(()),
        code => Err(CudaError {
            call,
            cause: Cause::Driver {
                code,
                name: calls::name_of(code),
            },
            context: context(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(result: CUresult) -> CudaError {
        let cause = Cause::Driver {
            code: result as i32,
            name: format!("{result:?}"),
        };
        CudaError {
            call: "cuTest",
            cause,
            context: "4 bytes".to_owned(),
        }
    }

    #[test]
    fn an_error_names_the_call_the_code_and_the_context() {
        let error = error(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(error.code(), Some(2));
        assert!(error.is_out_of_memory());
        assert!(!error.is_sticky());
        assert_eq!(error.fault(), Fault::Memory);
        let text = error.to_string();
        for part in ["cuTest", "CUDA_ERROR_OUT_OF_MEMORY", "(2)", "4 bytes"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn an_illegal_address_poisons_the_process_and_is_a_bug_of_a_kernel() {
        let error = error(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(error.is_sticky());
        assert_eq!(error.fault(), Fault::Baton);
    }

    #[test]
    fn a_launch_with_too_many_resources_can_be_tried_again_with_less() {
        assert!(!error(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES).is_sticky());
        assert!(!error(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED).is_sticky());
    }

    #[test]
    fn an_image_for_another_gpu_is_a_matter_of_setup() {
        assert_eq!(error(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU).fault(), Fault::Setup);
        assert_eq!(
            error(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION).fault(),
            Fault::Setup
        );
    }

    #[test]
    fn ecc_errors_are_the_machines() {
        let error = error(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
        assert!(error.is_sticky());
        assert_eq!(error.fault(), Fault::Machine);
    }

    #[test]
    fn a_misuse_has_no_code_of_the_driver() {
        let error = CudaError::misuse("cuLaunchKernel", "more than 32 arguments", "kernel f");
        assert_eq!(error.code(), None);
        assert_eq!(error.fault(), Fault::Baton);
    }

    #[test]
    fn a_device_that_was_given_up_is_the_machines_and_may_still_work() {
        let error = CudaError {
            call: "cuTest",
            cause: Cause::GivenUp,
            context: String::new(),
        };
        assert_eq!((error.code(), error.fault()), (None, Fault::Machine));
        assert!(!error.is_sticky());
    }
}
