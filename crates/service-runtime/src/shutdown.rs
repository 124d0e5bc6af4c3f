//! How a process is asked to stop: by a signal, by the end of stdin, or by a drain request. All other code only listens.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// A request to drain and exit, shared by all tasks of a process. Clones share it. It cannot be taken back.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    token: CancellationToken,
}

impl Shutdown {
    pub fn new() -> Self {
        Self::default()
    }
    /// Idempotent.
    pub fn request(&self) {
        self.token.cancel();
    }
    pub fn is_requested(&self) -> bool {
        self.token.is_cancelled()
    }
    /// Returns when shutdown is requested, or at once when it already was.
    pub async fn requested(&self) {
        self.token.cancelled().await;
    }
}

/// The time that a drained node needs for its goodbyes when a peer does not listen: two seconds for streams that are still
/// open, one second for the last reports to coordinators, and one for the entry in etcd. A node needs all of it only when
/// every peer hangs.
pub const NODE_GOODBYE_TIME: Duration = Duration::from_millis(3_500);

/// The part of a drain's time that running requests get. The process is gone when the whole time is over.
pub fn time_for_requests(drain: Duration, goodbye: Duration) -> Duration {
    drain.saturating_sub(goodbye).max(drain / 2)
}

/// The exit code after a second signal, as shells report for SIGINT.
const INTERRUPTED_EXIT_CODE: i32 = 130;

/// SIGTERM or SIGINT asks for a drain. A second signal ends the process at once with code 130.
///
/// # Errors
/// The operating system refused a signal handler.
pub(crate) fn on_signals() -> std::io::Result<Shutdown> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let shutdown = Shutdown::new();
    let requested = shutdown.clone();
    tokio::spawn(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!(signal = name, "draining; a second signal stops at once");
        requested.request();
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::warn!("second signal: stopping without waiting for the drain");
        #[allow(
            clippy::disallowed_methods,
            reason = "the user asked twice: skipping the drain is the point"
        )]
        std::process::exit(INTERRUPTED_EXIT_CODE);
    });
    Ok(shutdown)
}

/// `--exit-with-stdin`: drain when stdin ends. It ends when the parent dies, however it dies. A plain thread reads stdin,
/// because a blocked read must not delay the runtime's own shutdown.
///
/// # Errors
/// No thread could be started.
pub(crate) fn on_stdin_end(shutdown: &Shutdown) -> std::io::Result<()> {
    let shutdown = shutdown.clone();
    std::thread::Builder::new()
        .name("stdin-watch".to_owned())
        .spawn(move || {
            wait_for_end(std::io::stdin().lock());
            tracing::info!("stdin ended: the parent asks for a drain, or is gone");
            shutdown.request();
        })?;
    Ok(())
}

/// The bytes are ignored. An error ends the stream, as the end of the file does.
fn wait_for_end(mut input: impl std::io::Read) {
    let mut scratch = [0u8; 256];
    loop {
        match input.read(&mut scratch) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_reaches_every_clone_and_stays() {
        let shutdown = Shutdown::new();
        let other = shutdown.clone();
        assert!(!other.is_requested());
        let waiting = tokio::spawn(async move { other.requested().await });
        shutdown.request();
        shutdown.request();
        waiting.await.unwrap();
        assert!(shutdown.is_requested());
        shutdown.requested().await;
    }

    #[test]
    fn requests_get_what_is_left_of_a_drain_and_never_less_than_half() {
        let time = |ms| time_for_requests(Duration::from_millis(ms), NODE_GOODBYE_TIME).as_millis();
        assert_eq!((time(10_000), time(7_000), time(100), time(0)), (6_500, 3_500, 50, 0));
    }

    #[test]
    fn stdin_is_over_at_end_of_file_and_not_before() {
        let mut reader = std::io::Cursor::new(vec![7u8; 1000]);
        wait_for_end(&mut reader);
        assert_eq!(reader.position(), 1000);
    }
}
