//! How long to wait before etcd is tried again. The pause doubles up to a limit and has jitter, so that not all processes
//! of a cluster return at once.

use std::time::Duration;

use rand::Rng as _;

/// The first pause. A lost lease is granted again after it, not after a whole TTL.
const FIRST: Duration = Duration::from_millis(50);
/// The longest pause: a recovered etcd hears of each client within this time. `service-runtime/src/membership/link.rs` has a
/// similar limit for the status streams.
pub(crate) const BACK_OFF_MAX: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct BackOff {
    next: Duration,
}

impl BackOff {
    pub(crate) fn new() -> Self {
        Self { next: FIRST }
    }

    pub(crate) fn reset(&mut self) {
        self.next = FIRST;
    }

    pub(crate) fn pause(&mut self) -> Duration {
        let pause = jittered(self.next);
        self.next = (self.next * 2).min(BACK_OFF_MAX);
        pause
    }
}

/// A random time between half of a duration and all of it.
pub(crate) fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(rand::rng().random_range(0.5..=1.0))
}
