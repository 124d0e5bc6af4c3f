//! The functions of NVRTC.

use std::ffi::{c_char, c_int, c_void};

use crate::table::function_table;

/// A program as NVRTC hands it out.
pub(crate) type Program = *mut c_void;

function_table! {
    /// Own declarations: a result is a plain number, so that a later NVRTC may have further ones, and the library is the one
    /// that the loader found. Bindings that search by name would take another toolkit's `libnvrtc.so` before it.
    NvrtcTable {
        version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> c_int;
        error_string = "nvrtcGetErrorString": fn(c_int) -> *const c_char;
        create = "nvrtcCreateProgram": fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        destroy = "nvrtcDestroyProgram": fn(*mut Program) -> c_int;
        compile = "nvrtcCompileProgram": fn(Program, c_int, *const *const c_char) -> c_int;
        cubin_size = "nvrtcGetCUBINSize": fn(Program, *mut usize) -> c_int;
        cubin = "nvrtcGetCUBIN": fn(Program, *mut c_char) -> c_int;
        ptx_size = "nvrtcGetPTXSize": fn(Program, *mut usize) -> c_int;
        ptx = "nvrtcGetPTX": fn(Program, *mut c_char) -> c_int;
        log_size = "nvrtcGetProgramLogSize": fn(Program, *mut usize) -> c_int;
        log = "nvrtcGetProgramLog": fn(Program, *mut c_char) -> c_int;
    }
}
