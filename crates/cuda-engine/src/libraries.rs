//! NVIDIA's libraries, searched once for this process. Nothing is searched before somebody asks for a device.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use cuda::{Libraries, Search};

/// What was found stays loaded for the rest of the process, so a second engine gets the same.
static FOUND: OnceLock<Arc<Libraries>> = OnceLock::new();

/// Searches at the first call.
pub fn libraries() -> Arc<Libraries> {
    let search = || {
        let environment = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
        let folders = environment.map(|folder| site_folders(&folder)).unwrap_or_default();
        Arc::new(Libraries::find(&Search::from_environment(folders)))
    };
    FOUND.get_or_init(search).clone()
}

/// Where `pip` puts packages in a virtual environment: `lib/python3.12/site-packages`.
fn site_folders(environment: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(environment.join("lib"))
        .into_iter()
        .flatten()
        .flatten();
    let pythons = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("python"));
    let mut folders: Vec<PathBuf> = pythons.map(|entry| entry.path().join("site-packages")).collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packages_of_a_virtual_environment_are_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["lib/python3.12/site-packages", "lib/other"] {
            std::fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        assert_eq!(
            site_folders(folder.path()),
            [folder.path().join("lib/python3.12/site-packages")]
        );
        assert!(site_folders(&folder.path().join("missing")).is_empty());
    }
}
