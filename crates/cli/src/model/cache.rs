//! Where models are kept, and the lock and the scratch folder of one pull. Only a complete file gets its final name.

use std::env;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::model::catalogue::CatalogueModel;
use crate::model::error::PullError;
use crate::model::interrupt::Interrupt;
use crate::terminal::say;

/// How long a second pull waits for the first. A slow line needs minutes for 100 MB.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(30 * 60);
const LOCK_POLL: Duration = Duration::from_millis(100);

/// `$BATON_CACHE_DIR`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`.
///
/// # Errors
/// [`PullError::NoCacheFolder`] when none of the variables is set.
pub(crate) fn default_folder() -> Result<PathBuf, PullError> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("BATON_CACHE_DIR")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("baton")))
        .or_else(|| Some(set("HOME")?.join(".cache/baton")))
        .ok_or(PullError::NoCacheFolder)
}

/// The places of one model in a cache folder.
#[derive(Clone, Debug)]
pub struct ModelPlace {
    folder: PathBuf,
    model: &'static CatalogueModel,
}

impl ModelPlace {
    pub fn new(cache: &Path, model: &'static CatalogueModel) -> ModelPlace {
        ModelPlace {
            folder: cache.join("models").join(model.name),
            model,
        }
    }

    /// Where the finished file is.
    pub fn file(&self) -> PathBuf {
        self.folder.join(self.model.file_name)
    }

    /// Whether the finished file is there. Its size is enough, because the file got its name only after its hash was right.
    pub fn is_cached(&self) -> bool {
        fs::metadata(self.file()).is_ok_and(|file| file.is_file() && file.len() == self.model.bytes)
    }

    /// Makes the folder, takes the lock and removes what a killed pull may have left.
    ///
    /// # Errors
    /// [`PullError`]: the folder cannot be written, another pull holds the lock too long, or an interrupt.
    pub fn claim(&self, interrupt: &Interrupt) -> Result<Claim, PullError> {
        fs::create_dir_all(&self.folder).map_err(PullError::at(&self.folder))?;
        let lock_path = self.folder.join(".lock");
        let lock = take_lock(&lock_path, interrupt)?;
        // From here on `Claim::drop` tidies up, also when the next line fails.
        let claim = Claim {
            folder: self.folder.clone(),
            scratch: self.folder.join(".pull"),
            lock_path,
            _lock: lock,
        };
        match fs::remove_dir_all(&claim.scratch) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(PullError::at(&claim.scratch)(error));
            }
            _ => {}
        }
        fs::create_dir_all(&claim.scratch).map_err(PullError::at(&claim.scratch))?;
        Ok(claim)
    }
}

/// The exclusive right to fill one model's folder. Dropping it removes the scratch folder, the lock file and the
/// folders it leaves empty.
#[derive(Debug)]
pub struct Claim {
    folder: PathBuf,
    scratch: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl Claim {
    /// An empty folder on the same file system as the finished file.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Best effort: the next pull clears the scratch folder too, and an empty folder does no harm.
        let _ = fs::remove_dir_all(&self.scratch);
        let _ = fs::remove_file(&self.lock_path);
        // These calls succeed only where nothing was kept.
        let _ = fs::remove_dir(&self.folder);
        let _ = self.folder.parent().map(fs::remove_dir);
    }
}

pub(super) fn take_lock(path: &Path, interrupt: &Interrupt) -> Result<File, PullError> {
    let started = Instant::now();
    let mut told = false;
    loop {
        interrupt.check()?;
        // The holder may have removed the folder with the lock, so both are made again each time.
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(PullError::at(folder))?;
        }
        let file = match OpenOptions::new().create(true).truncate(false).write(true).open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            other => other.map_err(PullError::at(path))?,
        };
        match file.try_lock() {
            // A lock on a file that the last holder has removed protects nothing. Try the new file.
            Ok(()) if is_same_file(&file, path) => return Ok(file),
            Ok(()) => continue,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(PullError::at(path)(error)),
        }
        if !told {
            say!("another baton is downloading this model; waiting for it");
            told = true;
        }
        if started.elapsed() > LOCK_WAIT_MAX {
            return Err(PullError::Locked {
                minutes: LOCK_WAIT_MAX.as_secs() / 60,
            });
        }
        thread::sleep(LOCK_POLL);
    }
}

fn is_same_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}
