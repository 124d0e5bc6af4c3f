//! NCCL's functions, structs and codes, as `nccl.h` of 2.28.9 has them. Own declarations: the bindings of `cudarc` never look for
//! `libnccl.so.2`, the only name that packages have, and treat a code that they do not know as one that cannot be.

use std::ffi::{c_char, c_int, c_void};

use cudarc::driver::sys::CUstream;

use crate::table::function_table;

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const IN_PROGRESS: c_int = 7;
/// `ncclUint8`: everything is sent as bytes.
pub(crate) const UINT8: c_int = 1;
/// `NCCL_UNIQUE_ID_BYTES`.
pub(crate) const ID_BYTES: usize = 128;

pub(crate) type Comm = *mut c_void;

/// `ncclUniqueId`, which C passes by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawId(pub [u8; ID_BYTES]);

function_table! {
    NcclTable {
        version = "ncclGetVersion": fn(*mut c_int) -> c_int;
        unique_id = "ncclGetUniqueId": fn(*mut RawId) -> c_int;
        init = "ncclCommInitRankConfig": fn(*mut Comm, c_int, RawId, c_int, *mut Config) -> c_int;
        async_error = "ncclCommGetAsyncError": fn(Comm, *mut c_int) -> c_int;
        finalize = "ncclCommFinalize": fn(Comm) -> c_int;
        destroy = "ncclCommDestroy": fn(Comm) -> c_int;
        abort = "ncclCommAbort": fn(Comm) -> c_int;
        group_start = "ncclGroupStart": fn() -> c_int;
        group_end = "ncclGroupEnd": fn() -> c_int;
        send = "ncclSend": fn(*const c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;
        recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;
        error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
        last_error = "ncclGetLastError": fn(Comm) -> *const c_char;
    }
}

/// `NCCL_CONFIG_UNDEF_INT`: NCCL chooses. Pointers that are not set are null (`NCCL_CONFIG_UNDEF_PTR`).
const UNDEFINED: c_int = c_int::MIN;

/// `ncclConfig_t` of 2.28. An older library reads the first fields, which are its own, by `version`; a later one takes its own
/// choice for those that are missing, by `size`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Config {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    pub traffic_class: c_int,
    pub comm_name: *const c_char,
    pub collnet_enable: c_int,
    pub cta_policy: c_int,
    pub shrink_share: c_int,
    pub nvls_ctas: c_int,
    pub channels_per_net_peer: c_int,
    pub nvlink_centric_sched: c_int,
}

impl Config {
    /// `ncclConfig_t.magic`.
    pub const MAGIC: u32 = 0xcafe_beef;
    /// `NCCL_VERSION(2, 28, 9)`: the header that this struct is of.
    const VERSION: u32 = 22809;

    /// No call waits. At most so many thread blocks of a GPU move bytes.
    pub fn polled(ctas_max: Option<u32>) -> Self {
        let ctas_max = ctas_max.and_then(|ctas| c_int::try_from(ctas).ok());
        Self {
            size: size_of::<Self>(),
            magic: Self::MAGIC,
            version: Self::VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: ctas_max.unwrap_or(UNDEFINED),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
        }
    }
}

/// `ncclResult_t`.
pub(crate) fn name_of(code: c_int) -> &'static str {
    match code {
        0 => "ncclSuccess",
        1 => "ncclUnhandledCudaError",
        2 => "ncclSystemError",
        3 => "ncclInternalError",
        4 => "ncclInvalidArgument",
        5 => "ncclInvalidUsage",
        6 => "ncclRemoteError",
        7 => "ncclInProgress",
        _ => "unknown to this version of baton",
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn a_configuration_has_the_layout_of_the_header() {
        assert_eq!(size_of::<Config>(), 80);
        assert_eq!(offset_of!(Config, blocking), 16);
        assert_eq!(offset_of!(Config, max_ctas), 28);
        assert_eq!(size_of::<RawId>(), 128);
    }

    #[test]
    fn a_polled_configuration_leaves_the_rest_to_the_library() {
        let config = Config::polled(Some(4));
        assert_eq!((config.size, config.magic, config.blocking), (80, 0xcafe_beef, 0));
        assert_eq!((config.max_ctas, config.min_ctas), (4, i32::MIN));
        assert!(config.net_name.is_null() && config.comm_name.is_null());
        assert_eq!(Config::polled(None).max_ctas, i32::MIN);
    }
}
