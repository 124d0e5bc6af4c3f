//! Everything that happens because time has passed: leases, the limits of a request, the waits on its legs.

use std::time::Duration;

use crate::ids::RequestId;
use crate::request::{AttemptKey, QueueLimit, RejectReason, RequestError};
use crate::time::Time;

use super::action::DropCause;
use super::event::{Leg, LegError, TimedWait};
use super::handoff::Phase;
use super::stats::count;
use super::{Cluster, RETRY_AFTER_MIN};

impl Cluster {
    /// Sets how long the present wait may last; the request's deadline and queue limit always apply besides.
    pub(super) fn set_wait(&mut self, request: RequestId, until: Option<Time>) {
        let Some(tracked) = self.requests.get_mut(&request) else {
            return;
        };
        tracked.wait_until = until;
        let queue = (tracked.phase == Phase::Queued).then_some(tracked.queue_deadline);
        let wake = until.into_iter().chain(queue).chain([tracked.deadline]).min();
        if let Some(old) = std::mem::replace(&mut tracked.wake, wake) {
            self.wakes.remove(&(old, request));
        }
        if let Some(wake) = wake {
            self.wakes.insert((wake, request));
        }
    }

    /// The process stood still, so it could hear neither nodes nor legs. Waits for those are extended by this time. The client's own
    /// limits are not extended.
    pub(super) fn stood_still(&mut self, stillness: Duration) {
        self.members.stood_still(stillness);
        let waits = self.requests.iter().filter_map(|(id, t)| Some((*id, t.wait_until?)));
        let waits: Vec<(RequestId, Time)> = waits.collect();
        for (request, until) in waits {
            self.set_wait(request, Some(until + stillness));
        }
    }

    pub(super) fn end_leases(&mut self, now: Time) {
        for id in self.members.expired(now) {
            self.node_lost(now, &id, DropCause::LeaseExpired);
        }
    }

    /// Does everything whose time has come, in order of time and id.
    pub(super) fn due(&mut self, now: Time) {
        self.members.end_suspicions(now);
        while let Some((_, request)) = self.wakes.first().copied().filter(|(t, _)| *t <= now) {
            self.request_is_due(now, request);
        }
    }

    fn request_is_due(&mut self, now: Time, request: RequestId) {
        let Some(tracked) = self.requests.get(&request) else {
            self.wakes.retain(|(_, id)| *id != request);
            return;
        };
        let key = tracked.key();
        if tracked.phase == Phase::Queued && tracked.placements == 0 {
            return self.queue_timed_out(now, request);
        }
        // All tokens have come. Only a report is late, also where the request's time is over meanwhile.
        if tracked.phase == Phase::Finishing {
            return self.complete(now, request);
        }
        if tracked.deadline <= now {
            let stage = tracked.phase.stage().name().to_string();
            let waited_ms = u64::try_from(tracked.request.time_limit.as_millis()).unwrap_or(u64::MAX);
            return self.fail(now, request, RequestError::DeadlineExceeded { stage, waited_ms });
        }
        match tracked.phase {
            Phase::Queued => self.queue_timed_out(now, request),
            // The shell answers `EndAttempt` at once; only the deadline ends this wait.
            Phase::Recovering => self.set_wait(request, None),
            phase => self.wait_timed_out(now, key, phase),
        }
    }

    /// The request found no place in time. If it has never been placed it is turned away, else it fails.
    fn queue_timed_out(&mut self, now: Time, request: RequestId) {
        let Some(tracked) = self.requests.get(&request) else {
            return;
        };
        let waited_ms = u64::try_from(now.since(tracked.queued_since).as_millis()).unwrap_or(u64::MAX);
        if tracked.was_broken_off {
            return self.fail(now, request, RequestError::NoPlaceAgain { waited_ms });
        }
        if tracked.placements > 0 {
            count(&mut self.stats.shed, tracked.request.lane);
            return self.fail(now, request, RequestError::NoRoom { waited_ms });
        }
        let limit = match tracked.deadline <= now {
            true => QueueLimit::RequestTime,
            false => QueueLimit::QueueWait,
        };
        count(&mut self.stats.shed, tracked.request.lane);
        self.forget(request);
        let reason = RejectReason::QueueTimeout { limit, waited_ms };
        self.reject(request, reason, Some(RETRY_AFTER_MIN));
    }

    fn wait_timed_out(&mut self, now: Time, key: AttemptKey, phase: Phase) {
        let Some(tracked) = self.requests.get(&key.request) else {
            return;
        };
        let has_prefill = tracked.legs.prefill.as_ref().is_some_and(|l| l.started_at.is_some());
        let (leg, wait) = match phase {
            Phase::Opening => (Leg::Decode, TimedWait::Open),
            Phase::Opened if has_prefill => (Leg::Prefill, TimedWait::PrefillStart),
            Phase::Prefilling if has_prefill => (Leg::Prefill, TimedWait::Silence),
            _ if tracked.legs.decode.is_some() => (Leg::Decode, TimedWait::Silence),
            _ => (Leg::Prefill, TimedWait::Silence),
        };
        let progress = tracked
            .legs
            .get(leg)
            .and_then(|l| self.members.get(&l.node))
            .map(|n| n.progress_at);
        let alive_until = progress
            .map(|at| at + self.config.stream_silence_max)
            .filter(|until| *until > now);
        match (wait, alive_until) {
            (TimedWait::Silence, Some(until)) => self.set_wait(key.request, Some(until)),
            _ => self.fail_leg(now, key, (leg, LegError::TimedOut { wait })),
        }
    }
}
