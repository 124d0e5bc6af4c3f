//! A node or a pair that failed is set aside for a while. Then one request tries it before the others follow.

use crate::ids::RequestId;
use crate::time::Time;

/// Whether requests may go to something that can fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Trust {
    #[default]
    Full,
    /// It failed: nothing goes there before this time.
    SetAside { until: Time },
    /// The time has passed, and nothing is known yet: one request at a time may go there. This one does.
    OnTrial { by: Option<RequestId> },
}

impl Trust {
    /// Whether one more request may go there now.
    pub(super) fn admits(self, now: Time) -> bool {
        match self {
            Trust::Full => true,
            Trust::SetAside { until } => until <= now,
            Trust::OnTrial { by } => by.is_none(),
        }
    }

    /// This request goes there. Where trust is not full, it is the trial.
    pub(super) fn placed(&mut self, request: RequestId) {
        if *self != Trust::Full {
            *self = Trust::OnTrial { by: Some(request) };
        }
    }

    /// The request has nothing more to do with it. If it was the trial and said nothing, the next one may try.
    pub(super) fn released(&mut self, request: RequestId) {
        if *self == (Trust::OnTrial { by: Some(request) }) {
            *self = Trust::OnTrial { by: None };
        }
    }

    /// Ends a time that has passed, so that [`Trust::wake`] names no past one.
    pub(super) fn due(&mut self, now: Time) {
        if self.wake().is_some_and(|until| until <= now) {
            *self = Trust::OnTrial { by: None };
        }
    }

    pub(super) fn wake(self) -> Option<Time> {
        match self {
            Trust::SetAside { until } => Some(until),
            Trust::Full | Trust::OnTrial { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_its_time_one_request_at_a_time_may_try() {
        let (early, late) = (Time::from_millis(999), Time::from_millis(1_000));
        let mut trust = Trust::SetAside { until: late };
        assert!(!trust.admits(early) && trust.admits(late));
        trust.due(early);
        assert_eq!(trust.wake(), Some(late));
        trust.due(late);
        assert_eq!((trust.wake(), trust.admits(late)), (None, true));
        trust.placed(RequestId(1));
        assert!(!trust.admits(late), "the trial is on");
        trust.released(RequestId(2));
        assert!(!trust.admits(late), "another request says nothing about it");
        trust.released(RequestId(1));
        assert!(trust.admits(late), "the trial ended without a word");
        trust = Trust::Full;
        trust.placed(RequestId(3));
        assert!(trust.admits(early));
    }
}
