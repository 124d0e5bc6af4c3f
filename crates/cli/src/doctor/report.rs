//! What `baton doctor --gpu` found, as text, as JSON, and as a page to paste.

use std::collections::BTreeMap;
use std::fmt;

use cuda::{DeviceFacts, Libraries, LoaderReport};
use model_files::gguf::hex;
use serde::Serialize;

use super::kernel_group::{GroupEnd, GroupReport, KernelCheck};
use crate::observe::table::{Cell, Table};
use crate::terminal::{Paint, Terminal};
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
    /// The GPU whose kernels were checked.
    device: u32,
    /// Empty if no kernel was run.
    kernels: Vec<GroupReport>,
}

impl GpuReport {
    pub fn new(libraries: &Libraries, device: u32, kernels: Vec<GroupReport>) -> Self {
        Self {
            version: VERSION,
            commit: coordinator::BUILD_COMMIT,
            kernels_sha256: hex(&cuda_engine::kernels::sources_sha256()),
            loader: libraries.report().clone(),
            devices: DeviceFacts::of_all(libraries),
            device,
            kernels,
        }
    }

    /// A page in Markdown, with everything as JSON at its end.
    pub fn page(&self) -> serde_json::Result<String> {
        let json = serde_json::to_string_pretty(self)?;
        Ok(format!(
            "# baton doctor --gpu\n\n```text\n{self}```\n\n<details><summary>JSON</summary>\n\n```json\n{json}\n```\n\n</details>\n"
        ))
    }

    fn verdict(&self) -> String {
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
            () if wrong.is_empty() && not_run == 0 => format!(
                "Every kernel is right on GPU {}: {} checks. `--devices cuda:{0}` serves on it.",
                self.device,
                self.kernels.iter().map(|group| group.checks().len()).sum::<usize>()
            ),
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
        if !self.kernels.is_empty() {
            writeln!(f, "\n{}", kernel_table(&self.kernels).render(Terminal::plain()))?;
        }
        for group in &self.kernels {
            match &group.end {
                GroupEnd::Checked { .. } => {}
                GroupEnd::Broken { said } => writeln!(f, "group {} could not run: {said}", group.group)?,
                GroupEnd::TimedOut { seconds } => {
                    writeln!(
                        f,
                        "group {} had not ended after {seconds} s and was killed",
                        group.group
                    )?;
                }
            }
        }
        for check in self.wrong() {
            let KernelCheck {
                kernel,
                shape,
                worst_index,
                ..
            } = check;
            let error = figure(check.largest_error);
            writeln!(
                f,
                "{kernel} is wrong: {shape}: value {worst_index}, largest error {error}"
            )?;
        }
        writeln!(f, "{}", self.verdict())
    }
}

/// One row for each kernel, with its worst figures.
fn kernel_table(groups: &[GroupReport]) -> Table {
    let mut table = Table::new(&["group", "kernel", ">checks", ">largest error", ">NMSE", "verdict"]);
    for group in groups {
        let mut by_kernel: BTreeMap<&str, Vec<&KernelCheck>> = BTreeMap::new();
        for check in group.checks() {
            by_kernel.entry(&check.kernel).or_default().push(check);
        }
        for (kernel, checks) in by_kernel {
            let verdict = match checks.iter().all(|check| check.is_right) {
                true => Cell::new("right").paint(Paint::Good),
                false => Cell::new("WRONG").paint(Paint::Bad),
            };
            let worst = |of: fn(&KernelCheck) -> Option<f64>| {
                let values: Option<Vec<f64>> = checks.iter().map(|check| of(check)).collect();
                Cell::new(figure(values.map(|values| values.into_iter().fold(0.0, f64::max))))
            };
            table.row(vec![
                Cell::new(group.group),
                Cell::new(kernel),
                Cell::new(checks.len().to_string()),
                worst(|check| check.largest_error),
                worst(|check| check.nmse),
                verdict,
            ]);
        }
    }
    table
}

fn figure(value: Option<f64>) -> String {
    match value {
        None => "not a number".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(value) => format!("{value:.1e}"),
    }
}
