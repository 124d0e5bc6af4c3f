//! A timer that is exact to some tens of microseconds. The runtime's own timers are up to a millisecond late, which would count
//! as the client's lag.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Instant;

use tokio::sync::Notify;

/// A thread that waits for one time after the other. It ends with the timer.
#[derive(Debug)]
pub(super) struct Timer {
    thread: SyncSender<Instant>,
    woken: Arc<Notify>,
    set: Option<Instant>,
}

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        // The thread takes each time at once, so there is never more than one.
        let (sender, receiver) = sync_channel(1);
        let woken = Arc::new(Notify::new());
        let notify = Arc::clone(&woken);
        thread::Builder::new()
            .name("load-timer".to_owned())
            .spawn(move || wait(&receiver, &notify))?;
        Ok(Self {
            thread: sender,
            woken,
            set: None,
        })
    }

    /// Waits until `deadline`. It may return early, when a time that was given before has come.
    pub(super) async fn until(&mut self, deadline: Instant) {
        if self.set != Some(deadline) {
            self.set = Some(deadline);
            // The thread lives as long as this end of the channel.
            let _ = self.thread.send(deadline);
        }
        self.woken.notified().await;
        self.set = None;
    }
}

fn wait(deadlines: &Receiver<Instant>, woken: &Notify) {
    while let Ok(mut deadline) = deadlines.recv() {
        loop {
            match deadlines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(newer) => deadline = newer,
                Err(RecvTimeoutError::Timeout) => break woken.notify_one(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}
