//! Waits for the device that have a limit, and what happens after it. The driver's own waits have none: a GPU that hangs without an
//! error would keep its node for ever.

use std::sync::Once;
use std::time::{Duration, Instant};

use cuda::{Device, Event};
use engine::EngineLimits;

use crate::error::{DeviceHangs, WorkError};

/// What any step may take. A decode step takes some 10 ms; other programs on the GPU and clocks that are turned down for its
/// heat make it some times slower, not thousands.
const STEP_TIME: Duration = Duration::from_secs(60);
/// What each token of the largest step may take besides. An 8B model needs 16 GFLOP for its weights, and at a context of 131,072
/// tokens 69 GFLOP for attention (computed): in 10 ms that is half of the speed of a small GPU (NVIDIA A2, data sheet: 18 TFLOP/s).
const TOKEN_TIME: Duration = Duration::from_millis(10);
/// The false driver of the tests interprets each instruction, so a step of a real model takes it minutes or hours.
const INTERPRETED_STEP_TIME: Duration = Duration::from_secs(24 * 3_600);

/// So long the host looks again at once: a thread that sleeps is woken some 50 us late (Linux, `PR_SET_TIMERSLACK`), which is much
/// for a short copy.
const SPIN: Duration = Duration::from_micros(50);
/// Afterwards the host sleeps for this part of the time that it has waited, so that it sees the end at most 6 % late.
const PAUSE_PART: u32 = 16;
/// A decode step of 10 ms is seen 1.5 % late then, and looking takes some percent of a core, where the driver's wait takes all of it.
const PAUSE_MAX: Duration = Duration::from_micros(100);

/// A node that has lost its engine says goodbye and ends within some seconds.
const EXIT_TIME_LIMIT: Duration = Duration::from_secs(30);

/// How long the host waits for a device.
#[derive(Clone, Debug)]
pub(crate) struct Patience {
    device: Device,
    limit: Duration,
}

impl Patience {
    pub(crate) fn new(device: &Device, limit: Duration) -> Self {
        let device = device.clone();
        Self { device, limit }
    }

    /// Waits until everything before the event's last record is over.
    ///
    /// # Errors
    /// The device has failed, perhaps in that work. Or it has not ended the work in time: then it is given up.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), WorkError> {
        let began = Instant::now();
        while !event.is_done()? {
            let waited = began.elapsed();
            if waited >= self.limit {
                self.give_up();
                let facts = self.device.facts();
                return Err(WorkError::Hangs(DeviceHangs {
                    ordinal: facts.ordinal,
                    name: facts.name.clone(),
                    waited,
                }));
            }
            match pause(waited) {
                Some(pause) => std::thread::sleep(pause),
                None => std::hint::spin_loop(),
            }
        }
        Ok(())
    }

    /// The device gets no more work, and nothing that it may still use is freed. It is done once, however often it is called.
    pub(crate) fn give_up(&self) {
        static FIRST: Once = Once::new();
        self.device.give_up();
        FIRST.call_once(|| {
            let thread = std::thread::Builder::new().name("given-up-gpu".to_owned());
            if let Err(error) = thread.spawn(end_process) {
                tracing::error!(%error, "nothing ends this process if the driver keeps it from ending by itself");
            }
        });
    }
}

/// The limit of a step, unless the options say another one.
pub(crate) fn step_limit(limits: EngineLimits, is_interpreted: bool) -> Duration {
    match is_interpreted {
        true => INTERPRETED_STEP_TIME,
        false => STEP_TIME.saturating_add(TOKEN_TIME.saturating_mul(limits.max_batch_tokens)),
    }
}

/// Before the next look at an event. `None`: look at once.
fn pause(waited: Duration) -> Option<Duration> {
    (waited >= SPIN).then(|| (waited / PAUSE_PART).min(PAUSE_MAX))
}

/// A thread that is in a call of the driver, and the driver's own work at the end of a process, may wait for the device as well.
fn end_process() {
    std::thread::sleep(EXIT_TIME_LIMIT);
    tracing::error!("this process has not ended after its GPU was given up; it is aborted");
    // tidy: allow(process-exit) because whatever else ends a process may wait for the device
    std::process::abort();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waits_spin_and_long_ones_sleep_a_little() {
        assert_eq!(pause(Duration::from_micros(49)), None);
        assert_eq!(pause(Duration::from_micros(800)), Some(Duration::from_micros(50)));
        assert_eq!(pause(Duration::from_secs(50)), Some(PAUSE_MAX));
    }

    #[test]
    fn large_steps_may_take_longer() {
        let limits = |max_batch_tokens| EngineLimits {
            max_batch_tokens,
            max_sequences: 1,
        };
        assert_eq!(step_limit(limits(512), false), Duration::from_millis(65_120));
        assert!(step_limit(limits(u32::MAX), false) > Duration::from_secs(3_600));
        assert_eq!(step_limit(limits(512), true), INTERPRETED_STEP_TIME);
    }
}
