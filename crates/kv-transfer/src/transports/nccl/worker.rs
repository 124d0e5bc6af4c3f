//! One communicator, on a thread of its own: made, used for one exchange at a time, and aborted. Calls of the library that hang
//! then hold up this thread alone. The pair sees a state and has deadlines.
//!
//! What the communicator reads and writes is held until its abort has returned. When the abort does not return, the thread, the
//! memory and the communicator are kept for the rest of the process, and counted. So is the memory when the abort fails.

use std::any::Any;
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::fault::Ending;
use super::group::Run;
use super::library::{CommunicatorId, Direction, Library, Rank, RankOf};
use crate::device::DeviceLimits;

/// Between looks at a communicator that has nothing to do.
const LOOK_WHEN_IDLE: Duration = Duration::from_millis(20);
/// Looks at a running exchange that follow each other without a pause: a few megabytes take less than a sleep does.
const LOOKS_WITHOUT_PAUSE: u32 = 200;
/// Between later looks.
const PAUSE: Duration = Duration::from_micros(50);

/// Communicators of this process whose kernels may still run. While there is one, freeing memory of a device may wait for it
/// for ever (nccl issue 564).
static MAY_RUN: AtomicUsize = AtomicUsize::new(0);

pub(super) fn may_run() -> bool {
    MAY_RUN.load(Ordering::SeqCst) > 0
}

/// The life of a communicator, as its pair sees it.
#[derive(Clone, Debug)]
pub(super) enum State {
    Making,
    Ready,
    /// It is being aborted, or has been.
    Ended(Arc<Ending>),
}

/// One exchange to make.
struct Order {
    direction: Direction,
    runs: Vec<Run>,
    has_run: oneshot::Sender<()>,
}

/// What a communicator needs.
pub(super) struct Plan {
    pub library: Arc<dyn Library>,
    pub id: CommunicatorId,
    pub rank: RankOf,
    /// The memory that exchanges name. It is dropped after the abort, and never if the abort fails.
    pub held: Arc<dyn Any + Send + Sync>,
    pub limits: DeviceLimits,
    /// Counts what an abort leaves behind that fails or does not return.
    pub keep: Arc<dyn Fn(&'static str) + Send + Sync>,
}

/// What a communicator leaves behind. An abort that is late may fail afterwards: it leaves the same things behind, so they count once.
struct Leftovers {
    keep: Arc<dyn Fn(&'static str) + Send + Sync>,
    are_counted: AtomicBool,
}

impl Leftovers {
    fn count(&self, what: &'static str) {
        if !self.are_counted.swap(true, Ordering::SeqCst) {
            (self.keep)(what);
        }
    }
}

/// The pair's end. Dropping it ends the communicator.
pub(super) struct Worker {
    orders: SyncSender<Order>,
    state: watch::Receiver<State>,
    over: CancellationToken,
}

impl Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("state", &*self.state.borrow())
            .finish_non_exhaustive()
    }
}

impl Worker {
    /// Begins to make the communicator. Needs a Tokio runtime around it.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(plan: Plan) -> Result<Self, Ending> {
        // One exchange is under way at a time.
        let (orders, taken) = sync_channel(1);
        let (state_in, state) = watch::channel(State::Making);
        let (aborted, was_aborted) = oneshot::channel();
        let (over, limits) = (CancellationToken::new(), plan.limits);
        let leftovers = Arc::new(Leftovers {
            keep: plan.keep.clone(),
            are_counted: AtomicBool::new(false),
        });
        let thread = Thread {
            plan,
            leftovers: leftovers.clone(),
            state: state_in,
            over: over.clone(),
        };
        let named = std::thread::Builder::new().name("nccl".to_owned());
        let started = named.spawn(move || {
            thread.run(&taken);
            // Nobody may be there any more.
            let _ = aborted.send(());
        });
        let started = started.map_err(Ending::Thread)?;
        // A runtime that ends waits a while for its blocking tasks: the thread should not be in the library while the process
        // takes that down.
        tokio::task::spawn_blocking(move || started.join());
        tokio::spawn(watch_abort((state.clone(), was_aborted), limits, leftovers));
        Ok(Self { orders, state, over })
    }

    /// Gives an exchange to the thread. One is under way at a time. Without runs there is nothing to do.
    pub fn exchange(&self, direction: Direction, runs: Vec<Run>) -> Running {
        if runs.is_empty() {
            return Running::Over;
        }
        let (has_run, ran) = oneshot::channel();
        // A thread that takes no order drops it, and the state says why.
        let _ = self.orders.try_send(Order {
            direction,
            runs,
            has_run,
        });
        Running::UnderWay(ran)
    }

    /// Waits for the next state. After the end it waits for ever. Cancel-safe.
    pub async fn next_state(&mut self) -> State {
        match self.state.changed().await {
            Ok(()) => self.state.borrow_and_update().clone(),
            Err(_) => std::future::pending().await,
        }
    }
}

/// An exchange at this rank.
#[derive(Debug)]
pub(super) enum Running {
    UnderWay(oneshot::Receiver<()>),
    Over,
    /// The communicator has ended. Its state says why.
    Lost,
}

impl Running {
    /// Ends once, when the exchange has run. Cancel-safe.
    pub async fn over(&mut self) {
        if let Running::UnderWay(ran) = self {
            *self = match ran.await {
                Ok(()) => Running::Over,
                Err(_) => Running::Lost,
            };
            if matches!(self, Running::Over) {
                return;
            }
        }
        std::future::pending().await
    }

    pub fn is_over(&self) -> bool {
        matches!(self, Running::Over)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.over.cancel();
    }
}

/// Waits for the end, and then for the abort. An abort that takes too long is counted and left alone.
async fn watch_abort(
    (mut state, was_aborted): (watch::Receiver<State>, oneshot::Receiver<()>),
    limits: DeviceLimits,
    leftovers: Arc<Leftovers>,
) {
    let _ = state.wait_for(|state| matches!(state, State::Ended(_))).await;
    if tokio::time::timeout(limits.abort_wait, was_aborted).await.is_err() {
        leftovers.count("a communicator that does not abort, its thread and its memory");
    }
}

/// The thread's end.
struct Thread {
    plan: Plan,
    leftovers: Arc<Leftovers>,
    state: watch::Sender<State>,
    over: CancellationToken,
}

impl Thread {
    fn run(self, orders: &Receiver<Order>) {
        let began = self.plan.library.begin(&self.plan.id, self.plan.rank);
        let mut rank = match began {
            Ok(rank) => rank,
            Err(error) => return self.tell(Ending::Library(error)),
        };
        MAY_RUN.fetch_add(1, Ordering::SeqCst);
        let Err(ending) = self.live(&mut *rank, orders);
        let is_wanted_end = matches!(ending, Ending::Closed);
        let why = ending.to_string();
        self.tell(ending);
        let begun = Instant::now();
        let aborted = rank.abort();
        let abort_ms = begun.elapsed().as_millis();
        if let Err(error) = aborted {
            // Its kernel may run on and write. So it stays among those that may run, and nobody gets its memory.
            tracing::error!(why, %error, abort_ms, "a communicator has ended, and its abort has failed");
            std::mem::forget(self.plan.held);
            return self
                .leftovers
                .count("a communicator whose abort has failed, and its memory");
        }
        MAY_RUN.fetch_sub(1, Ordering::SeqCst);
        match is_wanted_end {
            true => tracing::debug!(abort_ms, "a communicator is closed"),
            false => tracing::warn!(why, abort_ms, "a communicator has ended"),
        }
    }

    fn tell(&self, ending: Ending) {
        self.state.send_replace(State::Ended(Arc::new(ending)));
    }

    /// Until something ends it.
    fn live(&self, rank: &mut dyn Rank, orders: &Receiver<Order>) -> Result<std::convert::Infallible, Ending> {
        self.make(rank)?;
        self.state.send_replace(State::Ready);
        loop {
            match orders.recv_timeout(LOOK_WHEN_IDLE) {
                Ok(order) => self.exchange(rank, order)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Ending::Closed),
            }
            self.look(rank)?;
        }
    }

    fn make(&self, rank: &mut dyn Rank) -> Result<(), Ending> {
        let mut pauses = Pauses::default();
        loop {
            let waited = pauses.begun.elapsed();
            let not_made = |error| Ending::NotMade {
                waited,
                error,
                listener: self.plan.id.listener(),
            };
            match self.look(rank) {
                Ok(true) => return Ok(()),
                Ok(false) if waited >= self.plan.limits.communicator_wait => return Err(not_made(None)),
                Ok(false) => pauses.next(),
                // The peer's end may give up a moment before this one.
                Err(Ending::Library(error)) => return Err(not_made(Some(error))),
                Err(ending) => return Err(ending),
            }
        }
    }

    fn exchange(&self, rank: &mut dyn Rank, order: Order) -> Result<(), Ending> {
        rank.post(order.direction, &order.runs).map_err(Ending::Library)?;
        let mut pauses = Pauses::default();
        while !rank.has_run().map_err(Ending::Library)? {
            let waited = pauses.begun.elapsed();
            if waited >= self.plan.limits.group_wait {
                let bytes = order.runs.iter().map(|run| run.bytes as u64).sum();
                return Err(Ending::Late { bytes, waited });
            }
            self.look(rank)?;
            pauses.next();
        }
        // Nobody waits for it when the pair has just ended.
        let _ = order.has_run.send(());
        Ok(())
    }

    /// Whether the library is at rest.
    fn look(&self, rank: &mut dyn Rank) -> Result<bool, Ending> {
        if self.over.is_cancelled() {
            return Err(Ending::Closed);
        }
        rank.is_settled().map_err(Ending::Library)
    }
}

/// The pauses of one wait.
struct Pauses {
    begun: Instant,
    looks: u32,
}

impl Default for Pauses {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            looks: 0,
        }
    }
}

impl Pauses {
    fn next(&mut self) {
        self.looks += 1;
        match self.looks {
            ..LOOKS_WITHOUT_PAUSE => std::hint::spin_loop(),
            _ => std::thread::park_timeout(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests;
