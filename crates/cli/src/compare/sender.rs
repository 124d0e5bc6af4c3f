//! One run of load, on a thread of its own: a client that waits for a core measures itself.

use std::process::{Command, Stdio};

use anyhow::Context;
use rustix::process::setpriority_process;
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use workload::record::Run;

use crate::bench::load;
use crate::bench::load::plan::{LoadPlan, Observer, Progress};

/// Above ordinary programs, and below what the system needs.
const NICE: i32 = -10;
const REAL_TIME_PRIORITY: &str = "10";

/// How the client's thread gets its core. It sleeps nearly all the time, and when an answer or a due time comes it must run at once:
/// a client that waits for a node to leave the core would measure that wait. Only root may take the first two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Placement {
    RealTime,
    Nice,
    #[default]
    Ordinary,
}

impl Placement {
    pub fn words(self) -> String {
        match self {
            Self::RealTime => format!("the client's thread at real-time priority {REAL_TIME_PRIORITY}"),
            Self::Nice => format!("the client's thread at nice {NICE}"),
            Self::Ordinary => "the client's thread at ordinary priority".to_owned(),
        }
    }

    /// The best that this thread may have.
    fn take() -> Self {
        // No safe call sets a thread's policy; the program of util-linux does.
        let thread = gettid().as_raw_nonzero().to_string();
        // Threads that it starts have it too: the load client has one for its times.
        let words = ["--rr", "--pid", REAL_TIME_PRIORITY, &thread];
        let done = Command::new("chrt").args(words).stderr(Stdio::null()).status();
        if done.is_ok_and(|status| status.success()) {
            return Self::RealTime;
        }
        // On Linux the number 0 is the calling thread, not the whole process: the nodes do not inherit it.
        match setpriority_process(None, NICE) {
            Ok(()) => Self::Nice,
            Err(_) => Self::Ordinary,
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
    let placement = Placement::take();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the client's runtime")?;
    let run = runtime.block_on(load::run(plan, Observer { on_progress, stop }))?;
    Ok((run, placement))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_some_priority_and_the_threads_beside_it_keep_theirs() {
        let of_this_thread = || std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
        // Field 41 is the policy; fields are counted from behind the name in brackets, which is the second.
        let policy = |stat: String| {
            let rest = stat.rsplit(')').next().unwrap_or_default().to_owned();
            rest.split_whitespace().nth(38).unwrap_or_default().to_owned()
        };
        let taken = std::thread::spawn(move || (Placement::take(), policy(of_this_thread())));
        let (placement, own) = taken.join().expect("the thread ends");
        assert_eq!(placement == Placement::RealTime, own == "2", "{placement:?} {own}");
        assert_eq!(policy(of_this_thread()), "0");
        assert!(placement.words().starts_with("the client's thread"));
    }
}
