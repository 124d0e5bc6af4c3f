//! NVIDIA's compute-sanitizer over the kernels, each with one small shape. Not run on hardware.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use cuda_engine::kernels::ImageForm;
use cuda_engine::kernels::check::Group;

use super::child::{self, Ended};
use super::kernel_group;
use super::step::{Check, Row, StepReport};
use crate::terminal::say;

const PROGRAM: &str = "compute-sanitizer";
/// Where NVIDIA's wheels have their programs: `nvidia/cu13/bin`, `nvidia/cuda_sanitizer_api/bin`.
const WHEELS: &str = "nvidia";
const FOLDERS_DEEP_MAX: usize = 3;
/// Memory that is not the kernel's, races in shared memory, wrong use of barriers.
const TOOLS: [&str; 3] = ["memcheck", "racecheck", "synccheck"];
/// The status of the program when it found something. No check of ours ends with it.
const FOUND: &str = "9";
/// Kernels run some hundred times slower than without it.
const LIMIT: Duration = Duration::from_secs(600);
const NOT_ASKED: &str = "only with --sanitize";
const FALSE_DRIVER: &str =
    "not applicable: this is the false driver of the tests, which compute-sanitizer does not know";

/// What the step has to work with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sanitizer {
    NotRun(&'static str),
    Program(PathBuf),
}

impl Sanitizer {
    /// Looks for the program if it was asked for.
    ///
    /// # Errors
    /// It is not there.
    pub fn find(is_asked: bool, form: ImageForm) -> anyhow::Result<Self> {
        if !is_asked {
            return Ok(Self::NotRun(NOT_ASKED));
        }
        if form == ImageForm::Ptx {
            return Ok(Self::NotRun(FALSE_DRIVER));
        }
        let on_path = std::env::var_os("PATH").and_then(|folders| in_folders(&folders));
        let by_pip = || {
            let environment = std::env::var_os("VIRTUAL_ENV")?;
            in_environment(Path::new(&environment))
        };
        let found = on_path.or_else(by_pip);
        let found = found.context("compute-sanitizer is not found: pip install nvidia-cuda-sanitizer-api")?;
        Ok(Self::Program(found))
    }

    /// Runs every group of kernels under every tool.
    pub fn check(&self, device: u32, seed: u64) -> StepReport {
        let program = match self {
            Self::NotRun(why) => return StepReport::not_run(Row::Sanitize, *why),
            Self::Program(program) => program,
        };
        let begun = Instant::now();
        let mut checks = Vec::new();
        for tool in TOOLS {
            for group in Group::ALL {
                say!("kernels of group {} under {tool} ...", group.name());
                let ended = command(program, tool, kernel_group::words(group, device, seed));
                let ended = ended.and_then(|command| child::run(command, LIMIT));
                checks.push(judge(format!("{tool}, group {}", group.name()), ended));
            }
        }
        StepReport {
            seconds: begun.elapsed().as_secs_f64(),
            ..StepReport::of_checks(Row::Sanitize, checks)
        }
    }
}

fn command(program: &Path, tool: &str, words: [String; 3]) -> anyhow::Result<Command> {
    let own = child::this_program()?;
    let mut command = Command::new(program);
    command.args(["--tool", tool, "--error-exitcode", FOUND]);
    command.arg(own.get_program()).args(own.get_args());
    command.args(words).arg("--small");
    Ok(command)
}

/// The last summary of the tool. A run without one has looked at nothing.
fn judge(what: String, ended: anyhow::Result<Ended>) -> Check {
    let (is_right, said) = match ended {
        Err(error) => (false, format!("{error:#}; is the file executable (chmod +x)?")),
        Ok(Ended { status: None, .. }) => (false, format!("it had not ended after {} s", LIMIT.as_secs())),
        Ok(Ended {
            status: Some(status),
            stdout,
            stderr,
            ..
        }) => match summary(&stdout).or_else(|| summary(&stderr)) {
            Some(summary) => (status.success() && is_clean(summary), summary.to_owned()),
            None => (false, format!("it told no summary; {status}: {stderr}")),
        },
    };
    Check { what, is_right, said }
}

/// `========= ERROR SUMMARY: 0 errors`, `========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)`
/// (Compute Sanitizer documentation).
fn summary(output: &str) -> Option<&str> {
    let lines = output.lines().rev();
    let mut summaries = lines.filter(|line| line.contains("SUMMARY:"));
    summaries.next().map(|line| line.trim_start_matches('=').trim())
}

fn is_clean(summary: &str) -> bool {
    let after = summary.split("SUMMARY:").nth(1);
    after.is_some_and(|after| after.trim_start().starts_with("0 "))
}

fn in_folders(folders: &OsStr) -> Option<PathBuf> {
    let mut programs = std::env::split_paths(folders).map(|folder| folder.join(PROGRAM));
    programs.find(|program| program.is_file())
}

/// `lib/python3.12/site-packages/nvidia/.../bin/compute-sanitizer`.
fn in_environment(environment: &Path) -> Option<PathBuf> {
    let pythons = folders_in(&environment.join("lib"));
    let mut wheels = pythons.iter().map(|python| python.join("site-packages").join(WHEELS));
    wheels.find_map(|folder| below(&folder, FOLDERS_DEEP_MAX))
}

fn below(folder: &Path, deep: usize) -> Option<PathBuf> {
    let program = folder.join("bin").join(PROGRAM);
    if program.is_file() {
        return Some(program);
    }
    let deeper = deep.checked_sub(1)?;
    folders_in(folder).iter().find_map(|inner| below(inner, deeper))
}

/// In the order of their names.
fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_of_a_wheel_is_found() {
        let environment = tempfile::tempdir().expect("a folder");
        assert_eq!(in_environment(environment.path()), None);
        let bin = environment.path().join("lib/python3.12/site-packages/nvidia/cu13/bin");
        std::fs::create_dir_all(&bin).expect("folders");
        assert_eq!(in_environment(environment.path()), None);
        std::fs::write(bin.join(PROGRAM), "").expect("a file");
        assert_eq!(in_environment(environment.path()), Some(bin.join(PROGRAM)));
        assert_eq!(in_folders(bin.as_os_str()), Some(bin.join(PROGRAM)));
    }

    #[test]
    fn the_last_summary_counts() {
        let said = "========= COMPUTE-SANITIZER\n[]\n========= ERROR SUMMARY: 0 errors\n";
        assert_eq!(summary(said), Some("ERROR SUMMARY: 0 errors"));
        assert!(is_clean("ERROR SUMMARY: 0 errors"));
        assert!(is_clean(
            "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
        ));
        assert!(!is_clean("ERROR SUMMARY: 10 errors"));
        assert!(!is_clean("ERROR SUMMARY: 1 error"));
        assert_eq!(summary("no driver"), None);
    }

    #[test]
    fn it_runs_only_if_it_is_asked_for_and_not_on_the_false_driver() {
        let not_asked = Sanitizer::find(false, ImageForm::Cubin).expect("an answer");
        assert_eq!(not_asked, Sanitizer::NotRun(NOT_ASKED));
        let on_false = Sanitizer::find(true, ImageForm::Ptx).expect("an answer");
        assert_eq!(on_false, Sanitizer::NotRun(FALSE_DRIVER));
        assert!(!on_false.check(0, 1).is_good());
    }
}
