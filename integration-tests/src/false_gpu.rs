//! The false CUDA driver under whole processes: where it is, what their environment says, and what it has told when they ended.
//!
//! `BATON_FALSE_CUDA` names the folder that `scripts/false-cuda` makes; `scripts/test` sets it.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The driver puts the number of its process for `%p`.
const REPORT: &str = "driver-%p.json";

/// What nodes on the false GPU need of the program that starts them.
#[derive(Clone, Copy, Debug)]
pub struct FalseGpu {
    /// Writes a small model. The builder of such models is for tests and examples, so this library cannot write one itself.
    pub write_model: fn(&Path) -> io::Result<()>,
    /// Where compiled kernels are kept. `None`: where the user's are.
    pub kernel_cache: Option<&'static str>,
}

/// The folder with the false driver, as a path that holds in any working directory.
///
/// # Errors
/// The variable is not set, or names no folder.
pub fn folder() -> Result<String> {
    let given = std::env::var_os("BATON_FALSE_CUDA").map(PathBuf::from);
    let given = given.context("BATON_FALSE_CUDA names the folder that scripts/false-cuda makes")?;
    let folder = given.canonicalize();
    let folder = folder.with_context(|| format!("BATON_FALSE_CUDA names {}", given.display()))?;
    Ok(folder.display().to_string())
}

/// The environment of processes that use the driver. Each writes its report into `reports` when it ends.
///
/// # Errors
/// As [`folder`].
pub fn variables(reports: &Path, kernel_cache: Option<&Path>) -> Result<Vec<(String, String)>> {
    let mut variables = vec![
        ("BATON_CUDA_PATH", folder()?),
        ("FALSE_CUDA_REPORT", reports.join(REPORT).display().to_string()),
    ];
    variables.extend(kernel_cache.map(|folder| ("BATON_KERNEL_CACHE", folder.display().to_string())));
    let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), value));
    Ok(variables.collect())
}

/// What the drivers of processes have told that have ended. One that was killed has told nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    pub launches: u64,
    /// The numbers of the processes.
    pub processes: BTreeSet<u32>,
    /// Findings and leaks, in words.
    pub wrong: Vec<String>,
}

impl Told {
    /// Reads the reports in a folder, which may have other files.
    ///
    /// # Errors
    /// The folder cannot be read, or a report is none.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut told = Self::default();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let Some(process) = process_of(&entry.file_name().to_string_lossy()) else {
                continue;
            };
            let text = std::fs::read_to_string(entry.path())?;
            let added = serde_json::from_str(&text)
                .map_err(anyhow::Error::from)
                .and_then(|report: Value| told.add(process, &report));
            added.with_context(|| format!("the report of the driver of process {process}: {text}"))?;
        }
        Ok(told)
    }

    fn add(&mut self, process: u32, report: &Value) -> Result<()> {
        let (findings, leaks) = (&report["findings"], &report["leaks"]);
        if !findings.as_array().context("it has no findings")?.is_empty() {
            self.wrong
                .push(format!("the driver of process {process} found {findings}"));
        }
        let mut counts = leaks.as_object().context("it has no leaks")?.values();
        if counts.any(|count| count.as_u64() != Some(0)) {
            self.wrong.push(format!("process {process} has not given back {leaks}"));
        }
        self.launches += report["launches"].as_u64().context("it has no launches")?;
        self.processes.insert(process);
        Ok(())
    }
}

/// The process that has written a file of this name.
fn process_of(file: &str) -> Option<u32> {
    let (before, after) = REPORT.split_once("%p")?;
    file.strip_prefix(before)?.strip_suffix(after)?.parse().ok()
}

/// The drivers' reports: no finding, no leak, and kernels ran.
///
/// # Errors
/// What was wrong.
pub fn check(reports: &Path) -> Result<()> {
    let told = Told::read(reports)?;
    ensure!(told.wrong.is_empty(), "{}", told.wrong.join("\n"));
    ensure!(told.launches > 0, "no kernel ran on the false driver");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_and_a_leak_are_told_with_their_process() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("room");
        write("events.jsonl", "no report");
        write("driver-7.json", r#"{"launches":3,"findings":[],"leaks":{"streams":0}}"#);
        assert!(check(folder.path()).is_ok());
        write(
            "driver-8.json",
            r#"{"launches":0,"findings":["a race"],"leaks":{"streams":2}}"#,
        );
        let told = Told::read(folder.path()).expect("reports");
        assert_eq!((told.launches, told.processes.len()), (3, 2));
        assert!(
            told.wrong.len() == 2 && told.wrong.iter().all(|what| what.contains("process 8")),
            "{told:?}"
        );
        assert!(check(folder.path()).is_err());
        write("driver-9.json", "{}");
        assert!(Told::read(folder.path()).is_err(), "a report without its parts");
    }
}
