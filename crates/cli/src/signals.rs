//! The signals that end a verb, and the exit status each stands for at the end of `baton up`.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::Exit;

/// Why the user or the system wants it to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Interrupt,
    Terminate,
}

impl Stop {
    pub fn exit(self) -> Exit {
        match self {
            Self::Interrupt => Exit::Interrupted,
            Self::Terminate => Exit::Ok,
        }
    }

    /// Of a verb that has not done what it was asked for: a script must not take it for done.
    pub fn exit_early(self) -> Exit {
        match self {
            Self::Interrupt => Exit::Interrupted,
            Self::Terminate => Exit::Failure,
        }
    }
}

/// How many parts of this process listen just now.
static LISTENERS: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Listener;

impl Listener {
    fn new() -> Self {
        LISTENERS.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        LISTENERS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// From now on something else listens until the process ends: what stands in ends nothing.
pub fn are_handled_elsewhere() {
    std::mem::forget(Listener::new());
}

#[derive(Debug)]
pub struct Signals {
    listener: Option<Listener>,
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    pub fn install() -> std::io::Result<Self> {
        Ok(Self {
            listener: Some(Listener::new()),
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            // The terminal was closed. That is the same as a request to stop.
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Ends the process at a signal for which nobody else listens. Where a process has listened once, a signal does not end it by
    /// itself any more.
    pub async fn stand_in(mut self) {
        self.listener = None;
        loop {
            let stop = self.next().await;
            if LISTENERS.load(Ordering::SeqCst) == 0 {
                end_at_once(stop);
            }
        }
    }

    pub async fn next(&mut self) -> Stop {
        tokio::select! {
            _ = self.interrupt.recv() => Stop::Interrupt,
            _ = self.terminate.recv() => Stop::Terminate,
            _ = self.hangup.recv() => Stop::Terminate,
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "who has child processes to end, or anything to drain, listens"
)]
fn end_at_once(stop: Stop) {
    std::process::exit(stop.exit_early() as i32);
}
