//! What the allocator does with buffers that were freed: it keeps them.
//!
//! Each frame of a gRPC stream is received into a buffer of its own. glibc gives the memory behind them back to the kernel
//! whenever 128 KiB at the end of an arena are free, and takes it again, zeroed and page by page, for the next frame: 8,000
//! page faults for a transfer of 47 MB, and half its throughput (docs/reliability.md).

/// glibc's own upper limits: where its adaptation ends when a program frees larger and larger blocks (mallopt(3),
/// `DEFAULT_MMAP_THRESHOLD_MAX`; the trim threshold is twice that).
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES_MIN: i32 = 32 << 20;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES_MAX: i32 = 64 << 20;

/// Arenas, whatever the number of cores: with the limit above they keep 256 MiB at the most.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ARENAS_MAX: i32 = 4;

/// For a process that moves KV: the first thing it does. With another libc nothing is changed.
pub fn keep() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (parameter, value) in [
        (libc::M_TRIM_THRESHOLD, KEPT_BYTES_MAX),
        (libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN),
        (libc::M_ARENA_MAX, ARENAS_MAX),
    ] {
        // SAFETY: they are numbers of the allocator's policy; no memory is touched. No other thread runs yet that could
        // read one while it is written. A value it does not like leaves its own policy as it is.
        unsafe { libc::mallopt(parameter, value) };
    }
}
