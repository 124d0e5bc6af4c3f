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
        // It listens until the work has ended, which writes what it has: a further signal changes nothing.
        let listener = tokio::spawn(async move {
            loop {
                signals.next().await;
                stopped.cancel();
            }
        });
        let outcome = work(stop).await;
        listener.abort();
        outcome
    })
}

/// Whether the user, or the end of the time, has cut a run short.
pub(crate) fn is_cut(run: &Run) -> bool {
    run.environment.get("interrupted") == Some(&json!(true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::test_kit;

    #[test]
    fn a_run_is_cut_when_its_environment_says_so() {
        let mut run = test_kit::run("a", Vec::new());
        assert!(!is_cut(&run));
        run.environment.insert("interrupted".to_owned(), json!(true));
        assert!(is_cut(&run));
    }
}
