//! Which threads of the pool should rest, because waiting for them costs more than they do.
//!
//! Beside a process that uses the same core, a thread loses that core for milliseconds in the middle of a tile. All other
//! threads then wait for that one tile. With few threads and short phases this costs more than the thread brings: with two
//! threads, of which one had half of a core, steps of one stream took 1.2 to 1.35 times as long as with one thread alone
//! (docs/measurements/engine-speed.md). So the time for which the pool waits while a thread is suspended is the thread's debt.
//! A thread with too much debt rests, and then it tries again. To sleep while waiting, so that the system may move the suspended thread
//! to the free core, did not help.
//!
//! This is a decision without threads or clocks; the pool carries it out.

use std::time::{Duration, Instant};

/// A debt above this is a reason to rest. With a tick of 250 Hz, as on the machine of the measurements, a slice of a competing
/// process takes up to 4 ms. So one interruption alone is no reason, and two in a row are.
const MOST_DEBT: Duration = Duration::from_millis(5);
/// A trial beside a competing process loses some 8 ms, two of its slices. So the first rest limits the loss to about a
/// twelfth, and the longest to a hundredth. A longer one would keep a thread idle for long when the competitor has gone.
pub(super) const FIRST_REST: Duration = Duration::from_millis(100);
const LONGEST_REST: Duration = Duration::from_millis(800);

#[derive(Clone, Copy)]
struct Rest {
    until: Instant,
    length: Duration,
}

#[derive(Clone, Copy)]
enum Account {
    Working {
        /// At `as_of`; it shrinks as time passes.
        debt: Duration,
        as_of: Instant,
        last_rest: Option<Rest>,
    },
    Resting(Rest),
}

/// The accounts of all workers of a pool.
pub(super) struct Rests {
    accounts: Vec<Account>,
    resting: usize,
}

impl Rests {
    pub(super) fn of(workers: usize, now: Instant) -> Self {
        let account = Account::Working {
            debt: Duration::ZERO,
            as_of: now,
            last_rest: None,
        };
        Self {
            accounts: vec![account; workers],
            resting: 0,
        }
    }

    /// The number of workers that rest now.
    pub(super) fn resting(&self) -> usize {
        self.resting
    }

    /// The pool could do nothing but wait while `worker` was suspended for so long. True when that worker should rest from now on.
    pub(super) fn waited_for(&mut self, worker: usize, suspended: Duration, now: Instant) -> bool {
        let threads = (self.accounts.len() - self.resting + 1) as f64;
        let Account::Working { debt, as_of, last_rest } = &mut self.accounts[worker] else {
            return false;
        };
        // With one thread fewer, n threads take n / (n - 1) times as long, so to wait for less than 1 / n of the time still
        // pays if n threads are n times as fast as one. They share the memory's bandwidth, so two thirds of it.
        let forgiven = now.saturating_duration_since(*as_of).mul_f64(2.0 / (3.0 * threads));
        *debt = debt.saturating_sub(forgiven) + suspended;
        *as_of = now;
        if *debt <= MOST_DEBT {
            return false;
        }
        // A thread that worked for longer than it had rested begins anew.
        let length = last_rest
            .filter(|last| now.saturating_duration_since(last.until) <= last.length)
            .map_or(FIRST_REST, |last| (last.length * 2).min(LONGEST_REST));
        self.accounts[worker] = Account::Resting(Rest {
            until: now + length,
            length,
        });
        self.resting += 1;
        true
    }

    /// Ends the rests that are over, and names their workers.
    pub(super) fn end(&mut self, now: Instant, mut is_back: impl FnMut(usize)) {
        for (worker, account) in self.accounts.iter_mut().enumerate() {
            if let Account::Resting(rest) = *account
                && rest.until <= now
            {
                *account = Account::Working {
                    debt: Duration::ZERO,
                    as_of: now,
                    last_rest: Some(rest),
                };
                self.resting -= 1;
                is_back(worker);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn back(rests: &mut Rests, now: Instant) -> Vec<usize> {
        let mut back = Vec::new();
        rests.end(now, |worker| back.push(worker));
        back
    }

    /// Worker 0 of `workers` is suspended for so long in every `period`, for at most 10 s. When it had to rest.
    fn first_rest(workers: usize, suspended: Duration, period: Duration) -> Option<Duration> {
        let start = Instant::now();
        let mut rests = Rests::of(workers, start);
        (1..=10_000 / period.as_millis() as u32)
            .map(|nth| period * nth)
            .find(|&at| rests.waited_for(0, suspended, start + at))
    }

    #[test]
    fn a_thread_rests_when_waiting_for_it_costs_more_than_it_brings() {
        assert_eq!(first_rest(1, ms(4), ms(8)), Some(ms(16)), "half of a core gone");
        assert_eq!(first_rest(1, ms(4), ms(20)), None, "a fifth of the time");
        // Eight threads together lose much more by the same waiting.
        assert_eq!(first_rest(7, ms(4), ms(20)), Some(ms(40)));
        assert_eq!(first_rest(7, ms(4), ms(100)), None, "a twenty-fifth of the time");
        assert_eq!(
            first_rest(1, ms(6), ms(1_000)),
            Some(ms(1_000)),
            "one long wait is enough"
        );
    }

    #[test]
    fn a_rest_that_did_not_help_is_followed_by_a_longer_one() {
        let mut now = Instant::now();
        let mut rests = Rests::of(1, now);
        let mut lengths = Vec::new();
        for _ in 0..6 {
            assert!(rests.waited_for(0, ms(6), now));
            assert_eq!(rests.resting(), 1);
            assert!(!rests.waited_for(0, ms(6), now), "it rests already");
            let began = now;
            while back(&mut rests, now).is_empty() {
                now += ms(10);
            }
            assert_eq!(rests.resting(), 0);
            lengths.push(now - began);
        }
        assert_eq!(lengths, [100, 200, 400, 800, 800, 800].map(ms));
        now += ms(801);
        assert!(rests.waited_for(0, ms(6), now));
        assert_eq!(
            back(&mut rests, now + ms(100)),
            [0],
            "it had worked for longer than it had rested"
        );
    }

    #[test]
    fn each_thread_has_its_own_account() {
        let now = Instant::now();
        let mut rests = Rests::of(3, now);
        for worker in [0, 1, 2] {
            assert!(!rests.waited_for(worker, ms(4), now));
        }
        assert!(rests.waited_for(1, ms(4), now));
        assert_eq!(rests.resting(), 1);
        assert_eq!(back(&mut rests, now + ms(100)), [1]);
    }
}
