//! Work that Ctrl-C ends early, with what it has.

use anyhow::Context as _;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use workload::record::Run;

use crate::signals::Signals;

/// Runs the work on a thread of its own runtime, with a token that Ctrl-C cancels.
pub(super) fn until_interrupted<T>(
    work: impl AsyncFnOnce(CancellationToken) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the runtime")?.block_on(async {
        let mut signals = Signals::install().context("cannot listen for Ctrl-C")?;
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let listener = tokio::spawn(async move {
            signals.next().await;
            stopped.cancel();
        });
        let outcome = work(stop).await;
        listener.abort();
        outcome
    })
}

/// Whether Ctrl-C ended this run.
pub(super) fn is_cut(run: &Run) -> bool {
    run.environment.get("interrupted") == Some(&json!(true))
}
