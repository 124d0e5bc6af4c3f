//! `baton compare`: co-located, disaggregated and conditional arms on the same trace at equal cores, and what follows from it.
//!
//! Read `local.rs` first: the order of the parts. `deployed.rs` is the same for clusters that somebody else started.

mod args;
mod budget;
mod conclude;
mod cores;
mod costs;
mod decision_record;
mod deployed;
mod facts;
mod fairness;
mod finish;
mod local;
mod machine;
mod measure;
mod order;
mod output;
mod point;
mod prepare;
mod progress;
mod runner;
mod sender;
#[cfg(test)]
pub(crate) mod test_kit;
mod traffic;
mod tuning;

use anyhow::Context;

pub use args::CompareArgs;

use crate::exit::Exit;
use crate::terminal::say;

/// # Errors
/// The arguments do not fit together, a cluster does not start, or a file cannot be read or written.
pub fn run(args: CompareArgs) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // It starts processes and reads their pipes. The load has a thread of its own.
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    if !args.plan_only {
        finish::make_folders(&args)?;
    }
    crate::version::warn_unless_release();
    if let Some(words) = args.words_on_default() {
        say!("{words}");
    }
    runtime.block_on(async {
        let stops = finish::stop_on_signals()?;
        let work = async {
            match args.arm.is_empty() {
                true => local::compare(&args, stops.soon.clone()).await,
                false => deployed::compare(&args, stops.soon.clone()).await,
            }
        };
        tokio::select! {
            outcome = work => outcome,
            () = stops.at_once.cancelled() => Ok(Exit::Interrupted),
        }
    })
}
