//! One large zeroed allocation that asks for huge pages. The KV cache and the packed weights each live in one.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};

/// Transparent huge pages need this alignment to be used from the first byte. With them, reading 96 MB of weights was 1.5
/// times as fast.
const HUGE_PAGE: usize = 2 << 20;

/// Name of shareable memory in `/proc/PID/maps`; no file has it.
const MEMFD_NAME: &std::ffi::CStr = c"baton-kv-pool";

/// Owns the bytes. The owner of this value decides which code may touch them.
pub(crate) struct HugeMemory {
    start: NonNull<u8>,
    layout: Layout,
    /// The memory itself, where it is not the allocator's.
    shared: Option<(File, MmapRaw)>,
}

// SAFETY: a plain owned allocation; the pointer is handed out only to code that orders its own accesses.
unsafe impl Send for HugeMemory {}
// SAFETY: as above; `&HugeMemory` itself reads nothing but the pointer and the length.
unsafe impl Sync for HugeMemory {}

impl HugeMemory {
    /// `None` when the size is zero or too large, or the system has no such memory.
    pub(crate) fn zeroed(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes, HUGE_PAGE)
            .ok()
            .filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        advise_huge_pages(start, bytes);
        Some(Self {
            start,
            layout,
            shared: None,
        })
    }

    /// The same in a memfd, which other processes can map when they get it, and which nobody can resize any more.
    ///
    /// # Errors
    /// An error of the system, also when the size is zero or too large.
    pub(crate) fn shareable(bytes: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(bytes, 1).map_err(io::Error::other)?;
        let file = sealed_memory(bytes as u64)?;
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        let start = NonNull::new(map.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        advise_huge_pages(start, bytes);
        Ok(Self {
            start,
            layout,
            shared: Some((file, map)),
        })
    }

    /// The descriptor for another process. `None` for memory of this process alone.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.shared.as_ref().map(|(file, _)| file.as_fd())
    }

    /// For owners that order the accesses themselves.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    /// Only for an owner that hands out no writable pointers while the result lives, as `Weights` does.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the range is one live, initialised allocation; the owner's promise rules out writers.
        unsafe { std::slice::from_raw_parts(self.start(), self.len()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is one live, initialised allocation, and `&mut self` is the only way to it.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len()) }
    }
}

impl Drop for HugeMemory {
    fn drop(&mut self) {
        if self.shared.is_none() {
            // SAFETY: without a mapping `start` came from `alloc_zeroed(layout)`, and this is its only owner.
            unsafe { dealloc(self.start.as_ptr(), self.layout) }
        }
    }
}

/// Zeroed memory behind a descriptor. Its size is fixed from here on, so no mapping of it can ever fault.
fn sealed_memory(bytes: u64) -> io::Result<File> {
    use std::os::fd::FromRawFd as _;
    // SAFETY: the name is a C string; the call gives a fresh descriptor or -1.
    let descriptor = unsafe { libc::memfd_create(MEMFD_NAME.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open and nobody else has it.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(bytes)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: plain integers; the descriptor is open.
    match unsafe { libc::fcntl(descriptor, libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Best effort: without huge pages everything works, only slower.
fn advise_huge_pages(start: NonNull<u8>, bytes: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the range is one live allocation of ours; this advice does not change its content.
    unsafe {
        libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}
