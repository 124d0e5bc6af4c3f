//! Large ranges of memory that ask for huge pages. The KV cache and the packed weights each live in one.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;

use memmap2::{MmapOptions, MmapRaw};

/// Transparent huge pages need this alignment to be used from the first byte. With them, reading 96 MB of weights was 1.5
/// times as fast.
const HUGE_PAGE: usize = 2 << 20;

/// Name of shareable memory in `/proc/PID/maps`; no file has it.
const MEMFD_NAME: &std::ffi::CStr = c"baton-kv-pool";

/// Owns the bytes. The owner of this value decides which code may touch them. The kernel gives a page when it is touched
/// first, so memory that nobody has used yet costs nothing.
pub(crate) struct HugeMemory {
    start: NonNull<u8>,
    length: usize,
    /// The addresses, at most one huge page more than the memory has. They are given back with this value.
    _range: MmapRaw,
    /// The memory itself, where it is not this process's alone.
    file: Option<File>,
}

// SAFETY: a plain owned mapping; the pointer is handed out only to code that orders its own accesses.
unsafe impl Send for HugeMemory {}
// SAFETY: as above; `&HugeMemory` itself reads nothing but the pointer and the length.
unsafe impl Sync for HugeMemory {}

impl HugeMemory {
    /// `None` when the size is zero or too large, or the system has no such memory.
    pub(crate) fn zeroed(bytes: usize) -> Option<Self> {
        let (range, start) = aligned_range(bytes).ok()?;
        advise_huge_pages(start, bytes);
        Some(Self {
            start,
            length: bytes,
            _range: range,
            file: None,
        })
    }

    /// The same in a memfd, which other processes can map when they get it, and which nobody can resize any more.
    ///
    /// # Errors
    /// An error of the system, also when the size is zero or too large.
    pub(crate) fn shareable(bytes: usize) -> io::Result<Self> {
        let file = memory_file(MEMFD_NAME)?;
        file.set_len(bytes as u64)?;
        seal(&file, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL)?;
        Self::of_file(file, bytes, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Maps the first bytes of a file that is at least as long.
    fn of_file(file: File, bytes: usize, protection: i32) -> io::Result<Self> {
        if file.metadata()?.len() < bytes as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (range, start) = aligned_range(bytes)?;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the new mapping takes the place of addresses that `range` owns and nobody uses; unmapping `range` unmaps it.
        let mapped = unsafe { libc::mmap(start.as_ptr().cast(), bytes, protection, flags, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        advise_huge_pages(start, bytes);
        Ok(Self {
            start,
            length: bytes,
            _range: range,
            file: Some(file),
        })
    }

    /// Maps a memory file that this process fills.
    ///
    /// # Errors
    /// An error of the system.
    pub(crate) fn to_fill(file: File, bytes: usize) -> io::Result<Self> {
        let mut memory = Self::of_file(file, bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        memory.take_huge_pages();
        Ok(memory)
    }

    /// Where the system has no huge pages for memory files by itself (`shmem_enabled` is `never` on most), it still makes one
    /// when it is asked for it. Best effort: every page that stays small works, too.
    fn take_huge_pages(&mut self) {
        for page in self.bytes_mut().chunks_exact_mut(HUGE_PAGE) {
            // A page that has no byte yet cannot be made huge.
            page[0] = 0;
            // SAFETY: the range is live memory of ours; this advice does not change its content.
            unsafe { libc::madvise(page.as_mut_ptr().cast(), HUGE_PAGE, libc::MADV_COLLAPSE) };
        }
    }

    /// Memory that nobody writes to any more.
    pub(crate) fn fixed(self) -> FixedMemory {
        FixedMemory(Some(self))
    }

    /// The descriptor for another process. `None` for memory of this process alone.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.as_fd())
    }

    /// For owners that order the accesses themselves.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is one live, initialised mapping, and `&mut self` is the only way to it.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len()) }
    }
}

/// Memory that is only read. The default holds no byte.
#[derive(Default)]
pub(crate) struct FixedMemory(Option<HugeMemory>);

impl FixedMemory {
    /// Maps a memory file whose content can never change again (see [`Sealing`]).
    ///
    /// # Errors
    /// An error of the system.
    pub(crate) fn of_sealed(file: File, bytes: usize) -> io::Result<Self> {
        HugeMemory::of_file(file, bytes, libc::PROT_READ).map(HugeMemory::fixed)
    }
}

impl Deref for FixedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Some(memory) = &self.0 else { return &[] };
        // SAFETY: the range is one live, initialised mapping; nothing writes to it, because no method of this type does.
        unsafe { std::slice::from_raw_parts(memory.start(), memory.len()) }
    }
}

/// Zeroed addresses of this process, and the first of them that is a multiple of a huge page.
fn aligned_range(bytes: usize) -> io::Result<(MmapRaw, NonNull<u8>)> {
    let reserved = bytes.checked_add(HUGE_PAGE).filter(|_| bytes > 0);
    let reserved = reserved.ok_or(io::ErrorKind::InvalidInput)?;
    let range = MmapRaw::from(MmapOptions::new().len(reserved).map_anon()?);
    let first = range.as_mut_ptr();
    // A mapping begins at a multiple of a page, so the rest is within the huge page that was added.
    let start = first.wrapping_add(first.align_offset(HUGE_PAGE));
    let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
    Ok((range, start))
}

/// An empty file in memory. It is gone with its last descriptor and mapping.
///
/// # Errors
/// An error of the system.
pub(crate) fn memory_file(name: &std::ffi::CStr) -> io::Result<File> {
    use std::os::fd::FromRawFd as _;
    // SAFETY: the name is a C string; the call gives a fresh descriptor or -1.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open and nobody else has it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Nobody can change the content or the length of a memory file after this. There must be no writable mapping of it.
///
/// # Errors
/// An error of the system, such as a mapping that still writes.
pub(crate) fn seal_content(file: &File) -> io::Result<()> {
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    seal(file, seals)
}

/// What can still be done to a file in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sealing {
    /// It can be filled, and sealed afterwards.
    Open,
    /// Its content and its length can never change again.
    Sealed,
    /// It is no memory file, or one that cannot be sealed.
    Impossible,
}

impl Sealing {
    pub(crate) fn of(file: &File) -> Self {
        let wanted = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        // SAFETY: plain integers; the descriptor is open.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) } {
            0 => Self::Open,
            seals if seals > 0 && seals & wanted == wanted => Self::Sealed,
            _ => Self::Impossible,
        }
    }
}

fn seal(file: &File, seals: i32) -> io::Result<()> {
    // SAFETY: plain integers; the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Best effort: without huge pages everything works, only slower. Miri has no such call.
fn advise_huge_pages(start: NonNull<u8>, bytes: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    // SAFETY: the range is one live allocation of ours; this advice does not change its content.
    unsafe {
        libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
    }
    #[cfg(any(not(target_os = "linux"), miri))]
    let _ = (start, bytes);
}
