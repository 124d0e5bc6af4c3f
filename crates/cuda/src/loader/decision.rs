//! What follows from the answers of the libraries. Pure: the answers are arguments, so every situation is a unit test.

use std::fmt;

use serde::Serialize;

use super::search::{Component, Origin};
use super::version::Version;
use super::visible::{Entry, VisibleDevices};

/// Releases of the driver that CUDA 12 and CUDA 13 need on Linux (NVIDIA's table "CUDA Toolkit and minimum required driver
/// version for CUDA minor version compatibility").
const DRIVER_FOR_CUDA_12: u32 = 525;
const DRIVER_FOR_CUDA_13: u32 = 580;
/// Older drivers know none of the toolkits that are searched.
const CUDA_MAJOR_MIN: u32 = 12;

/// Codes of `cuInit` (cuda.h).
const SUCCESS: i32 = 0;
const STUB_LIBRARY: i32 = 34;
const NO_DEVICE: i32 = 100;

/// What became of one place in which a library was searched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Used {
        version: Option<Version>,
    },
    NotThere,
    NotLoadable {
        reason: String,
    },
    SymbolMissing {
        symbol: &'static str,
    },
    /// A library that is only there to link programs against.
    Stub,
    /// A library that says neither yes nor its version.
    NoAnswer {
        call: &'static str,
        code: i32,
    },
    /// CUDA of a later major version than the driver's.
    TooNewForDriver {
        version: Version,
    },
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Used { version: Some(version) } => write!(f, "used, version {version}"),
            Outcome::Used { version: None } => f.write_str("used"),
            Outcome::NotThere => f.write_str("not there"),
            Outcome::NotLoadable { reason } => write!(f, "cannot be loaded: {reason}"),
            Outcome::SymbolMissing { symbol } => write!(f, "too old: it has no {symbol}"),
            Outcome::Stub => f.write_str("a stub for linking, not a driver"),
            Outcome::NoAnswer { call, code } => write!(f, "{call} failed with {code}"),
            Outcome::TooNewForDriver { version } => write!(f, "CUDA {version} is too new for the driver"),
        }
    }
}

/// A place that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attempt {
    pub component: Component,
    pub origin: Origin,
    /// A path, or a name for the dynamic linker.
    pub path: String,
    /// The file that the dynamic linker chose, if the library was loaded.
    pub file: Option<String>,
    pub outcome: Outcome,
}

/// What a driver's library answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DriverAnswers {
    /// The file that was loaded, if the system says it.
    pub file: Option<String>,
    /// `cuInit`, and the name of its code.
    pub init: i32,
    pub init_name: String,
    /// `cuDriverGetVersion`, `None` if the call failed.
    pub version: Option<i32>,
    /// `cuDeviceGetCount`, `None` if the call failed.
    pub devices: Option<i32>,
}

impl DriverAnswers {
    /// A stub knows no version, says that it is one, or lies in the toolkit's folder of stubs.
    pub fn is_stub(&self) -> bool {
        let is_in_stubs = self
            .file
            .as_ref()
            .is_some_and(|file| file.split('/').any(|part| part == "stubs"));
        is_in_stubs || self.init == STUB_LIBRARY || self.version == Some(0)
    }
}

/// Which library the driver's bindings reach by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    Same,
    Other { file: String },
    Nothing,
}

/// What is known of the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "decision")]
pub enum DriverDecision {
    Ready {
        cuda: Version,
        devices: u32,
    },
    NotFound,
    /// A driver of an earlier time.
    SymbolMissing {
        file: String,
        symbol: String,
    },
    Stub {
        file: String,
    },
    TooOld {
        cuda: Version,
    },
    /// Another library of the driver's name comes first for code that asks for it by name.
    Hidden {
        by: String,
    },
    /// A library that was named by its path, and that nothing can find by its name.
    Unreachable {
        file: String,
    },
    InitFailed {
        code: i32,
        name: String,
    },
    NoDevice,
    DevicesHidden,
    DevicesInvalid {
        entry: String,
    },
}

pub(super) fn decide_driver(answers: &DriverAnswers, reach: &Reach, visible: &VisibleDevices) -> DriverDecision {
    let file = || answers.file.clone().unwrap_or_else(|| "libcuda.so.1".to_owned());
    if answers.is_stub() {
        return DriverDecision::Stub { file: file() };
    }
    if !matches!(answers.init, SUCCESS | NO_DEVICE) {
        let (code, name) = (answers.init, answers.init_name.clone());
        return DriverDecision::InitFailed { code, name };
    }
    let Some(cuda) = answers.version.and_then(Version::of_cuda) else {
        return DriverDecision::Stub { file: file() };
    };
    if cuda.major < CUDA_MAJOR_MIN {
        return DriverDecision::TooOld { cuda };
    }
    let devices = match answers.init {
        SUCCESS => answers.devices.and_then(|count| u32::try_from(count).ok()).unwrap_or(0),
        _ => 0,
    };
    match (devices, visible, reach) {
        (0, VisibleDevices::Nothing, _) => DriverDecision::DevicesHidden,
        (0, VisibleDevices::All, _) => DriverDecision::NoDevice,
        (0, VisibleDevices::Cut { valid, invalid }, _) if valid.is_empty() => {
            DriverDecision::DevicesInvalid { entry: invalid.clone() }
        }
        (0, _, _) => DriverDecision::DevicesInvalid {
            entry: visible.entries().first().map(entry_text).unwrap_or_default(),
        },
        (_, _, Reach::Other { file }) => DriverDecision::Hidden { by: file.clone() },
        (_, _, Reach::Nothing) => DriverDecision::Unreachable { file: file() },
        (devices, _, Reach::Same) => DriverDecision::Ready { cuda, devices },
    }
}

fn entry_text(entry: &Entry) -> String {
    match entry {
        Entry::Ordinal(ordinal) => ordinal.to_string(),
        Entry::Gpu(uuid) | Entry::Mig(uuid) => uuid.clone(),
    }
}

impl DriverDecision {
    pub fn cuda(&self) -> Option<Version> {
        match self {
            DriverDecision::Ready { cuda, .. } | DriverDecision::TooOld { cuda } => Some(*cuda),
            _ => None,
        }
    }
}

impl fmt::Display for DriverDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DriverDecision::Ready { cuda, devices } => write!(f, "ready: CUDA {cuda}, {devices} visible GPU(s)"),
            DriverDecision::NotFound => f.write_str(
                "no NVIDIA driver: there is no libcuda.so.1; in a container, start it with GPUs (`--gpus all`)",
            ),
            DriverDecision::SymbolMissing { file, symbol } => {
                write!(
                    f,
                    "the driver in {file} is too old: it has no {symbol}; install release {DRIVER_FOR_CUDA_12} or later"
                )
            }
            DriverDecision::Stub { file } => {
                write!(
                    f,
                    "{file} is a stub for linking, not a driver; take its folder out of LD_LIBRARY_PATH"
                )
            }
            DriverDecision::TooOld { cuda } => {
                write!(
                    f,
                    "the driver knows only CUDA {cuda}; install release {DRIVER_FOR_CUDA_12} or later"
                )
            }
            DriverDecision::Hidden { by } => {
                write!(f, "{by} hides the driver; take its folder out of LD_LIBRARY_PATH")
            }
            DriverDecision::Unreachable { file } => {
                write!(
                    f,
                    "{file} is not named libcuda.so.1 inside, so nothing finds it; it is no NVIDIA driver"
                )
            }
            DriverDecision::InitFailed { code, name } => {
                write!(
                    f,
                    "the driver does not start: cuInit answers {name} ({code}); look at `nvidia-smi` and the kernel's log"
                )
            }
            DriverDecision::NoDevice => f.write_str(
                "the driver sees no GPU; in a container, pass one (`--gpus all`), else look at `nvidia-smi`",
            ),
            DriverDecision::DevicesHidden => {
                f.write_str("CUDA_VISIBLE_DEVICES is empty, which hides every GPU; unset it or name one")
            }
            DriverDecision::DevicesInvalid { entry } => {
                write!(
                    f,
                    "CUDA_VISIBLE_DEVICES names `{entry}`, which is no GPU here; `nvidia-smi -L` lists them"
                )
            }
        }
    }
}

/// Whether code that a toolkit makes runs on a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageRule {
    /// Machine code and PTX.
    CubinAndPtx,
    /// PTX of a later minor version is refused with error 222, machine code of the same major version is not.
    CubinOnly,
    Neither,
}

/// By the versions of CUDA of both.
pub(super) fn image_rule(driver: Version, toolkit: Version) -> ImageRule {
    let (driver, toolkit) = ((driver.major, driver.minor), (toolkit.major, toolkit.minor));
    match toolkit {
        _ if toolkit <= driver => ImageRule::CubinAndPtx,
        (major, _) if major == driver.0 => ImageRule::CubinOnly,
        _ => ImageRule::Neither,
    }
}

/// A machine without a driver can still compile for others.
pub(super) fn fits(driver: Option<Version>, library: Version) -> bool {
    driver.is_none_or(|driver| image_rule(driver, library) != ImageRule::Neither)
}

/// What is known of a library that comes besides the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "decision")]
pub enum LibraryDecision {
    Ready {
        version: Version,
    },
    NotFound,
    /// Only for the compiler: it needs a second file of the same version when it compiles first.
    BuiltinsMissing {
        version: Version,
    },
    DriverTooOld {
        version: Version,
        driver_release_min: u32,
    },
    /// It is there and does not serve: the last reason.
    Unusable {
        why: String,
    },
}

/// By the places that were tried. A library that was found wins over everything that was not.
pub(super) fn decide_library(attempts: &[Attempt], component: Component) -> LibraryDecision {
    let mut decision = LibraryDecision::NotFound;
    for attempt in attempts.iter().filter(|attempt| attempt.component == component) {
        match &attempt.outcome {
            Outcome::Used { version: Some(version) } => return LibraryDecision::Ready { version: *version },
            Outcome::TooNewForDriver { version } => {
                let driver_release_min = driver_release(*version);
                decision = LibraryDecision::DriverTooOld {
                    version: *version,
                    driver_release_min,
                };
            }
            Outcome::NotThere => {}
            // A driver that is too old is what a user can mend, so it stays the reason.
            _ if matches!(decision, LibraryDecision::DriverTooOld { .. }) => {}
            other => {
                let why = format!("{}: {other}", attempt.path);
                decision = LibraryDecision::Unusable { why };
            }
        }
    }
    decision
}

fn driver_release(toolkit: Version) -> u32 {
    match toolkit.major {
        ..=12 => DRIVER_FOR_CUDA_12,
        _ => DRIVER_FOR_CUDA_13,
    }
}

/// The compiler needs its second file.
pub(super) fn decide_nvrtc(attempts: &[Attempt]) -> LibraryDecision {
    let builtins = decide_library(attempts, Component::NvrtcBuiltins);
    match decide_library(attempts, Component::Nvrtc) {
        LibraryDecision::Ready { version } if !matches!(builtins, LibraryDecision::Ready { .. }) => {
            LibraryDecision::BuiltinsMissing { version }
        }
        decision => decision,
    }
}

impl LibraryDecision {
    pub fn version(&self) -> Option<Version> {
        match self {
            LibraryDecision::Ready { version } => Some(*version),
            _ => None,
        }
    }
}

impl fmt::Display for LibraryDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LibraryDecision::Ready { version } => write!(f, "ready: version {version}"),
            LibraryDecision::NotFound => {
                f.write_str("not found; install it with pip, or name its folder in BATON_CUDA_PATH")
            }
            LibraryDecision::BuiltinsMissing { version } => {
                let (major, minor) = (version.major, version.minor);
                write!(
                    f,
                    "libnvrtc-builtins.so.{major}.{minor} is missing beside libnvrtc; install the whole package again"
                )
            }
            LibraryDecision::DriverTooOld {
                version,
                driver_release_min,
            } => {
                write!(
                    f,
                    "version {version} needs a driver of release {driver_release_min} or later; update the driver"
                )
            }
            LibraryDecision::Unusable { why } => write!(f, "found, but it cannot be used: {why}"),
        }
    }
}

#[cfg(test)]
#[path = "decision_tests.rs"]
mod tests;
