//! One run of load for the verbs that make several, and the files that they write.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use workload::record::Run;

use super::load;
use super::load::plan::{LoadPlan, Observer};
use crate::exit::{Exit, WithExit as _};

/// Of an open loop: this share of its time at either end is not measured.
const EDGE_SHARE: f64 = 0.1;

/// Why no more runs were made.
#[derive(Debug)]
pub(super) enum End {
    Whole,
    /// Ctrl-C.
    Cut,
    /// A run could not be made, as when the server has died. What was measured before it is kept.
    Broken(anyhow::Error),
}

/// # Errors
/// As the load client's.
pub(super) async fn measure(plan: &LoadPlan, stop: &CancellationToken) -> anyhow::Result<Run> {
    let observer = Observer {
        stop: stop.clone(),
        ..Observer::silent()
    };
    load::run(plan, observer).await
}

/// Leaves the first and the last tenth of an open loop's time out of its figures.
///
/// # Errors
/// At this rate the run would take longer than a clock can count.
pub(super) fn leave_out_edges(plan: &mut LoadPlan, rate: f64) -> anyhow::Result<()> {
    let edge = Duration::try_from_secs_f64(plan.trace.requests.len() as f64 / rate * EDGE_SHARE);
    plan.warm_up = edge.context("the rate is too low").exit(Exit::Usage)?;
    plan.cool_down = plan.warm_up;
    Ok(())
}

/// # Errors
/// The folder or the file cannot be written.
pub(super) fn write_json(folder: &Path, name: &str, value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value).with_context(|| format!("{name} cannot be written as JSON"))?;
    write_text(folder, name, &(text + "\n"))
}

/// # Errors
/// As [`write_json`].
pub(super) fn write_text(folder: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = folder.join(name);
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}
