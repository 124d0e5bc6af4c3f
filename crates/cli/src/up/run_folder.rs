//! The folder of one `baton up` below the user's cache: where its API and the logs of its processes are. `baton logs` reads it.
//!
//! The folder goes with a cluster that ends well, and stays after a failure. A lock says whether the cluster runs: the kernel
//! releases it, however the process dies.

use std::cmp::Reverse;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::model::cache;

/// Two files of this size for each process: about 80,000 lines of 200 bytes.
pub(super) const LOG_BYTES_MAX: u64 = 8 << 20;
/// Clusters that failed and whose logs are kept. Each takes 16 MiB for a process at most.
const ENDED_MAX: usize = 5;
/// Logs have the addresses of clients. They are nobody else's business.
const ONLY_THE_USER: u32 = 0o700;
const LOCK: &str = "lock";
const FACTS: &str = "cluster.json";
const FACTS_NEW: &str = "cluster.json.new";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunFacts {
    pub pid: u32,
    pub started_unix_ms: u64,
    /// `None` until the cluster is ready.
    pub url: Option<String>,
    /// The folder with `NAME.log` of each process.
    pub logs: PathBuf,
}

impl RunFacts {
    pub fn started(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.started_unix_ms)
    }

    /// The names of the processes that have a log, in the order of the alphabet. A folder of the user's may have logs of earlier clusters,
    /// which nobody has written to since this one began.
    pub fn processes(&self) -> Vec<String> {
        let started = self.started();
        let name = |file: fs::DirEntry| {
            let written = file.metadata().and_then(|facts| facts.modified()).ok()?;
            let name = file.file_name().to_str()?.strip_suffix(".log")?.to_owned();
            (written >= started).then_some(name)
        };
        let files = fs::read_dir(&self.logs).into_iter().flatten().flatten();
        let mut names: Vec<String> = files.filter_map(name).collect();
        names.sort_unstable();
        names
    }
}

/// A cluster that runs here, or one that ended and left its folder.
#[derive(Clone, Debug)]
pub(crate) struct SeenRun {
    pub folder: PathBuf,
    pub facts: RunFacts,
    pub is_running: bool,
}

/// Where the folders of this user are. `None` without a home.
pub(crate) fn parent() -> Option<PathBuf> {
    Some(cache::default_folder().ok()?.join("up"))
}

/// The clusters of this user on this machine, the newest first.
pub(crate) fn all(parent: &Path) -> Vec<SeenRun> {
    let folders = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut all: Vec<SeenRun> = folders.filter_map(|folder| seen(folder.path())).collect();
    all.sort_by_key(|run| Reverse(run.facts.started_unix_ms));
    all
}

fn seen(folder: PathBuf) -> Option<SeenRun> {
    let facts = fs::read(folder.join(FACTS)).ok()?;
    Some(SeenRun {
        facts: serde_json::from_slice(&facts).ok()?,
        is_running: is_running(&folder),
        folder,
    })
}

/// Whether the cluster of this folder runs.
pub(crate) fn is_running(folder: &Path) -> bool {
    let lock = File::open(folder.join(LOCK));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// The folder of this process's cluster.
#[derive(Debug)]
pub(super) struct RunFolder {
    path: PathBuf,
    facts: RunFacts,
    _lock: File,
}

impl RunFolder {
    /// `logs` is the folder that the user wants logs in; else they are in this one.
    ///
    /// # Errors
    /// The folder cannot be made or written.
    pub fn create(parent: &Path, logs: Option<&Path>) -> io::Result<Self> {
        let only_the_user = |is_recursive| {
            let mut builder = DirBuilder::new();
            builder.recursive(is_recursive).mode(ONLY_THE_USER);
            builder
        };
        only_the_user(true).create(parent)?;
        remove_the_oldest(parent);
        let name = format!("{}-{:08x}", std::process::id(), rand::random::<u32>());
        let path = parent.join(name);
        only_the_user(false).create(&path)?;
        let filled = Self::fill(&path, logs);
        if filled.is_err() {
            // Without its facts nobody would find it again.
            let _ = fs::remove_dir_all(&path);
        }
        filled
    }

    fn fill(path: &Path, logs: Option<&Path>) -> io::Result<Self> {
        let lock = File::create(path.join(LOCK))?;
        lock.lock()?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let folder = Self {
            path: path.to_owned(),
            facts: RunFacts {
                pid: std::process::id(),
                started_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
                url: None,
                logs: std::path::absolute(logs.unwrap_or(path))?,
            },
            _lock: lock,
        };
        folder.write()?;
        Ok(folder)
    }

    pub fn logs(&self) -> &Path {
        &self.facts.logs
    }

    /// # Errors
    /// The disk is full, or somebody has removed the folder.
    pub fn is_ready_at(&mut self, url: &str) -> io::Result<()> {
        self.facts.url = Some(url.to_owned());
        self.write()
    }

    /// A reader finds the old facts or the new ones, and never a part.
    fn write(&self) -> io::Result<()> {
        let new = self.path.join(FACTS_NEW);
        fs::write(&new, serde_json::to_vec(&self.facts)?)?;
        fs::rename(new, self.path.join(FACTS))
    }

    pub fn has_logs(&self) -> bool {
        !self.facts.processes().is_empty()
    }

    /// Removes the folder. Logs in a folder that the user named stay.
    pub fn remove(self) {
        // Whatever stays is removed when five more clusters have failed.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn remove_the_oldest(parent: &Path) {
    let ended = all(parent).into_iter().filter(|run| !run.is_running);
    for run in ended.skip(ENDED_MAX) {
        // Another `up` may remove it at the same time.
        let _ = fs::remove_dir_all(run.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_seen_while_it_runs_and_after_a_failure_and_not_after_a_good_end() {
        let parent = tempfile::tempdir().expect("a folder");
        let parent = parent.path().join("up");
        let mut first = RunFolder::create(&parent, None).expect("made");
        let second = RunFolder::create(&parent, Some(Path::new("/var/log/mine"))).expect("made");
        first.is_ready_at("http://127.0.0.1:8000").expect("written");
        let runs = all(&parent);
        assert!(runs.len() == 2 && runs.iter().all(|run| run.is_running), "{runs:?}");
        let ready = runs.iter().find(|run| run.facts.url.is_some()).expect("the first one");
        assert_eq!(
            (ready.facts.logs.as_path(), first.logs()),
            (ready.folder.as_path(), ready.folder.as_path())
        );
        let other = runs.iter().find(|run| run.facts.url.is_none()).expect("the second one");
        assert_eq!(other.facts.logs, Path::new("/var/log/mine"));
        // What a failure leaves: a folder whose lock is free.
        drop(second);
        first.remove();
        let runs = all(&parent);
        assert!(runs.len() == 1 && !runs[0].is_running, "{runs:?}");
    }

    #[test]
    fn logs_of_an_earlier_cluster_in_the_same_folder_are_not_of_this_one() {
        let parent = tempfile::tempdir().expect("a folder");
        let logs = tempfile::tempdir().expect("a folder");
        let earlier = File::create(logs.path().join("prefill-1.log")).expect("made");
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        earlier.set_modified(hour_ago).expect("set");
        let folder = RunFolder::create(parent.path(), Some(logs.path())).expect("made");
        assert!(!folder.has_logs());
        let own = File::create(logs.path().join("decode-0.log")).expect("made");
        own.set_modified(SystemTime::now() + Duration::from_secs(1))
            .expect("set");
        File::create(logs.path().join("notes.txt")).expect("made");
        assert_eq!(folder.facts.processes(), ["decode-0"]);
    }

    #[test]
    fn only_the_last_failures_are_kept() {
        let parent = tempfile::tempdir().expect("a folder");
        for _ in 0..ENDED_MAX + 3 {
            drop(RunFolder::create(parent.path(), None).expect("made"));
        }
        // The last one came after the last removal.
        assert_eq!(all(parent.path()).len(), ENDED_MAX + 1);
    }

    #[test]
    fn folders_that_are_none_of_ours_are_passed_over() {
        let parent = tempfile::tempdir().expect("a folder");
        fs::create_dir(parent.path().join("empty")).expect("made");
        fs::create_dir(parent.path().join("bent")).expect("made");
        fs::write(parent.path().join("bent").join(FACTS), b"{").expect("written");
        assert!(all(parent.path()).is_empty());
        assert!(all(Path::new("/no/such/folder")).is_empty());
    }
}
