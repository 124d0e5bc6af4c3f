//! The gate in front of an engine: the first time on a GPU, with its driver and these kernels, one shape of each kernel is
//! compared with the host. A wrong kernel refuses to serve: wrong text is worse than no engine.
//!
//! A pass is kept in the user's cache folder. A failure is not: the next opening looks again, which takes two seconds.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cuda::{Device, DeviceFacts};
use model_files::gguf::hex;
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::kernels::cache::KernelCache;
use crate::kernels::check::{Bench, Extent, Group, Outcome};
use crate::kernels::{AttentionShape, KernelError, KernelId, Target, sources_sha256};

/// The numbers that kernels are checked with.
const SEED: u64 = 1;
/// First line of a kept verdict. It changes with what is checked.
const PASSED: &str = "baton kernels checked 1";

/// Why the engine does not serve.
#[derive(Debug, Error)]
pub enum GateError {
    #[error(
        "kernel {kernel:?} is wrong on {device}: {shape} differs from the host by {largest_error:e} at value {worst_index}; \
         wrong kernels: {wrong:?}; nothing is served. Run `baton doctor --gpu` and report what it prints, or use `--device cpu`"
    )]
    Wrong {
        kernel: KernelId,
        device: String,
        shape: String,
        largest_error: f64,
        worst_index: usize,
        /// Every kernel that is wrong, each once.
        wrong: Vec<KernelId>,
    },
    #[error(
        "the kernels of group `{group}` cannot be checked on {device}: {cause}; nothing is served. Run `baton doctor --gpu` and \
         report what it prints, or use `--device cpu`"
    )]
    Broken {
        group: &'static str,
        device: String,
        cause: Box<KernelError>,
    },
}

/// How an opening passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateVerdict {
    /// The kernels were checked now.
    Checked,
    /// They were checked at an earlier opening.
    Kept,
}

/// Passes, or says which kernel is wrong. A verdict that cannot be kept is not an error.
pub(crate) fn pass(
    device: &Device,
    target: &Target<'_>,
    shape: AttentionShape,
    cache: Option<&KernelCache>,
) -> Result<GateVerdict, GateError> {
    let facts = device.facts();
    let key = Key::of(facts, target, shape);
    let file = cache.map(|cache| folder_of(cache.folder()).join(key.file_name()));
    if file.as_deref().is_some_and(|file| is_kept(file, &key)) {
        return Ok(GateVerdict::Kept);
    }
    check(device, target, shape)?;
    if let Some(file) = &file
        && let Err(error) = keep(file, &key)
    {
        tracing::warn!(%error, file = %file.display(), "that the kernels are right is not kept; the next start checks them again");
    }
    Ok(GateVerdict::Checked)
}

fn check(device: &Device, target: &Target<'_>, shape: AttentionShape) -> Result<(), GateError> {
    let name = || device.facts().name.clone();
    let broken = |group: Group| {
        move |cause| GateError::Broken {
            group: group.name(),
            device: name(),
            cause: Box::new(cause),
        }
    };
    let mut bench = Bench::new(device, target).map_err(broken(Group::Rows))?;
    let mut outcomes = Vec::new();
    for group in Group::ALL {
        outcomes.extend(
            group
                .run(&mut bench, Extent::Gate(shape), SEED)
                .map_err(broken(group))?,
        );
    }
    judge(&outcomes, name)
}

fn judge(outcomes: &[Outcome], device: impl FnOnce() -> String) -> Result<(), GateError> {
    let mut wrong = outcomes.iter().filter(|outcome| !outcome.is_right);
    let Some(first) = wrong.next() else { return Ok(()) };
    let mut kernels = vec![first.kernel];
    for outcome in wrong {
        if !kernels.contains(&outcome.kernel) {
            kernels.push(outcome.kernel);
        }
    }
    Err(GateError::Wrong {
        kernel: first.kernel,
        device: device(),
        shape: first.shape.clone(),
        largest_error: first.largest_error,
        worst_index: first.worst_index,
        wrong: kernels,
    })
}

/// Everything that a verdict holds for, one fact a line.
struct Key(String);

impl Key {
    fn of(facts: &DeviceFacts, target: &Target<'_>, shape: AttentionShape) -> Self {
        let release = facts.driver_release.as_deref().unwrap_or("unknown");
        let cuda = facts.driver_cuda.map(|version| version.to_string()).unwrap_or_default();
        let nvrtc = target.nvrtc_version;
        let arch = target.arch.to_string();
        let form = target.form;
        let sources = hex(&sources_sha256());
        Self(format!(
            "{PASSED}\n{}\n{release}\n{cuda}\n{sources}\n{nvrtc}\n{arch}\n{form:?}\n{shape:?}\n",
            facts.uuid
        ))
    }

    fn file_name(&self) -> String {
        let digest: [u8; 32] = Sha256::digest(self.0.as_bytes()).into();
        hex(&digest)
    }
}

/// Beside the compiled kernels, whose folder has a limit of files.
fn folder_of(kernels: &Path) -> PathBuf {
    let mut name = kernels.file_name().unwrap_or_default().to_owned();
    name.push("-checked");
    kernels.with_file_name(name)
}

fn is_kept(file: &Path, key: &Key) -> bool {
    fs::read(file).is_ok_and(|content| content == key.0.as_bytes())
}

/// A file appears under its name only when it is whole.
fn keep(file: &Path, key: &Key) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let unfinished = folder.join(format!("{}.part", std::process::id()));
    fs::write(&unfinished, &key.0)?;
    fs::rename(&unfinished, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::check::Limit;

    fn outcome(kernel: KernelId, is_right: bool) -> Outcome {
        Outcome {
            kernel,
            shape: "3 x 8".to_owned(),
            largest_error: 0.5,
            nmse: 0.1,
            worst_index: 7,
            limit: Limit {
                absolute: 0.0,
                relative: 0.0,
                nmse: 0.0,
            },
            is_right,
        }
    }

    #[test]
    fn each_wrong_kernel_is_named_once() {
        let right = [outcome(KernelId::Embed, true)];
        assert!(judge(&right, String::new).is_ok());
        let outcomes = [
            outcome(KernelId::Embed, true),
            outcome(KernelId::RmsNorm, false),
            outcome(KernelId::RmsNorm, false),
            outcome(KernelId::GateSilu, false),
        ];
        let error = judge(&outcomes, || "a GPU".to_owned()).unwrap_err();
        match &error {
            GateError::Wrong { kernel, wrong, .. } => {
                assert_eq!(*kernel, KernelId::RmsNorm);
                assert_eq!(*wrong, [KernelId::RmsNorm, KernelId::GateSilu]);
            }
            other => panic!("{other}"),
        }
        assert!(error.to_string().contains("RmsNorm"));
    }

    #[test]
    fn a_pass_is_kept_for_its_key_only() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = folder_of(&scratch.path().join("kernels"));
        assert_eq!(folder, scratch.path().join("kernels-checked"));
        let (key, other) = (Key("a".to_owned()), Key("b".to_owned()));
        let file = folder.join(key.file_name());
        assert!(!is_kept(&file, &key));
        keep(&file, &key).unwrap();
        assert!(is_kept(&file, &key));
        assert!(!is_kept(&file, &other), "a file under a wrong name says nothing");
        assert_ne!(key.file_name(), other.file_name());
    }
}
