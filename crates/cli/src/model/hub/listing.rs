//! The hub's list of a revision's files, with their sizes and hashes.

use serde::Deserialize;

use super::cache::is_commit;
use super::http::{Client, encoded};
use super::name::{HubName, is_relative_path};
use crate::model::error::PullError;
use crate::model::hub_error::{BadListing, HubError};
use crate::model::interrupt::Interrupt;

/// A file takes about 300 bytes of the answer. Models with ten thousand files are not models.
const ANSWER_BYTES_MAX: usize = 16 << 20;

#[derive(Debug)]
pub(super) struct Listing {
    /// What the revision is now.
    pub commit: String,
    files: Vec<RemoteFile>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    pub name: String,
    pub size: Option<u64>,
    /// Lower-case hex, for files that are large enough to have one.
    pub sha256: Option<String>,
    /// The name of its content in the cache.
    pub blob: Option<String>,
}

#[derive(Deserialize)]
struct Page {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// # Errors
    /// [`HubError`], or an interrupt.
    pub(super) async fn ask(client: &Client, name: &HubName, interrupt: &Interrupt) -> Result<Listing, PullError> {
        let revision = encoded(name.revision(), false);
        let path = format!("api/models/{}/revision/{revision}?blobs=true", name.repository());
        let url = client.url(&path);
        let mut answer = client.get(&url, 0, interrupt).await?;
        check_status(answer.status.as_u16(), name, &url)?;
        let no_listing = |cause| HubError::NoListing {
            url: url.clone(),
            cause,
        };
        let mut body = Vec::new();
        while let Some(data) = answer.next(interrupt).await?.map_err(|cause| HubError::Unreachable {
            url: url.clone(),
            cause,
        })? {
            if body.len() + data.len() > ANSWER_BYTES_MAX {
                let max = ANSWER_BYTES_MAX;
                return Err(no_listing(BadListing::TooLong { max }).into());
            }
            body.extend_from_slice(&data);
        }
        Ok(Listing::read(&body).map_err(no_listing)?)
    }

    fn read(body: &[u8]) -> Result<Listing, BadListing> {
        let page: Page = serde_json::from_slice(body)?;
        if !is_commit(&page.sha) {
            return Err(BadListing::NoCommit);
        }
        // A name that would leave the snapshot's folder is no name of a model's file.
        let siblings = page
            .siblings
            .into_iter()
            .filter(|file| is_relative_path(&file.rfilename));
        let files = siblings.map(|file| {
            let (sha256, size) = file.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            let sha256 = sha256.filter(|hash| is_hash(hash, 64));
            RemoteFile {
                name: file.rfilename,
                size: size.or(file.size),
                blob: sha256.clone().or(file.blob_id).filter(|id| is_blob(id)),
                sha256,
            }
        });
        Ok(Listing {
            commit: page.sha,
            files: files.collect(),
        })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|file| file.name.as_str())
    }

    pub(super) fn files_called(&self, names: &[String]) -> impl Iterator<Item = &RemoteFile> {
        self.files.iter().filter(|file| names.contains(&file.name))
    }
}

pub(super) fn check_status(status: u16, name: &HubName, url: &str) -> Result<(), HubError> {
    let name = || name.to_string();
    match status {
        200 | 206 => Ok(()),
        404 => Err(HubError::NotFound { name: name() }),
        401 | 403 => Err(HubError::NotAllowed { name: name(), status }),
        _ => Err(HubError::Status {
            url: url.to_owned(),
            status,
        }),
    }
}

fn is_hash(text: &str, characters: usize) -> bool {
    text.len() == characters
        && text
            .bytes()
            .all(|byte| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'))
}

/// A name of content, which becomes the name of a file here.
pub(super) fn is_blob(id: &str) -> bool {
    is_hash(id, 40) || is_hash(id, 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_sizes_and_names_are_checked_before_they_are_used() {
        let (commit, hash) = ("c0".repeat(20), "ab".repeat(32));
        let page = format!(
            r#"{{"sha": "{commit}", "more": 1, "siblings": [
                {{"rfilename": "../../etc/passwd", "size": 1}},
                {{"rfilename": "/etc/passwd", "size": 1}},
                {{"rfilename": "big.gguf", "size": 1, "blobId": "{commit}", "lfs": {{"sha256": "{hash}", "size": 7}}}},
                {{"rfilename": "odd.gguf", "lfs": {{"sha256": "../x"}}, "blobId": "a/b"}},
                {{"rfilename": "config.json", "size": 3, "blobId": "{commit}"}}]}}"#
        );
        let listing = Listing::read(page.as_bytes()).unwrap();
        assert_eq!(
            listing.names().collect::<Vec<_>>(),
            ["big.gguf", "odd.gguf", "config.json"]
        );
        let [big, odd, config] = &listing.files[..] else {
            panic!("{listing:?}")
        };
        assert_eq!(
            (big.size, big.sha256.as_ref(), big.blob.as_ref()),
            (Some(7), Some(&hash), Some(&hash))
        );
        assert_eq!((odd.size, &odd.sha256, &odd.blob), (None, &None, &None));
        assert_eq!(
            (config.size, &config.sha256, config.blob.as_ref()),
            (Some(3), &None, Some(&commit))
        );
        assert!(matches!(Listing::read(b"<html>"), Err(BadListing::Json(_))));
        let bad = br#"{"sha": "main", "siblings": []}"#;
        assert!(matches!(Listing::read(bad), Err(BadListing::NoCommit)));
    }
}
