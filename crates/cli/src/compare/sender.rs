//! One run of load, on a thread of its own: a client that waits for a core measures itself.

use anyhow::Context;
use rustix::process::setpriority_process;
use rustix::thread::{CpuSet, sched_setaffinity};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use workload::record::Run;

use crate::bench::load;
use crate::bench::load::plan::{LoadPlan, Observer, Progress};

/// Above ordinary programs, and below what the system needs. Only root may take it.
const NICE: i32 = -10;

/// Where the client ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Placement {
    pub has_priority: bool,
}

impl Placement {
    pub fn words(self) -> String {
        match self.has_priority {
            true => format!("the client's thread at nice {NICE}"),
            false => "the client's thread at ordinary priority".to_owned(),
        }
    }
}

/// Sends the load from a thread that may use `cores` only. `None` leaves the cores as they are.
///
/// # Errors
/// What the load client says.
pub(super) async fn send(
    plan: LoadPlan,
    cores: Option<Vec<u32>>,
    stop: CancellationToken,
    on_progress: impl FnMut(Progress) + Send + 'static,
) -> anyhow::Result<(Run, Placement)> {
    let (sender, receiver) = oneshot::channel();
    let work = move || {
        let outcome = on_this_thread(&plan, cores.as_deref(), stop, Box::new(on_progress));
        // The receiver is gone only when the whole program ends.
        let _ = sender.send(outcome);
    };
    std::thread::Builder::new()
        .name("load".to_owned())
        .spawn(work)
        .context("cannot start the client's thread")?;
    receiver.await.context("the client's thread panicked")?
}

fn on_this_thread(
    plan: &LoadPlan,
    cores: Option<&[u32]>,
    stop: CancellationToken,
    on_progress: Box<dyn FnMut(Progress)>,
) -> anyhow::Result<(Run, Placement)> {
    if let Some(cores) = cores {
        let mut set = CpuSet::new();
        cores
            .iter()
            .filter(|core| (**core as usize) < CpuSet::MAX_CPU)
            .for_each(|core| set.set(*core as usize));
        sched_setaffinity(None, &set).context("cannot use the client's cores")?;
    }
    // On Linux the number 0 is the calling thread, not the whole process: the nodes do not inherit it.
    let has_priority = setpriority_process(None, NICE).is_ok();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the client's runtime")?;
    let run = runtime.block_on(load::run(plan, Observer { on_progress, stop }))?;
    Ok((run, Placement { has_priority }))
}
