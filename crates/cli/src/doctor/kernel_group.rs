//! One group of kernel checks, in a process of its own: after an illegal address a process can use its GPU no more.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use cuda::Device;
use cuda_engine::kernels::Target;
use cuda_engine::kernels::cache::KernelCache;
use cuda_engine::kernels::check::{Bench, Extent, Group, Outcome};
use serde::{Deserialize, Serialize};

use crate::exit::Exit;

/// A group takes a second on a GPU, and a minute on the false driver of the tests. A kernel that never ends holds its process,
/// which is killed then.
const GROUP_TIMEOUT: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What one check found, as the two processes tell it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct KernelCheck {
    pub kernel: String,
    pub shape: String,
    /// `None` if a result is no number.
    pub largest_error: Option<f64>,
    /// Sum of the squared errors by that of the squared results. `None` as above.
    pub nmse: Option<f64>,
    pub worst_index: usize,
    pub is_right: bool,
}

impl From<Outcome> for KernelCheck {
    fn from(outcome: Outcome) -> Self {
        let finite = |value: f64| value.is_finite().then_some(value);
        Self {
            kernel: format!("{:?}", outcome.kernel),
            shape: outcome.shape,
            largest_error: finite(outcome.largest_error),
            nmse: finite(outcome.nmse),
            worst_index: outcome.worst_index,
            is_right: outcome.is_right,
        }
    }
}

/// What became of a group.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "ended")]
pub(super) enum GroupEnd {
    Checked {
        checks: Vec<KernelCheck>,
    },
    /// The process ended without a result: its last words.
    Broken {
        said: String,
    },
    TimedOut {
        seconds: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct GroupReport {
    pub group: &'static str,
    pub seconds: f64,
    #[serde(flatten)]
    pub end: GroupEnd,
}

impl GroupReport {
    pub fn is_right(&self) -> bool {
        match &self.end {
            GroupEnd::Checked { checks } => !checks.is_empty() && checks.iter().all(|check| check.is_right),
            GroupEnd::Broken { .. } | GroupEnd::TimedOut { .. } => false,
        }
    }

    pub fn checks(&self) -> &[KernelCheck] {
        match &self.end {
            GroupEnd::Checked { checks } => checks,
            GroupEnd::Broken { .. } | GroupEnd::TimedOut { .. } => &[],
        }
    }
}

/// Runs a group in this process and prints its checks as JSON.
pub(super) fn run_here(group: Group, device: u32, seed: u64) -> anyhow::Result<Exit> {
    let libraries = cuda_engine::libraries();
    let device = Device::open(&libraries, device).context("the GPU cannot be opened")?;
    let cache = KernelCache::of_user(|name| std::env::var_os(name).map(PathBuf::from));
    let target = Target::of(&libraries, &device, cache.as_ref())?;
    let mut bench = Bench::new(&device, &target)?;
    let outcomes = group.run(&mut bench, Extent::Whole, seed)?;
    let checks: Vec<KernelCheck> = outcomes.into_iter().map(KernelCheck::from).collect();
    writeln!(std::io::stdout().lock(), "{}", serde_json::to_string(&checks)?)?;
    Ok(Exit::Ok)
}

/// Starts this program for a group and waits for its end.
///
/// # Errors
/// This program cannot be started.
pub(super) fn run_apart(group: Group, device: u32, seed: u64) -> anyhow::Result<GroupReport> {
    let executable = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(executable);
    command.args(["doctor", "--gpu", "--kernel-group", group.name()]);
    command.args([format!("--device={device}"), format!("--seed={seed}")]);
    let begun = Instant::now();
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start a process for the kernels")?;
    let end = end_of(child, begun + GROUP_TIMEOUT)?;
    Ok(GroupReport {
        group: group.name(),
        seconds: begun.elapsed().as_secs_f64(),
        end,
    })
}

fn end_of(mut child: Child, deadline: Instant) -> anyhow::Result<GroupEnd> {
    let stdout = child.stdout.take().map(read_all);
    let stderr = child.stderr.take().map(read_all);
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if Instant::now() < deadline => thread::sleep(LOOK_EVERY),
            None => break None,
        }
    };
    if status.is_none() {
        // It may have ended by itself meanwhile.
        let _ = child.kill();
        child.wait()?;
    }
    let text = |reader: Option<thread::JoinHandle<Vec<u8>>>| {
        let bytes = reader.and_then(|reader| reader.join().ok()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    };
    let (said, failed) = (text(stdout), text(stderr));
    Ok(match status {
        None => GroupEnd::TimedOut {
            seconds: GROUP_TIMEOUT.as_secs(),
        },
        Some(status) => match serde_json::from_str(&said) {
            Ok(checks) if status.success() => GroupEnd::Checked { checks },
            _ => GroupEnd::Broken {
                said: format!("{status}: {failed}"),
            },
        },
    })
}

/// In a thread, so that a full pipe stops nobody.
fn read_all(mut from: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is shown.
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}
