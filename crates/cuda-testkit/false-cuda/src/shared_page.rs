//! Owns what two processes share: a page of words, and the handles by which one process finds the other's files. A handle names the
//! exporting process and its descriptors, so it works while that process lives, and between processes that may look at each other
//! in `/proc` (one user, one pid namespace).

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::address_space::new_file;

const PAGE_BYTES: usize = 4096;
const WORDS: usize = PAGE_BYTES / 8;
/// The word that tells this page from another file that got the same descriptor later.
const NONCE: usize = WORDS - 1;

/// Atomic words in a file that several processes map.
#[derive(Debug)]
pub(crate) struct SharedPage {
    at: usize,
    file: OwnedFd,
}

impl SharedPage {
    pub(crate) fn new() -> io::Result<Self> {
        static PAGES: AtomicU64 = AtomicU64::new(1);
        let page = Self::map(new_file(PAGE_BYTES)?)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let count = PAGES.fetch_add(1, Ordering::Relaxed);
        page.word(NONCE)
            .store((now.as_nanos() as u64) ^ (count << 56), Ordering::SeqCst);
        Ok(page)
    }

    fn map(file: OwnedFd) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let descriptor = file.as_raw_fd();
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                protection,
                libc::MAP_SHARED,
                descriptor,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { at: at as usize, file })
    }

    /// Indices are constants of this crate, far below the page's end.
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS, "a page has {WORDS} words");
        // SAFETY: the page is mapped while `self` lives, the index is in it, and all who have it use atomic words.
        unsafe { &*(self.at as *const AtomicU64).add(index) }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: `map` has mapped this range, and references into it borrow `self`.
        unsafe { libc::munmap(self.at as *mut libc::c_void, PAGE_BYTES) };
    }
}

/// `CUipcMemHandle` and `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcHandle {
    pub reserved: [u8; 64],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandleKind {
    Memory = 0x6d65_6d6f,
    Event = 0x6576_656e,
}

/// What a handle says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HandleFields {
    pub(crate) process: u32,
    pub(crate) nonce: u64,
    page: RawFd,
    /// Memory only.
    file: RawFd,
    pub(crate) bytes: u64,
}

impl HandleFields {
    pub(crate) fn new(page: &SharedPage, memory: Option<(&OwnedFd, usize)>) -> Self {
        Self {
            process: std::process::id(),
            nonce: page.word(NONCE).load(Ordering::SeqCst),
            page: page.file.as_raw_fd(),
            file: memory.map_or(-1, |(file, _)| file.as_raw_fd()),
            bytes: memory.map_or(0, |(_, bytes)| bytes as u64),
        }
    }

    pub(crate) fn pack(&self, kind: HandleKind) -> IpcHandle {
        let words = [
            kind as u64,
            self.process.into(),
            self.nonce,
            self.page as u64,
            self.file as u64,
            self.bytes,
        ];
        let mut reserved = [0; 64];
        for (part, word) in reserved.chunks_exact_mut(8).zip(words) {
            part.copy_from_slice(&word.to_ne_bytes());
        }
        IpcHandle { reserved }
    }

    /// `None`: no handle of this kind.
    pub(crate) fn unpack(handle: &IpcHandle, kind: HandleKind) -> Option<Self> {
        let mut words = handle
            .reserved
            .chunks_exact(8)
            .map(|part| part.try_into().map_or(0, u64::from_ne_bytes));
        if words.next()? != kind as u64 {
            return None;
        }
        let (process, nonce) = (words.next()?.try_into().ok()?, words.next()?);
        let (page, file) = (words.next()? as RawFd, words.next()? as RawFd);
        Some(Self {
            process,
            nonce,
            page,
            file,
            bytes: words.next()?,
        })
    }

    fn open(&self, descriptor: RawFd, bytes_min: u64) -> io::Result<OwnedFd> {
        let path = format!("/proc/{}/fd/{descriptor}", self.process);
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() < bytes_min {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(file.into())
    }

    /// The exporter's page, if it still is the one that was exported.
    pub(crate) fn open_page(&self) -> io::Result<SharedPage> {
        let page = SharedPage::map(self.open(self.page, PAGE_BYTES as u64)?)?;
        if page.word(NONCE).load(Ordering::SeqCst) != self.nonce {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(page)
    }

    pub(crate) fn open_memory(&self) -> io::Result<OwnedFd> {
        self.open(self.file, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_says_what_was_packed() {
        let page = SharedPage::new().unwrap();
        let fields = HandleFields::new(&page, None);
        let handle = fields.pack(HandleKind::Event);
        assert_eq!(HandleFields::unpack(&handle, HandleKind::Event), Some(fields));
        assert_eq!(HandleFields::unpack(&handle, HandleKind::Memory), None);
    }

    #[test]
    fn a_page_that_is_opened_again_has_the_same_words() {
        let page = SharedPage::new().unwrap();
        page.word(3).store(7, Ordering::SeqCst);
        let again = HandleFields::new(&page, None).open_page().unwrap();
        assert_eq!(again.word(3).load(Ordering::SeqCst), 7);
    }

    #[test]
    fn a_handle_whose_page_is_gone_is_refused() {
        let page = SharedPage::new().unwrap();
        let fields = HandleFields::new(&page, None);
        drop(page);
        assert!(fields.open_page().is_err());
    }
}
