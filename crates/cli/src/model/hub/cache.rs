//! The cache that the hub's tools share: `models--org--name/` with `refs/REVISION`, `snapshots/COMMIT/FILE` and `blobs/`.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::choose::{Chosen, Form, choose, models};
use super::name::HubName;
use crate::model::error::PullError;

/// A commit's name has 40 characters.
const REFERENCE_BYTES_MAX: u64 = 256;
/// The index of a model of 400 billion parameters has 100 KB.
const INDEX_BYTES_MAX: u64 = 64 << 20;
const INDEX: &str = "model.safetensors.index.json";
/// Repositories of models have few folders in folders, and their snapshots no loops.
const FOLDER_DEPTH_MAX: usize = 4;

#[derive(Clone, Debug)]
pub(crate) struct HubCache {
    folder: PathBuf,
}

/// One commit of one repository, whole or in part.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub folder: PathBuf,
    pub commit: String,
    /// `org/name`.
    pub repository: String,
    /// Of all snapshots of the repository.
    pub blobs: PathBuf,
    /// A lock for each blob; the hub's own tools take the same.
    pub locks: PathBuf,
}

impl HubCache {
    pub(crate) fn new(folder: PathBuf) -> HubCache {
        HubCache { folder }
    }

    /// The folder of all revisions of a repository.
    pub(crate) fn repository(&self, name: &HubName) -> PathBuf {
        self.folder.join(folder_name(name.repository()))
    }

    pub(crate) fn snapshot(&self, name: &HubName, commit: &str) -> Snapshot {
        self.snapshot_of(name.repository().to_owned(), commit.to_owned())
    }

    fn snapshot_of(&self, repository: String, commit: String) -> Snapshot {
        let folder_name = folder_name(&repository);
        let folder = self.folder.join(&folder_name);
        Snapshot {
            folder: folder.join("snapshots").join(&commit),
            blobs: folder.join("blobs"),
            locks: self.folder.join(".locks").join(folder_name),
            commit,
            repository,
        }
    }

    /// The model's path, if all of its files are here.
    pub(crate) fn find(&self, name: &HubName) -> Option<PathBuf> {
        let reference = self.repository(name).join("refs").join(name.revision());
        let commit =
            read_reference(&reference).or_else(|| is_commit(name.revision()).then(|| name.revision().to_owned()))?;
        let snapshot = self.snapshot(name, &commit);
        let names = snapshot.names();
        let chosen = choose(names.iter().map(String::as_str), name.file()).ok()?;
        snapshot.path_of(&chosen)
    }

    /// Remembers which commit the revision is.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn keep_revision(&self, name: &HubName, commit: &str) -> Result<(), PullError> {
        if name.revision() == commit {
            return Ok(());
        }
        let path = self.repository(name).join("refs").join(name.revision());
        let folder = path.parent().unwrap_or(&path);
        fs::create_dir_all(folder).map_err(PullError::at(folder))?;
        // Others share this cache, so the umask alone decides who may read it, as with the hub's own tools.
        let mut file = tempfile::Builder::new()
            .permissions(fs::Permissions::from_mode(0o666))
            .tempfile_in(folder)
            .map_err(PullError::at(folder))?;
        file.write_all(commit.as_bytes()).map_err(PullError::at(&path))?;
        file.persist(&path).map_err(|error| PullError::at(&path)(error.error))?;
        Ok(())
    }

    /// All snapshots, ordered by repository. What cannot be read is left out.
    pub(crate) fn snapshots(&self) -> Vec<Snapshot> {
        let mut found = Vec::new();
        for folder in folder_names(&self.folder) {
            let Some(repository) = folder.strip_prefix("models--") else {
                continue;
            };
            let repository = repository.replacen("--", "/", 1);
            for commit in folder_names(&self.folder.join(&folder).join("snapshots")) {
                found.push(self.snapshot_of(repository.clone(), commit));
            }
        }
        found
    }
}

impl Snapshot {
    /// The paths of the models whose files are all here.
    pub(crate) fn models(&self) -> Vec<(Chosen, PathBuf)> {
        let names = self.names();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let with_path = |chosen: Chosen| Some((self.path_of(&chosen)?, chosen));
        let found = models(&names).into_iter().filter_map(with_path);
        found.map(|(path, chosen)| (chosen, path)).collect()
    }

    /// The names of its files, with slashes.
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        collect_names(&self.folder, "", (FOLDER_DEPTH_MAX, &mut names));
        names.sort();
        names
    }

    fn has(&self, name: &str) -> bool {
        fs::metadata(self.folder.join(name)).is_ok_and(|file| file.is_file())
    }

    fn path_of(&self, chosen: &Chosen) -> Option<PathBuf> {
        let is_whole = match chosen.form {
            Form::Gguf => chosen.files.iter().all(|name| self.has(name)),
            Form::Folder => {
                let has_weights = match self.has(INDEX) {
                    true => read_index(&self.folder.join(INDEX))?.iter().all(|name| self.has(name)),
                    false => self.has("model.safetensors"),
                };
                has_weights && self.has("config.json") && self.has("tokenizer.json")
            }
        };
        let path = match chosen.form {
            Form::Gguf => self.folder.join(chosen.files.first()?),
            Form::Folder => self.folder.clone(),
        };
        is_whole.then_some(path)
    }

    /// Bytes of the files of a model.
    pub(crate) fn bytes_of(&self, chosen: &Chosen) -> u64 {
        let bytes = |name| fs::metadata(self.folder.join(name)).map_or(0, |file| file.len());
        chosen.files.iter().map(bytes).sum()
    }

    /// Gives the blob the name of a file of the snapshot. A name that is there already is replaced in one step.
    ///
    /// # Errors
    /// The link cannot be made.
    pub(super) fn link(&self, name: &str, blob: &str) -> Result<(), PullError> {
        let path = self.folder.join(name);
        let folder = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(folder).map_err(PullError::at(folder))?;
        // From `snapshots/COMMIT/` it is two steps up, and one more for each folder in the name.
        let up = "../".repeat(2 + name.matches('/').count());
        let target = format!("{up}blobs/{blob}");
        if fs::read_link(&path).is_ok_and(|known| known == Path::new(&target)) {
            return Ok(());
        }
        let scratch = tempfile::tempdir_in(folder).map_err(PullError::at(folder))?;
        let link = scratch.path().join("link");
        symlink(&target, &link).map_err(PullError::at(&link))?;
        fs::rename(&link, &path).map_err(PullError::at(&path))
    }
}

fn folder_name(repository: &str) -> String {
    format!("models--{}", repository.replace('/', "--"))
}

pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40
        && text
            .bytes()
            .all(|byte| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'))
}

fn read_reference(path: &Path) -> Option<String> {
    let mut text = String::new();
    let file = File::open(path).ok()?;
    file.take(REFERENCE_BYTES_MAX).read_to_string(&mut text).ok()?;
    let commit = text.trim();
    is_commit(commit).then(|| commit.to_owned())
}

/// The weight files that an index names. `None` when it is no index.
fn read_index(path: &Path) -> Option<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    if fs::metadata(path).ok()?.len() > INDEX_BYTES_MAX {
        return None;
    }
    let index: Index = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let mut files: Vec<String> = index.weight_map.into_values().collect();
    files.sort();
    files.dedup();
    (!files.is_empty()).then_some(files)
}

fn folder_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> = folders
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn collect_names(folder: &Path, prefix: &str, (depth, names): (usize, &mut Vec<String>)) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let name = format!("{prefix}{name}");
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if !is_folder {
            names.push(name);
        } else if depth > 1 {
            collect_names(&entry.path(), &format!("{name}/"), (depth - 1, names));
        }
    }
}
