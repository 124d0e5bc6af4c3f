//! What a search found, for people and for programs.

use std::fmt;

use serde::Serialize;

use super::decision::{Attempt, DriverDecision, ImageRule, LibraryDecision};
use super::search::Origin;

#[derive(Clone, Debug, Serialize)]
pub struct LoaderReport {
    pub driver: DriverDecision,
    pub nvrtc: LibraryDecision,
    pub cublaslt: LibraryDecision,
    pub nccl: LibraryDecision,
    /// `None` where the driver or the compiler is missing.
    pub image_rule: Option<ImageRule>,
    /// The value of `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visible_devices: Option<String>,
    /// Every place that was tried, in order.
    pub attempts: Vec<Attempt>,
}

impl LoaderReport {
    /// There is a GPU, and kernels can be compiled for it. cuBLASLt and NCCL are optional.
    pub fn is_ready(&self) -> bool {
        let has_driver = matches!(self.driver, DriverDecision::Ready { .. });
        has_driver && matches!(self.nvrtc, LibraryDecision::Ready { .. })
    }
}

impl Origin {
    fn text(self) -> &'static str {
        match self {
            Origin::Explicit => "named by the user",
            Origin::DynamicLinker => "dynamic linker",
            Origin::PythonPackage => "Python package",
            Origin::Toolkit => "toolkit",
            Origin::Distribution => "distribution",
            Origin::SameFolder => "same folder",
        }
    }
}

/// Two tables: what was decided, and every place.
impl fmt::Display for LoaderReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "driver", &self.driver)?;
        line(f, "NVRTC", &self.nvrtc)?;
        line(f, "cuBLASLt", &self.cublaslt)?;
        line(f, "NCCL", &self.nccl)?;
        match self.image_rule {
            Some(ImageRule::CubinAndPtx) => line(f, "images", &"machine code and PTX of this NVRTC run")?,
            Some(ImageRule::CubinOnly) => line(f, "images", &"only machine code of this NVRTC runs")?,
            Some(ImageRule::Neither) | None => {}
        }
        if let Some(visible) = &self.visible_devices {
            line(f, "visible", &format_args!("CUDA_VISIBLE_DEVICES={visible}"))?;
        }
        writeln!(f)?;
        for attempt in &self.attempts {
            let (path, outcome) = (&attempt.path, &attempt.outcome);
            let origin = attempt.origin.text();
            let file = attempt.file.as_ref().filter(|file| *file != path);
            let file = file.map(|file| format!(" ({file})")).unwrap_or_default();
            let text = format!("{origin:18} {path}: {outcome}{file}");
            line(f, attempt.component.name(), &text)?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, text: &dyn fmt::Display) -> fmt::Result {
    writeln!(f, "{name:15} {text}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::{Component, Libraries, Outcome, Search, Version};

    fn report() -> LoaderReport {
        LoaderReport {
            driver: DriverDecision::NoDevice,
            nvrtc: LibraryDecision::Ready {
                version: Version::new(13, 0),
            },
            cublaslt: LibraryDecision::NotFound,
            nccl: LibraryDecision::NotFound,
            image_rule: None,
            visible_devices: Some("0".to_owned()),
            attempts: vec![Attempt {
                component: Component::Nvrtc,
                origin: Origin::PythonPackage,
                path: "/venv/libnvrtc.so.13".to_owned(),
                file: None,
                outcome: Outcome::Used {
                    version: Some(Version::new(13, 0)),
                },
            }],
        }
    }

    #[test]
    fn a_report_names_each_decision_and_each_place() {
        let text = report().to_string();
        for part in [
            "sees no GPU",
            "13.0",
            "CUDA_VISIBLE_DEVICES=0",
            "/venv/libnvrtc.so.13",
            "Python package",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn a_report_is_data_for_programs() {
        let value = serde_json::to_value(report()).expect("it is plain data");
        assert_eq!(value["driver"]["decision"], "no_device");
        assert_eq!(value["nvrtc"]["version"], "13.0");
        assert_eq!(value["attempts"][0]["outcome"]["used"]["version"], "13.0");
    }

    /// What this machine has does not matter: there is an answer, and no panic.
    #[test]
    fn a_search_in_an_empty_folder_ends_with_a_report() {
        let folder = tempfile::tempdir().expect("a folder");
        let search = Search {
            explicit_folders: vec![folder.path().to_owned()],
            ..Search::default()
        };
        let libraries = Libraries::find(&search);
        assert!(!libraries.report().attempts.is_empty());
    }
}
