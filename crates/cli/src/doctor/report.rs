//! What `baton doctor --gpu` found, as text, as JSON, and as a page to paste.

use std::fmt;

use cuda::{DeviceFacts, Libraries, LoaderReport};
use model_files::gguf::hex;
use serde::Serialize;

use super::kernel_group::{GroupEnd, GroupReport, KernelCheck};
use super::step::{Outcome, Row, StepReport};
use super::tables;
use crate::terminal::Terminal;
use crate::version::VERSION;

#[derive(Debug, Serialize)]
pub(super) struct GpuReport {
    version: &'static str,
    /// Null for a local build.
    commit: Option<&'static str>,
    /// Of the kernels' sources and compiler options.
    kernels_sha256: String,
    loader: LoaderReport,
    devices: Vec<DeviceFacts>,
    /// The GPU that was checked.
    device: u32,
    /// All steps, also those that were not run.
    steps: Vec<StepReport>,
    /// Empty if no kernel was run.
    kernels: Vec<GroupReport>,
}

impl GpuReport {
    pub fn new(libraries: &Libraries, device: u32, (kernels, steps): (Vec<GroupReport>, Vec<StepReport>)) -> Self {
        Self {
            version: VERSION,
            commit: coordinator::BUILD_COMMIT,
            kernels_sha256: hex(&cuda_engine::kernels::sources_sha256()),
            loader: libraries.report().clone(),
            devices: DeviceFacts::of_all(libraries),
            device,
            steps,
            kernels,
        }
    }

    pub fn steps(&self) -> &[StepReport] {
        &self.steps
    }

    /// A page in Markdown, with everything as JSON at its end.
    pub fn page(&self) -> serde_json::Result<String> {
        let json = serde_json::to_string_pretty(self)?;
        Ok(format!(
            "# baton doctor --gpu\n\n```text\n{self}```\n\n<details><summary>JSON</summary>\n\n```json\n{json}\n```\n\n</details>\n"
        ))
    }

    /// What follows for serving, and what was wrong besides kernels.
    fn verdict(&self) -> String {
        let wrong: Vec<String> = self.steps.iter().filter_map(wrong_step).collect();
        let mut lines = vec![self.verdict_on_kernels(wrong.is_empty())];
        lines.extend(wrong);
        lines.join("\n")
    }

    fn verdict_on_kernels(&self, are_other_steps_good: bool) -> String {
        let wrong: Vec<&str> = self.wrong().map(|check| check.kernel.as_str()).collect();
        let not_run = self.kernels.iter().filter(|group| group.checks().is_empty()).count();
        match () {
            () if self.kernels.is_empty() && self.loader.is_ready() => {
                "No kernel was run. The libraries that a GPU engine needs are here.".to_owned()
            }
            () if self.kernels.is_empty() => {
                "Not run: this machine has no GPU, or lacks what the first lines name. baton serves on the CPU."
                    .to_owned()
            }
            () if wrong.is_empty() && not_run == 0 => {
                let checks: usize = self.kernels.iter().map(|group| group.checks().len()).sum();
                let serves = match are_other_steps_good {
                    true => format!(" `--devices cuda:{}` serves on it.", self.device),
                    false => String::new(),
                };
                format!("Every kernel is right on GPU {}: {checks} checks.{serves}", self.device)
            }
            () => format!(
                "GPU {} must not serve: {} wrong checks{}, {not_run} groups that did not end. Please report this page.",
                self.device,
                wrong.len(),
                names(&wrong)
            ),
        }
    }

    fn wrong(&self) -> impl Iterator<Item = &KernelCheck> {
        let checks = self.kernels.iter().flat_map(GroupReport::checks);
        checks.filter(|check| !check.is_right)
    }
}

/// What a wrong step means. Kernels have a verdict of their own.
fn wrong_step(step: &StepReport) -> Option<String> {
    let Outcome::Wrong { why } = &step.outcome else {
        return None;
    };
    let then = match step.step {
        Row::Kernels => return None,
        Row::CudaIpc => "Leave `cuda-ipc` out of `--transports`.",
        Row::Nccl => "Leave `nccl` out of `--transports`.",
        Row::Model | Row::Sanitize => "This GPU must not serve.",
        Row::Machine => "Its times could not be taken.",
    };
    let why = why.replace('\n', " ");
    Some(format!(
        "{} is wrong: {why}. {then} Please report this page.",
        step.step
    ))
}

/// Each name once, in brackets.
fn names(kernels: &[&str]) -> String {
    let once: std::collections::BTreeSet<&&str> = kernels.iter().collect();
    let once: Vec<&str> = once.into_iter().copied().collect();
    match once.as_slice() {
        [] => String::new(),
        once => format!(" ({})", once.join(", ")),
    }
}

impl fmt::Display for GpuReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let commit = self.commit.unwrap_or("local build");
        writeln!(
            f,
            "baton {} ({commit}), kernels {}",
            self.version,
            &self.kernels_sha256[..12]
        )?;
        for device in &self.devices {
            writeln!(f, "GPU {}: {device}", device.ordinal)?;
        }
        write!(f, "{}", self.loader)?;
        let tables = [
            tables::steps(&self.steps),
            tables::kernels(&self.kernels),
            tables::figures(&self.steps),
            tables::checks(&self.steps),
        ];
        for table in tables.iter().filter(|table| !table.is_empty()) {
            write!(f, "\n{}", table.render(Terminal::plain()))?;
        }
        writeln!(f)?;
        for group in &self.kernels {
            write_trouble(f, group)?;
        }
        for check in self.wrong() {
            let KernelCheck {
                kernel,
                shape,
                worst_index,
                ..
            } = check;
            let error = tables::error(check.largest_error);
            writeln!(
                f,
                "{kernel} is wrong: {shape}: value {worst_index}, largest error {error}"
            )?;
        }
        writeln!(f, "{}", self.verdict())
    }
}

fn write_trouble(f: &mut fmt::Formatter<'_>, group: &GroupReport) -> fmt::Result {
    let name = group.group;
    match &group.end {
        GroupEnd::Checked { .. } => Ok(()),
        GroupEnd::Broken { said } => writeln!(f, "group {name} could not run: {said}"),
        GroupEnd::TimedOut { seconds } => {
            writeln!(f, "group {name} had not ended after {seconds} s and was killed")
        }
    }
}
