//! The parts of a run: which requests count, and from when to when. The load client and the simulator go by the same ones.

use std::time::Duration;

use crate::record::{RequestRecord, RunPart};

/// What does not count at the beginning and at the end of a run. The time at which a request was due tells to which part it belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// From the start of the run.
    pub warm_up: Duration,
    /// Before the time at which the last request was due.
    pub cool_down: Duration,
}

impl LeftOut {
    /// Says of each record to which part of the run it belongs. These must be all the records of the run.
    pub fn set_parts(self, records: &mut [RequestRecord]) {
        let cool_down_from = last_due(records).saturating_sub(self.cool_down);
        for record in records {
            record.part = if record.scheduled < self.warm_up {
                RunPart::WarmUp
            } else if !self.cool_down.is_zero() && record.scheduled > cool_down_from {
                RunPart::CoolDown
            } else {
                RunPart::Measured
            };
        }
    }

    /// From when to when the measured part is, once the parts are set. Where a warm-up or a cool-down bounds it, it reaches to that
    /// bound: the time before the first and after the last request in it is part of the load that was offered.
    pub fn measured_part(self, records: &[RequestRecord]) -> (Duration, Duration) {
        let measured = || records.iter().filter(|record| record.is_measured());
        let first = measured().map(|record| record.scheduled).min().unwrap_or_default();
        let ended = measured().map(|record| record.ended).max().unwrap_or_default();
        let from = match self.warm_up {
            Duration::ZERO => first,
            warm_up => warm_up,
        };
        let to = match self.cool_down {
            Duration::ZERO => ended,
            cool_down => ended.max(last_due(records).saturating_sub(cool_down)),
        };
        (from, to)
    }
}

fn last_due(records: &[RequestRecord]) -> Duration {
    records.iter().map(|record| record.scheduled).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{later, request};

    /// Due every 10 ms, each with one token 1 ms later.
    fn parts_of(left_out: LeftOut) -> (Vec<RunPart>, (u128, u128)) {
        let mut records: Vec<RequestRecord> = (0..10)
            .map(|id| later(request(id, &[1]), f64::from(id) * 10.0))
            .collect();
        left_out.set_parts(&mut records);
        let (from, to) = left_out.measured_part(&records);
        let parts = records.iter().map(|record| record.part).collect();
        (parts, (from.as_millis(), to.as_millis()))
    }

    #[test]
    fn without_bounds_all_requests_count_from_the_first_due_time_to_the_last_end() {
        let (parts, measured) = parts_of(LeftOut::default());
        assert_eq!((parts, measured), (vec![RunPart::Measured; 10], (0, 91)));
    }

    #[test]
    fn the_measured_part_reaches_to_the_bounds_of_warm_up_and_cool_down() {
        let (parts, measured) = parts_of(LeftOut {
            warm_up: Duration::from_millis(15),
            cool_down: Duration::from_millis(25),
        });
        assert_eq!(parts[..2], [RunPart::WarmUp; 2]);
        assert_eq!(parts[2..7], [RunPart::Measured; 5]);
        assert_eq!(parts[7..], [RunPart::CoolDown; 3]);
        // The cool-down begins at 90 - 25 = 65 ms, after the end at 61 ms.
        assert_eq!(measured, (15, 65));
    }
}
