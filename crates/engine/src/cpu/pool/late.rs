//! Which thread the caller waits for, and whether that thread computes or is suspended.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// When the caller has waited for this long, it looks which thread is late. Shorter waits are not worth the look.
pub(super) const LATE: Duration = Duration::from_micros(100);
/// While it waits, the caller looks without a pause. What is longer than this between two looks was a suspension of the caller itself, and
/// perhaps of all threads at once.
const LONGEST_LOOK: Duration = Duration::from_millis(1);

/// What a worker and the caller tell each other. Each has its own line of the cache (two, because they are fetched in pairs).
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Worker {
    pub in_tile: AtomicBool,
    /// It takes no more tiles until its rest is over. It may take one that it was about to claim.
    pub rests: AtomicBool,
    /// The clock of the time that it computes.
    cpu_clock: OnceLock<libc::clockid_t>,
}

impl Worker {
    /// Called by the thread itself.
    pub(super) fn starts(&self) {
        if let Some(clock) = own_cpu_clock() {
            self.cpu_clock.get_or_init(|| clock);
        }
    }

    /// The time that it has computed so far. None where the system does not tell.
    fn cpu_time(&self) -> Option<Duration> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call only fills the struct.
        let failed = unsafe { libc::clock_gettime(*self.cpu_clock.get()?, &mut time) };
        (failed == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
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

/// A worker that was in a tile when the caller had waited for [`LATE`].
pub(super) struct Late {
    pub worker: usize,
    /// What its clock said then.
    cpu_since: Option<Duration>,
    /// When the caller last saw it in a tile.
    seen: Instant,
    pub waited: Duration,
}

impl Late {
    pub(super) fn at(worker: usize, workers: &[Worker], now: Instant) -> Self {
        Self {
            worker,
            cpu_since: workers[worker].cpu_time(),
            seen: now,
            waited: Duration::ZERO,
        }
    }

    /// Looks who is late now. Returns the one that was late before, when it has finished its tile and another has not. The last one stays
    /// `late` when it finishes.
    pub(super) fn look(late: &mut Option<Self>, workers: &[Worker], now: Instant) -> Option<Self> {
        let in_tile = |worker: &Worker| worker.in_tile.load(Ordering::Relaxed);
        match late {
            Some(late) if in_tile(&workers[late.worker]) => {
                late.waited += (now - late.seen).min(LONGEST_LOOK);
                late.seen = now;
                None
            }
            _ => {
                let another = workers.iter().position(in_tile)?;
                late.replace(Self::at(another, workers, now))
            }
        }
    }

    /// How long it stood in its tile without computing. A long tile or a slow core is no suspension.
    pub(super) fn suspended(&self, workers: &[Worker]) -> Duration {
        let computed = self.cpu_since.zip(workers[self.worker].cpu_time());
        let computed = computed.map(|(before, now)| now.saturating_sub(before));
        computed.map_or(Duration::ZERO, |computed| self.waited.saturating_sub(computed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_wait_for_a_worker_is_forgotten() {
        let workers = [Worker::default(), Worker::default()];
        let is_in_tile = |worker: usize, is| workers[worker].in_tile.store(is, Ordering::Relaxed);
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let mut late = None;
        assert!(Late::look(&mut late, &workers, at(0)).is_none() && late.is_none());
        is_in_tile(0, true);
        assert!(Late::look(&mut late, &workers, at(10)).is_none());
        assert!(Late::look(&mut late, &workers, at(500)).is_none());
        // The caller itself was suspended.
        assert!(Late::look(&mut late, &workers, at(9_000)).is_none());
        let waited = |late: &Late| (late.worker, late.waited.as_micros());
        assert_eq!(late.as_ref().map(waited), Some((0, 490 + 1_000)));
        // It finishes while the caller looks away, and nobody else is late.
        is_in_tile(0, false);
        assert!(Late::look(&mut late, &workers, at(9_100)).is_none());
        assert_eq!(late.as_ref().map(waited), Some((0, 1_490)));
        is_in_tile(1, true);
        let before = Late::look(&mut late, &workers, at(9_200));
        assert_eq!(before.as_ref().map(waited), Some((0, 1_490)));
        assert_eq!(late.as_ref().map(waited), Some((1, 0)));
    }
}
