//! A thread that keeps spans, and makes spans of measured times, some milliseconds after the fact. Sixteen requests that
//! begin at the same moment end about a hundred spans before their first tokens, and would otherwise wait for each of these
//! spans.

use std::io;
use std::mem;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::trace::SpanData;

use crate::telemetry::MeasuredSpan;

/// How long work waits, so that a burst wakes the thread once and not for each span, and is over by then. This is long
/// beside a first token and short for a reader of traces; a reader's question ends the wait.
const LINGER: Duration = Duration::from_millis(25);
/// The spans of some hundred requests. Further spans are made and kept by their own callers: nothing is lost, and no queue
/// grows.
const SPANS_WAITING_MAX: usize = 2048;
/// This many spans wake the thread before the time is over.
const SPANS_WAITING_FOR_LONG_MAX: usize = SPANS_WAITING_MAX / 2;

#[derive(Default)]
struct Waiting {
    /// A span to be made of measured times, under this parent.
    measured: Vec<(MeasuredSpan, Context)>,
    /// A span to be kept.
    ended: Vec<SpanData>,
    /// Callers to tell when all earlier work is done. Their number is that of waiting callers, which the endpoint limits.
    flushes: Vec<Box<dyn FnOnce() + Send>>,
    /// The thread has ended, which only a panic causes. Nobody may wait for it.
    is_over: bool,
}

impl Waiting {
    fn spans(&self) -> usize {
        self.measured.len() + self.ended.len()
    }
    fn is_empty(&self) -> bool {
        self.spans() == 0 && self.flushes.is_empty()
    }
    fn may_linger(&self) -> bool {
        self.flushes.is_empty() && self.spans() < SPANS_WAITING_FOR_LONG_MAX
    }
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    came: Condvar,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to the waiting work. Gives the work back when too much waits already.
    fn bring<T>(&self, span: T, place: fn(&mut Waiting) -> &mut Vec<T>) -> Result<(), T> {
        let mut waiting = self.waiting();
        let spans = waiting.spans();
        if spans >= SPANS_WAITING_MAX || waiting.is_over {
            return Err(span);
        }
        place(&mut waiting).push(span);
        drop(waiting);
        if spans == 0 || spans + 1 == SPANS_WAITING_FOR_LONG_MAX {
            self.came.notify_one();
        }
        Ok(())
    }

    /// Waits for work, and then for more of it, and swaps it with `empty`.
    fn take(&self, empty: &mut Waiting, linger: Duration) {
        let idle = self.came.wait_while(self.waiting(), |waiting| waiting.is_empty());
        let waiting = idle.unwrap_or_else(PoisonError::into_inner);
        let lingered = self
            .came
            .wait_timeout_while(waiting, linger, |waiting| waiting.may_linger());
        let (mut waiting, _) = lingered.unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut *waiting, empty);
    }
}

/// The entrance to the thread. Clones lead to the same thread.
#[derive(Clone)]
pub(super) struct Recorder(Arc<Shared>);

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").finish_non_exhaustive()
    }
}

impl Recorder {
    /// Starts the thread, which lives as long as the process. `keep` gets each span that has ended.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(super) fn start(keep: impl Fn(SpanData) + Send + 'static) -> io::Result<Self> {
        Self::lingering(LINGER, keep)
    }

    fn lingering(linger: Duration, keep: impl Fn(SpanData) + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let recorder = Self(shared.clone());
        std::thread::Builder::new()
            .name("span-recorder".to_owned())
            .spawn(move || run(&shared, linger, keep))?;
        Ok(recorder)
    }

    /// # Errors
    /// The span, when too many wait: the caller makes it. Boxed because it is large and this is rare.
    pub(super) fn make(&self, span: MeasuredSpan, parent: Context) -> Result<(), Box<(MeasuredSpan, Context)>> {
        let brought = self.0.bring((span, parent), |waiting| &mut waiting.measured);
        brought.map_err(Box::new)
    }

    /// # Errors
    /// The span, when too many wait: the caller keeps it.
    pub(super) fn keep(&self, span: SpanData) -> Result<(), Box<SpanData>> {
        self.0.bring(span, |waiting| &mut waiting.ended).map_err(Box::new)
    }

    fn when_kept(&self, tell: impl FnOnce() + Send + 'static) {
        let mut waiting = self.0.waiting();
        if waiting.is_over {
            // The sender is dropped, so the caller's wait ends at once.
            return;
        }
        waiting.flushes.push(Box::new(tell));
        drop(waiting);
        self.0.came.notify_one();
    }

    /// Waits until all earlier work is done, for `limit` at most. Blocks.
    pub(super) fn flush(&self, limit: Duration) -> Result<(), RecvTimeoutError> {
        let (tell, told) = sync_channel(1);
        self.when_kept(move || {
            let _ = tell.try_send(());
        });
        told.recv_timeout(limit)
    }

    /// The same for async callers. It returns after `limit` in any case.
    pub(super) async fn settled(&self, limit: Duration) {
        let (tell, told) = tokio::sync::oneshot::channel();
        self.when_kept(move || {
            let _ = tell.send(());
        });
        let _ = tokio::time::timeout(limit, told).await;
    }
}

/// Ends all waits for a thread that has panicked.
struct EndsTheWait<'a>(&'a Shared);

impl Drop for EndsTheWait<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting();
        waiting.is_over = true;
        waiting.flushes.clear();
    }
}

fn run(shared: &Shared, linger: Duration, keep: impl Fn(SpanData)) {
    let _ends_the_wait = EndsTheWait(shared);
    let mut work = Waiting::default();
    loop {
        shared.take(&mut work, linger);
        for (span, parent) in work.measured.drain(..) {
            span.record(&parent);
        }
        work.ended.drain(..).for_each(&keep);
        // The spans that were made above have ended, and are in the queue again.
        mem::swap(&mut shared.waiting().ended, &mut work.ended);
        work.ended.drain(..).for_each(&keep);
        for tell in work.flushes.drain(..) {
            tell();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use super::*;
    use crate::spans::store::tests::span;

    const LIMIT: Duration = Duration::from_secs(20);

    fn counting(linger: Duration) -> (Recorder, Arc<AtomicUsize>) {
        let kept = Arc::new(AtomicUsize::new(0));
        let counter = kept.clone();
        let keep = move |_: SpanData| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        (Recorder::lingering(linger, keep).expect("a thread"), kept)
    }

    #[test]
    fn a_flush_waits_for_all_that_came_before_and_no_longer() {
        // By itself the thread would not reach these within the limit.
        let (recorder, kept) = counting(LIMIT * 100);
        for round in 1..=50 {
            for id in 1..=10 {
                recorder.keep(span(1, id)).expect("room");
            }
            recorder.flush(LIMIT).expect("kept");
            assert_eq!(kept.load(Ordering::Relaxed), round * 10);
        }
        recorder.flush(LIMIT).expect("nothing to keep");
    }

    #[test]
    fn a_thread_that_panicked_is_not_waited_for() {
        let recorder = Recorder::start(|_| panic!("on purpose")).expect("a thread");
        recorder.keep(span(1, 1)).expect("room");
        assert_eq!(recorder.flush(LIMIT), Err(RecvTimeoutError::Disconnected));
        while recorder.keep(span(1, 2)).is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(recorder.flush(LIMIT), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn nothing_is_lost_when_too_many_come() {
        // The thread is stuck in its first span until it is released.
        let (go, gone) = sync_channel::<()>(0);
        let kept = Arc::new(AtomicUsize::new(0));
        let counter = kept.clone();
        let recorder = Recorder::start(move |_| {
            if counter.fetch_add(1, Ordering::Relaxed) == 0 {
                let _ = gone.recv();
            }
        })
        .expect("a thread");
        recorder.keep(span(1, 1)).expect("room");
        while kept.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let given_back = (0..SPANS_WAITING_MAX as u64 + 7)
            .filter(|id| recorder.keep(span(1, *id)).is_err())
            .count();
        assert_eq!(given_back, 7);
        assert_eq!(recorder.flush(Duration::ZERO), Err(RecvTimeoutError::Timeout));
        go.send(()).expect("it waits");
        recorder.flush(LIMIT).expect("kept");
        assert_eq!(kept.load(Ordering::Relaxed), SPANS_WAITING_MAX + 1);
    }

    #[tokio::test]
    async fn what_is_brought_is_kept_without_a_flush_and_readers_wait_for_it() {
        let (recorder, kept) = counting(LINGER);
        recorder.keep(span(1, 1)).expect("room");
        recorder.settled(LIMIT).await;
        assert_eq!(kept.load(Ordering::Relaxed), 1);
        recorder.keep(span(1, 2)).expect("room");
        let began = Instant::now();
        while kept.load(Ordering::Relaxed) < 2 {
            assert!(began.elapsed() < LIMIT, "left lying");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
