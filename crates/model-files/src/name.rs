//! What a model is called: the name comes from its file or folder.

use std::path::Path;

/// `Llama-3-8B.Q4_K_M` for `Llama-3-8B.Q4_K_M.gguf` and for the first part of a split file,
/// `Llama-3-8B.Q4_K_M-00001-of-00003.gguf`. A folder gives its own name. A snapshot in the cache of the Hugging Face hub,
/// `models--org--name/snapshots/COMMIT`, gives `org/name`.
pub fn of(path: &Path) -> String {
    if !path.is_dir() {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        return without_part(&stem).unwrap_or(&stem).to_owned();
    }
    // A path such as `.` or `..` has no name of its own.
    let whole = path.canonicalize();
    let path = whole.as_deref().unwrap_or(path);
    repository(path).unwrap_or_else(|| path.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

/// The stem without `-00001-of-00003`.
fn without_part(stem: &str) -> Option<&str> {
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (name, part) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (!name.is_empty() && is_number(part) && is_number(total)).then_some(name)
}

/// The repository of a snapshot folder in the hub's cache.
fn repository(snapshot: &Path) -> Option<String> {
    let snapshots = snapshot.parent()?;
    if snapshots.file_name()? != "snapshots" {
        return None;
    }
    let folder = snapshots.parent()?.file_name()?.to_str()?;
    Some(folder.strip_prefix("models--")?.replacen("--", "/", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gives_its_stem_without_the_number_of_the_part() {
        let name = |path: &str| of(Path::new(path));
        assert_eq!(name("/models/Tiny-1B.Q4_1.gguf"), "Tiny-1B.Q4_1");
        assert_eq!(name("big-00001-of-00003.gguf"), "big");
        for whole in [
            "big-1-of-3",
            "00001-of-00003",
            "-00001-of-00003",
            "of-the-people",
            "a-0000x-of-00003",
        ] {
            assert_eq!(name(&format!("{whole}.gguf")), whole);
        }
        assert_eq!(name("model"), "model");
    }

    #[test]
    fn a_folder_gives_its_name_and_a_snapshot_that_of_its_repository() {
        let root = tempfile::tempdir().unwrap();
        let name = |path: &str| {
            let folder = root.path().join(path);
            std::fs::create_dir_all(&folder).unwrap();
            of(&folder)
        };
        assert_eq!(name("Tiny-1B.v2"), "Tiny-1B.v2");
        assert_eq!(name("models--org--my-name/snapshots/0a1b"), "org/my-name");
        assert_eq!(name("models--org--my-name/snapshots/0a1b/."), "org/my-name");
        assert_eq!(name("elsewhere/snapshots/0a1b"), "0a1b");
        assert_eq!(name("Tiny-1B.v2/inner/.."), "Tiny-1B.v2");
    }
}
