//! Every error between a model file and a drawn token.

use std::time::Duration;

use cuda::CudaError;
use cuda::cublaslt::GemmError;
use engine::{DeviceError, EngineError, KvMemoryError, SampleError};
use model_files::gguf::GgufError;
use thiserror::Error;

use crate::gate::GateError;
use crate::kernels::calls::CallError;
use crate::kernels::{KernelError, UnsupportedShape};
use crate::memory::DoesNotFit;
use crate::model::UnsupportedModel;

/// A GPU that does not end its work. It is given up: nothing that it may still use is freed.
#[derive(Debug, Error)]
#[error(
    "cuda:{ordinal} ({name}) has not ended its work in {waited:.1?}, it hangs; look for `Xid` in `dmesg` and at what `nvidia-smi -q` \
     says of this GPU, then restart the node"
)]
pub struct DeviceHangs {
    /// The N of `cuda:N`.
    pub ordinal: u32,
    pub name: String,
    pub waited: Duration,
}

/// Why work was not done by the device. In a step it ends the engine.
#[derive(Debug, Error)]
pub enum WorkError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Product(#[from] GemmError),
    #[error(transparent)]
    Hangs(#[from] DeviceHangs),
    #[error(
        "the device left no drawn token where one belongs: a bug of the GPU engine, or memory that was overwritten"
    )]
    UnknownDraw,
}

impl WorkError {
    /// Whether the device runs nothing of this process any more.
    pub fn is_sticky(&self) -> bool {
        self.cuda().is_some_and(CudaError::is_sticky)
    }

    fn cuda(&self) -> Option<&CudaError> {
        match self {
            WorkError::Cuda(error) => Some(error),
            WorkError::Product(GemmError::Cuda(error)) => Some(error),
            WorkError::Kernel(
                KernelError::Cuda(cause) | KernelError::Device { cause, .. } | KernelError::Load { cause, .. },
            ) => Some(cause),
            WorkError::Kernel(_)
            | WorkError::Call(_)
            | WorkError::Product(_)
            | WorkError::Hangs(_)
            | WorkError::UnknownDraw => None,
        }
    }

    /// As the contract of engines has it.
    pub(crate) fn for_engine(&self) -> EngineError {
        EngineError::Device(DeviceError(self.to_string()))
    }
}

/// Why no engine was opened. Nothing of it stays on the device.
#[derive(Debug, Error)]
pub enum CudaEngineError {
    #[error("cuda:{ordinal} cannot be used: {cause}")]
    Device { ordinal: u32, cause: CudaError },
    #[error(transparent)]
    Shape(#[from] UnsupportedShape),
    #[error(transparent)]
    Model(#[from] UnsupportedModel),
    #[error("the model file cannot be read: {0}")]
    File(#[from] GgufError),
    #[error(transparent)]
    Memory(#[from] DoesNotFit),
    #[error(transparent)]
    Gate(Box<GateError>),
    /// Limits, block sizes and types of tensors, as for every engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("the model cannot be sampled from: {0}")]
    Sampler(#[from] SampleError),
    #[error(transparent)]
    Work(#[from] WorkError),
}

impl From<GateError> for CudaEngineError {
    fn from(error: GateError) -> Self {
        Self::Gate(Box::new(error))
    }
}

impl From<KvMemoryError> for CudaEngineError {
    fn from(error: KvMemoryError) -> Self {
        Self::Engine(error.into())
    }
}

impl From<KernelError> for CudaEngineError {
    fn from(error: KernelError) -> Self {
        Self::Work(error.into())
    }
}

impl From<CudaError> for CudaEngineError {
    fn from(error: CudaError) -> Self {
        Self::Work(error.into())
    }
}

#[cfg(test)]
mod tests {
    use cuda::Cause;

    use super::*;
    use crate::kernels::KernelId;

    fn cuda_error(code: i32) -> CudaError {
        CudaError {
            call: "cuTest",
            cause: Cause::Driver {
                code,
                name: "CUDA_ERROR_TEST".to_owned(),
            },
            context: String::new(),
        }
    }

    #[test]
    fn an_illegal_address_is_seen_through_every_wrapping() {
        // 700 is CUDA_ERROR_ILLEGAL_ADDRESS, 701 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (cuda.h).
        let wrapped = |code| {
            [
                WorkError::Cuda(cuda_error(code)),
                WorkError::Product(GemmError::Cuda(cuda_error(code))),
                WorkError::Kernel(KernelError::Cuda(cuda_error(code))),
                WorkError::Kernel(KernelError::Device {
                    kernel: KernelId::Embed,
                    what: "launched",
                    cause: cuda_error(code),
                }),
            ]
        };
        assert!(wrapped(700).iter().all(WorkError::is_sticky));
        assert!(!wrapped(701).iter().any(WorkError::is_sticky));
        assert!(!WorkError::UnknownDraw.is_sticky());
    }

    #[test]
    fn a_device_that_hangs_is_named_with_its_time_and_may_go_on() {
        let hangs = WorkError::Hangs(DeviceHangs {
            ordinal: 3,
            name: "NVIDIA H200".to_owned(),
            waited: Duration::from_millis(65_120),
        });
        assert!(!hangs.is_sticky());
        let text = hangs.to_string();
        for part in ["cuda:3", "NVIDIA H200", "65.1s", "dmesg"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
