//! The inbox of the loop. It is bounded, and it neither loses the end of a handoff nor blocks a sender.
//!
//! Bounds: `REQUESTS_MAX` requests (the rest is refused); at most one commit and one end for each handoff, so no more than the
//! scheduler has sequences; signs of life are sets, at most one entry for each handoff.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::CompletedStep;
use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::{Arrived, ReceiveEnd, TransferRefusal};
use service_runtime::admin::BlockLedger;
use service_runtime::clock::Clock;
use serving_core::ids::TransferId;
use serving_core::kv::CacheReset;
use serving_core::request::AttemptKey;
use serving_core::scheduler::{BlockReport, PushEnd};
use serving_core::time::Time;
use tokio::sync::oneshot;

use crate::request::NewRequest;

/// Requests that may wait for the loop. It takes them all as soon as it has a CPU, so this is what may arrive until then.
const REQUESTS_MAX: usize = 256;

/// Why the inbox did not take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    Full,
    /// The loop has ended.
    Closed,
}

/// A transfer that is complete and verified; the loop answers.
#[derive(Debug)]
pub struct CommitJob {
    pub arrived: Arrived,
    pub answer: oneshot::Sender<Result<(), TransferRefusal>>,
}

/// A step that is over, with its times as the engine's thread saw them.
#[derive(Debug)]
pub struct StepDone {
    pub ended: Time,
    pub took: Duration,
    pub completed: CompletedStep,
}

/// Tells the handoffs of a node apart, whatever tickets its peers send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HandoffSerial(u64);

impl HandoffSerial {
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The end of a handoff, for the loop.
#[derive(Clone, Debug)]
pub struct PushEnded {
    pub key: AttemptKey,
    /// Tells it from a handoff of an earlier life of the key.
    pub serial: HandoffSerial,
    pub end: PushEnd,
    /// With `Acked`.
    pub report: Option<PushReport>,
}

/// What an acknowledged push brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushReport {
    pub transport: &'static str,
    pub kv_bytes: u64,
    pub moving: Duration,
    pub last_written: Instant,
}

/// Everything that arrived since the loop last looked, to be applied in the order of the fields.
#[derive(Debug, Default)]
pub struct Arrivals {
    pub step: Option<StepDone>,
    pub requests: Vec<NewRequest>,
    pub began: BTreeSet<TransferId>,
    pub progressed: BTreeSet<TransferId>,
    pub commits: Vec<CommitJob>,
    pub receive_ends: Vec<(TransferId, TransportKind, ReceiveEnd)>,
    pub push_ends: Vec<PushEnded>,
    /// Who asked for a block report.
    pub questions: Vec<oneshot::Sender<BlockReport>>,
    /// Who asked for an empty prefix cache.
    pub cache_resets: Vec<oneshot::Sender<CacheReset>>,
    /// Set once: finish what runs until then, take nothing new.
    pub drain_until: Option<Time>,
    /// The engine's thread has ended.
    pub is_engine_gone: bool,
}

/// Block reports, and resets of the prefix cache, that may be asked for at once: a person, a monitor, a test.
const QUESTIONS_MAX: usize = 16;

#[derive(Debug, Default)]
struct State {
    arrivals: Arrivals,
    is_woken: bool,
    is_closed: bool,
}

#[derive(Debug, Default)]
pub struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

impl Inbox {
    /// Gives the request back when it is not taken.
    pub fn request(&self, new: NewRequest) -> Result<(), (Box<NewRequest>, NotTaken)> {
        let mut state = self.lock();
        if state.is_closed {
            return Err((Box::new(new), NotTaken::Closed));
        }
        if state.arrivals.requests.len() >= REQUESTS_MAX {
            return Err((Box::new(new), NotTaken::Full));
        }
        state.arrivals.requests.push(new);
        self.wake_locked(state);
        Ok(())
    }
    pub fn began(&self, transfer: TransferId) {
        let mut state = self.lock();
        state.arrivals.began.insert(transfer);
        self.wake_locked(state);
    }
    /// Does not wake the loop: it looks at signs of life before it looks at its timers, and nothing else depends on them.
    pub fn progressed(&self, transfer: TransferId) {
        self.lock().arrivals.progressed.insert(transfer);
    }
    pub fn step_done(&self, step: StepDone) {
        let mut state = self.lock();
        state.arrivals.step = Some(step);
        self.wake_locked(state);
    }
    pub fn engine_gone(&self) {
        let mut state = self.lock();
        state.arrivals.is_engine_gone = true;
        self.wake_locked(state);
    }
    /// Dropped when the loop has ended: the answer's sender goes with it.
    pub fn commit(&self, job: CommitJob) {
        let mut state = self.lock();
        if !state.is_closed {
            state.arrivals.commits.push(job);
            self.wake_locked(state);
        }
    }
    pub fn receive_ended(&self, transfer: TransferId, transport: TransportKind, end: ReceiveEnd) {
        let mut state = self.lock();
        if !state.is_closed {
            state.arrivals.receive_ends.push((transfer, transport, end));
            self.wake_locked(state);
        }
    }
    pub fn push_ended(&self, ended: PushEnded) {
        let mut state = self.lock();
        if !state.is_closed {
            state.arrivals.push_ends.push(ended);
            self.wake_locked(state);
        }
    }
    pub fn drain(&self, until: Time) {
        let mut state = self.lock();
        state.arrivals.drain_until = Some(until);
        self.wake_locked(state);
    }
    fn question(&self, answer: oneshot::Sender<BlockReport>) {
        let mut state = self.lock();
        if !state.is_closed && state.arrivals.questions.len() < QUESTIONS_MAX {
            state.arrivals.questions.push(answer);
            self.wake_locked(state);
        }
    }
    /// Asks for an empty prefix cache. The receiver ends without an answer when the loop is gone or too many have asked already.
    pub fn reset_prefix_cache(&self) -> oneshot::Receiver<CacheReset> {
        let (answer, answered) = oneshot::channel();
        let mut state = self.lock();
        if !state.is_closed && state.arrivals.cache_resets.len() < QUESTIONS_MAX {
            state.arrivals.cache_resets.push(answer);
            self.wake_locked(state);
        }
        answered
    }
    /// Something outside the inbox has changed: a client has gone, the push queue has room, a pair is up or down.
    pub fn wake(&self) {
        self.wake_locked(self.lock());
    }
    /// The loop has ended: nobody will look again. Gives back the requests that nobody has seen.
    pub fn close(&self) -> Vec<NewRequest> {
        let mut state = self.lock();
        state.is_closed = true;
        std::mem::take(&mut state.arrivals).requests
    }

    /// Waits for something, at most until `deadline`, and takes everything.
    pub fn take(&self, deadline: Time) -> Arrivals {
        let mut state = self.lock();
        loop {
            let left = deadline.remaining(Clock::now());
            if state.is_woken || left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_woken = false;
        std::mem::take(&mut state.arrivals)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn wake_locked(&self, mut state: MutexGuard<'_, State>) {
        state.is_woken = true;
        drop(state);
        self.changed.notify_one();
    }
}

impl BlockLedger for Inbox {
    fn ask(&self) -> oneshot::Receiver<BlockReport> {
        let (answer, answered) = oneshot::channel();
        self.question(answer);
        answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn an_end_is_not_lost_and_wakes_the_loop() {
        let inbox = Arc::new(Inbox::default());
        let sender = inbox.clone();
        let thread = std::thread::spawn(move || {
            sender.receive_ended(TransferId(1), kv_transfer::grpc::KIND, ReceiveEnd::PairLost)
        });
        let work = inbox.take(Clock::now() + Duration::from_secs(20));
        assert_eq!(work.receive_ends.len(), 1);
        thread.join().expect("no panic");
        assert!(inbox.take(Clock::now()).receive_ends.is_empty());
    }

    #[test]
    fn an_idle_wait_ends_at_its_deadline() {
        let start = Clock::now();
        Inbox::default().take(start + Duration::from_millis(5));
        assert!(Clock::now() >= start + Duration::from_millis(5));
    }

    #[test]
    fn a_commit_for_a_loop_that_is_gone_is_answered_by_its_absence() {
        let inbox = Inbox::default();
        inbox.close();
        let (answer, mut answered) = oneshot::channel();
        let arrived = Arrived {
            transfer: TransferId(1),
            key: serving_core::request::AttemptKey {
                request: serving_core::ids::RequestId(1),
                attempt: serving_core::ids::Attempt(0),
            },
            transport: kv_transfer::grpc::KIND,
            first_tokens: Vec::new(),
            kv_bytes: 0,
            frames: 0,
            first_frame: None,
            last_frame: std::time::Instant::now(),
            traceparent: None,
            cached_tokens: None,
        };
        inbox.commit(CommitJob { arrived, answer });
        assert!(answered.try_recv().is_err());
    }
}
