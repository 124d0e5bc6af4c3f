//! Rights to give one node work, counted over one membership stream (see `NodeStatus` in `membership.proto`).

use std::time::Duration;

use crate::scheduler::permit_shares::StreamPermits;
use crate::time::Time;

use super::event::StreamId;

/// How long the node must have missed work before this side believes that it never arrived. Longer than any dispatch
/// that is still on its way could take to show up in a status.
const LOST_WORK_AFTER: Duration = Duration::from_secs(2);

/// Both totals only grow, so a lost or repeated report neither mints nor loses a permit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permits {
    /// `None` while the node has no stream: nothing is granted then.
    stream: Option<StreamId>,
    granted_total: u64,
    used_total: u64,
    /// What the node asked back because another coordinator waits for it, and what of that it has been given.
    recalled_total: u64,
    returned_total: u64,
    /// Part of `used_total` whose work the node has not answered yet.
    unanswered: u64,
    /// Since when work has been missing, and the least that was missing at any report since: what the newest reports
    /// merely have not seen yet is not lost.
    missing: Option<(Time, u64)>,
    /// Set by a refusal: the node is fuller than its permits say, so wait for its next report.
    is_paused: bool,
}

/// Permits taken for one leg of one attempt. Given back whole, or turned into received work: never both.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Charge {
    stream: Option<StreamId>,
    cost: u64,
}

impl Permits {
    pub(super) fn of_stream(stream: StreamId) -> Self {
        Self {
            stream: Some(stream),
            ..Self::default()
        }
    }

    pub fn available(&self) -> u64 {
        if self.is_paused {
            return 0;
        }
        self.unused()
    }

    fn unused(&self) -> u64 {
        self.granted_total
            .saturating_sub(self.used_total.saturating_add(self.returned_total))
    }

    /// Gives back what was recalled and is not in use; the total of all that was given back.
    pub(crate) fn return_recalled(&mut self) -> u64 {
        let owed = self.recalled_total.saturating_sub(self.returned_total);
        self.returned_total += owed.min(self.unused());
        self.returned_total
    }

    #[cfg(test)]
    pub(crate) fn for_tests() -> Self {
        Self::of_stream(StreamId(1))
    }

    pub(crate) fn take(&mut self, cost: u64) -> Option<Charge> {
        if cost > self.available() {
            return None;
        }
        self.used_total += cost;
        self.unanswered += cost;
        Some(Charge {
            stream: self.stream,
            cost,
        })
    }

    /// The node answered, whatever it said: the work was received.
    pub(crate) fn answered(&mut self, charge: Charge) {
        if charge.stream != self.stream {
            return;
        }
        self.unanswered = self.unanswered.saturating_sub(charge.cost);
    }

    /// The work never reached the node.
    pub(super) fn give_back(&mut self, charge: Charge) {
        if charge.stream != self.stream {
            return;
        }
        self.unanswered = self.unanswered.saturating_sub(charge.cost);
        self.used_total = self.used_total.saturating_sub(charge.cost);
    }

    pub(super) fn pause_until_report(&mut self) {
        self.is_paused = true;
    }

    pub(crate) fn reported(&mut self, now: Time, said: StreamPermits) {
        let received_total = said.received_total;
        self.is_paused = false;
        // Reports of one stream come in order; a smaller total could only be a node's bug.
        self.granted_total = self.granted_total.max(said.granted_total);
        self.recalled_total = self.recalled_total.max(said.recalled_total);
        // What the node has received was used, whatever this side believed lost, and whoever sent it on an older stream.
        let kept_total = self.granted_total.saturating_sub(self.returned_total);
        self.used_total = self.used_total.max(received_total.min(kept_total));
        let missing = self
            .used_total
            .saturating_sub(received_total.saturating_add(self.unanswered));
        if missing == 0 {
            self.missing = None;
            return;
        }
        let (since, least) = self
            .missing
            .map_or((now, missing), |(at, least)| (at, least.min(missing)));
        self.missing = Some((since, least));
        if now.since(since) >= LOST_WORK_AFTER {
            self.used_total -= least;
            self.missing = None;
        }
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        assert!(
            self.used_total + self.returned_total <= self.granted_total,
            "used {} and returned {} of {}",
            self.used_total,
            self.returned_total,
            self.granted_total
        );
        assert!(self.unanswered <= self.used_total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(granted_total: u64, received_total: u64) -> StreamPermits {
        StreamPermits {
            granted_total,
            received_total,
            recalled_total: 0,
        }
    }

    fn granted(n: u64) -> Permits {
        let mut permits = Permits::of_stream(StreamId(1));
        permits.reported(Time::ZERO, said(n, 0));
        permits
    }

    #[test]
    fn permits_run_out_and_come_back_as_the_node_grants_more() {
        let mut p = granted(10);
        let charge = p.take(8).expect("8 of 10");
        assert!(p.take(3).is_none());
        p.answered(charge);
        assert_eq!(p.available(), 2);
        p.reported(Time::from_millis(1), said(18, 8));
        assert_eq!(p.available(), 10);
        p.reported(Time::from_millis(2), said(18, 8));
        assert_eq!(p.available(), 10, "a repeated report mints nothing");
    }

    #[test]
    fn work_that_never_arrived_is_given_back() {
        let mut p = granted(10);
        let charge = p.take(8).expect("8 of 10");
        p.give_back(charge);
        assert_eq!(p.available(), 10);
    }

    #[test]
    fn a_charge_of_an_older_stream_changes_nothing() {
        let mut old = granted(10);
        let charge = old.take(8).expect("8 of 10");
        let mut new = Permits::of_stream(StreamId(2));
        new.reported(Time::ZERO, said(10, 0));
        let _taken = new.take(9).expect("9 of 10");
        new.give_back(charge);
        assert_eq!(new.available(), 1);
    }

    #[test]
    fn a_refusal_pauses_until_the_next_report() {
        let mut p = granted(10);
        p.pause_until_report();
        assert_eq!(p.available(), 0);
        p.reported(Time::from_millis(5), said(10, 0));
        assert_eq!(p.available(), 10);
    }

    #[test]
    fn answered_work_the_node_never_counts_is_believed_lost_after_two_seconds() {
        let mut p = granted(10);
        let charge = p.take(4).expect("4 of 10");
        p.answered(charge);
        p.reported(Time::from_millis(100), said(10, 0));
        p.reported(Time::from_millis(1_000), said(10, 0));
        assert_eq!(p.available(), 6);
        p.reported(Time::from_millis(2_100), said(10, 0));
        assert_eq!(p.available(), 10);
    }

    #[test]
    fn reports_that_lag_behind_a_busy_node_mint_no_permits() {
        let mut p = granted(100);
        let (mut sent, mut received) = (0, 0);
        for tick in 1..=100 {
            if let Some(charge) = p.take(4) {
                p.answered(charge);
                sent += 4;
            }
            // Each report misses the newest work, as it does under constant load; nothing is ever lost.
            p.reported(Time::from_millis(100 * tick), said(received + 100, received));
            received = sent;
        }
        p.reported(Time::from_millis(10_100), said(received + 100, received));
        assert_eq!(
            p.available(),
            100,
            "the node has room for 100 and was sent all it counts"
        );
    }

    #[test]
    fn a_new_stream_that_counts_older_work_starts_from_what_was_received() {
        let mut p = Permits::of_stream(StreamId(3));
        p.reported(Time::ZERO, said(1_050, 1_000));
        assert_eq!(p.available(), 50);
    }

    #[test]
    fn work_on_its_way_is_not_believed_lost() {
        let mut p = granted(10);
        let _charge = p.take(4).expect("4 of 10");
        for ms in [0, 1_000, 2_000, 3_000, 9_000] {
            p.reported(Time::from_millis(ms), said(10, 0));
        }
        assert_eq!(p.available(), 6);
    }

    #[test]
    fn what_is_recalled_goes_back_unless_it_is_in_use_and_then_when_it_comes_free() {
        let mut p = granted(10);
        let charge = p.take(7).expect("7 of 10");
        let recall = StreamPermits {
            recalled_total: 6,
            ..said(10, 0)
        };
        p.reported(Time::from_millis(1), recall);
        assert_eq!((p.return_recalled(), p.available()), (3, 0));
        p.give_back(charge);
        assert_eq!((p.return_recalled(), p.available()), (6, 4));
        p.reported(Time::from_millis(2), recall);
        assert_eq!(
            (p.return_recalled(), p.available()),
            (6, 4),
            "a repeated recall takes nothing"
        );
        p.check_invariants();
    }
}
