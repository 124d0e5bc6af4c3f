//! One file of the hub into the cache: resumed where it stopped, checked, and only then given its name.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use model_files::gguf::hex;
use sha2::{Digest as _, Sha256};

use super::cache::Snapshot;
use super::http::{Answer, Client, encoded};
use super::listing::{RemoteFile, check_status, is_blob};
use super::name::HubName;
use crate::model::cache::take_lock;
use crate::model::error::PullError;
use crate::model::hub_error::HubError;
use crate::model::interrupt::Interrupt;

/// Bytes that are read at a time of what has arrived before.
const CHUNK_BYTES: usize = 1 << 20;
const PARTIAL_CONTENT: u16 = 206;
/// What was kept is longer than the file. The next try begins anew.
const RANGE_NOT_SATISFIABLE: u16 = 416;

pub(super) struct Download<'a> {
    pub client: &'a Client,
    pub snapshot: &'a Snapshot,
    pub file: &'a RemoteFile,
    pub interrupt: &'a Interrupt,
    /// Gets the bytes of this file that are here.
    pub progress: &'a mut dyn FnMut(u64),
}

/// What has arrived of a file.
struct Arrived {
    file: File,
    path: PathBuf,
    hasher: Sha256,
    bytes: u64,
}

impl Download<'_> {
    /// Returns the file's size.
    ///
    /// # Errors
    /// [`PullError`].
    pub(super) async fn run(&mut self) -> Result<u64, PullError> {
        let place = format!("{}/{}", self.snapshot.commit, self.file.name);
        // A mirror may not say how the content is called before it sends it.
        let key = self.file.blob.clone().unwrap_or_else(|| hex(&Sha256::digest(place)));
        let (blobs, locks) = (&self.snapshot.blobs, &self.snapshot.locks);
        fs::create_dir_all(blobs).map_err(PullError::at(blobs))?;
        fs::create_dir_all(locks).map_err(PullError::at(locks))?;
        // Dropping the lock gives it back. Its file stays, as the hub's own tools leave theirs.
        let _lock = take_lock(&locks.join(format!("{key}.lock")), self.interrupt)?;
        if let Some(bytes) = self.bytes_here() {
            (self.progress)(bytes);
            return Ok(bytes);
        }
        let mut arrived = Arrived::open(blobs.join(format!("{key}.incomplete")), self.file.sha256.is_some())?;
        (self.progress)(arrived.bytes);
        if let Some(blob) = self.file.blob.as_ref().filter(|_| arrived.is_all_of(self.file)) {
            // The try before this one ended when it had everything, and before the file had its name.
            let bytes = arrived.keep(&blobs.join(blob))?;
            self.snapshot.link(&self.file.name, blob)?;
            return Ok(bytes);
        }
        let mut answer = self.ask(&mut arrived).await?;
        let expected_size = self.file.size.or(answer.entity.bytes);
        let given_id = answer.entity.id.clone().filter(|id| is_blob(id));
        let of_header = given_id.clone().filter(|id| id.len() == 64);
        let expected_hash = self.file.sha256.clone().or(of_header);
        self.receive(&mut answer, &mut arrived, expected_size).await?;
        let hash = arrived.check(&self.file.name, (expected_size, expected_hash))?;
        let blob = self.file.blob.clone().or(given_id).unwrap_or(hash);
        let bytes = arrived.keep(&blobs.join(&blob))?;
        self.snapshot.link(&self.file.name, &blob)?;
        Ok(bytes)
    }

    /// The size of the file, if all of it is in the cache: in this snapshot, or as the content of another one.
    fn bytes_here(&self) -> Option<u64> {
        let size_of = |path: &Path| {
            let bytes = fs::metadata(path).ok().filter(|file| file.is_file())?.len();
            self.file.size.is_none_or(|size| size == bytes).then_some(bytes)
        };
        let Some(blob) = &self.file.blob else {
            return size_of(&self.snapshot.folder.join(&self.file.name));
        };
        let bytes = size_of(&self.snapshot.blobs.join(blob))?;
        self.snapshot.link(&self.file.name, blob).ok()?;
        Some(bytes)
    }

    /// Asks for what is still missing. A server that cannot begin in the middle sends everything.
    async fn ask(&self, arrived: &mut Arrived) -> Result<Answer, PullError> {
        let (repository, commit) = (&self.snapshot.repository, &self.snapshot.commit);
        let path = format!("{repository}/resolve/{commit}/{}", encoded(&self.file.name, true));
        let url = self.client.url(&path);
        let mut answer = self.client.get(&url, arrived.bytes, self.interrupt).await?;
        if answer.status.as_u16() == RANGE_NOT_SATISFIABLE {
            arrived.restart()?;
            answer = self.client.get(&url, 0, self.interrupt).await?;
        }
        let name = format!("{repository}@{commit}");
        let name = HubName::parse(&name).ok_or(HubError::NotFound { name })?;
        check_status(answer.status.as_u16(), &name, &url)?;
        if answer.status.as_u16() != PARTIAL_CONTENT && arrived.bytes > 0 {
            arrived.restart()?;
        }
        Ok(answer)
    }

    async fn receive(
        &mut self,
        answer: &mut Answer,
        arrived: &mut Arrived,
        size: Option<u64>,
    ) -> Result<(), PullError> {
        loop {
            let data = match answer.next(self.interrupt).await? {
                Ok(Some(data)) => data,
                Ok(None) => return Ok(()),
                Err(cause) => {
                    let (file, bytes) = (self.file.name.clone(), arrived.bytes);
                    return Err(HubError::Cut { file, bytes, cause }.into());
                }
            };
            arrived.add(&data)?;
            (self.progress)(arrived.bytes);
            // The rest of a file that is too long is not wanted.
            if size.is_some_and(|size| arrived.bytes > size) {
                return Ok(());
            }
        }
    }
}

impl Arrived {
    /// What came in an earlier try is kept only where a hash will tell whether both halves are of one file.
    fn open(path: PathBuf, is_resumable: bool) -> Result<Arrived, PullError> {
        let mut options = OpenOptions::new();
        let file = options
            .create(true)
            .read(true)
            .write(true)
            .truncate(!is_resumable)
            .open(&path);
        let file = file.map_err(PullError::at(&path))?;
        let mut arrived = Arrived {
            file,
            path,
            hasher: Sha256::new(),
            bytes: 0,
        };
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let count = arrived.file.read(&mut chunk).map_err(PullError::at(&arrived.path))?;
            if count == 0 {
                return Ok(arrived);
            }
            arrived.hasher.update(&chunk[..count]);
            arrived.bytes += count as u64;
        }
    }

    /// Whether nothing is missing, as the hash of the file tells.
    fn is_all_of(&self, file: &RemoteFile) -> bool {
        let found = || hex(&self.hasher.clone().finalize());
        file.size == Some(self.bytes) && file.sha256.as_ref().is_some_and(|expected| *expected == found())
    }

    fn restart(&mut self) -> Result<(), PullError> {
        let emptied = self.file.set_len(0).and_then(|()| io::Seek::rewind(&mut self.file));
        emptied.map_err(PullError::at(&self.path))?;
        (self.hasher, self.bytes) = (Sha256::new(), 0);
        Ok(())
    }

    fn add(&mut self, data: &[u8]) -> Result<(), PullError> {
        self.file.write_all(data).map_err(PullError::at(&self.path))?;
        self.hasher.update(data);
        self.bytes += data.len() as u64;
        Ok(())
    }

    /// The hash of the content. Other content than expected is removed.
    fn check(&mut self, name: &str, (size, hash): (Option<u64>, Option<String>)) -> Result<String, PullError> {
        let found = hex(&self.hasher.finalize_reset());
        let wrong = if let Some(expected) = size.filter(|size| *size != self.bytes) {
            HubError::WrongSize {
                file: name.to_owned(),
                found: self.bytes,
                expected,
            }
        } else if let Some(expected) = hash.filter(|hash| *hash != found) {
            HubError::WrongHash {
                file: name.to_owned(),
                found,
                expected,
            }
        } else {
            return Ok(found);
        };
        fs::remove_file(&self.path).map_err(PullError::at(&self.path))?;
        Err(wrong.into())
    }

    /// Gives the content its name.
    fn keep(self, path: &Path) -> Result<u64, PullError> {
        self.file.sync_all().map_err(PullError::at(&self.path))?;
        fs::rename(&self.path, path).map_err(PullError::at(path))?;
        if let Some(folder) = path.parent() {
            let synced = File::open(folder).and_then(|folder| folder.sync_all());
            synced.map_err(PullError::at(folder))?;
        }
        Ok(self.bytes)
    }
}
