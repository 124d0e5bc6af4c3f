//! Sizes and values of NVIDIA's headers, against which this crate's own declarations are tested.

mod constants;

use cudarc::driver::sys;

use self::constants::CONSTANTS;

/// What this crate has for a name of the list. `None`: the list has a name that nothing here knows.
fn ours(name: &str) -> Option<u64> {
    let size = |bytes: usize| Some(bytes as u64);
    match name {
        "sizeof(CUipcMemHandle)" => size(size_of::<sys::CUipcMemHandle>()),
        "sizeof(CUipcEventHandle)" => size(size_of::<sys::CUipcEventHandle>()),
        "sizeof(CUuuid)" => size(size_of::<sys::CUuuid>()),
        "sizeof(CUlaunchAttribute)" => size(size_of::<sys::CUlaunchAttribute>()),
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
