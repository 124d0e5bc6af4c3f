//! The threads of a pool: phases, waking, rests and panics.

use std::time::Duration;

use super::rest::FIRST_REST;
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
    let mut late = Late::at(0, &pool.shared.workers, began);
    late.waited = Duration::from_millis(6);
    charge(&mut pool.rests, &pool.shared.workers, &late);
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
