//! One group of kernel checks, in a process of its own: after an illegal address a process can use its GPU no more.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use cuda::Device;
use cuda_engine::kernels::cache::KernelCache;
use cuda_engine::kernels::check::{Bench, Extent, Group, Outcome};
use cuda_engine::kernels::{AttentionShape, Target};
use serde::{Deserialize, Serialize};

use super::child;
use super::step::{self, Row, StepReport};
use crate::exit::Exit;

/// A group takes a second on a GPU, and a minute on the false driver of the tests. A kernel that never ends holds its process,
/// which is killed then.
const GROUP_TIMEOUT: Duration = Duration::from_secs(300);
/// Attention for which small checks are made: heads of 64 values, three query heads for each KV head.
const SMALL_ATTENTION: (usize, usize, usize) = (64, 9, 3);

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
    fn is_right(&self) -> bool {
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

pub(super) fn step_of(groups: &[GroupReport]) -> StepReport {
    let checks: usize = groups.iter().map(|group| group.checks().len()).sum();
    let wrong: Vec<&str> = groups
        .iter()
        .filter(|group| !group.is_right())
        .map(|group| group.group)
        .collect();
    let outcome = match wrong.as_slice() {
        [] => step::Outcome::Right {
            said: format!("{checks} checks"),
        },
        wrong => step::Outcome::Wrong {
            why: format!("groups {}", wrong.join(", ")),
        },
    };
    StepReport {
        seconds: groups.iter().map(|group| group.seconds).sum(),
        ..StepReport::new(Row::Kernels, outcome)
    }
}

/// How much a group checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shapes {
    All,
    /// One of each kernel: under a sanitizer a kernel takes hundreds of times as long.
    Small,
}

impl Shapes {
    fn extent(self) -> anyhow::Result<Extent> {
        let (head_dim, heads, kv_heads) = SMALL_ATTENTION;
        Ok(match self {
            Shapes::All => Extent::Whole,
            Shapes::Small => Extent::Gate(AttentionShape::new(head_dim, heads, kv_heads)?),
        })
    }
}

/// Runs a group in this process and prints its checks as JSON.
pub(super) fn run_here(group: Group, shapes: Shapes, (device, seed): (u32, u64)) -> anyhow::Result<Exit> {
    let libraries = cuda_engine::libraries();
    let device = Device::open(&libraries, device).context("the GPU cannot be opened")?;
    let cache = KernelCache::of_user(|name| std::env::var_os(name).map(PathBuf::from));
    let target = Target::of(&libraries, &device, cache.as_ref())?;
    let mut bench = Bench::new(&device, &target)?;
    let outcomes = group.run(&mut bench, shapes.extent()?, seed)?;
    let checks: Vec<KernelCheck> = outcomes.into_iter().map(KernelCheck::from).collect();
    writeln!(crate::stdout::stdout(), "{}", serde_json::to_string(&checks)?)?;
    Ok(Exit::Ok)
}

/// Starts this program for a group and waits for its end. Whatever happens is in the report.
pub(super) fn run_apart(group: Group, device: u32, seed: u64) -> GroupReport {
    let begun = Instant::now();
    let end = end_of(group, device, seed).unwrap_or_else(|error| GroupEnd::Broken {
        said: format!("{error:#}"),
    });
    GroupReport {
        group: group.name(),
        seconds: begun.elapsed().as_secs_f64(),
        end,
    }
}

fn end_of(group: Group, device: u32, seed: u64) -> anyhow::Result<GroupEnd> {
    let mut command = child::this_program()?;
    command.args(words(group, device, seed));
    let ended = child::run(command, GROUP_TIMEOUT)?;
    Ok(match ended.status {
        None => GroupEnd::TimedOut {
            seconds: GROUP_TIMEOUT.as_secs(),
        },
        Some(status) => match serde_json::from_str(&ended.stdout) {
            Ok(checks) if status.success() => GroupEnd::Checked { checks },
            _ => GroupEnd::Broken {
                said: format!("{status}: {}", ended.stderr),
            },
        },
    })
}

/// The words of the command line that run a group.
pub(super) fn words(group: Group, device: u32, seed: u64) -> [String; 3] {
    [
        format!("--kernel-group={}", group.name()),
        format!("--device={device}"),
        format!("--seed={seed}"),
    ]
}
