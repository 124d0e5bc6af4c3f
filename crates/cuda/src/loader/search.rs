//! Where libraries are searched, in order. Pure but for [`Search::from_environment`].

use std::path::{Path, PathBuf};

use serde::Serialize;

/// Folders to search first, separated like those of `PATH`.
pub const PATH_VARIABLE: &str = "BATON_CUDA_PATH";
const VISIBLE_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
/// Where toolkits from NVIDIA's installers are: `cuda`, `cuda-13`, `cuda-13.0`.
const TOOLKITS_FOLDER: &str = "/usr/local";
/// Where Debian and Ubuntu have their libraries.
const DISTRIBUTION_FOLDERS: [&str; 3] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"];
/// A folder with more toolkits is no machine that somebody looks after: the rest is not searched.
const TOOLKITS_MAX: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Component {
    Driver,
    Nvrtc,
    NvrtcBuiltins,
    CublasLt,
    Nccl,
}

impl Component {
    pub(super) fn name(self) -> &'static str {
        match self {
            Component::Driver => "driver",
            Component::Nvrtc => "NVRTC",
            Component::NvrtcBuiltins => "NVRTC builtins",
            Component::CublasLt => "cuBLASLt",
            Component::Nccl => "NCCL",
        }
    }

    /// As NVIDIA's packages name the files. CUDA 13 before CUDA 12.
    fn files(self) -> &'static [&'static str] {
        match self {
            Component::Driver => &["libcuda.so.1"],
            Component::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            // Its name has the version of the NVRTC that was found.
            Component::NvrtcBuiltins => &[],
            Component::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
            Component::Nccl => &["libnccl.so.2"],
        }
    }

    /// What a folder that the user names may have besides, for libraries that were built here.
    fn plain_file(self) -> Option<&'static str> {
        match self {
            Component::Driver => Some("libcuda.so"),
            Component::Nvrtc => Some("libnvrtc.so"),
            Component::NvrtcBuiltins => None,
            Component::CublasLt => Some("libcublasLt.so"),
            Component::Nccl => Some("libnccl.so"),
        }
    }

    /// Below a Python site folder (layouts of NVIDIA's wheels of CUDA 13, then 12). No wheel has the driver.
    fn wheel_folders(self) -> &'static [&'static str] {
        match self {
            Component::Driver => &[],
            Component::Nvrtc | Component::NvrtcBuiltins => &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
            Component::CublasLt => &["nvidia/cu13/lib", "nvidia/cublas/lib"],
            Component::Nccl => &["nvidia/nccl/lib"],
        }
    }
}

/// Why a place is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    Explicit,
    /// A name without a folder: `LD_LIBRARY_PATH` and the system's cache of libraries decide.
    DynamicLinker,
    PythonPackage,
    Toolkit,
    Distribution,
    /// The folder in which a library that belongs to it was found.
    SameFolder,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub origin: Origin,
    pub path: String,
}

/// What decides where libraries are looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Folders that the user named: searched first, each with its `lib64` and `lib`.
    pub explicit_folders: Vec<PathBuf>,
    /// Python site folders, in which `pip` puts NVIDIA's wheels.
    pub site_folders: Vec<PathBuf>,
    /// Toolkits, the newest first.
    pub toolkit_folders: Vec<PathBuf>,
    /// The value of `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visible_devices: Option<String>,
}

impl Search {
    /// Reads the environment and the names in `/usr/local`. It opens no library.
    pub fn from_environment(site_folders: Vec<PathBuf>) -> Self {
        let explicit = std::env::var_os(PATH_VARIABLE).unwrap_or_default();
        let not_empty = |folder: &PathBuf| !folder.as_os_str().is_empty();
        Self {
            explicit_folders: std::env::split_paths(&explicit).filter(not_empty).collect(),
            site_folders,
            toolkit_folders: toolkits(Path::new(TOOLKITS_FOLDER)),
            visible_devices: std::env::var_os(VISIBLE_VARIABLE).map(|value| value.to_string_lossy().into_owned()),
        }
    }

    /// Every place for a component, in the order in which they are tried.
    pub fn candidates(&self, component: Component) -> Vec<Candidate> {
        let mut found = Vec::new();
        let mut add = |origin, path: String| found.push(Candidate { origin, path });
        for folder in &self.explicit_folders {
            for below in ["", "lib64", "lib"] {
                for file in component.files().iter().copied().chain(component.plain_file()) {
                    add(Origin::Explicit, text(&folder.join(below).join(file)));
                }
            }
        }
        for file in component.files() {
            add(Origin::DynamicLinker, (*file).to_owned());
        }
        let site = self.site_folders.iter().flat_map(|site| {
            let below = component.wheel_folders().iter();
            below.map(move |folder| (Origin::PythonPackage, site.join(folder)))
        });
        let has_driver = component == Component::Driver;
        let toolkits = self.toolkit_folders.iter().filter(|_| !has_driver);
        let toolkit = toolkits.map(|toolkit| (Origin::Toolkit, toolkit.join("lib64")));
        let system = DISTRIBUTION_FOLDERS.iter();
        let system = system.map(|folder| (Origin::Distribution, PathBuf::from(folder)));
        for (origin, folder) in site.chain(toolkit).chain(system) {
            for file in component.files() {
                add(origin, text(&folder.join(file)));
            }
        }
        found
    }
}

/// A folder whose name is no text does not exist for the dynamic linker either.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// `cuda` first, which is what the machine's owner chose, then the versions downwards.
fn toolkits(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut named: Vec<(Vec<u32>, PathBuf)> = entries
        .filter_map(|entry| Some((toolkit_version(entry.file_name().to_str()?)?, entry.path())))
        .collect();
    named.sort_by(|one, other| other.cmp(one));
    named.truncate(TOOLKITS_MAX);
    named.into_iter().map(|(_, path)| path).collect()
}

/// `None` for a folder that is not a toolkit's. The folder without a version comes before all others.
fn toolkit_version(name: &str) -> Option<Vec<u32>> {
    match name.strip_prefix("cuda")? {
        "" => Some(vec![u32::MAX]),
        version => version
            .strip_prefix('-')?
            .split('.')
            .map(|part| part.parse().ok())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(search: &Search, component: Component) -> Vec<String> {
        search.candidates(component).into_iter().map(|one| one.path).collect()
    }

    fn search() -> Search {
        Search {
            explicit_folders: vec!["/opt/x".into()],
            site_folders: vec!["/venv/site".into()],
            toolkit_folders: vec!["/usr/local/cuda".into()],
            visible_devices: None,
        }
    }

    #[test]
    fn the_places_for_the_compiler_come_in_the_stated_order() {
        let places = paths(&search(), Component::Nvrtc);
        let at = |path: &str| places.iter().position(|one| one == path).expect("it is searched");
        let order = [
            "/opt/x/libnvrtc.so.13",
            "/opt/x/lib64/libnvrtc.so.12",
            "/opt/x/lib/libnvrtc.so",
            "libnvrtc.so.13",
            "libnvrtc.so.12",
            "/venv/site/nvidia/cu13/lib/libnvrtc.so.13",
            "/venv/site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "/usr/local/cuda/lib64/libnvrtc.so.13",
            "/usr/lib/x86_64-linux-gnu/libnvrtc.so.13",
        ];
        assert!(order.is_sorted_by_key(|path| at(path)), "{places:?}");
    }

    #[test]
    fn the_driver_is_searched_in_no_package_and_no_toolkit() {
        let places = paths(&search(), Component::Driver);
        assert!(places.contains(&"/opt/x/libcuda.so".to_owned()));
        assert!(places.contains(&"libcuda.so.1".to_owned()));
        assert!(
            !places
                .iter()
                .any(|path| path.contains("site") || path.contains("local"))
        );
    }

    #[test]
    fn nccl_is_searched_by_the_only_name_that_its_packages_have() {
        let places = paths(&Search::default(), Component::Nccl);
        assert_eq!(places[0], "libnccl.so.2");
    }

    #[test]
    fn the_toolkit_without_a_version_comes_first_then_the_newest() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["cuda-12.4", "cuda", "cuda-13", "cuda-12.10", "share", "cuda-samples"] {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        let found = toolkits(folder.path());
        let names: Vec<_> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        assert_eq!(names, ["cuda", "cuda-13", "cuda-12.10", "cuda-12.4"]);
    }

    #[test]
    fn a_folder_of_toolkits_that_is_not_there_is_no_error() {
        assert!(toolkits(Path::new("/no/such/folder")).is_empty());
    }
}
