//! The log of one process. With a limit it is two files: the one that grows, and the one before it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// `FOLDER/NAME.log`.
pub(crate) fn path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.log"))
}

/// What was in the log before it began anew: `FOLDER/NAME.log.1`.
pub(crate) fn path_before(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.log.1"))
}

#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    path_before: PathBuf,
    file: File,
    bytes: u64,
    /// A longer file begins anew. `None`: it grows.
    bytes_max: Option<u64>,
}

impl LogFile {
    /// # Errors
    /// The file cannot be made.
    pub fn create(folder: &Path, name: &str, bytes_max: Option<u64>) -> io::Result<Self> {
        let path = path(folder, name);
        Ok(Self {
            file: File::create(&path)?,
            path_before: path_before(folder, name),
            path,
            bytes: 0,
            bytes_max,
        })
    }

    /// Adds a line. One that cannot be written is dropped: a full disk must not stop the process that logs.
    pub fn add(&mut self, line: &str) {
        if self.bytes_max.is_some_and(|max| self.bytes >= max) && self.begin_anew().is_err() {
            return;
        }
        // One write for the whole line, so that a reader who follows finds its end with it.
        if self.file.write_all(format!("{line}\n").as_bytes()).is_ok() {
            self.bytes += line.len() as u64 + 1;
        }
    }

    fn begin_anew(&mut self) -> io::Result<()> {
        match fs::rename(&self.path, &self.path_before) {
            // An attempt that could not make the new file has renamed the old one already.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.file = File::create(&self.path)?;
        self.bytes = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_with_a_limit_keeps_its_last_lines_and_never_more_than_two_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut log = LogFile::create(folder.path(), "decode-0", Some(10)).expect("a file");
        for line in ["first", "second", "third", "fourth", "fifth"] {
            log.add(line);
        }
        let read = |path: PathBuf| fs::read_to_string(path).expect("a file");
        assert_eq!(read(path(folder.path(), "decode-0")), "fifth\n");
        assert_eq!(read(path_before(folder.path(), "decode-0")), "third\nfourth\n");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2);
    }
}
