//! Replays every committed input. An input that once broke something stays here.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    names.map(|name| name.into_string().expect("a name in UTF-8")).collect()
}

/// The inputs of all targets together stay small: each is in every clone.
const CORPUS_BYTES_MAX: u64 = 400 << 10;

#[test]
fn each_target_has_inputs_and_each_folder_a_target() {
    let targets: BTreeSet<String> = fuzz::TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(names_in(&corpus()), targets);
    let mut bytes = 0;
    for target in &targets {
        let folder = corpus().join(target);
        let inputs = names_in(&folder);
        assert!(!inputs.is_empty(), "{target} has no input");
        let length = |name| fs::metadata(folder.join(name)).expect("an input").len();
        bytes += inputs.iter().map(length).sum::<u64>();
    }
    assert!(bytes <= CORPUS_BYTES_MAX, "{bytes} bytes of inputs");
}

/// In one test, because the memory of an input is counted for the whole process.
#[test]
fn every_input_is_handled() {
    let mut failed = Vec::new();
    for target in fuzz::TARGETS {
        let target = fuzz::open(target.name).expect("it is in the list");
        for name in names_in(&corpus().join(target.name)) {
            let input = fs::read(corpus().join(target.name).join(&name)).expect("an input");
            if catch_unwind(AssertUnwindSafe(|| target.check(&input))).is_err() {
                failed.push(format!("corpus/{}/{name}", target.name));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}
