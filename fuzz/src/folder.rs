//! A folder in memory, which targets write their inputs to: what reads files is opened by path.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// The files of one target. Each target makes its folder once.
#[derive(Debug)]
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        let in_memory = Path::new("/dev/shm");
        let made = match in_memory.is_dir() {
            true => tempfile::tempdir_in(in_memory),
            false => tempfile::tempdir(),
        };
        Self(made.expect("a folder for the inputs"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, content).expect("the folder takes a file");
        path
    }

    pub(crate) fn remove(&self, name: &str) {
        // It may not be there.
        let _ = std::fs::remove_file(self.path().join(name));
    }
}
