//! What `--model` means: a path, a name of the catalogue, or a name on the Hugging Face hub.

use std::io;
use std::path::PathBuf;

use crate::model::catalogue::{self, CatalogueModel};
use crate::model::error::PullError;
use crate::model::hub::{self, FetchOptions, HubName, HubSettings};
use crate::model::interrupt::Interrupt;
use crate::model::pull::{self, PullOptions};
use crate::model::unpack::file_sha256;

/// Where a model is on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedModel {
    /// A GGUF file or a folder.
    pub path: PathBuf,
    /// Its name in the catalogue. Other models are called by their file or folder.
    pub name: Option<String>,
}

/// Where a model comes from.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Catalogue(&'static CatalogueModel),
    Path(PathBuf),
    Hub(HubName),
}

impl Source {
    /// What exists as a file or folder is meant as such, except for the names of the catalogue.
    ///
    /// # Errors
    /// [`PullError::NoSuchFile`] or [`PullError::UnknownModel`].
    pub(super) fn of(model: &str) -> Result<Source, PullError> {
        if let Some(known) = catalogue::find(model) {
            return Ok(Source::Catalogue(known));
        }
        let path = PathBuf::from(model);
        if path.exists() {
            return Ok(Source::Path(path));
        }
        // `models/my.gguf` is a path with a mistake, and not a repository.
        let is_file_name = model.ends_with(".gguf") && !model.contains(':');
        match HubName::parse(model) {
            Some(name) if !is_file_name => Ok(Source::Hub(name)),
            // A word without a dot or a slash is meant as a name.
            _ if model.contains(['/', '.']) => Err(PullError::NoSuchFile { path }),
            _ => Err(PullError::UnknownModel { name: model.to_owned() }),
        }
    }

    /// Makes sure that the model is on this machine. Blocks. Ctrl-C and SIGTERM end it.
    ///
    /// # Errors
    /// [`PullError`].
    pub(super) fn fetch(self, options: FetchOptions) -> Result<ResolvedModel, PullError> {
        match self {
            Source::Path(path) => Ok(ResolvedModel { path, name: None }),
            Source::Catalogue(model) => {
                let FetchOptions { force, quiet } = options;
                let options = PullOptions {
                    force,
                    quiet,
                    ..PullOptions::from_env()?
                };
                // Signals are caught only while something is fetched.
                let path = match pull::cached(model, &options) {
                    Some(path) => path,
                    None => pull::fetch(model, &options, &Interrupt::watch())?,
                };
                let name = Some(model.name.to_owned());
                Ok(ResolvedModel { path, name })
            }
            Source::Hub(name) => {
                let settings = HubSettings::from_env();
                let path = match hub::cached(&name, &settings, options.force)? {
                    Some(path) => path,
                    None => hub::fetch(&name, &settings, (options, &Interrupt::watch()))?,
                };
                Ok(ResolvedModel { path, name: None })
            }
        }
    }
}

/// A model on this machine, as it was found.
#[derive(Clone, Debug)]
pub(crate) struct FoundModel {
    pub path: PathBuf,
    /// SHA-256 of the file, lower-case hex, where it is known.
    pub sha256: Option<&'static str>,
}

impl FoundModel {
    /// Reads the whole file. `None`: nobody knows what its hash should be.
    ///
    /// # Errors
    /// Those of reading the file.
    pub fn is_intact(&self) -> io::Result<Option<bool>> {
        let Some(expected) = self.sha256 else { return Ok(None) };
        Ok(Some(file_sha256(&self.path)? == expected))
    }
}

/// The model that `--model MODEL` means, without fetching it. `None`: it is not on this machine.
///
/// # Errors
/// [`PullError`]: no such file, no such name, or no cache.
pub(crate) fn find(model: &str) -> Result<Option<FoundModel>, PullError> {
    Ok(match Source::of(model)? {
        Source::Path(path) => Some(FoundModel { path, sha256: None }),
        Source::Catalogue(model) => {
            let path = pull::cached(model, &PullOptions::from_env()?);
            let sha256 = Some(model.sha256);
            path.map(|path| FoundModel { path, sha256 })
        }
        Source::Hub(name) => {
            let path = hub::cached(&name, &HubSettings::from_env(), false)?;
            path.map(|path| FoundModel { path, sha256: None })
        }
    })
}

/// The model that `--model MODEL` means, fetched when it has a name and is not on this machine.
///
/// # Errors
/// [`PullError`]: no such file, no such name, or the download failed.
pub fn resolve(model: &str) -> Result<ResolvedModel, PullError> {
    Source::of(model)?.fetch(FetchOptions {
        force: false,
        quiet: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    #[test]
    fn a_model_is_a_path_a_short_name_or_a_name_on_the_hub() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("own.gguf");
        std::fs::write(&file, b"x").unwrap();
        for path in [file.as_path(), folder.path()] {
            let resolved = resolve(path.to_str().unwrap()).unwrap();
            assert_eq!((resolved.path.as_path(), resolved.name), (path, None));
        }
        assert!(matches!(Source::of("smollm2-135m"), Ok(Source::Catalogue(model)) if model.name == "smollm2-135m"));
        for name in ["org/name", "org/name@v1", "org/name:Q4_K_M", "org/name:file.gguf"] {
            assert!(
                matches!(Source::of(name), Ok(Source::Hub(found)) if found.to_string() == name),
                "{name}"
            );
        }
        for path in ["/nonexistent/x.gguf", "./org", "org/name.gguf", "a/b/c", "x.gguf"] {
            let error = Source::of(path).expect_err("no such file");
            assert!(matches!(error, PullError::NoSuchFile { .. }), "{path}");
            assert_eq!(error.exit(), Exit::Usage, "{path}");
        }
        assert!(matches!(Source::of("gpt-17"), Err(PullError::UnknownModel { name }) if name == "gpt-17"));
    }
}
