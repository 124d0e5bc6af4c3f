//! The end of one process's log, and what is added to it. The log may begin anew at any time: see `local_cluster::log_path`.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::local_cluster::{log_path, log_path_before};

/// The most of a file that is read at once: twice what `baton up` lets a log grow to. A log in a folder of the user's has no
/// limit.
const BYTES_MAX: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct Tail {
    pub name: String,
    path: PathBuf,
    path_before: PathBuf,
    /// What nobody has written to since then is of an earlier cluster, which had its logs in the same folder.
    since: SystemTime,
    /// `None`: there is no file yet.
    open: Option<OpenLog>,
}

/// A file that is read from its beginning to its end. It stays readable when it gets another name, and when it is removed.
#[derive(Debug)]
struct OpenLog {
    file: File,
    inode: u64,
    written: SystemTime,
    /// Where the last whole line that was read ends.
    offset: u64,
}

impl Tail {
    /// The log in `folder` of a cluster that started at `since`.
    pub fn new(folder: &Path, name: String, since: SystemTime) -> Self {
        Self {
            since,
            path: log_path(folder, &name),
            path_before: log_path_before(folder, &name),
            name,
            open: None,
        }
    }

    /// The last lines so far. [`Self::new_lines`] goes on behind them.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn last_lines(&mut self, count: usize) -> io::Result<Vec<String>> {
        let Some(mut newest) = OpenLog::of(&self.path)? else {
            return Ok(Vec::new());
        };
        // A log that began anew after it was opened is the file before now, and is not read twice.
        let is_own = |before: &OpenLog| before.inode != newest.inode && before.written >= self.since;
        let before = OpenLog::of(&self.path_before)?.filter(is_own);
        let mut lines = match before {
            Some(mut before) => before.end()?,
            None => Vec::new(),
        };
        lines.extend(newest.end()?);
        self.open = Some(newest);
        Ok(lines.split_off(lines.len().saturating_sub(count)))
    }

    /// Whole lines that have come since the last call.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn new_lines(&mut self) -> io::Result<Vec<String>> {
        let mut lines = match &mut self.open {
            Some(open) => open.whole_lines()?,
            None => Vec::new(),
        };
        if let Some(mut newest) = OpenLog::of(&self.path)?
            && self.open.as_ref().is_none_or(|open| open.inode != newest.inode)
        {
            // What came between the read above and the new name.
            if let Some(open) = &mut self.open {
                lines.extend(open.whole_lines()?);
            }
            lines.extend(newest.whole_lines()?);
            self.open = Some(newest);
        }
        Ok(lines)
    }
}

impl OpenLog {
    /// `None`: there is no such file.
    fn of(path: &Path) -> io::Result<Option<Self>> {
        match File::open(path) {
            Ok(file) => {
                let facts = file.metadata()?;
                Ok(Some(Self {
                    inode: facts.ino(),
                    written: facts.modified()?,
                    file,
                    offset: 0,
                }))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The lines at the end of the file.
    fn end(&mut self) -> io::Result<Vec<String>> {
        self.offset = self.file.metadata()?.len().saturating_sub(BYTES_MAX);
        let is_cut = self.offset > 0;
        let mut lines = self.whole_lines()?;
        if is_cut && !lines.is_empty() {
            // Its beginning is not here.
            lines.remove(0);
        }
        Ok(lines)
    }

    /// The whole lines that have not been read.
    fn whole_lines(&mut self) -> io::Result<Vec<String>> {
        // Somebody has emptied the file, as with `: > decode-0.log` in a folder of the user's.
        if self.offset > self.file.metadata()?.len() {
            self.offset = 0;
        }
        self.file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        self.file.by_ref().take(BYTES_MAX).read_to_end(&mut bytes)?;
        let length = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.offset += length as u64;
        let text = String::from_utf8_lossy(&bytes[..length]);
        Ok(text.lines().map(str::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, OpenOptions};
    use std::io::Write as _;
    use std::time::{Duration, UNIX_EPOCH};

    fn add(path: &Path, text: &str) {
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.expect("a file").write_all(text.as_bytes()).expect("written");
    }

    #[test]
    fn the_last_lines_reach_into_the_file_before_and_half_a_line_waits_for_its_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, before) = (log_path(folder.path(), "d"), log_path_before(folder.path(), "d"));
        add(&before, "1\n2\n");
        add(&path, "3\nhal");
        let mut tail = Tail::new(folder.path(), "d".to_owned(), UNIX_EPOCH);
        assert_eq!(tail.last_lines(2).expect("read"), ["2", "3"]);
        assert_eq!(tail.new_lines().expect("read"), Vec::<String>::new());
        add(&path, "f\n");
        assert_eq!(tail.new_lines().expect("read"), ["half"]);
        assert_eq!(tail.new_lines().expect("read"), Vec::<String>::new());
    }

    #[test]
    fn what_an_earlier_cluster_has_left_in_the_folder_is_not_shown() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, before) = (log_path(folder.path(), "d"), log_path_before(folder.path(), "d"));
        let started = SystemTime::now() - Duration::from_secs(60);
        add(&before, "of the earlier one\n");
        let earlier = OpenOptions::new().append(true).open(&before).expect("the file");
        earlier
            .set_modified(started - Duration::from_secs(1))
            .expect("its time");
        add(&path, "own\n");
        let mut tail = Tail::new(folder.path(), "d".to_owned(), started);
        assert_eq!(tail.last_lines(9).expect("read"), ["own"]);
        // Somebody has written to it since: it is the own one, which was full.
        add(&before, "own, too\n");
        let mut tail = Tail::new(folder.path(), "d".to_owned(), started);
        assert_eq!(tail.last_lines(9).expect("read").len(), 3);
    }

    #[test]
    fn nothing_is_lost_when_a_log_begins_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, before) = (log_path(folder.path(), "d"), log_path_before(folder.path(), "d"));
        let mut tail = Tail::new(folder.path(), "d".to_owned(), UNIX_EPOCH);
        assert_eq!(tail.last_lines(9).expect("no file"), Vec::<String>::new());
        add(&path, "1\n");
        assert_eq!(tail.new_lines().expect("read"), ["1"]);
        add(&path, "2\n");
        fs::rename(&path, &before).expect("renamed");
        add(&path, "3\n");
        assert_eq!(tail.new_lines().expect("read"), ["2", "3"]);
        // In a user's folder.
        fs::write(&path, "").expect("emptied");
        assert_eq!(tail.new_lines().expect("read"), Vec::<String>::new());
        add(&path, "4\n");
        assert_eq!(tail.new_lines().expect("read"), ["4"]);
        // The last words of a cluster that has ended and taken its folder along.
        add(&path, "5\n");
        fs::remove_file(&path).expect("removed");
        assert_eq!(tail.new_lines().expect("read"), ["5"]);
    }
}
