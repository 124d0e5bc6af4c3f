//! The engine's threads. They take tiles of work from one counter, so that a suspended thread delays no other thread.
//!
//! A phase ends when all its **tiles** are done, not when all threads have arrived. When the system suspends a thread
//! between two tiles, the other threads take its share. (An engine that waits for all threads of a phase becomes many
//! times slower beside a competing job.) A waiting thread spins for a short time and then parks. The caller of
//! [`Pool::parallel`] works too. A thread that is often suspended in the middle of a tile rests ([`rest`]).
//!
//! The claim word packs (phase number, tile count, next tile). A late thread therefore either gets a tile of the phase
//! that runs now or learns that there is none.

mod late;
mod rest;
#[cfg(test)]
mod tests;

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use self::late::{LATE, Late, Worker};
use self::rest::Rests;
use crate::EngineError;

/// More threads than this on one model of this size only wait for each other.
const MOST_THREADS: usize = 256;
/// Iterations of a worker before it parks: about 50 microseconds (a pause takes about 140 cycles on current Intel CPUs). It
/// is more than a thread waits for another thread's last tile, and less than sampling takes between two steps.
const WORKER_SPINS: u32 = 1_000;
/// Iterations of the caller before it lets the system run the thread that still works on a tile.
const CALLER_SPINS: u32 = 500;
const TILE_BITS: u32 = 24;
const TILE_MASK: u64 = (1 << TILE_BITS) - 1;
/// Leaves room above the count for one failed claim of every thread.
const MOST_TILES: usize = (TILE_MASK as usize) - MOST_THREADS - 1;

type Work<'a> = &'a (dyn Fn(usize, usize) + Sync);

struct Shared {
    /// `phase << 48 | count << 24 | next`.
    claim: AtomicU64,
    done: AtomicU32,
    /// The number of workers that are parked or about to park and do not rest.
    sleepers: AtomicU32,
    workers: Box<[Worker]>,
    stop: AtomicBool,
    panicked: AtomicBool,
    /// The running phase's closure. Written by the caller between phases, read only by holders of a claimed tile.
    work: UnsafeCell<Option<Work<'static>>>,
    lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `work` is the only field that is not Sync. It is written only while no tile is claimed (the caller waits for
// all tiles of a phase before the next) and read only between a claim and its completion; the claim word's
// release/acquire orders the two.
unsafe impl Sync for Shared {}
// SAFETY: the closure behind `work` is Sync, so a reference to it may be used from any thread.
unsafe impl Send for Shared {}

/// Fixed threads for the life of an engine.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    phase: u64,
    rests: Rests,
}

impl Pool {
    /// `threads` counts the caller: 1 starts none.
    pub(crate) fn new(threads: usize) -> Result<Self, EngineError> {
        if !(1..=MOST_THREADS).contains(&threads) {
            return Err(EngineError::BadThreadCount {
                threads,
                most: MOST_THREADS,
            });
        }
        let shared = Arc::new(Shared {
            claim: AtomicU64::new(0),
            done: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            workers: (1..threads).map(|_| Worker::default()).collect(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            work: UnsafeCell::new(None),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            workers: Vec::with_capacity(threads - 1),
            phase: 0,
            rests: Rests::of(threads - 1, Instant::now()),
        };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("engine-{thread}"))
                .spawn(move || work_until_stopped(&shared, thread))
                .map_err(|source| EngineError::ThreadStart { source })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Every thread that may run a tile.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The threads that share the next phase. The others rest.
    pub(crate) fn active_threads(&mut self) -> usize {
        if self.rests.resting() > 0 {
            self.end_rests(Instant::now());
        }
        self.threads() - self.rests.resting()
    }

    /// Runs `work(tile, thread)` for every tile below `tiles`, each exactly once, and returns when all are done.
    /// What a tile wrote is visible to all tiles of later phases.
    pub(crate) fn parallel(&mut self, tiles: usize, work: Work<'_>) {
        assert!(tiles <= MOST_TILES, "a phase of {tiles} tiles");
        if self.active_threads() == 1 || tiles <= 1 {
            (0..tiles).for_each(|tile| work(tile, 0));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: the lifetime is only written differently: every use ends before this call returns, because the
        // call waits for all tiles, also when one panics. No tile is claimed now, so nobody reads `work`.
        unsafe { *shared.work.get() = Some(std::mem::transmute::<Work<'_>, Work<'static>>(work)) };
        shared.done.store(0, Ordering::Relaxed);
        self.phase = (self.phase + 1) & 0xffff;
        shared.claim.store(
            self.phase << (2 * TILE_BITS) | (tiles as u64) << TILE_BITS,
            Ordering::SeqCst,
        );
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            shared.wake_sleepers();
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| while claim_and_run(shared, 0) {}));
        if outcome.is_err() {
            // For the other threads, the tile that panicked here is done.
            shared.done.fetch_add(1, Ordering::Release);
            while catch_unwind(AssertUnwindSafe(|| claim_and_run(shared, 0))).unwrap_or_else(|_| {
                shared.done.fetch_add(1, Ordering::Release);
                true
            }) {}
        }
        self.wait_for_the_last(tiles);
        if let Err(payload) = outcome {
            resume_unwind(payload);
        }
        assert!(
            !self.shared.panicked.swap(false, Ordering::Relaxed),
            "a thread of the engine panicked; its message is above"
        );
    }

    /// Waits until all tiles of the running phase are done.
    fn wait_for_the_last(&mut self, tiles: usize) {
        let shared = &*self.shared;
        let all_done = || shared.done.load(Ordering::Acquire) as usize >= tiles;
        for _ in 0..CALLER_SPINS {
            if all_done() {
                return;
            }
            std::hint::spin_loop();
        }
        let begun = Instant::now();
        let mut late: Option<Late> = None;
        while !all_done() {
            std::thread::yield_now();
            let now = Instant::now();
            if now - begun >= LATE
                && let Some(before) = Late::look(&mut late, &shared.workers, now)
            {
                charge(&mut self.rests, &shared.workers, &before);
            }
        }
        if let Some(late) = late {
            charge(&mut self.rests, &shared.workers, &late);
        }
    }

    fn end_rests(&mut self, now: Instant) {
        let shared = &*self.shared;
        let mut is_any_back = false;
        self.rests.end(now, |worker| {
            shared.workers[worker].rests.store(false, Ordering::SeqCst);
            is_any_back = true;
        });
        if is_any_back {
            shared.wake_sleepers();
        }
    }
}

fn charge(rests: &mut Rests, workers: &[Worker], late: &Late) {
    if rests.waited_for(late.worker, late.suspended(workers), Instant::now()) {
        // Before the next phase is published, so that a worker that sees the phase sees this too.
        workers[late.worker].rests.store(true, Ordering::SeqCst);
    }
}

impl Shared {
    fn wake_sleepers(&self) {
        let _guard = self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.sleepers.store(0, Ordering::SeqCst);
        self.wake.notify_all();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake_sleepers();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tiles; nothing is left to report here.
            let _ = worker.join();
        }
    }
}

/// Takes one tile of the running phase. False when it has none left.
fn claim_and_run(shared: &Shared, thread: usize) -> bool {
    let claimed = shared.claim.fetch_add(1, Ordering::AcqRel);
    let (tile, count) = (claimed & TILE_MASK, (claimed >> TILE_BITS) & TILE_MASK);
    if tile >= count {
        return false;
    }
    // SAFETY: a claimed tile keeps its phase open until `done` is raised below, so the closure is alive and unchanged.
    if let Some(work) = unsafe { *shared.work.get() } {
        work(tile as usize, thread);
    }
    shared.done.fetch_add(1, Ordering::Release);
    true
}

fn work_until_stopped(shared: &Shared, thread: usize) {
    let worker = &shared.workers[thread - 1];
    worker.starts();
    while wait_for_work(shared, worker) {
        while !worker.rests.load(Ordering::SeqCst) {
            worker.in_tile.store(true, Ordering::Relaxed);
            let outcome = catch_unwind(AssertUnwindSafe(|| claim_and_run(shared, thread)));
            worker.in_tile.store(false, Ordering::Relaxed);
            match outcome {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => {
                    shared.panicked.store(true, Ordering::Relaxed);
                    shared.done.fetch_add(1, Ordering::Release);
                }
            }
        }
    }
}

/// Returns when there are unclaimed tiles. False when the pool stops.
fn wait_for_work(shared: &Shared, worker: &Worker) -> bool {
    let has_work = || {
        let claim = shared.claim.load(Ordering::SeqCst);
        (claim & TILE_MASK) < (claim >> TILE_BITS) & TILE_MASK && !worker.rests.load(Ordering::SeqCst)
    };
    for _ in 0..WORKER_SPINS {
        if has_work() {
            return true;
        }
        std::hint::spin_loop();
    }
    let mut guard = shared.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    loop {
        if shared.stop.load(Ordering::SeqCst) {
            return false;
        }
        // Announce first, look second. The caller publishes first and looks for sleepers second, so one of the two sees the
        // other. The lock keeps the caller's notification from coming between our look and our wait. A worker that rests
        // does not announce itself, so that no phase wakes it.
        if !worker.rests.load(Ordering::SeqCst) {
            shared.sleepers.fetch_add(1, Ordering::SeqCst);
        }
        if has_work() {
            return true;
        }
        guard = shared.wake.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner());
    }
}
