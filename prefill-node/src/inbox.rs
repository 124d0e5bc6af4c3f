//! What may happen to the step loop, and how its thread waits for it.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use proto::messages::{PrefillEvent, PrefillRequest};
use service_runtime::admin::BlockLedger;
use serving_core::request::AttemptKey;
use serving_core::scheduler::{BlockReport, PushEnd};
use serving_core::time::Time;
use tokio::sync::{mpsc, oneshot};

use crate::handoff::PushReport;

/// Commands between two steps. Senders wait when it is full, so that no cancel and no end of a push is ever lost.
pub const INBOX_MAX: usize = 256;
/// Everything that may happen to the loop.
#[derive(Debug)]
pub enum Command {
    Prefill(Box<NewPrefill>),
    /// The response stream is gone. `leg` tells it from a refused duplicate of the same key.
    Cancel {
        key: AttemptKey,
        leg: u64,
    },
    PushEnded {
        key: AttemptKey,
        leg: u64,
        end: PushEnd,
        /// With `Acked`.
        report: Option<PushReport>,
    },
    /// Something that the loop looks at by itself has changed: the push queue, the pairs.
    Wake,
    /// Who holds which blocks.
    Report(oneshot::Sender<BlockReport>),
    /// No further requests; those here go on.
    Drain,
    /// The drain's time is over: every request here fails.
    GiveUp,
    Stop,
}

#[derive(Debug)]
pub struct NewPrefill {
    pub message: PrefillRequest,
    pub leg: u64,
    pub events: mpsc::Sender<PrefillEvent>,
    pub received_at: Time,
    /// The request's span on this node; ends when the request does.
    pub span: tracing::Span,
}

/// Asks the loop as `/admin/blocks` does. Weak: a question must not keep a loop alive that everybody has let go of.
#[derive(Debug)]
pub struct Ledger(pub mpsc::WeakSender<Command>);

impl BlockLedger for Ledger {
    fn ask(&self) -> oneshot::Receiver<BlockReport> {
        let (answer, answered) = oneshot::channel();
        if let Some(inbox) = self.0.upgrade() {
            // Full: the question is dropped, which the asker sees.
            let _ = inbox.try_send(Command::Report(answer));
        }
        answered
    }
}

/// Wakes the loop's thread when a command comes.
#[derive(Debug)]
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a command with the thread's own timer, so that the loop outlives the async runtime. `Pending`: none came.
pub fn receive(inbox: &mut mpsc::Receiver<Command>, limit: Duration) -> Poll<Option<Command>> {
    let deadline = Instant::now() + limit;
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(command) = inbox.poll_recv(&mut context) {
            return Poll::Ready(command);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Poll::Pending;
        }
        std::thread::park_timeout(left);
    }
}
