//! The log of one process: the file that grows, and the one before it, which is of an earlier process of its name or was full.

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
    /// What an earlier process of this name has logged becomes the file before.
    ///
    /// # Errors
    /// The file cannot be made, or the earlier one cannot get its new name.
    pub fn create(folder: &Path, name: &str, bytes_max: Option<u64>) -> io::Result<Self> {
        let (path, path_before) = (path(folder, name), path_before(folder, name));
        // A link or a pipe that somebody has put there stays in its place.
        if fs::symlink_metadata(&path).is_ok_and(|there| there.is_file() && there.len() > 0) {
            fs::rename(&path, &path_before)?;
        }
        Ok(Self {
            file: File::create(&path)?,
            path_before,
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

    fn read(path: PathBuf) -> String {
        fs::read_to_string(path).expect("a file")
    }

    #[test]
    fn the_log_of_an_earlier_process_of_the_name_is_kept_until_the_next_one_has_said_something() {
        let folder = tempfile::tempdir().expect("a folder");
        let create = || LogFile::create(folder.path(), "decode-0", None).expect("a file");
        create().add("of the first");
        create().add("of the second");
        assert_eq!(read(path(folder.path(), "decode-0")), "of the second\n");
        assert_eq!(read(path_before(folder.path(), "decode-0")), "of the first\n");
        for _silent in 0..2 {
            create();
            assert_eq!(read(path(folder.path(), "decode-0")), "");
            assert_eq!(read(path_before(folder.path(), "decode-0")), "of the second\n");
        }
    }

    #[test]
    fn a_log_with_a_limit_keeps_its_last_lines_and_never_more_than_two_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut log = LogFile::create(folder.path(), "decode-0", Some(10)).expect("a file");
        for line in ["first", "second", "third", "fourth", "fifth"] {
            log.add(line);
        }
        assert_eq!(read(path(folder.path(), "decode-0")), "fifth\n");
        assert_eq!(read(path_before(folder.path(), "decode-0")), "third\nfourth\n");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2);
    }
}
