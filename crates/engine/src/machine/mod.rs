//! What this machine can do at most: loops that only multiply, and loops that only read. The engine's speed is shown beside it
//! (`baton bench engine --limits`).
//!
//! A peak belongs to an instruction set, so it is measured with the one that [`crate::KernelChoice::Auto`] takes here. A machine
//! with AMX has a higher one, which no kernel uses.

mod peaks;

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::memory::{FixedMemory, HugeMemory};
use peaks::Loops;

/// Long enough for the clock of a core to rise, and short beside what is measured afterwards.
const MEASURED: Duration = Duration::from_millis(60);
/// Rounds of a loop between two looks at the clock: some tenths of a millisecond.
const ROUNDS: u64 = 20_000;

/// Measures with so many threads. Each call is one sample.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    loops: Loops,
    threads: usize,
}

impl Machine {
    pub fn new(threads: usize) -> Self {
        Self {
            loops: Loops::of_this_machine(),
            threads: threads.max(1),
        }
    }

    /// The instruction set of the peaks.
    pub fn instructions(&self) -> &'static str {
        self.loops.name
    }

    /// Operations a second of dot products of 8-bit integers: a product and an addition are two.
    pub fn int8_dot(&self) -> f64 {
        self.rate(|_| (self.loops.int8_dot)(ROUNDS))
    }

    /// Operations a second of products with additions in f32: two for each.
    pub fn f32_fma(&self) -> f64 {
        self.rate(|_| (self.loops.f32_fma)(ROUNDS))
    }

    /// Bytes a second, where each thread reads its share of a [`Range`] again and again.
    pub fn read(&self, range: &Range) -> f64 {
        // A part of several huge pages' size at a time, so that the clock is looked at often enough.
        const PART: usize = 4 << 20;
        let share = range.0.len() / self.threads;
        self.rate(|thread| {
            let own = &range.0[thread * share..(thread + 1) * share];
            own.chunks(PART).map(|part| (self.loops.read)(part)).sum()
        })
    }

    /// The sum of what the threads do a second. `work` says how much it has done.
    fn rate(&self, work: impl Fn(usize) -> u64 + Sync) -> f64 {
        let start = Barrier::new(self.threads);
        let of_thread = |thread| {
            work(thread);
            start.wait();
            let (began, mut done) = (Instant::now(), 0);
            while began.elapsed() < MEASURED {
                done += work(thread);
            }
            done as f64 / began.elapsed().as_secs_f64()
        };
        thread::scope(|scope| {
            let of_thread = &of_thread;
            let others: Vec<_> = (1..self.threads)
                .map(|thread| scope.spawn(move || of_thread(thread)))
                .collect();
            let own = of_thread(0);
            others
                .into_iter()
                .map(|other| other.join().expect("the loops do not panic"))
                .fold(own, |sum, rate| sum + rate)
        })
    }
}

/// Memory to read, in huge pages where the system has them, as packed weights lie.
pub struct Range(FixedMemory);

impl Range {
    /// `None`: the system has no such memory.
    pub fn new(bytes: usize) -> Option<Self> {
        let mut memory = HugeMemory::zeroed(bytes)?;
        // A page that nobody wrote to is one page of zeros for all of them, which stays in the cache.
        memory.bytes_mut().fill(1);
        Some(Self(memory.fixed()))
    }
}

impl std::fmt::Debug for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Range").field(&self.0.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn every_thread_works() {
        let seen = Mutex::new(BTreeSet::new());
        let rate = Machine::new(3).rate(|thread| {
            seen.lock().expect("no thread panicked").insert(thread);
            1
        });
        assert!(rate > 0.0);
        assert_eq!(
            seen.into_inner().expect("no thread panicked"),
            BTreeSet::from([0, 1, 2])
        );
    }

    #[test]
    fn every_share_of_a_range_is_read() {
        let range = Range::new(10 << 20).expect("memory");
        assert!(Machine::new(3).read(&range) > 0.0);
    }
}
