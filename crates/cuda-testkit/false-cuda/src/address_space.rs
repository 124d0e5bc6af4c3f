//! Owns the addresses of device memory: one reserved range of the process, in which every allocation is a mapping of its own memory
//! file. A host that touches it gets a segmentation fault, as the range is closed unless the driver works.
//! An address is never given out twice, so a use after free is always seen.

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Mappings begin at multiples of this: a multiple of every page size.
const GRANULE: usize = 64 << 10;
/// Addresses are used up, memory is not. When they are gone, allocations fail with OUT_OF_MEMORY.
const RESERVED_BYTES: usize = 1 << 40;

fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(GRANULE)
}

/// A file in memory with so many bytes of zeros.
pub(crate) fn new_file(bytes: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string, and the call has no other requirement.
    let file = unsafe { libc::memfd_create(c"false-cuda".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above has just made the descriptor, and nothing else has it.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    // SAFETY: the descriptor is open.
    match unsafe { libc::ftruncate(file.as_raw_fd(), rounded(bytes) as libc::off_t) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Closed,
    Open,
}

#[derive(Debug)]
pub(crate) struct AddressSpace {
    reserved: Option<Range<u64>>,
    /// Below it every address was given out.
    next: u64,
    access: Access,
}

impl AddressSpace {
    pub(crate) fn new() -> Self {
        Self {
            reserved: None,
            next: 0,
            access: Access::Closed,
        }
    }

    /// Whether an address is or was one of device memory.
    pub(crate) fn has(&self, address: u64) -> bool {
        self.reserved.as_ref().is_some_and(|range| range.contains(&address))
    }

    fn reserve(&mut self) -> io::Result<Range<u64>> {
        if let Some(range) = &self.reserved {
            return Ok(range.clone());
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), RESERVED_BYTES, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        self.next = (base as u64).next_multiple_of(GRANULE as u64);
        let range = base as u64..base as u64 + RESERVED_BYTES as u64;
        self.reserved = Some(range.clone());
        Ok(range)
    }

    /// Maps a file of so many bytes. One granule behind it stays empty, so that an overrun meets nothing.
    pub(crate) fn map(&mut self, file: &OwnedFd, bytes: usize) -> io::Result<u64> {
        let range = self.reserve()?;
        let at = self.next;
        let end = at
            .checked_add((rounded(bytes) + GRANULE) as u64)
            .filter(|end| *end <= range.end);
        let end = end.ok_or(io::ErrorKind::OutOfMemory)?;
        self.replace(at, bytes, Some(file))?;
        self.next = end;
        Ok(at)
    }

    pub(crate) fn unmap(&mut self, at: u64, bytes: usize) {
        // The address stays reserved. If the kernel refuses, the old mapping stays and is only never used again.
        let _ = self.replace(at, bytes, None);
    }

    fn replace(&self, at: u64, bytes: usize, file: Option<&OwnedFd>) -> io::Result<()> {
        let protection = match self.access {
            Access::Closed => libc::PROT_NONE,
            Access::Open => libc::PROT_READ | libc::PROT_WRITE,
        };
        let (flags, descriptor) = match file {
            Some(file) => (libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd()),
            None => (
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
            ),
        };
        // SAFETY: the range lies in the reserved one (`map` checks it, `unmap` gets what `map` gave), which only this type changes.
        let mapped = unsafe { libc::mmap(at as *mut c_void, rounded(bytes), protection, flags, descriptor, 0) };
        if mapped == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Lets the process read and write device memory until `close`.
    pub(crate) fn open(&mut self) {
        if self.access == Access::Closed {
            self.protect(libc::PROT_READ | libc::PROT_WRITE);
            self.access = Access::Open;
        }
    }

    pub(crate) fn close(&mut self) {
        if self.access == Access::Open {
            self.protect(libc::PROT_NONE);
            self.access = Access::Closed;
        }
    }

    fn protect(&self, protection: libc::c_int) {
        let Some(range) = &self.reserved else { return };
        // SAFETY: the range is reserved by this type. Nothing has a reference into it: kernels and copies use raw addresses.
        let answer = unsafe {
            libc::mprotect(
                range.start as *mut c_void,
                (self.next - range.start) as usize,
                protection,
            )
        };
        assert_eq!(
            answer,
            0,
            "device memory cannot be protected: {}",
            io::Error::last_os_error()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_not_given_out_twice() {
        let mut space = AddressSpace::new();
        let file = new_file(100).unwrap();
        let first = space.map(&file, 100).unwrap();
        assert!(space.has(first) && !space.has(0));
        space.unmap(first, 100);
        assert!(space.map(&file, 100).unwrap() > first);
    }

    #[test]
    fn two_mappings_of_a_file_are_one_memory() {
        let mut space = AddressSpace::new();
        let file = new_file(8).unwrap();
        let (one, two) = (space.map(&file, 8).unwrap(), space.map(&file, 8).unwrap());
        space.open();
        // SAFETY: both addresses are mapped and open.
        let seen = unsafe {
            *(one as *mut u64) = 42;
            *(two as *const u64)
        };
        space.close();
        assert_eq!(seen, 42);
    }
}
