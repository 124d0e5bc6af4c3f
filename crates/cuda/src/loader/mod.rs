//! Finds NVIDIA's libraries and says of each why it is used or not. Nothing is looked for before [`Libraries::find`].
//!
//! The order: folders that the user named (`BATON_CUDA_PATH`), the dynamic linker, Python packages, toolkits, the
//! distribution. The driver comes first, because it decides which toolkit may be used. What the answers mean is decided in
//! `decision.rs`, without IO.

mod compiler;
pub(crate) mod cublaslt_table;
mod decision;
mod driver;
mod libraries;
pub(crate) mod nccl_table;
mod report;
mod search;
mod version;
mod visible;

use libloading::os::unix::Library;

pub(crate) use self::compiler::{NvrtcTable, Program};
pub use self::decision::{Attempt, DriverDecision, ImageRule, LibraryDecision, Outcome};
pub use self::libraries::Libraries;
pub use self::report::LoaderReport;
pub use self::search::{Candidate, Component, Origin, PATH_VARIABLE, Search};
pub use self::version::Version;

/// Opens a candidate.
fn open(path: &str) -> Result<Library, Outcome> {
    // The dynamic linker's text for a file that is not there says less than this.
    if path.contains('/') && !std::path::Path::new(path).exists() {
        return Err(Outcome::NotThere);
    }
    crate::table::open(path).map_err(|reason| match reason.contains("No such file") && !path.contains('/') {
        true => Outcome::NotThere,
        false => Outcome::NotLoadable { reason },
    })
}
