//! Maps a model file into memory.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// The file's bytes, which stay in the file's mapping.
///
/// Another process that shortens the file while it is mapped makes the operating system kill this one (SIGBUS);
/// `baton model pull` therefore only ever replaces files by rename.
///
/// # Errors
/// The system's; a folder or a device is an error, too.
pub(crate) fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    // SAFETY: the mapping is read-only, and nothing else in this process uses it. The one way to invalidate it is another
    // process shortening the file, which ends this process with SIGBUS and cannot corrupt memory; a writer changing bytes
    // in place is outside the contract of model files (documented above).
    unsafe { Mmap::map(&file) }
}
