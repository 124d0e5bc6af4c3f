//! The engine's threads. They take tiles of work from one counter, so that a suspended thread delays no other thread.
//!
//! A phase ends when all its **tiles** are done, not when all threads have arrived. When the system suspends a thread
//! between two tiles, the other threads take its share. (An engine that waits for all threads of a phase becomes many
//! times slower beside a competing job.) A waiting thread spins for a short time and then parks. The caller of
//! [`Pool::parallel`] works too. A thread that is often suspended in the middle of a tile rests ([`super::rest`]).
//!
//! The claim word packs (phase number, tile count, next tile). A late thread therefore either gets a tile of the phase
//! that runs now or learns that there is none.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::rest::Rests;
use crate::EngineError;

/// More threads than this on one model of this size only wait for each other.
const MOST_THREADS: usize = 256;
/// Iterations of a worker before it parks: about 50 microseconds (a pause takes about 140 cycles on current Intel CPUs). It
/// is more than a thread waits for another thread's last tile, and less than sampling takes between two steps.
const WORKER_SPINS: u32 = 1_000;
/// Iterations of the caller before it lets the system run the thread that still works on a tile.
const CALLER_SPINS: u32 = 500;
/// When the caller has waited for this long, it looks which thread is late, and whether that thread computes or is suspended. Shorter
/// waits are not worth the look.
const LATE: Duration = Duration::from_micros(100);

/// The caller looks every few microseconds. What is longer than this was a suspension of the caller, and perhaps of all threads at once.
const LONGEST_LOOK: Duration = Duration::from_millis(1);

const TILE_BITS: u32 = 24;
const TILE_MASK: u64 = (1 << TILE_BITS) - 1;
/// Leaves room above the count for one failed claim of every thread.
const MOST_TILES: usize = (TILE_MASK as usize) - MOST_THREADS - 1;

type Work<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// What a worker and the caller tell each other. Each has its own line of the cache (two, because they are fetched in pairs).
#[repr(align(128))]
#[derive(Default)]
struct Worker {
    in_tile: AtomicBool,
    /// It takes no more tiles until its rest is over. It may take one that it was about to claim.
    rests: AtomicBool,
    /// The clock of the time that it computes. Set when it starts.
    cpu_clock: OnceLock<libc::clockid_t>,
}

impl Worker {
    /// The time that it has computed so far. None where the system does not tell.
    fn cpu_time(&self) -> Option<Duration> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call only fills the struct.
        let failed = unsafe { libc::clock_gettime(*self.cpu_clock.get()?, &mut time) };
        (failed == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}

/// A worker that was in a tile when the caller had waited for [`LATE`].
struct Late {
    worker: usize,
    /// What its clock said then.
    cpu_since: Option<Duration>,
    /// When the caller last saw it in a tile.
    seen: Instant,
    waited: Duration,
}

impl Late {
    fn at(worker: usize, shared: &Shared, now: Instant) -> Self {
        Self {
            worker,
            cpu_since: shared.workers[worker].cpu_time(),
            seen: now,
            waited: Duration::ZERO,
        }
    }

    /// Looks who is late now. Returns the one that was late before, when it has finished its tile and another has not. The last one stays
    /// `late` when it finishes.
    fn look(late: &mut Option<Self>, shared: &Shared, now: Instant) -> Option<Self> {
        let in_tile = |worker: &Worker| worker.in_tile.load(Ordering::Relaxed);
        match late {
            Some(late) if in_tile(&shared.workers[late.worker]) => {
                late.waited += (now - late.seen).min(LONGEST_LOOK);
                late.seen = now;
                None
            }
            _ => {
                let another = shared.workers.iter().position(in_tile)?;
                late.replace(Self::at(another, shared, now))
            }
        }
    }

    /// How long it stood in its tile without computing. A long tile or a slow core is no suspension.
    fn suspended(&self, shared: &Shared) -> Duration {
        let computed = self.cpu_since.zip(shared.workers[self.worker].cpu_time());
        let computed = computed.map(|(before, now)| now.saturating_sub(before));
        computed.map_or(Duration::ZERO, |computed| self.waited.saturating_sub(computed))
    }
}

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
            if now - begun < LATE {
                continue;
            }
            if let Some(before) = Late::look(&mut late, shared, now) {
                charge(&mut self.rests, shared, &before);
            }
        }
        late.into_iter().for_each(|late| charge(&mut self.rests, shared, &late));
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

fn charge(rests: &mut Rests, shared: &Shared, late: &Late) {
    if rests.waited_for(late.worker, late.suspended(shared), Instant::now()) {
        // Before the next phase is published, so that a worker that sees the phase sees this too.
        shared.workers[late.worker].rests.store(true, Ordering::SeqCst);
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
    if let Some(clock) = own_cpu_clock() {
        worker.cpu_clock.get_or_init(|| clock);
    }
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

#[cfg(target_os = "linux")]
fn own_cpu_clock() -> Option<libc::clockid_t> {
    let mut clock = 0;
    // SAFETY: the thread is this one, and the call only fills the number.
    let failed = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut clock) };
    (failed == 0).then_some(clock)
}

#[cfg(not(target_os = "linux"))]
fn own_cpu_clock() -> Option<libc::clockid_t> {
    None
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

#[cfg(test)]
mod tests {
    use super::super::rest::FIRST_REST;
    use super::*;

    #[test]
    fn every_tile_runs_once_and_phases_are_ordered() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(threads).unwrap();
            let cells: Vec<AtomicU32> = (0..97).map(|_| AtomicU32::new(0)).collect();
            for phase in 0..3_000u32 {
                let tiles = 1 + phase as usize % cells.len();
                pool.parallel(tiles, &|tile, thread| {
                    assert!(thread < threads);
                    // Relaxed on purpose, because the pool must order the phases.
                    cells[tile].store(cells[tile].load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                });
            }
            let total: u32 = cells.iter().map(|cell| cell.load(Ordering::Relaxed)).sum();
            let expected: u32 = (0..3_000).map(|phase| 1 + phase % 97).sum();
            assert_eq!(total, expected, "{threads} threads");
        }
    }

    fn wait_until_parked(pool: &Pool, workers: u32, deadline: Instant) {
        while pool.shared.sleepers.load(Ordering::SeqCst) < workers {
            assert!(Instant::now() < deadline, "the workers never parked");
            std::thread::yield_now();
        }
    }

    #[test]
    fn parked_workers_wake_up() {
        let mut pool = Pool::new(2).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        for round in 0..3 {
            // On a busy machine the worker may have to rest, and then it would not come.
            pool.end_rests(Instant::now() + Duration::from_secs(3_600));
            wait_until_parked(&pool, 1, deadline);
            // Both tiles wait for each other, so only a woken worker can let this phase end.
            let arrived = AtomicU32::new(0);
            pool.parallel(2, &|_, _| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 2 {
                    assert!(Instant::now() < deadline, "round {round}: the worker never came");
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_worker_that_is_suspended_again_and_again_has_to_rest() {
        let mut pool = Pool::new(3).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        // Nobody sends, so a wait for this stands for a tile whose thread has no core.
        let (_sender, nothing) = std::sync::mpsc::sync_channel::<()>(1);
        let nothing = Mutex::new(nothing);
        // Two phases are enough on an idle machine. On a busy one the caller waits for its own core as well, and that is no debt.
        while !pool.shared.workers[0].rests.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "it never had to rest");
            let has_come = AtomicBool::new(false);
            pool.parallel(3, &|_, thread| {
                if thread == 1 {
                    has_come.store(true, Ordering::Relaxed);
                    let _ = nothing.lock().unwrap().recv_timeout(Duration::from_millis(4));
                }
                // The two others take a tile each and leave it the third.
                while !has_come.load(Ordering::Relaxed) && Instant::now() < deadline {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_resting_worker_takes_no_tiles_and_comes_back() {
        let mut pool = Pool::new(3).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        wait_until_parked(&pool, 2, deadline);
        let began = Instant::now();
        let mut late = Late::at(0, &pool.shared, began);
        late.waited = Duration::from_millis(6);
        charge(&mut pool.rests, &pool.shared, &late);
        let mut is_back = false;
        while !is_back {
            assert!(Instant::now() < deadline, "it never came back");
            let (tiles, its_tiles) = (AtomicU32::new(0), AtomicU32::new(0));
            pool.parallel(64, &|_, thread| {
                tiles.fetch_add(1, Ordering::Relaxed);
                its_tiles.fetch_add(u32::from(thread == 1), Ordering::Relaxed);
                std::thread::yield_now();
            });
            assert_eq!(tiles.load(Ordering::Relaxed), 64);
            is_back = its_tiles.load(Ordering::Relaxed) > 0;
        }
        assert!(began.elapsed() >= FIRST_REST, "it took a tile while it rested");
    }

    #[test]
    fn no_wait_for_a_worker_is_forgotten() {
        let pool = Pool::new(3).unwrap();
        // Parked workers leave their marks alone.
        wait_until_parked(&pool, 2, Instant::now() + Duration::from_secs(60));
        let shared = &*pool.shared;
        let is_in_tile = |worker: usize, is| shared.workers[worker].in_tile.store(is, Ordering::Relaxed);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let mut late = None;
        assert!(Late::look(&mut late, shared, at(0)).is_none() && late.is_none());
        is_in_tile(0, true);
        assert!(Late::look(&mut late, shared, at(10)).is_none());
        assert!(Late::look(&mut late, shared, at(500)).is_none());
        // The caller itself was suspended.
        assert!(Late::look(&mut late, shared, at(9_000)).is_none());
        let waited = |late: &Late| (late.worker, late.waited.as_micros());
        assert_eq!(late.as_ref().map(waited), Some((0, 490 + 1_000)));
        // It finishes while the caller looks away, and nobody else is late.
        is_in_tile(0, false);
        assert!(Late::look(&mut late, shared, at(9_100)).is_none());
        assert_eq!(late.as_ref().map(waited), Some((0, 1_490)));
        is_in_tile(1, true);
        let before = Late::look(&mut late, shared, at(9_200));
        assert_eq!(before.as_ref().map(waited), Some((0, 1_490)));
        assert_eq!(late.as_ref().map(waited), Some((1, 0)));
    }

    #[test]
    fn a_panic_in_a_tile_reaches_the_caller_and_the_pool_survives() {
        let mut pool = Pool::new(3).unwrap();
        for bad in 0..20 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.parallel(20, &|tile, _| assert!(tile != bad, "tile {tile}"));
            }));
            assert!(result.is_err());
            let count = AtomicU32::new(0);
            pool.parallel(20, &|_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.load(Ordering::Relaxed), 20);
        }
    }

    #[test]
    fn absurd_thread_counts_are_errors() {
        assert!(matches!(Pool::new(0), Err(EngineError::BadThreadCount { .. })));
        assert!(matches!(Pool::new(257), Err(EngineError::BadThreadCount { .. })));
    }
}
