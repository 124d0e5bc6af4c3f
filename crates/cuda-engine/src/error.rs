//! Every error between a model file and a drawn token.

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
            WorkError::Kernel(_) | WorkError::Call(_) | WorkError::Product(_) | WorkError::UnknownDraw => None,
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
}
