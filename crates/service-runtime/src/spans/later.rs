//! Makes spans on a thread of its own, for threads that have something better to do: a step in which sixteen requests end
//! makes a hundred spans, and the next step's requests would wait for them.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use opentelemetry::Context;

use crate::telemetry::MeasuredSpan;

/// Some hundred requests' worth. What comes on top is made by who brings it: nothing is lost, and nothing piles up.
const SPANS_WAITING_MAX: usize = 1024;

/// Set once spans are recorded at all.
static QUEUE: OnceLock<SyncSender<Work>> = OnceLock::new();

enum Work {
    // Boxed: a span is many times the size of the other.
    Span(Box<(MeasuredSpan, Context)>),
    /// Answered when all that came before it is made.
    Flush(SyncSender<()>),
}

/// Starts the thread; it lives as long as the process.
///
/// # Errors
/// The system has no thread left.
pub(crate) fn start() -> io::Result<()> {
    let (queue, work) = sync_channel(SPANS_WAITING_MAX);
    std::thread::Builder::new()
        .name("span-recorder".to_owned())
        .spawn(move || run(&work))?;
    let _ = QUEUE.set(queue);
    Ok(())
}

fn run(work: &Receiver<Work>) {
    while let Ok(work) = work.recv() {
        match work {
            Work::Span(span) => {
                let (span, parent) = *span;
                span.record(&parent);
            }
            Work::Flush(done) => {
                let _ = done.try_send(());
            }
        }
    }
}

pub(crate) fn record(span: MeasuredSpan, parent: Context) {
    let Some(queue) = QUEUE.get() else {
        span.record(&parent);
        return;
    };
    if let Err(TrySendError::Full(Work::Span(span)) | TrySendError::Disconnected(Work::Span(span))) =
        queue.try_send(Work::Span(Box::new((span, parent))))
    {
        let (span, parent) = *span;
        span.record(&parent);
    }
}

/// Waits until what was brought before is made, at most so long. Blocks.
pub(crate) fn flush(limit: Duration) -> Result<(), RecvTimeoutError> {
    let Some(queue) = QUEUE.get() else { return Ok(()) };
    let (done, is_done) = sync_channel(1);
    if queue.try_send(Work::Flush(done)).is_err() {
        return Err(RecvTimeoutError::Timeout);
    }
    is_done.recv_timeout(limit)
}
