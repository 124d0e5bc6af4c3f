//! The libraries that were found, each with the table of its functions.

use std::ffi::c_int;
use std::path::Path;

use libloading::os::unix::Library;

use super::compiler::NvrtcTable;
use super::cublaslt_table::CublasLtTable;
use super::decision::{
    Attempt, DriverDecision, LibraryDecision, Outcome, decide_library, decide_nvrtc, fits, image_rule,
};
use super::driver;
use super::nccl_table::NcclTable;
use super::report::LoaderReport;
use super::search::{Candidate, Component, Origin, Search};
use super::version::Version;
use super::visible::VisibleDevices;
use crate::error::{Cause, CudaError};
use crate::table;

/// What a search found. It stays loaded for the rest of the process.
#[derive(Debug)]
pub struct Libraries {
    report: LoaderReport,
    nvrtc: Option<NvrtcTable>,
    cublaslt: Option<CublasLtTable>,
    nccl: Option<NcclTable>,
}

/// A table of functions and the version that its library says.
struct Found<T> {
    table: T,
    version: Version,
    /// Any of its functions, which tells the file.
    address: usize,
}

impl Libraries {
    /// Searches everything. It never fails: what is missing is in the [report](Self::report).
    pub fn find(search: &Search) -> Self {
        let visible = VisibleDevices::parse(search.visible_devices.as_deref());
        let mut attempts = Vec::new();
        let driver = driver::find(search, &visible, &mut attempts);
        let cuda = driver.cuda();
        let nvrtc = first(search, (Component::Nvrtc, cuda), &mut attempts, nvrtc_of);
        if let Some(found) = &nvrtc {
            let candidates = builtins_of(found, &attempts);
            open_builtins(candidates, found.version, &mut attempts);
        }
        let cublaslt = first(search, (Component::CublasLt, cuda), &mut attempts, cublaslt_of);
        let nccl = first(search, (Component::Nccl, None), &mut attempts, nccl_of);
        let compiler = decide_nvrtc(&attempts);
        let report = LoaderReport {
            visible_devices: search.visible_devices.clone(),
            image_rule: cuda
                .zip(compiler.version())
                .map(|(cuda, nvrtc)| image_rule(cuda, nvrtc)),
            cublaslt: decide_library(&attempts, Component::CublasLt),
            nccl: decide_library(&attempts, Component::Nccl),
            driver,
            nvrtc: compiler,
            attempts,
        };
        let has_compiler = matches!(report.nvrtc, LibraryDecision::Ready { .. });
        Self {
            report,
            nvrtc: nvrtc.filter(|_| has_compiler).map(|found| found.table),
            cublaslt: cublaslt.map(|found| found.table),
            nccl: nccl.map(|found| found.table),
        }
    }

    pub fn report(&self) -> &LoaderReport {
        &self.report
    }

    /// # Errors
    /// There is no driver with a GPU.
    pub(crate) fn check_driver(&self) -> Result<(), CudaError> {
        match &self.report.driver {
            DriverDecision::Ready { .. } => Ok(()),
            other => Err(CudaError {
                call: "cuInit",
                cause: Cause::NoDriver(other.to_string()),
                context: String::new(),
            }),
        }
    }

    pub(crate) fn nvrtc(&self) -> Result<NvrtcTable, LibraryDecision> {
        self.nvrtc.ok_or_else(|| self.report.nvrtc.clone())
    }

    pub(crate) fn cublaslt(&self) -> Result<CublasLtTable, LibraryDecision> {
        self.cublaslt.ok_or_else(|| self.report.cublaslt.clone())
    }

    pub(crate) fn nccl(&self) -> Result<NcclTable, LibraryDecision> {
        self.nccl.ok_or_else(|| self.report.nccl.clone())
    }

    /// The version of the compiler, which is a part of the name of what it made.
    pub fn nvrtc_version(&self) -> Option<Version> {
        self.report.nvrtc.version()
    }
}

/// The first candidate that has every function, says its version, and fits the driver.
fn first<T>(
    search: &Search,
    (component, cuda): (Component, Option<Version>),
    attempts: &mut Vec<Attempt>,
    ask: fn(&Library) -> Result<Found<T>, Outcome>,
) -> Option<Found<T>> {
    for Candidate { origin, path } in search.candidates(component) {
        let (mut file, mut used) = (None, None);
        let outcome = match super::open(&path).and_then(|library| ask_and_keep(library, ask)) {
            Err(outcome) => outcome,
            Ok(found) if !fits(cuda, found.version) => Outcome::TooNewForDriver { version: found.version },
            Ok(found) => {
                let version = Some(found.version);
                file = table::file_of(found.address);
                used = Some(found);
                Outcome::Used { version }
            }
        };
        let attempt = Attempt {
            component,
            origin,
            path,
            file,
            outcome,
        };
        attempts.push(attempt);
        if used.is_some() {
            return used;
        }
    }
    None
}

/// A library whose functions were called stays loaded. One that lacks a function was not called.
fn ask_and_keep<T>(library: Library, ask: fn(&Library) -> Result<Found<T>, Outcome>) -> Result<Found<T>, Outcome> {
    let asked = ask(&library);
    if !matches!(asked, Err(Outcome::SymbolMissing { .. })) {
        std::mem::forget(library);
    }
    asked
}

fn missing(symbol: &'static str) -> Outcome {
    Outcome::SymbolMissing { symbol }
}

fn nvrtc_of(library: &Library) -> Result<Found<NvrtcTable>, Outcome> {
    let table = NvrtcTable::resolve(library).map_err(missing)?;
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: NVRTC writes two ints.
    let code = unsafe { (table.version)(&raw mut major, &raw mut minor) };
    let parts = (u32::try_from(major), u32::try_from(minor));
    match (code, parts) {
        (0, (Ok(major), Ok(minor))) => Ok(Found {
            table,
            version: Version::new(major, minor),
            address: table.version as usize,
        }),
        _ => Err(Outcome::NoAnswer {
            call: "nvrtcVersion",
            code,
        }),
    }
}

fn cublaslt_of(library: &Library) -> Result<Found<CublasLtTable>, Outcome> {
    let table = CublasLtTable::resolve(library).map_err(missing)?;
    // SAFETY: it takes nothing and returns a number.
    let version = unsafe { (table.version)() };
    Ok(Found {
        table,
        version: Version::of_library(version as u64),
        address: table.version as usize,
    })
}

fn nccl_of(library: &Library) -> Result<Found<NcclTable>, Outcome> {
    let table = NcclTable::resolve(library).map_err(missing)?;
    let mut version: c_int = 0;
    // SAFETY: NCCL writes one int. It opens no socket for it.
    let code = unsafe { (table.version)(&raw mut version) };
    match (code, u64::try_from(version)) {
        (0, Ok(version)) => Ok(Found {
            table,
            version: Version::of_library(version),
            address: table.version as usize,
        }),
        _ => Err(Outcome::NoAnswer {
            call: "ncclGetVersion",
            code,
        }),
    }
}

/// NVRTC opens this file by its bare name when it compiles first, and looks in no folder of its own. Once it is loaded, the
/// dynamic linker knows it by that name.
fn builtins_of(found: &Found<NvrtcTable>, attempts: &[Attempt]) -> Vec<Candidate> {
    let Version { major, minor, .. } = found.version;
    let name = format!("libnvrtc-builtins.so.{major}.{minor}");
    let used = attempts.iter().rfind(|attempt| attempt.component == Component::Nvrtc);
    let file = used.and_then(|attempt| attempt.file.as_deref());
    // The file may be a link into another folder, so the folder of the path counts, too.
    let path = used
        .map(|attempt| attempt.path.as_str())
        .filter(|path| path.contains('/'));
    let folders = path.into_iter().chain(file).filter_map(|one| Path::new(one).parent());
    let beside = folders.map(|folder| Candidate {
        origin: Origin::SameFolder,
        path: folder.join(&name).to_string_lossy().into_owned(),
    });
    let by_name = Candidate {
        origin: Origin::DynamicLinker,
        path: name.clone(),
    };
    beside.chain([by_name]).collect()
}

fn open_builtins(candidates: Vec<Candidate>, version: Version, attempts: &mut Vec<Attempt>) {
    for Candidate { origin, path } in candidates {
        let opened = super::open(&path).map(std::mem::forget);
        let is_open = opened.is_ok();
        let outcome = match opened {
            Ok(()) => Outcome::Used { version: Some(version) },
            Err(outcome) => outcome,
        };
        let attempt = Attempt {
            component: Component::NvrtcBuiltins,
            origin,
            path,
            file: None,
            outcome,
        };
        attempts.push(attempt);
        if is_open {
            return;
        }
    }
}
