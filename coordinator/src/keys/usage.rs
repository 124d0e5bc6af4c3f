//! What the holder of a key uses, against the limits of the key. Time is an argument.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use super::file::Limits;

const MINUTE: Duration = Duration::from_secs(60);
/// What may come at once, as a part of a minute's worth: five seconds of it. A whole minute's worth at once would fill the nodes for all others,
/// and could be taken twice within a minute (integration-tests/python/fairness_probe.py).
const AT_ONCE: f64 = 1.0 / 12.0;
/// What a holder of a key is told who has too many requests open: nobody knows when one of them ends.
const WHEN_ONE_ENDS: Duration = Duration::from_secs(1);

/// A budget that fills evenly, so much a minute, and holds at most five seconds' worth, or one. A new one is full.
#[derive(Clone, Copy, Debug, Default)]
struct Budget {
    /// Used of the full budget at `at`. What was not known before can take more than there is.
    used: f64,
    at: Option<Instant>,
}

impl Budget {
    /// How much is used now.
    fn used(&mut self, per_minute: NonZeroU32, now: Instant) -> f64 {
        let per_minute = f64::from(per_minute.get());
        if let Some(at) = self.at {
            let filled = now.saturating_duration_since(at).as_secs_f64() / MINUTE.as_secs_f64() * per_minute;
            self.used = (self.used - filled).max(0.0);
        }
        self.at = Some(now);
        self.used
    }

    fn left(&mut self, per_minute: NonZeroU32, now: Instant) -> f64 {
        let full = (f64::from(per_minute.get()) * AT_ONCE).max(1.0);
        full - self.used(per_minute, now)
    }

    /// The time until `amount` is there.
    fn wait_for(&mut self, amount: f64, per_minute: NonZeroU32, now: Instant) -> Duration {
        let missing = (amount - self.left(per_minute, now)).max(0.0);
        MINUTE.mul_f64(missing / f64::from(per_minute.get()))
    }
}

/// Which limit a request is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverLimit {
    Requests {
        per_minute: NonZeroU32,
        retry_after: Duration,
    },
    Tokens {
        per_minute: NonZeroU32,
        retry_after: Duration,
    },
    Concurrent {
        most: NonZeroU32,
    },
}

impl OverLimit {
    /// Every [`OverLimit::name`].
    #[cfg(test)]
    pub const NAMES: [&'static str; 3] = ["requests_per_minute", "tokens_per_minute", "concurrent_requests"];

    /// The limit's name in the file of keys, and in the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests { .. } => "requests_per_minute",
            Self::Tokens { .. } => "tokens_per_minute",
            Self::Concurrent { .. } => "concurrent_requests",
        }
    }

    #[must_use]
    pub fn retry_after(self) -> Duration {
        match self {
            Self::Requests { retry_after, .. } | Self::Tokens { retry_after, .. } => retry_after,
            Self::Concurrent { .. } => WHEN_ONE_ENDS,
        }
    }
}

/// What is left after a request has begun, for the limits that the key has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Limit, and what is left of it.
    pub requests: Option<(u32, u32)>,
    pub tokens: Option<(u32, u32)>,
}

#[derive(Debug, Default)]
pub(super) struct Usage {
    requests: Budget,
    tokens: Budget,
    running: u32,
}

impl Usage {
    /// Counts one request, if there is room for it.
    pub fn begin(&mut self, limits: &Limits, now: Instant) -> Result<Room, OverLimit> {
        if let Some(most) = limits.concurrent_requests
            && self.running >= most.get()
        {
            return Err(OverLimit::Concurrent { most });
        }
        if let Some(per_minute) = limits.tokens_per_minute {
            // How many tokens this one takes is known when it ends. It begins when there is one.
            let retry_after = self.tokens.wait_for(1.0, per_minute, now);
            if !retry_after.is_zero() {
                return Err(OverLimit::Tokens {
                    per_minute,
                    retry_after,
                });
            }
        }
        if let Some(per_minute) = limits.requests_per_minute {
            let retry_after = self.requests.wait_for(1.0, per_minute, now);
            if !retry_after.is_zero() {
                return Err(OverLimit::Requests {
                    per_minute,
                    retry_after,
                });
            }
            self.requests.used += 1.0;
        }
        self.running += 1;
        let room =
            |budget: &mut Budget, per_minute: NonZeroU32| (per_minute.get(), budget.left(per_minute, now) as u32);
        Ok(Room {
            requests: limits.requests_per_minute.map(|limit| room(&mut self.requests, limit)),
            tokens: limits.tokens_per_minute.map(|limit| room(&mut self.tokens, limit)),
        })
    }

    pub fn used_tokens(&mut self, tokens: u32, limits: &Limits, now: Instant) {
        if let Some(per_minute) = limits.tokens_per_minute {
            self.tokens.used(per_minute, now);
            self.tokens.used += f64::from(tokens);
        }
    }

    pub fn ended(&mut self) {
        self.running = self.running.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn limits(requests: u32, tokens: u32, concurrent: u32) -> Limits {
        Limits {
            requests_per_minute: NonZeroU32::new(requests),
            tokens_per_minute: NonZeroU32::new(tokens),
            concurrent_requests: NonZeroU32::new(concurrent),
        }
    }

    #[test]
    fn requests_come_back_evenly() {
        let (mut usage, limits, now) = (Usage::default(), limits(36, 0, 0), Instant::now());
        for left in (0..3).rev() {
            assert_eq!(usage.begin(&limits, now).expect("has room").requests, Some((36, left)));
        }
        let refused = usage.begin(&limits, now).expect_err("is used up");
        assert_eq!(refused.retry_after().as_millis(), 1_666);
        assert!(usage.begin(&limits, now + Duration::from_millis(1_660)).is_err());
        assert!(usage.begin(&limits, now + Duration::from_millis(1_670)).is_ok());
    }

    #[test]
    fn tokens_are_paid_afterwards() {
        let (mut usage, limits, now) = (Usage::default(), limits(0, 60, 0), Instant::now());
        assert_eq!(usage.begin(&limits, now).expect("has room").tokens, Some((60, 5)));
        usage.used_tokens(64, &limits, now);
        let refused = usage.begin(&limits, now).expect_err("in debt");
        let per_minute = NonZeroU32::new(60).expect("not zero");
        let retry_after = Duration::from_secs(60);
        assert_eq!(
            refused,
            OverLimit::Tokens {
                per_minute,
                retry_after
            }
        );
        assert!(usage.begin(&limits, now + Duration::from_millis(59_900)).is_err());
        assert!(usage.begin(&limits, now + Duration::from_millis(60_100)).is_ok());
    }

    #[test]
    fn as_many_run_as_may() {
        let (mut usage, limits, now) = (Usage::default(), limits(0, 0, 2), Instant::now());
        usage.begin(&limits, now).expect("the first");
        usage.begin(&limits, now).expect("the second");
        let most = NonZeroU32::new(2).expect("not zero");
        assert_eq!(usage.begin(&limits, now), Err(OverLimit::Concurrent { most }));
        assert_eq!(OverLimit::Concurrent { most }.name(), OverLimit::NAMES[2]);
        usage.ended();
        assert!(usage.begin(&limits, now).is_ok());
    }

    proptest! {
        /// Whatever comes when: in no time do more begin than a full budget and what has filled since.
        #[test]
        fn no_more_begin_than_the_limit_allows(
            per_minute in 1u32..200,
            gaps_ms in prop::collection::vec(0u64..5_000, 1..300),
        ) {
            let (mut usage, limits, began) = (Usage::default(), limits(per_minute, 0, 0), Instant::now());
            let (mut now, mut taken) = (began, 0u32);
            for gap in gaps_ms {
                now += Duration::from_millis(gap);
                taken += u32::from(usage.begin(&limits, now).is_ok());
                let minutes = (now - began).as_secs_f64() / 60.0;
                let most = (f64::from(per_minute) * AT_ONCE).max(1.0) + f64::from(per_minute) * minutes + 1e-6;
                prop_assert!(f64::from(taken) <= most, "{taken} of {most}");
            }
        }
    }
}
