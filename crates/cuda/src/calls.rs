//! The functions of the driver that this crate calls, with their status as a number.
//!
//! The bindings of `cudarc` have the status as a Rust enum of the codes of CUDA 13.0. A newer driver may answer with another code, and a
//! value of an enum that is none of its variants is undefined behaviour. So the bindings give the types, the constants and the library, and
//! the calls are declared here.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUipcEventHandle, CUipcMemHandle, CUjit_option, CUmodule, CUresult, CUstream, CUstreamCaptureMode,
    CUuuid,
};

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: c_int = CUresult::CUDA_SUCCESS as c_int;
/// `CUDA_ERROR_NOT_READY`.
pub(crate) const NOT_READY: c_int = CUresult::CUDA_ERROR_NOT_READY as c_int;

/// Declares functions of the driver. Their arguments are those of the bindings.
macro_rules! calls {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        /// The names of all of them. The loader proves that the library has them.
        pub(crate) const SYMBOLS: &[&str] = &[$(stringify!($name)),*];

        $(
            /// # Safety
            /// What NVIDIA's documentation of the function asks for. The loader has found the driver.
            #[allow(non_snake_case, clippy::too_many_arguments, reason = "NVIDIA's function has this name and these arguments")]
            pub(crate) unsafe fn $name($($arg: $type),*) -> c_int {
                type Call = unsafe extern "C" fn($($type),*) -> c_int;
                static CALL: OnceLock<Call> = OnceLock::new();
                // SAFETY: the arguments are those of NVIDIA's header, and its status is an int.
                let call = CALL.get_or_init(|| unsafe { find(stringify!($name)) });
                // SAFETY: the caller's promise.
                unsafe { call($($arg),*) }
            }
        )*
    };
}

calls! {
    cuCtxSetCurrent(context: CUcontext);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice);
    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    cuDriverGetVersion(version: *mut c_int);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventElapsedTime(ms: *mut f32, earlier: CUevent, later: CUevent);
    cuEventQuery(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventSynchronize(event: CUevent);
    cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    cuGetErrorName(code: c_int, name: *mut *const c_char);
    cuGraphDestroy(graph: CUgraph);
    cuGraphExecDestroy(graph: CUgraphExec);
    cuGraphInstantiateWithFlags(made: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    cuGraphLaunch(graph: CUgraphExec, stream: CUstream);
    cuIpcCloseMemHandle(at: CUdeviceptr);
    cuIpcGetEventHandle(handle: *mut CUipcEventHandle, event: CUevent);
    cuIpcGetMemHandle(handle: *mut CUipcMemHandle, at: CUdeviceptr);
    cuIpcOpenEventHandle(event: *mut CUevent, handle: CUipcEventHandle);
    cuIpcOpenMemHandle_v2(at: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
    cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        params: *mut *mut c_void,
        extra: *mut *mut c_void
    );
    cuMemAlloc_v2(at: *mut CUdeviceptr, bytes: usize);
    cuMemFreeHost(at: *mut c_void);
    cuMemFree_v2(at: CUdeviceptr);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemsetD8Async(to: CUdeviceptr, byte: c_uchar, bytes: usize, stream: CUstream);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        count: c_uint,
        options: *mut CUjit_option,
        values: *mut *mut c_void
    );
    cuModuleUnload(module: CUmodule);
    cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
}

/// # Safety
/// `F` is the type of the driver's function of this name.
unsafe fn find<F: Copy>(name: &str) -> F {
    // SAFETY: the loader has opened this library before, so its start has nothing left to do.
    let library = unsafe { sys::culib() };
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name) };
    *found.unwrap_or_else(|error| panic!("the loader found {name}, and now it is not there: {error}"))
}

/// The driver's name of a status that one of its functions has returned. So the driver is there.
pub(crate) fn name_of(code: c_int) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the driver writes a pointer to a text that it keeps, or null for a code that it does not know.
    let status = unsafe { cuGetErrorName(code, &raw mut text) };
    // SAFETY: as above.
    unsafe { name_from((code, status), text) }
}

/// # Safety
/// After the status of success `text` is null or has an end, and lives as long as the driver.
pub(crate) unsafe fn name_from((code, status): (c_int, c_int), text: *const c_char) -> String {
    if status != SUCCESS || text.is_null() {
        return format!("error {code}");
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_functions_are_listed_once_and_in_order() {
        assert!(SYMBOLS.is_sorted());
        assert!(SYMBOLS.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn a_code_without_a_name_is_its_number() {
        // SAFETY: null is no text.
        let names = [(54_321, 1), (54_321, SUCCESS)].map(|answer| unsafe { name_from(answer, std::ptr::null()) });
        assert_eq!(names, ["error 54321", "error 54321"]);
    }
}
