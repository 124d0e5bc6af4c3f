//! Owns allocations of device memory and pinned host memory: where they are, who may free them, and what a copy may touch.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::address_space::new_file;
use crate::codes::{Answer, Code};
use crate::objects::{Allocation, FREED, IMPORTERS, Origin, Pinned, PinnedBy};
use crate::shared_page::{HandleFields, SharedPage};
use crate::state::State;

/// A host address range is pinned as a whole or counts as pageable.
const HOST_PAGE_BYTES: usize = 4096;

fn is_alive(process: u64) -> bool {
    // SAFETY: signal 0 is sent to nobody; the call only says whether the process exists.
    let answer = unsafe { libc::kill(process as libc::pid_t, 0) };
    answer == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}

impl State {
    pub(crate) fn allocate(&mut self, bytes: usize, origin: Origin) -> Result<u64, Code> {
        let device = self.current_device()?;
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let memory_bytes = self.settings.as_ref().map_or(0, |settings| settings.memory_bytes);
        if memory_bytes - self.devices[device].used_bytes < bytes {
            return Err(Code::OUT_OF_MEMORY);
        }
        let file = new_file(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        let at = self.place(Allocation {
            bytes,
            device,
            file,
            origin,
        })?;
        self.devices[device].used_bytes += bytes;
        Ok(at)
    }

    fn place(&mut self, memory: Allocation) -> Result<u64, Code> {
        let at = self
            .space
            .map(&memory.file, memory.bytes)
            .map_err(|_| Code::OUT_OF_MEMORY)?;
        self.devices[memory.device].memory.add(at, memory.bytes);
        self.allocations.insert(at, memory);
        Ok(at)
    }

    /// Maps what another process exported. A second time it is the same address.
    pub(crate) fn import(&mut self, fields: &HandleFields) -> Result<u64, Code> {
        let device = self.current_device()?;
        let wanted = (fields.process, fields.nonce);
        for (at, memory) in &mut self.allocations {
            if let Origin::Imported { key, times, .. } = &mut memory.origin
                && *key == wanted
            {
                *times += 1;
                return Ok(*at);
            }
        }
        let page = Arc::new(fields.open_page().map_err(|_| Code::INVALID_HANDLE)?);
        let file = fields.open_memory().map_err(|_| Code::INVALID_HANDLE)?;
        let me = u64::from(std::process::id());
        // Words of dead importers are taken over.
        let mut words = IMPORTERS;
        let is_taken = |index: &usize| {
            let word = page.word(*index);
            let owner = word.load(Ordering::SeqCst);
            let is_free = owner == 0 || owner == me || !is_alive(owner);
            is_free
                && word
                    .compare_exchange(owner, me, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok()
        };
        let word = words.find(is_taken).ok_or(Code::MAP_FAILED)?;
        let bytes = usize::try_from(fields.bytes).map_err(|_| Code::INVALID_HANDLE)?;
        let origin = Origin::Imported {
            page,
            key: wanted,
            times: 1,
            word,
        };
        let at = self.place(Allocation {
            bytes,
            device,
            file,
            origin,
        })?;
        // What other processes wrote is not seen here, so all of it counts as written.
        self.devices[device].memory.set_initialised(at, bytes);
        Ok(at)
    }

    /// The page of memory that is exported; from now on another process may write to it, so all of it counts as written.
    pub(crate) fn export(&mut self, at: u64) -> Result<Arc<SharedPage>, Code> {
        let memory = self.allocations.get_mut(&at).ok_or(Code::INVALID_VALUE)?;
        let Origin::Plain { page } = &mut memory.origin else {
            return Err(Code::INVALID_VALUE);
        };
        let page = match page {
            Some(page) => Arc::clone(page),
            None => Arc::clone(page.insert(Arc::new(SharedPage::new().map_err(|_| Code::OUT_OF_MEMORY)?))),
        };
        let (device, bytes) = (memory.device, memory.bytes);
        self.devices[device].memory.set_initialised(at, bytes);
        Ok(page)
    }

    /// Ends an allocation. Whoever calls has waited for the work that may use it.
    pub(crate) fn release(&mut self, at: u64) {
        let Some(memory) = self.allocations.remove(&at) else {
            return;
        };
        self.devices[memory.device].memory.remove(at);
        self.space.unmap(at, memory.bytes);
        match &memory.origin {
            Origin::Imported { page, word, .. } => page.word(*word).store(0, Ordering::SeqCst),
            Origin::Ordered => self.devices[memory.device].used_bytes -= memory.bytes,
            Origin::Plain { page } => {
                self.devices[memory.device].used_bytes -= memory.bytes;
                let Some(page) = page else { return };
                page.word(FREED).store(1, Ordering::SeqCst);
                let importers = IMPORTERS.map(|index| page.word(index).load(Ordering::SeqCst));
                for process in importers.filter(|process| *process != 0 && is_alive(*process)) {
                    self.misuse(format!(
                        "{} bytes are freed while process {process} has them open",
                        memory.bytes
                    ));
                }
            }
        }
    }

    /// The allocation that has all these bytes.
    pub(crate) fn allocation_of(&self, at: u64, bytes: usize) -> Option<(u64, &Allocation)> {
        let (start, memory) = self.allocations.range(..=at).next_back()?;
        let end = (at - start).checked_add(bytes as u64)?;
        (end <= memory.bytes as u64).then_some((*start, memory))
    }

    /// What a call says of a range that it is given: it has to be allocated now.
    pub(crate) fn check_range(&mut self, at: u64, bytes: usize) -> Answer {
        if self.allocation_of(at, bytes).is_some() {
            return Ok(());
        }
        self.misuse(format!("{bytes} bytes at {at:#x} are not within one allocation"));
        Err(Code::INVALID_VALUE)
    }

    pub(crate) fn is_pinned(&self, at: u64, bytes: usize) -> bool {
        let found = self.pinned.range(..=at).next_back();
        found.is_some_and(|(start, pinned)| at - start + bytes as u64 <= pinned.bytes as u64)
    }

    pub(crate) fn pin_new(&mut self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (rounded, flags) = (
            bytes.next_multiple_of(HOST_PAGE_BYTES),
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), rounded, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(Code::OUT_OF_MEMORY);
        }
        self.pinned.insert(
            at as u64,
            Pinned {
                bytes,
                by: PinnedBy::Allocated,
            },
        );
        Ok(at as u64)
    }

    pub(crate) fn pin_existing(&mut self, at: u64, bytes: usize) -> Answer {
        if at == 0 || bytes == 0 || self.space.has(at) {
            return Err(Code::INVALID_VALUE);
        }
        let end = at.checked_add(bytes as u64).ok_or(Code::INVALID_VALUE)?;
        let before = self.pinned.range(..end).next_back();
        if before.is_some_and(|(start, pinned)| *start + pinned.bytes as u64 > at) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.pinned.insert(
            at,
            Pinned {
                bytes,
                by: PinnedBy::Registered,
            },
        );
        Ok(())
    }

    /// Whoever calls has waited for the work that may use it.
    pub(crate) fn unpin(&mut self, at: u64, by: PinnedBy) -> Answer {
        let pinned = self.pinned.get(&at).copied().filter(|pinned| pinned.by == by);
        match (pinned, by) {
            (None, PinnedBy::Allocated) => return Err(Code::INVALID_VALUE),
            (None, PinnedBy::Registered) => return Err(Code::HOST_MEMORY_NOT_REGISTERED),
            (Some(pinned), PinnedBy::Allocated) => {
                // SAFETY: `pin_new` has mapped this range, and the caller of `cuMemFreeHost` gives it up.
                unsafe { libc::munmap(at as *mut c_void, pinned.bytes.next_multiple_of(HOST_PAGE_BYTES)) };
            }
            (Some(_), PinnedBy::Registered) => {}
        }
        self.pinned.remove(&at);
        Ok(())
    }
}
