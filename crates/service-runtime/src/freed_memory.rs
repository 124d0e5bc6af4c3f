//! What glibc's allocator does with memory that was freed: each process says what suits it. With another libc nothing is changed.
//!
//! A node receives each frame of a gRPC stream into a buffer of its own. By default glibc gives the memory behind such buffers back
//! to the kernel again and again, and takes it again, zeroed and page by page, for the next frame: 8,000 page faults for a transfer
//! of 47 MB, and half its throughput (docs/measurements/reliability.md).
//!
//! A coordinator holds large buffers for a moment only, for large request bodies. By default glibc takes such blocks from its
//! arenas as soon as one of them has been freed, and the arenas keep them: a flood of bodies cost 100 MiB where 40 MiB are in use.

/// What happens to the memory of a block that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreedMemory {
    /// The process keeps it, up to 256 MiB: the next buffer is there at once.
    Kept,
    /// The kernel gets large blocks back at once.
    GivenBack,
}

/// (trim threshold, smallest block that is mapped on its own, arenas); see mallopt(3). To set the second one also ends glibc's
/// habit of raising it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn policy(freed: FreedMemory) -> (i32, i32, i32) {
    match freed {
        // glibc's own upper limits, where its habit ends (`DEFAULT_MMAP_THRESHOLD_MAX`; the trim threshold is twice that). Four
        // arenas, whatever the number of cores, keep 256 MiB at the most.
        FreedMemory::Kept => (64 << 20, 32 << 20, 4),
        // Blocks above 256 KiB are those of large bodies; smaller ones are too many to map each. Each arena keeps 1 MiB, and 0 lets
        // glibc choose their number by the cores: small blocks are what most threads want at the same time.
        FreedMemory::GivenBack => (1 << 20, 256 << 10, 0),
    }
}

/// The first thing a process does.
pub fn set(freed: FreedMemory) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let (trim_bytes, mapped_bytes_min, arenas_max) = policy(freed);
        for (parameter, value) in [
            (libc::M_TRIM_THRESHOLD, trim_bytes),
            (libc::M_MMAP_THRESHOLD, mapped_bytes_min),
            (libc::M_ARENA_MAX, arenas_max),
        ] {
            // SAFETY: they are numbers of the allocator's policy; no memory is touched. No other thread runs yet that could
            // read one while it is written. A value that it does not like leaves its own policy as it is.
            unsafe { libc::mallopt(parameter, value) };
        }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _ = freed;
}
