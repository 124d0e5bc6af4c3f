//! Models of the Hugging Face hub: out of the cache that all its tools share, and fetched into it when they are not there.

mod cache;
mod choose;
mod download;
mod http;
mod listing;
mod name;
mod settings;

use std::path::PathBuf;

pub(super) use cache::{HubCache, Snapshot};
pub(super) use name::HubName;
pub(super) use settings::HubSettings;

use crate::model::error::PullError;
use crate::model::hub_error::{HubError, NoNetwork};
use crate::model::interrupt::Interrupt;
use crate::model::progress::Progress;
use choose::{NoChoice, choose};
use download::Download;
use http::Client;
use listing::Listing;

/// How to fetch.
#[derive(Clone, Copy, Debug)]
pub(super) struct FetchOptions {
    /// Ask the hub also when the model is in the cache: it may have a newer revision.
    pub force: bool,
    /// No progress on stderr.
    pub quiet: bool,
}

/// The path of the model called `name`, if all of it is in the cache, whoever fetched it: a GGUF file, or a snapshot folder.
/// `None` where the hub is to be asked.
///
/// # Errors
/// [`HubError::Offline`]: it is not there, and the network is not to be used. There is no cache.
pub(super) fn cached(name: &HubName, settings: &HubSettings, force: bool) -> Result<Option<PathBuf>, PullError> {
    let cache = HubCache::new(settings.cache()?);
    match cache.find(name) {
        Some(path) if !force || settings.is_offline => Ok(Some(path)),
        None if settings.is_offline => Err(offline(name, &cache, NoNetwork::Forbidden).into()),
        _ => Ok(None),
    }
}

/// Fetches what is missing of the model, and returns its path.
///
/// # Errors
/// [`PullError`]. What has arrived of a file is kept, and the next fetch goes on from there.
pub(super) fn fetch(
    name: &HubName,
    settings: &HubSettings,
    (options, interrupt): (FetchOptions, &Interrupt),
) -> Result<PathBuf, PullError> {
    let cache = HubCache::new(settings.cache()?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(HubError::Runtime)?;
    runtime.block_on(from_hub(name, settings, (&cache, options, interrupt)))
}

async fn from_hub(
    name: &HubName,
    settings: &HubSettings,
    (cache, options, interrupt): (&HubCache, FetchOptions, &Interrupt),
) -> Result<PathBuf, PullError> {
    let client = Client::new(settings)?;
    let without_network = |error| match error {
        HubError::Unreachable { cause, .. } => {
            let endpoint = settings.endpoint.clone();
            offline(name, cache, NoNetwork::Unreachable { endpoint, cause })
        }
        error => error,
    };
    let listing = Listing::ask(&client, name, interrupt)
        .await
        .map_err(|error| match error {
            PullError::Hub(error) => without_network(*error).into(),
            error => error,
        })?;
    let wanted = choose(listing.names(), name.file()).map_err(|why| no_choice(name, why))?;
    let files: Vec<_> = listing.files_called(&wanted.files).collect();
    // A mirror may leave sizes out. A total over some files would be wrong.
    let total = files.iter().map(|file| file.size).sum::<Option<u64>>();
    let snapshot = cache.snapshot(name, &listing.commit);
    let mut progress = Progress::start(format!("downloading {}", name.repository()), total, options.quiet);
    let mut done = 0;
    for file in files {
        let mut download = Download {
            client: &client,
            snapshot: &snapshot,
            file,
            interrupt,
            progress: &mut |bytes| progress.at(done + bytes),
        };
        done += download.run().await?;
    }
    drop(progress);
    cache.keep_revision(name, &listing.commit)?;
    match cache.find(name) {
        Some(path) => Ok(path),
        None => Err(HubError::Incomplete {
            name: name.to_string(),
            folder: snapshot.folder,
        }
        .into()),
    }
}

fn offline(name: &HubName, cache: &HubCache, why: NoNetwork) -> HubError {
    HubError::Offline {
        name: name.to_string(),
        folder: cache.repository(name),
        why: Box::new(why),
    }
}

fn no_choice(name: &HubName, why: NoChoice) -> HubError {
    let (text, repository) = (name.to_string(), name.repository().to_owned());
    match why {
        NoChoice::NoModel => HubError::NoModel { name: text },
        NoChoice::Several { choices } if name.file().is_none() => HubError::Several {
            name: text,
            repository,
            choices,
        },
        NoChoice::Several { choices } | NoChoice::NotThere { choices } => HubError::NoSuchFile { name: text, choices },
    }
}

#[cfg(test)]
#[path = "../hub_tests.rs"]
mod tests;
