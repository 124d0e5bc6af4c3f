//! Packed weights in memory that the processes of one `baton up` share. One of them packs, all of them map the same pages.
//!
//! `baton up` makes an empty memory file and tells its nodes the path. Whoever gets the file's lock packs into it and then
//! **seals** it: the kernel lets nobody change a sealed file any more. So a sealed file is a complete one, and whoever maps it
//! need not trust those who have it open. When the packer dies, the kernel frees its lock, and the next process packs
//! again. The kernel frees the memory with the last process that has it. Whatever goes wrong here, a process packs for
//! itself instead.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::memory::{self, FixedMemory, HugeMemory, Sealing};

/// The file's name in `/proc/PID/maps`.
const NAME: &std::ffi::CStr = c"baton-weights";
/// How long a process waits for another one that packs. A model of 5 GB takes a few seconds; a stopped process takes for ever.
const WAIT_AT_MOST: Duration = Duration::from_secs(60);
/// Packing takes at least tens of milliseconds.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Behind the weights, so that these begin on a huge page.
const TRAILER_BYTES: usize = 16 + 32 + 32;
const MAGIC: [u8; 16] = *b"baton-weights-1\n";

/// An empty memory file for the weights of one model. Processes of the same user can fill and map it, as long as this value
/// or one of their mappings lives.
#[derive(Debug)]
pub struct WeightsFile(File);

impl WeightsFile {
    /// # Errors
    /// The system has no such files.
    pub fn create() -> io::Result<Self> {
        memory::memory_file(NAME).map(Self)
    }

    /// Where other processes of this user open the file, as long as this process lives.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

/// Which weights a file holds, in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WeightsId {
    pub content: [u8; 32],
    pub layout: [u8; 32],
}

impl WeightsId {
    fn trailer(&self) -> [u8; TRAILER_BYTES] {
        let mut bytes = [0; TRAILER_BYTES];
        bytes[..16].copy_from_slice(&MAGIC);
        bytes[16..48].copy_from_slice(&self.content);
        bytes[48..].copy_from_slice(&self.layout);
        bytes
    }
}

/// Why this process packs its weights for itself.
#[derive(Debug, thiserror::Error)]
pub enum NotShared {
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("{} is no memory of `baton up`", .path.display())]
    NotMemory { path: PathBuf },
    #[error("they are those of another model or of other numerics")]
    OtherWeights,
    #[error("another process has been packing for {WAIT_AT_MOST:?}")]
    StillPacking,
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> NotShared {
    move |source| NotShared::System { what, source }
}

/// A [`WeightsFile`] as its users see it.
#[derive(Clone, Debug)]
pub(super) struct SharedWeights {
    path: PathBuf,
    wait: Duration,
}

impl SharedWeights {
    pub(super) fn at(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            wait: WAIT_AT_MOST,
        }
    }

    /// The weights that another process has packed, or those that `fill` writes now, for others, too. `id` is called when the
    /// bytes are there.
    ///
    /// # Errors
    /// [`NotShared`]. Then nothing is mapped.
    pub(super) fn take_or_fill(
        &self,
        bytes: usize,
        id: &dyn Fn() -> WeightsId,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<FixedMemory, NotShared> {
        let file = self.open(false).map_err(system("the memory cannot be opened"))?;
        if self.wait_until_complete(&file)? == State::Mine {
            // The lock ends with `file`, when the weights are sealed or could not be.
            self.fill(bytes, id, fill)?;
        }
        let packed = FixedMemory::of_sealed(file, bytes + TRAILER_BYTES).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => NotShared::OtherWeights,
            _ => NotShared::System {
                what: "the memory cannot be mapped",
                source,
            },
        })?;
        match packed[bytes..] == id().trailer() {
            true => Ok(packed),
            false => Err(NotShared::OtherWeights),
        }
    }

    fn open(&self, is_to_fill: bool) -> io::Result<File> {
        OpenOptions::new().read(true).write(is_to_fill).open(&self.path)
    }

    /// Returns with the file's lock, or when the file is complete.
    fn wait_until_complete(&self, file: &File) -> Result<State, NotShared> {
        let deadline = Instant::now() + self.wait;
        loop {
            match Sealing::of(file) {
                Sealing::Sealed => return Ok(State::Complete),
                Sealing::Open => {}
                // A file that somebody named by mistake must keep its content.
                Sealing::Impossible => {
                    return Err(NotShared::NotMemory {
                        path: self.path.clone(),
                    });
                }
            }
            match file.try_lock() {
                // The last owner of the lock may have sealed the file in between.
                Ok(()) if Sealing::of(file) == Sealing::Sealed => return Ok(State::Complete),
                Ok(()) => return Ok(State::Mine),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return Err(NotShared::StillPacking),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK_EVERY),
                Err(TryLockError::Error(source)) => return Err(system("the memory cannot be locked")(source)),
            }
        }
    }

    fn fill(&self, bytes: usize, id: &dyn Fn() -> WeightsId, fill: impl FnOnce(&mut [u8])) -> Result<(), NotShared> {
        let file = self.open(true).map_err(system("the memory cannot be written"))?;
        let filled = Self::fill_and_seal(&file, bytes, id, fill);
        if filled.is_err() {
            // Nobody is to use what is there, so nobody needs its memory. A sealed file refuses this, and is whole.
            let _ = file.set_len(0);
        }
        filled
    }

    fn fill_and_seal(
        file: &File,
        bytes: usize,
        id: &dyn Fn() -> WeightsId,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), NotShared> {
        let length = bytes + TRAILER_BYTES;
        // What a packer left that died is not wanted.
        let resized = file.set_len(0).and_then(|()| file.set_len(length as u64));
        resized.map_err(system("the memory cannot be resized"))?;
        let own = file.try_clone().map_err(system("the memory cannot be opened twice"))?;
        let mut memory =
            HugeMemory::to_fill(own, length).map_err(system("the memory cannot be mapped to be filled"))?;
        let (weights, trailer) = memory.bytes_mut().split_at_mut(bytes);
        fill(weights);
        trailer.copy_from_slice(&id().trailer());
        // A file with a mapping that writes cannot be sealed.
        drop(memory);
        memory::seal_content(file).map_err(system("the memory cannot be sealed"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// This process has the lock, and nothing is packed.
    Mine,
    Complete,
}

#[cfg(test)]
#[path = "shared_weights_tests.rs"]
mod tests;
