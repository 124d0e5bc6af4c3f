//! Loads, stores and atomics: where an address lies, whether it may be used, and what the shadow says of it.

use std::ptr;

use crate::fault::{AddressState, Fault};
use crate::findings::FindingKind;
use crate::instruction::{Address, Atomic, Load, Space, Store};
use crate::machine::Machine;
use crate::shadow::{Actor, Judge, Stamp, Usage};
use crate::windows;

/// One access of one thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) space: Space,
    pub(super) at: u64,
    pub(super) bytes: usize,
    pub(super) usage: Usage,
    pub(super) line: u32,
}

/// Where bytes lie that may be used.
#[derive(Clone, Copy, Debug)]
enum Location {
    Global(u64),
    Shared(usize),
    /// In the local memory of all threads.
    Local(usize),
    Param(usize),
    Image(usize),
}

/// The widest access has 16 bytes.
type Buffer = [u8; 16];

impl Machine<'_> {
    pub(super) fn load(&mut self, thread: usize, load: &Load, line: u32) -> Result<(), Fault> {
        let width = load.ty.bytes();
        let usage = if load.is_read_only {
            Usage::ReadOnlyPath
        } else {
            Usage::Read
        };
        let at = self.address(thread, load.address);
        let used = Use {
            space: load.space,
            at,
            bytes: width * load.to.len(),
            usage,
            line,
        };
        let location = self.judge(thread, &used)?;
        let buffer = self.read(location, used.bytes);
        for (target, bytes) in load.to.iter().zip(buffer.chunks_exact(width)) {
            // The register may be wider than the value.
            let value = load.ty.value(number(bytes)) as u64 & target.ty.mask();
            self.set(thread, target.register, value);
        }
        Ok(())
    }

    pub(super) fn store(&mut self, thread: usize, store: &Store, line: u32) -> Result<(), Fault> {
        let width = store.ty.bytes();
        let mut buffer = Buffer::default();
        for (source, bytes) in store.from.iter().zip(buffer.chunks_exact_mut(width)) {
            bytes.copy_from_slice(&self.get(thread, *source).to_le_bytes()[..width]);
        }
        let at = self.address(thread, store.address);
        let used = Use {
            space: store.space,
            at,
            bytes: width * store.from.len(),
            usage: Usage::Write,
            line,
        };
        let location = self.judge(thread, &used)?;
        self.write(location, &buffer[..used.bytes]);
        Ok(())
    }

    pub(super) fn atomic(&mut self, thread: usize, atomic: &Atomic, line: u32) -> Result<(), Fault> {
        let at = self.address(thread, atomic.address);
        let used = Use {
            space: atomic.space,
            at,
            bytes: atomic.bytes,
            usage: Usage::Atomic,
            line,
        };
        let location = self.judge(thread, &used)?;
        let old = number(&self.read(location, used.bytes)[..used.bytes]);
        let [a, b] = atomic.operands.map(|operand| self.get(thread, operand));
        let new = (atomic.f)(old, a, b);
        self.write(location, &new.to_le_bytes()[..used.bytes]);
        if let Some(to) = atomic.to {
            self.set(thread, to, old);
        }
        Ok(())
    }

    pub(super) fn address(&self, thread: usize, address: Address) -> u64 {
        self.get(thread, address.base).wrapping_add_signed(address.offset)
    }

    pub(super) fn stamp(&self, thread: usize, line: u32) -> Stamp {
        let state = &self.threads[thread];
        let (block_epoch, warp_epoch) = (state.block_epoch, state.warp_epoch);
        let actor = Actor {
            block: self.block,
            thread: thread as u32,
            block_epoch,
            warp_epoch,
        };
        self.memory.stamp(actor, line)
    }

    /// The address is a space, the address itself, and the number of bytes.
    pub(super) fn illegal(&self, thread: usize, access: (Space, u64, usize), line: u32) -> Fault {
        let (space, address, bytes) = access;
        let is_freed = space == Space::Global && self.memory.was_freed(address);
        let state = if is_freed {
            AddressState::Freed
        } else {
            AddressState::Outside
        };
        Fault::IllegalAddress {
            place: self.place(thread, line),
            space: space.name(),
            address,
            bytes,
            state,
        }
    }

    pub(super) fn check_alignment(&self, thread: usize, used: &Use) -> Result<(), Fault> {
        let &Use {
            at: address,
            bytes,
            line,
            ..
        } = used;
        if address.is_multiple_of(bytes as u64) {
            return Ok(());
        }
        Err(Fault::Misaligned {
            place: self.place(thread, line),
            address,
            bytes,
        })
    }

    /// Finds where the bytes lie, and tells the shadow.
    fn judge(&mut self, thread: usize, used: &Use) -> Result<Location, Fault> {
        self.check_alignment(thread, used)?;
        let (space, at) = match used.space {
            Space::Generic => windows::resolve(used.at),
            space => (space, used.at),
        };
        match space {
            Space::Shared => self.use_shared(thread, &Use { at, ..*used }).map(Location::Shared),
            Space::Local => self.use_local(thread, &Use { at, ..*used }).map(Location::Local),
            Space::Param if !used.usage.writes() => {
                let offset = within(at, used.bytes, self.launch.params.len());
                offset
                    .map(Location::Param)
                    .ok_or_else(|| self.illegal(thread, (space, at, used.bytes), used.line))
            }
            Space::Param => Err(self.unsupported(thread, used.line, "a write to a parameter")),
            _ => self.use_global(thread, &Use { at, ..*used }, space),
        }
    }

    fn use_global(&mut self, thread: usize, used: &Use, space: Space) -> Result<Location, Fault> {
        if let Some(offset) = windows::offset_in(windows::IMAGE, used.at) {
            if used.usage.writes() {
                return Err(self.unsupported(thread, used.line, "a write to a variable of the module"));
            }
            let offset = within(offset, used.bytes, self.kernel.image.len()).map(Location::Image);
            return offset.ok_or_else(|| self.illegal(thread, (space, used.at, used.bytes), used.line));
        }
        if space == Space::Constant {
            return Err(self.illegal(thread, (space, used.at, used.bytes), used.line));
        }
        let me = self.stamp(thread, used.line);
        let found = self
            .memory
            .use_bytes((used.at, used.bytes), me, used.usage, self.findings);
        found
            .map(|()| Location::Global(used.at))
            .ok_or_else(|| self.illegal(thread, (Space::Global, used.at, used.bytes), used.line))
    }

    /// The place in shared memory.
    pub(super) fn use_shared(&mut self, thread: usize, used: &Use) -> Result<usize, Fault> {
        let offset = within(used.at, used.bytes, self.shared.len());
        let offset = offset.ok_or_else(|| self.illegal(thread, (Space::Shared, used.at, used.bytes), used.line))?;
        let me = self.stamp(thread, used.line);
        let judge = Judge {
            me,
            usage: used.usage,
            is_shared: true,
            ended_before: &[],
            base: 0,
        };
        judge.use_cells(&mut self.shared_cells, offset..offset + used.bytes, self.findings);
        Ok(offset)
    }

    fn use_local(&mut self, thread: usize, used: &Use) -> Result<usize, Fault> {
        let offset = within(used.at, used.bytes, self.kernel.local_bytes);
        let offset = offset.ok_or_else(|| self.illegal(thread, (Space::Local, used.at, used.bytes), used.line))?;
        let start = thread * self.kernel.local_bytes + offset;
        let has_value = &mut self.local_has_value[start..start + used.bytes];
        if used.usage.writes() {
            has_value.fill(true);
        } else if has_value.contains(&false) {
            let first = || format!("block {} thread {thread}, byte {offset} of local memory", self.block);
            self.findings.add(FindingKind::UninitialisedLocal, used.line, 0, first);
        }
        Ok(start)
    }

    fn read(&self, location: Location, bytes: usize) -> Buffer {
        let mut buffer = Buffer::default();
        let to = &mut buffer[..bytes];
        match location {
            // SAFETY: `judge` has found the bytes within one region, whose owner keeps it readable while kernels run.
            Location::Global(at) => unsafe {
                ptr::copy_nonoverlapping(ptr::with_exposed_provenance(at as usize), to.as_mut_ptr(), bytes);
            },
            Location::Shared(at) => to.copy_from_slice(&self.shared[at..at + bytes]),
            Location::Local(at) => to.copy_from_slice(&self.local[at..at + bytes]),
            Location::Param(at) => to.copy_from_slice(&self.launch.params[at..at + bytes]),
            Location::Image(at) => to.copy_from_slice(&self.kernel.image[at..at + bytes]),
        }
        buffer
    }

    fn write(&mut self, location: Location, bytes: &[u8]) {
        match location {
            // SAFETY: `judge` has found the bytes within one region, whose owner keeps it writable while kernels run.
            Location::Global(at) => unsafe {
                ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    ptr::with_exposed_provenance_mut(at as usize),
                    bytes.len(),
                );
            },
            Location::Shared(at) => self.shared[at..at + bytes.len()].copy_from_slice(bytes),
            Location::Local(at) => self.local[at..at + bytes.len()].copy_from_slice(bytes),
            // `judge` refuses writes there.
            Location::Param(_) | Location::Image(_) => {}
        }
    }
}

/// The start of a range, if the range lies in so many bytes.
fn within(at: u64, bytes: usize, size: usize) -> Option<usize> {
    let start = usize::try_from(at).ok()?;
    start.checked_add(bytes).filter(|end| *end <= size)?;
    Some(start)
}

/// Up to 8 bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
