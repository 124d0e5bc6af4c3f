//! The signals that end a fetch of a model. They are noticed between two steps, so that everything half-done is removed. After the
//! fetch they end the process again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::sync::oneshot;

use crate::model::error::PullError;
use crate::signals::Signals;

/// Says whether the user wants to stop.
#[derive(Debug)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    /// Dropping it ends the watching; then the thread stands in for whoever does not listen.
    _watch: Option<oneshot::Sender<()>>,
}

impl Interrupt {
    /// Watches for signals until dropped. Where no handler can be set, a signal ends the process as usual, and the next
    /// pull removes what is left.
    pub fn watch() -> Interrupt {
        let requested = Arc::new(AtomicBool::new(false));
        let (watch, mut dropped) = oneshot::channel::<()>();
        let seen = Arc::clone(&requested);
        let started = thread::Builder::new().name("pull-signals".to_owned()).spawn(move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else {
                return;
            };
            runtime.block_on(async {
                let Ok(mut signals) = Signals::install() else { return };
                tokio::select! {
                    _ = signals.next() => {
                        seen.store(true, Ordering::Relaxed);
                        let _ = dropped.await;
                    }
                    _ = &mut dropped => {}
                }
                signals.stand_in().await;
            });
        });
        Interrupt {
            requested,
            _watch: started.is_ok().then_some(watch),
        }
    }

    /// An interrupt that the test fires itself.
    #[cfg(test)]
    pub fn by_hand(requested: Arc<AtomicBool>) -> Interrupt {
        Interrupt {
            requested,
            _watch: None,
        }
    }

    /// # Errors
    /// [`PullError::Interrupted`] once a signal has come.
    pub fn check(&self) -> Result<(), PullError> {
        if self.requested.load(Ordering::Relaxed) {
            Err(PullError::Interrupted)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, Signal, kill_process};
    use tokio::signal::unix::{SignalKind, signal};

    use super::*;
    use crate::signals;

    const ENDS_WITHIN: Duration = Duration::from_secs(10);
    const IS_CHILD: &str = "BATON_TEST_FETCHED_BEFORE";
    /// What a drain takes.
    const DRAIN: Duration = Duration::from_millis(300);

    /// A process of a test's own, which the signal may end. It is this test, started again.
    fn child(test: &str) -> (Child, Pid, impl Sized) {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", &format!("model::interrupt::tests::{test}"), "--nocapture"])
            .env(IS_CHILD, "1")
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut lines = lines.map_while(Result::ok);
        let is_said = lines.any(|line| line.contains("fetched"));
        assert!(is_said, "it ended before its fetch did: {:?}", child.wait());
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid")).expect("a pid");
        // The child writes more, so its pipe stays open.
        (child, pid, lines)
    }

    fn runtime() -> tokio::runtime::Runtime {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime")
    }

    #[test]
    fn ctrl_c_ends_what_runs_after_a_fetch() {
        if std::env::var_os(IS_CHILD).is_some() {
            // From here on no signal ends it by itself.
            drop(runtime().block_on(async { Signals::install() }).expect("installed"));
            drop(Interrupt::watch());
            println!("fetched");
            loop {
                std::thread::park();
            }
        }
        let (mut child, pid, _output) = child("ctrl_c_ends_what_runs_after_a_fetch");
        let began = Instant::now();
        // The thread that stands in may not have begun to, so one signal may not do.
        let end = loop {
            kill_process(pid, Signal::INT).expect("sent");
            match child.try_wait().expect("its end") {
                Some(end) => break Some(end),
                None if began.elapsed() < ENDS_WITHIN => std::thread::yield_now(),
                None => break None,
            }
        };
        // Nothing happens where it has ended.
        let _ = child.kill();
        assert_eq!(end.and_then(|end| end.code()), Some(130));
    }

    #[test]
    fn a_process_that_is_served_after_a_fetch_drains() {
        if std::env::var_os(IS_CHILD).is_some() {
            signals::are_handled_elsewhere();
            drop(Interrupt::watch());
            return runtime().block_on(async {
                let mut terminated = signal(SignalKind::terminate()).expect("installed");
                println!("fetched");
                terminated.recv().await;
                tokio::time::sleep(DRAIN).await;
            });
        }
        let (mut child, pid, _output) = child("a_process_that_is_served_after_a_fetch_drains");
        kill_process(pid, Signal::TERM).expect("sent");
        assert_eq!(child.wait().expect("its end").code(), Some(0));
    }
}
