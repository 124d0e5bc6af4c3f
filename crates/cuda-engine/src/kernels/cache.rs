//! The cache of compiled kernels in the user's cache folder: one file for each unit, architecture and compiler.
//!
//! A file appears under its name only when it is whole, and carries a hash of its content. A file that is damaged is compiled
//! anew. The cache never makes an engine fail: without it each start compiles. The processes of one machine often start together and
//! need the same kernels: they take turns, so that one of them compiles a unit and the others read it.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use super::driver::Version;
use super::source::{HEADERS, OPTIONS, Unit, hash_part};

/// Marks the file's form; the hash of the content follows.
const MAGIC: &[u8; 16] = b"baton kernel 1\n\0";
const HASH_BYTES: usize = 32;
/// A unit is 10 to 100 KB and a machine needs about a dozen. At the limit the files that were written first go.
const FILES_MAX: usize = 512;
/// Whose turn it is to compile. The file stays, and is empty.
const TURN: &str = "compiling.lock";
/// All units together take about ten seconds of a processor. Who waits longer compiles without a turn.
pub(crate) const TURN_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What decides the content of a file, besides the sources.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheKey<'a> {
    pub unit: Unit,
    /// As NVRTC is given it.
    pub arch: &'a str,
    pub nvrtc_version: Version,
    /// "cubin" or "ptx".
    pub form: &'a str,
}

impl CacheKey<'_> {
    fn file_name(&self) -> String {
        let mut hash = Sha256::new();
        for (name, text) in HEADERS {
            hash_part(&mut hash, name);
            hash_part(&mut hash, text);
        }
        let version = self.nvrtc_version.to_string();
        let parts = [
            self.unit.file.name(),
            self.unit.file.text(),
            self.arch,
            &version,
            self.form,
        ];
        parts
            .into_iter()
            .chain(OPTIONS)
            .for_each(|part| hash_part(&mut hash, part));
        self.unit
            .defines()
            .iter()
            .for_each(|define| hash_part(&mut hash, define));
        let digest: [u8; HASH_BYTES] = hash.finalize().into();
        // The unit is in the name for people, and for `scripts/kernel-mutants`, which puts changed kernels in its place.
        let name = self.unit.file.name().trim_end_matches(".cu").to_owned();
        let unit = [vec![name], self.unit.defines()].concat().join("-");
        format!("{unit}.{}.{}", model_files::gguf::hex(&digest), self.form)
    }
}

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// `BATON_KERNEL_CACHE`, or `baton/kernels` in the user's cache folder. `None` when the variables name no folder; `variable`
    /// reads one.
    pub fn of_user(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<Self> {
        let set = |name: &str| variable(name).filter(|path| path.is_absolute());
        let caches = || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        let named = variable("BATON_KERNEL_CACHE").filter(|path| !path.as_os_str().is_empty());
        // A path that cannot be made absolute is used as it is.
        let named = named.map(|path| std::path::absolute(&path).unwrap_or(path));
        let folder = named.or_else(|| Some(caches()?.join("baton").join("kernels")))?;
        Some(Self { folder })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The content of a whole file.
    pub(crate) fn get(&self, key: &CacheKey<'_>) -> Option<Vec<u8>> {
        let bytes = fs::read(self.folder.join(key.file_name())).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (hash, content) = rest.split_at_checked(HASH_BYTES)?;
        let found: [u8; HASH_BYTES] = Sha256::digest(content).into();
        (found == hash).then(|| content.to_vec())
    }

    /// # Errors
    /// The folder cannot be written. The caller says so once and goes on.
    pub(crate) fn put(&self, key: &CacheKey<'_>, content: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let name = key.file_name();
        // Two processes may write the same file. Each has a name of its own until its file is whole.
        let unfinished = self.folder.join(format!("{name}.{}.part", std::process::id()));
        let hash: [u8; HASH_BYTES] = Sha256::digest(content).into();
        let written = fs::write(&unfinished, [&MAGIC[..], &hash, content].concat());
        let placed = written.and_then(|()| fs::rename(&unfinished, self.folder.join(&name)));
        if placed.is_err() {
            // The error of the write is the one to report.
            let _ = fs::remove_file(&unfinished);
        }
        placed?;
        self.prune()
    }

    /// Waits until no other process compiles into this folder, or one has compiled this. It is this process's turn while the file is
    /// kept. `None` when it is there, the folder cannot be used or locked, or the others take too long: then this process compiles
    /// beside them.
    pub(crate) fn turn(&self, key: &CacheKey<'_>, within: Duration) -> Option<File> {
        fs::create_dir_all(&self.folder).ok()?;
        let file = File::create(self.folder.join(TURN)).ok()?;
        let ends = Instant::now() + within;
        while let Err(error) = file.try_lock() {
            let is_hopeless = matches!(error, TryLockError::Error(_));
            if is_hopeless || Instant::now() >= ends || self.folder.join(key.file_name()).exists() {
                return None;
            }
            thread::sleep(LOOK_EVERY);
        }
        Some(file)
    }

    fn prune(&self) -> io::Result<()> {
        let mut files: Vec<(SystemTime, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            // Another process may have removed the file.
            if let Ok(modified) = entry.metadata().and_then(|metadata| metadata.modified()) {
                files.push((modified, entry.path()));
            }
        }
        files.sort();
        let surplus = files.len().saturating_sub(FILES_MAX);
        for (_, path) in &files[..surplus] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::attention_shape::AttentionShape;
    use crate::kernels::source::KernelFile;

    fn key(arch: &str) -> CacheKey<'_> {
        CacheKey {
            unit: Unit::of(KernelFile::DecodeAttention, AttentionShape::new(64, 3, 1).unwrap()),
            arch,
            nvrtc_version: Version::new(13, 0),
            form: "cubin",
        }
    }

    #[test]
    fn what_was_put_is_got_and_a_damaged_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path().join("new"));
        assert_eq!(cache.get(&key("sm_90a")), None);
        cache.put(&key("sm_90a"), b"content").unwrap();
        assert_eq!(cache.get(&key("sm_90a")).as_deref(), Some(&b"content"[..]));
        assert_eq!(cache.get(&key("sm_80")), None);
        let path = cache.folder().join(key("sm_90a").file_name());
        let whole = fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &whole[..20], &[]] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(cache.get(&key("sm_90a")), None);
        }
    }

    #[test]
    fn two_processes_take_turns_and_nobody_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(folder.path().join("new"));
        let first = cache.turn(&key("sm_80"), Duration::ZERO).unwrap();
        assert!(cache.turn(&key("sm_80"), Duration::from_millis(1)).is_none());
        let second = thread::scope(|scope| {
            let second = scope.spawn(|| cache.turn(&key("sm_80"), TURN_WITHIN));
            drop(first);
            second.join().unwrap()
        });
        assert!(second.is_some() && cache.turn(&key("sm_80"), Duration::ZERO).is_none());
        cache.put(&key("sm_80"), b"content").unwrap();
        let is_there = cache.turn(&key("sm_80"), Duration::from_secs(86_400));
        assert!(is_there.is_none(), "nobody waits for what is there");
        let unusable = KernelCache::at(PathBuf::from("/dev/null/kernels"));
        assert!(unusable.turn(&key("sm_80"), TURN_WITHIN).is_none());
    }

    #[test]
    fn everything_that_changes_the_content_changes_the_name() {
        let other_group = CacheKey {
            unit: Unit::of(KernelFile::DecodeAttention, AttentionShape::new(64, 4, 1).unwrap()),
            ..key("sm_80")
        };
        let other_version = CacheKey {
            nvrtc_version: Version::new(13, 1),
            ..key("sm_80")
        };
        let other_form = CacheKey {
            form: "ptx",
            ..key("sm_80")
        };
        let names = [key("sm_80"), key("sm_89"), other_group, other_version, other_form].map(|key| key.file_name());
        let distinct: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
    }

    #[test]
    fn the_number_of_files_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        for index in 0..FILES_MAX + 5 {
            let file = fs::File::create(folder.path().join(format!("old{index}.cubin"))).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        }
        let cache = KernelCache::at(folder.path().to_owned());
        cache.put(&key("sm_80"), b"new").unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), FILES_MAX);
        assert!(cache.get(&key("sm_80")).is_some());
    }

    #[test]
    fn the_users_folder_is_found_by_the_variables() {
        let of = |variables: &[(&str, &str)]| {
            let read = |name: &str| {
                variables
                    .iter()
                    .find(|(known, _)| *known == name)
                    .map(|(_, value)| PathBuf::from(value))
            };
            KernelCache::of_user(read).map(|cache| cache.folder().to_owned())
        };
        assert_eq!(of(&[("HOME", "/home/u")]), Some("/home/u/.cache/baton/kernels".into()));
        assert_eq!(
            of(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "/c")]),
            Some("/c/baton/kernels".into())
        );
        assert_eq!(
            of(&[("HOME", "/home/u"), ("BATON_KERNEL_CACHE", "/k")]),
            Some("/k".into())
        );
        assert_eq!(of(&[("HOME", "relative")]), None);
    }
}
