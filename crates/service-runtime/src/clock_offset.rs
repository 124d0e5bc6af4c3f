//! The offset between this node's clocks and its coordinator's, measured for as long as the node is a member, with its
//! error.
//!
//! One exchange is Cristian's method (1989): ask, and assume that the coordinator read its clock half-way between question
//! and answer. The error is then at most half the round trip. Of the last few exchanges the one with the smallest error
//! counts. Its error grows by the drift of two quartz clocks since. Times of two processes are never compared without this
//! offset.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proto::messages::{ClockOffset, ClockReading, NodeReport};
use proto::v1;
use proto::v1::membership_service_client::MembershipServiceClient;
use serving_core::time::Time;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tonic::transport::Channel;

use crate::clock::Clock;

/// Exchanges right after joining, so that the first request finds a good offset.
const FIRST_EXCHANGES: u32 = 5;
const FIRST_INTERVAL: Duration = Duration::from_millis(20);
const INTERVAL: Duration = Duration::from_secs(2);
/// An answer that takes longer says nothing about clocks.
const ANSWER_TIME_LIMIT: Duration = Duration::from_secs(1);
/// Samples that are compared: those of 16 s.
const SAMPLES_KEPT: usize = 8;
/// Two clocks of 50 parts in a million each, which is the usual tolerance of a board's quartz.
const DRIFT_PER_SECOND: f64 = 100e-6;

#[derive(Clone, Copy, Debug)]
struct Sample {
    offset: ClockOffset,
    at: Time,
}

impl Sample {
    fn error_at(&self, now: Time) -> Duration {
        self.offset.error + now.since(self.at).mul_f64(DRIFT_PER_SECOND)
    }
}

/// One exchange: this node's clocks before and after, the coordinator's in between.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    pub asked_at: Time,
    pub answered_at: Time,
    /// This node's wall clock, read with `asked_at`.
    pub asked_unix_ns: u64,
    pub coordinator: ClockReading,
}

impl Exchange {
    fn offset(&self) -> ClockOffset {
        let round_trip = self.answered_at.since(self.asked_at);
        let half = i128::try_from(round_trip.as_nanos() / 2).unwrap_or(0);
        let between = |theirs: u64, mine: u64| {
            let nanoseconds = i128::from(theirs) - i128::from(mine) - half;
            i64::try_from(nanoseconds).unwrap_or(if nanoseconds < 0 { i64::MIN } else { i64::MAX })
        };
        ClockOffset {
            monotonic_ns: between(self.coordinator.monotonic.0, self.asked_at.0),
            unix_ns: between(self.coordinator.unix_ns, self.asked_unix_ns),
            error: round_trip / 2,
        }
    }
}

/// The best one of the last exchanges.
#[derive(Debug, Default)]
pub struct Estimate {
    samples: VecDeque<Sample>,
}

impl Estimate {
    /// Adds an exchange. Returns the best estimate now.
    pub fn add(&mut self, exchange: Exchange) -> ClockOffset {
        let newest = Sample {
            offset: exchange.offset(),
            at: exchange.answered_at,
        };
        // A wall clock was set, or a machine slept. Earlier samples are about other clocks.
        let agrees = |sample: &Sample| {
            let slack = sample.error_at(newest.at) + newest.offset.error;
            let apart = |a: i64, b: i64| u128::from(a.abs_diff(b)) <= slack.as_nanos() + STEP_TOLERANCE_NS;
            apart(sample.offset.unix_ns, newest.offset.unix_ns)
                && apart(sample.offset.monotonic_ns, newest.offset.monotonic_ns)
        };
        if !self.samples.iter().all(agrees) {
            self.samples.clear();
        }
        self.samples.push_back(newest);
        if self.samples.len() > SAMPLES_KEPT {
            self.samples.pop_front();
        }
        let best = self.samples.iter().min_by_key(|sample| sample.error_at(newest.at));
        let best = best.unwrap_or(&newest);
        ClockOffset {
            error: best.error_at(newest.at),
            ..best.offset
        }
    }
}

/// Reading two clocks of one process one after the other takes less than this.
const STEP_TOLERANCE_NS: u128 = 1_000_000;

/// Measures and reports to the coordinator until it is dropped.
#[derive(Debug)]
pub(crate) struct Measuring(AbortHandle);

impl Drop for Measuring {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts measuring. `note` is told each estimate before the coordinator is.
pub(crate) fn measure(
    client: MembershipServiceClient<Channel>,
    reports: mpsc::Sender<v1::NodeReport>,
    note: impl Fn(ClockOffset) + Send + 'static,
) -> Measuring {
    let report = move |offset| {
        note(offset);
        // The queue is full: the coordinator does not read. The next sample is newer anyway.
        let _ = reports.try_send(NodeReport::Clock(offset).into());
    };
    Measuring(tokio::spawn(keep_measuring(client, report)).abort_handle())
}

async fn keep_measuring(mut client: MembershipServiceClient<Channel>, report: impl Fn(ClockOffset)) {
    let mut estimate = Estimate::default();
    let mut done = 0;
    loop {
        match tokio::time::timeout(ANSWER_TIME_LIMIT, exchange(&mut client)).await {
            Ok(Ok(exchange)) => report(estimate.add(exchange)),
            Ok(Err(status)) => tracing::debug!(code = ?status.code(), "the coordinator did not tell its time"),
            Err(_) => tracing::debug!("the coordinator took too long to tell its time"),
        }
        done += 1;
        let pause = if done < FIRST_EXCHANGES {
            FIRST_INTERVAL
        } else {
            INTERVAL
        };
        tokio::time::sleep(pause).await;
    }
}

async fn exchange(client: &mut MembershipServiceClient<Channel>) -> Result<Exchange, tonic::Status> {
    let (asked_at, asked_unix_ns) = (Clock::now(), unix_ns());
    let reading: ClockReading = client.read_clock(v1::ClockQuestion {}).await?.into_inner().into();
    Ok(Exchange {
        asked_at,
        answered_at: Clock::now(),
        asked_unix_ns,
        coordinator: reading,
    })
}

/// The coordinator's answer.
pub fn read_clock() -> ClockReading {
    ClockReading {
        monotonic: Clock::now(),
        unix_ns: unix_ns(),
    }
}

fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_NS: u64 = 3_600_000_000_000;

    /// The coordinator's monotonic clock is 5 s ahead, its wall clock `wall_ahead_ns`. Each way takes the given time in us.
    fn exchange(at_ms: u64, (there_us, back_us): (u64, u64), wall_ahead_ns: u64) -> Exchange {
        let asked = at_ms * 1_000_000;
        let read = asked + there_us * 1_000;
        Exchange {
            asked_at: Time(asked),
            answered_at: Time(read + back_us * 1_000),
            asked_unix_ns: 1_000 * HOUR_NS + asked,
            coordinator: ClockReading {
                monotonic: Time(read + 5_000_000_000),
                unix_ns: 1_000 * HOUR_NS + read + wall_ahead_ns,
            },
        }
    }

    #[test]
    fn the_truth_lies_within_the_error_however_lopsided_the_way() {
        for way in [(100, 100), (2_000, 10), (10, 2_000), (0, 0)] {
            let offset = Estimate::default().add(exchange(1_000, way, HOUR_NS));
            let error = offset.error.as_nanos() as u64;
            assert!(
                offset.monotonic_ns.abs_diff(5_000_000_000) <= error,
                "{way:?} {offset:?}"
            );
            assert!(offset.unix_ns.abs_diff(HOUR_NS as i64) <= error, "{way:?} {offset:?}");
        }
    }

    #[test]
    fn a_slow_exchange_does_not_replace_a_good_one() {
        let mut estimate = Estimate::default();
        let good = estimate.add(exchange(1_000, (50, 50), 0));
        let after = estimate.add(exchange(3_000, (40_000, 10), 0));
        assert_eq!(after.monotonic_ns, good.monotonic_ns);
        assert!(after.error > good.error, "its age counts");
        assert!(after.error < Duration::from_millis(1));
    }

    #[test]
    fn a_wall_clock_that_was_set_is_believed_at_once() {
        let mut estimate = Estimate::default();
        estimate.add(exchange(1_000, (50, 50), 0));
        let after = estimate.add(exchange(3_000, (400, 400), HOUR_NS));
        assert!(after.unix_ns.abs_diff(HOUR_NS as i64) < 1_000_000);
    }

    #[test]
    fn an_offset_maps_times_of_the_node_and_refuses_those_before_the_coordinator() {
        let offset = Estimate::default().add(exchange(1_000, (0, 0), 0));
        assert_eq!(offset.map(Time(7)), Some(Time(5_000_000_007)));
        let behind = ClockOffset {
            monotonic_ns: -8,
            ..offset
        };
        assert_eq!(behind.map(Time(7)), None);
    }
}
