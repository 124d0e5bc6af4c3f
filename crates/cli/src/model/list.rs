//! `baton model list`: the models on this machine, in baton's own cache and in that of the Hugging Face hub.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use model_files::model::Model;
use serde::Serialize;

use crate::exit::Exit;
use crate::model::cache::{self, ModelPlace};
use crate::model::catalogue::{CATALOGUE, CatalogueModel};
use crate::model::hub::{HubCache, HubSettings, Snapshot};
use crate::model::unpack::file_sha256;
use crate::observe::table::{Cell, Table};
use crate::stdout::unless_reader_gone;
use crate::terminal::Terminal;

/// Characters of a commit that tell two apart.
const COMMIT_CHARS: usize = 8;

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Hash the cached files of the catalogue again and compare.
    #[arg(long)]
    pub verify: bool,
    /// One JSON array instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// State of one model on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum CacheState {
    NotCached,
    /// The files are there, with the right size.
    Cached,
    /// The file is there, and its hash was just found to be right.
    Verified,
    /// The file is there, but its content has changed since it was pulled.
    Damaged,
}

#[derive(Debug, Serialize)]
struct ListedModel {
    /// What `--model` takes.
    name: String,
    state: CacheState,
    bytes: u64,
    /// `None` for a model that is not here, or that this build cannot run.
    architecture: Option<String>,
    /// Why this build cannot run it.
    refused: Option<String>,
    license: Option<&'static str>,
    source: String,
    path: PathBuf,
}

/// Prints the list. A damaged file makes the exit status a failure.
pub fn run(args: &ListArgs) -> anyhow::Result<Exit> {
    let folder = cache::default_folder()?;
    let mut models = Vec::new();
    for model in &CATALOGUE {
        models.push(of_catalogue(&folder, model, args.verify)?);
    }
    if let Ok(folder) = HubSettings::from_env().cache() {
        models.extend(HubCache::new(folder).snapshots().iter().flat_map(of_hub));
    }
    let mut out = crate::stdout::stdout();
    unless_reader_gone(match args.json {
        true => writeln!(out, "{}", serde_json::to_string(&models)?),
        false => write!(out, "{}", table(&models)),
    })?;
    let is_damaged = models.iter().any(|model| model.state == CacheState::Damaged);
    Ok(if is_damaged { Exit::Failure } else { Exit::Ok })
}

fn of_catalogue(folder: &Path, model: &'static CatalogueModel, verify: bool) -> std::io::Result<ListedModel> {
    let place = ModelPlace::new(folder, model);
    let path = place.file();
    let state = match (place.is_cached(), verify) {
        (false, _) => CacheState::NotCached,
        (true, false) => CacheState::Cached,
        (true, true) if file_sha256(&path)? == model.sha256 => CacheState::Verified,
        (true, true) => CacheState::Damaged,
    };
    let (architecture, refused) = match state {
        CacheState::Cached | CacheState::Verified => architecture(&path),
        CacheState::NotCached | CacheState::Damaged => (None, None),
    };
    Ok(ListedModel {
        name: model.name.to_owned(),
        state,
        bytes: model.bytes,
        architecture,
        refused,
        license: Some(model.license),
        source: format!("{} {} (PyPI)", model.pieces[0].package, model.pieces[0].version),
        path,
    })
}

/// The models of a snapshot that can be given to `--model` as they are. A GGUF file is one for itself.
fn of_hub(snapshot: &Snapshot) -> Vec<ListedModel> {
    let commit: String = snapshot.commit.chars().take(COMMIT_CHARS).collect();
    let models = snapshot.models().into_iter().map(|(chosen, path)| {
        let (architecture, refused) = architecture(&path);
        let file = path
            .strip_prefix(&snapshot.folder)
            .ok()
            .filter(|file| !file.as_os_str().is_empty());
        ListedModel {
            name: match file {
                Some(file) => format!("{}:{}", snapshot.repository, file.display()),
                None => snapshot.repository.clone(),
            },
            state: CacheState::Cached,
            bytes: snapshot.bytes_of(&chosen),
            architecture,
            refused,
            license: None,
            source: format!("Hugging Face hub, commit {commit}"),
            path,
        }
    });
    models.collect()
}

/// The architecture, or why this build cannot run the model.
fn architecture(path: &Path) -> (Option<String>, Option<String>) {
    match Model::open(path) {
        Ok(model) => (Some(model.config().architecture.name.to_owned()), None),
        Err(error) => (None, Some(error.to_string())),
    }
}

fn table(models: &[ListedModel]) -> String {
    let mut table = Table::new(&["model", ">size", "architecture", "licence", "state", "where"]);
    for model in models {
        let (state, place) = match model.state {
            CacheState::NotCached => ("not here", format!("baton model pull {}", model.name)),
            CacheState::Cached if model.refused.is_some() => ("cannot run", model.path.display().to_string()),
            CacheState::Cached => ("here", model.path.display().to_string()),
            CacheState::Verified => ("verified", model.path.display().to_string()),
            CacheState::Damaged => ("DAMAGED", format!("baton model pull --force {}", model.name)),
        };
        table.row(vec![
            Cell::new(&model.name),
            format!("{} MB", model.bytes.div_ceil(1_000_000)).into(),
            model.architecture.clone().unwrap_or_else(|| "-".to_owned()).into(),
            Cell::new(model.license.unwrap_or("-")),
            Cell::new(state),
            place.into(),
        ]);
    }
    table.render(Terminal::plain())
}
