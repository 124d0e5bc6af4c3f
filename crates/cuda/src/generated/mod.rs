//! Sizes and values of NVIDIA's headers, against which this crate's own declarations are tested.

mod constants;

use std::mem::offset_of;

use cudarc::driver::sys;

use self::constants::CONSTANTS;
use crate::loader::{cublaslt_table, nccl_table};

/// What this crate has for a name of the list. `None`: the list has a name that nothing here knows.
fn ours(name: &str) -> Option<u64> {
    let size = |bytes: usize| Some(bytes as u64);
    let value = |value: i32| u64::try_from(value).ok();
    match name {
        "sizeof(CUipcMemHandle)" => size(size_of::<sys::CUipcMemHandle>()),
        "sizeof(CUipcEventHandle)" => size(size_of::<sys::CUipcEventHandle>()),
        "sizeof(CUuuid)" => size(size_of::<sys::CUuuid>()),
        "sizeof(CUlaunchAttribute)" => size(size_of::<sys::CUlaunchAttribute>()),
        "sizeof(ncclConfig_t)" => size(size_of::<nccl_table::Config>()),
        "offsetof(ncclConfig_t, blocking)" => size(offset_of!(nccl_table::Config, blocking)),
        "offsetof(ncclConfig_t, minCTAs)" => size(offset_of!(nccl_table::Config, min_ctas)),
        "offsetof(ncclConfig_t, maxCTAs)" => size(offset_of!(nccl_table::Config, max_ctas)),
        "offsetof(ncclConfig_t, netName)" => size(offset_of!(nccl_table::Config, net_name)),
        "offsetof(ncclConfig_t, commName)" => size(offset_of!(nccl_table::Config, comm_name)),
        "offsetof(ncclConfig_t, nvlinkCentricSched)" => size(offset_of!(nccl_table::Config, nvlink_centric_sched)),
        "ncclConfig_t.magic" => Some(u64::from(nccl_table::Config::MAGIC)),
        "sizeof(ncclUniqueId)" => size(nccl_table::ID_BYTES),
        "ncclInProgress" => value(nccl_table::IN_PROGRESS),
        "ncclUint8" => value(nccl_table::UINT8),
        "sizeof(cublasLtMatmulAlgo_t)" => size(size_of::<cublaslt_table::Algo>()),
        "sizeof(cublasLtMatmulHeuristicResult_t)" => size(size_of::<cublaslt_table::HeuristicResult>()),
        "offsetof(cublasLtMatmulHeuristicResult_t, state)" => size(offset_of!(cublaslt_table::HeuristicResult, state)),
        "CUBLASLT_MATMUL_DESC_TRANSA" => value(cublaslt_table::DESC_TRANSA),
        "CUBLASLT_MATMUL_DESC_TRANSB" => value(cublaslt_table::DESC_TRANSB),
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES" => value(cublaslt_table::PREF_MAX_WORKSPACE_BYTES),
        "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES" => value(cublaslt_table::PREF_MIN_ALIGNMENTS[0]),
        "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES" => value(cublaslt_table::PREF_MIN_ALIGNMENTS[3]),
        "CUBLAS_COMPUTE_32F" => value(cublaslt_table::COMPUTE_32F),
        "CUDA_R_32F" => value(cublaslt_table::R_32F),
        "CUDA_R_16BF" => value(cublaslt_table::R_16BF),
        "CUBLAS_OP_N" => value(cublaslt_table::OP_N),
        "CUBLAS_OP_T" => value(cublaslt_table::OP_T),
        _ => of_driver(name),
    }
}

/// Values of the driver's header, as the bindings have them.
fn of_driver(name: &str) -> Option<u64> {
    use sys::{CUdevice_attribute as Device, CUfunction_attribute as Function, CUresult as Result};
    let value = match name {
        "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS" => sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32,
        "CU_EVENT_INTERPROCESS" => sys::CUevent_flags::CU_EVENT_INTERPROCESS as u32,
        "CU_EVENT_DISABLE_TIMING" => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32,
        "CU_STREAM_NON_BLOCKING" => sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32,
        "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL" => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as u32,
        "CU_MEMHOSTALLOC_PORTABLE" => sys::CU_MEMHOSTALLOC_PORTABLE,
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN" => {
            Device::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as u32
        }
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES" => {
            Function::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32
        }
        "CU_JIT_ERROR_LOG_BUFFER" => sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER as u32,
        "CUDA_ERROR_OUT_OF_MEMORY" => Result::CUDA_ERROR_OUT_OF_MEMORY as u32,
        "CUDA_ERROR_STUB_LIBRARY" => Result::CUDA_ERROR_STUB_LIBRARY as u32,
        "CUDA_ERROR_NO_DEVICE" => Result::CUDA_ERROR_NO_DEVICE as u32,
        "CUDA_ERROR_NOT_READY" => Result::CUDA_ERROR_NOT_READY as u32,
        "CUDA_ERROR_ILLEGAL_ADDRESS" => Result::CUDA_ERROR_ILLEGAL_ADDRESS as u32,
        _ => return None,
    };
    Some(u64::from(value))
}

#[test]
fn every_size_and_value_is_the_one_of_nvidias_headers() {
    for (name, expected) in CONSTANTS {
        assert_eq!(ours(name), Some(*expected), "{name}");
    }
}
