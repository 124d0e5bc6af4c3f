//! What glibc's allocator does with freed memory. Each process chooses what suits it. With another libc nothing changes.
//!
//! A node receives each frame of a gRPC stream into a buffer of its own. By default glibc gives the memory of such buffers
//! back to the kernel and takes it again, zeroed and page by page, for the next frame. That cost 8,000 page faults for a
//! transfer of 47 MB and half of its throughput (docs/measurements/transfer.md).
//!
//! A coordinator holds large buffers only for a moment, for large request bodies. By default glibc takes such blocks from
//! its arenas as soon as one of them has been freed, and the arenas keep them: a flood of bodies cost 100 MiB where 40 MiB
//! were in use.

/// What happens to the memory of a freed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreedMemory {
    /// The process keeps it, up to 256 MiB, so that the next buffer is there at once.
    Kept,
    /// The kernel gets large blocks back at once.
    GivenBack,
}

/// (trim threshold, smallest block that is mapped on its own, arenas); see mallopt(3). Setting the second value also stops
/// glibc from raising it by itself.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn policy(freed: FreedMemory) -> (i32, i32, i32) {
    match freed {
        // These are glibc's own upper limits (`DEFAULT_MMAP_THRESHOLD_MAX`; the trim threshold is twice that). Four arenas,
        // whatever the number of cores, keep 256 MiB at most.
        FreedMemory::Kept => (64 << 20, 32 << 20, 4),
        // Blocks above 256 KiB are those of large bodies. Smaller blocks are too many to map each of them. Each arena keeps
        // 1 MiB. 0 lets glibc choose the number of arenas by the cores, because most threads want small blocks at the same
        // time.
        FreedMemory::GivenBack => (1 << 20, 256 << 10, 0),
    }
}

/// Gives the kernel what is free now, whatever the policy. Takes milliseconds.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the allocator orders this with the allocations of other threads itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The first call of a process.
pub fn set(freed: FreedMemory) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let (trim_bytes, mapped_bytes_min, arenas_max) = policy(freed);
        for (parameter, value) in [
            (libc::M_TRIM_THRESHOLD, trim_bytes),
            (libc::M_MMAP_THRESHOLD, mapped_bytes_min),
            (libc::M_ARENA_MAX, arenas_max),
        ] {
            // SAFETY: the arguments are numbers of the allocator's policy; no memory is touched. No other thread runs yet
            // that could read such a number while it is written. A value that the allocator refuses changes nothing.
            unsafe { libc::mallopt(parameter, value) };
        }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _ = freed;
}
