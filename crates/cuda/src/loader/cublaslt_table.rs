//! cuBLASLt's functions, structs and values, as `cublasLt.h` of CUDA 13.0 has them. Own declarations: a status is a plain number.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::CUstream;

use crate::table::function_table;

pub(crate) const SUCCESS: c_int = 0;
/// `CUBLAS_COMPUTE_32F`.
pub(crate) const COMPUTE_32F: c_int = 68;
/// `CUDA_R_32F` and `CUDA_R_16BF` (library_types.h).
pub(crate) const R_32F: c_int = 0;
pub(crate) const R_16BF: c_int = 14;
/// `CUBLAS_OP_N` and `CUBLAS_OP_T` (cublas_api.h).
pub(crate) const OP_N: c_int = 0;
pub(crate) const OP_T: c_int = 1;
/// `CUBLASLT_MATMUL_DESC_TRANSA`, `_TRANSB`: an int each.
pub(crate) const DESC_TRANSA: c_int = 3;
pub(crate) const DESC_TRANSB: c_int = 4;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`: eight bytes.
pub(crate) const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES` to `_D_BYTES`: four bytes each.
pub(crate) const PREF_MIN_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];

pub(crate) type Handle = *mut c_void;
pub(crate) type Descriptor = *mut c_void;

/// `cublasLtMatmulAlgo_t`. Only the library knows what is in it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Algo {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeuristicResult {
    pub algo: Algo,
    pub workspace_bytes: usize,
    pub state: c_int,
    pub waves: f32,
    reserved: [c_int; 4],
}

function_table! {
    CublasLtTable {
        version = "cublasLtGetVersion": fn() -> usize;
        create = "cublasLtCreate": fn(*mut Handle) -> c_int;
        destroy = "cublasLtDestroy": fn(Handle) -> c_int;
        desc_create = "cublasLtMatmulDescCreate": fn(*mut Descriptor, c_int, c_int) -> c_int;
        desc_set = "cublasLtMatmulDescSetAttribute": fn(Descriptor, c_int, *const c_void, usize) -> c_int;
        desc_destroy = "cublasLtMatmulDescDestroy": fn(Descriptor) -> c_int;
        layout_create = "cublasLtMatrixLayoutCreate": fn(*mut Descriptor, c_int, u64, u64, i64) -> c_int;
        layout_destroy = "cublasLtMatrixLayoutDestroy": fn(Descriptor) -> c_int;
        pref_create = "cublasLtMatmulPreferenceCreate": fn(*mut Descriptor) -> c_int;
        pref_set = "cublasLtMatmulPreferenceSetAttribute": fn(Descriptor, c_int, *const c_void, usize) -> c_int;
        pref_destroy = "cublasLtMatmulPreferenceDestroy": fn(Descriptor) -> c_int;
        heuristic = "cublasLtMatmulAlgoGetHeuristic": fn(
            Handle,
            Descriptor,
            Descriptor,
            Descriptor,
            Descriptor,
            Descriptor,
            Descriptor,
            c_int,
            *mut HeuristicResult,
            *mut c_int,
        ) -> c_int;
        matmul = "cublasLtMatmul": fn(
            Handle,
            Descriptor,
            *const c_void,
            *const c_void,
            Descriptor,
            *const c_void,
            Descriptor,
            *const c_void,
            *const c_void,
            Descriptor,
            *mut c_void,
            Descriptor,
            *const Algo,
            *mut c_void,
            usize,
            CUstream,
        ) -> c_int;
    }
}

/// `cublasStatus_t`.
pub(crate) fn name_of(code: c_int) -> &'static str {
    match code {
        0 => "CUBLAS_STATUS_SUCCESS",
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        11 => "CUBLAS_STATUS_MAPPING_ERROR",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        15 => "CUBLAS_STATUS_NOT_SUPPORTED",
        16 => "CUBLAS_STATUS_LICENSE_ERROR",
        _ => "unknown to this version of baton",
    }
}

// What the library copies out of and into.
const _: () = assert!(size_of::<Algo>() == 64 && size_of::<HeuristicResult>() == 96);
