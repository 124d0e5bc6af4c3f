//! `baton model list`: the known models and which of them are on this machine.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::exit::Exit;
use crate::model::cache::{self, ModelPlace};
use crate::model::catalogue::CATALOGUE;
use crate::model::unpack::file_sha256;

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Hash the cached files again and compare.
    #[arg(long)]
    pub verify: bool,
    /// One JSON object a line instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// State of one known model on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum CacheState {
    NotCached,
    /// The file is there, with the right size.
    Cached,
    /// The file is there, and its hash was just found to be right.
    Verified,
    /// The file is there, but its content has changed since it was pulled.
    Damaged,
}

#[derive(Debug, Serialize)]
struct ListedModel {
    name: &'static str,
    state: CacheState,
    bytes: u64,
    license: &'static str,
    source: String,
    path: PathBuf,
}

/// Prints the list. A damaged file makes the exit status a failure.
pub fn run(args: &ListArgs) -> anyhow::Result<Exit> {
    let folder = cache::default_folder()?;
    let mut out = std::io::stdout().lock();
    let mut exit = Exit::Ok;
    for model in &CATALOGUE {
        let place = ModelPlace::new(&folder, model);
        let state = match (place.is_cached(), args.verify) {
            (false, _) => CacheState::NotCached,
            (true, false) => CacheState::Cached,
            (true, true) if file_sha256(&place.file())? == model.sha256 => CacheState::Verified,
            (true, true) => CacheState::Damaged,
        };
        let listed = ListedModel {
            name: model.name,
            state,
            bytes: model.bytes,
            license: model.license,
            source: format!("{} {} (PyPI)", model.package, model.version),
            path: place.file(),
        };
        if args.json {
            writeln!(out, "{}", serde_json::to_string(&listed)?)?;
        } else {
            writeln!(out, "{}", line(&listed))?;
        }
        if state == CacheState::Damaged {
            exit = Exit::Failure;
        }
    }
    Ok(exit)
}

fn line(model: &ListedModel) -> String {
    let megabytes = model.bytes / 1_000_000;
    let state = match model.state {
        CacheState::NotCached => format!("not cached; baton model pull {}", model.name),
        CacheState::Cached => format!("cached    {}", model.path.display()),
        CacheState::Verified => format!("verified  {}", model.path.display()),
        CacheState::Damaged => format!(
            "DAMAGED   {}; baton model pull --force {}",
            model.path.display(),
            model.name
        ),
    };
    format!("{:<16} {megabytes:>6} MB  {:<12} {state}", model.name, model.license)
}
