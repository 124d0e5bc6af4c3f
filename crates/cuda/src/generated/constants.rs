//! Sizes and values of the headers of nvidia-cuda-runtime 13.0.96. Written by `scripts/cuda-abi-check --write`; do not edit.

#[rustfmt::skip]
pub(super) const CONSTANTS: &[(&str, u64)] = &[
    ("sizeof(CUipcMemHandle)", 64),
    ("sizeof(CUipcEventHandle)", 64),
    ("sizeof(CUuuid)", 16),
    ("sizeof(CUlaunchAttribute)", 72),
    ("CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS", 1),
    ("CU_EVENT_INTERPROCESS", 4),
    ("CU_EVENT_DISABLE_TIMING", 2),
    ("CU_STREAM_NON_BLOCKING", 1),
    ("CU_STREAM_CAPTURE_MODE_THREAD_LOCAL", 1),
    ("CU_MEMHOSTALLOC_PORTABLE", 1),
    ("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", 97),
    ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 8),
    ("CU_JIT_ERROR_LOG_BUFFER", 5),
    ("CUDA_ERROR_OUT_OF_MEMORY", 2),
    ("CUDA_ERROR_STUB_LIBRARY", 34),
    ("CUDA_ERROR_NO_DEVICE", 100),
    ("CUDA_ERROR_NOT_READY", 600),
    ("CUDA_ERROR_ILLEGAL_ADDRESS", 700),
];
