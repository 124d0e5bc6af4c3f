//! Goodput: how many good requests a second a run had. This is the one definition for summaries, verdicts and tuning.

use crate::record::{LoopKind, Run};

impl Run {
    /// This number of good requests, for each second.
    ///
    /// In an open loop it is the offered rate times the share of the measured requests that were good. The measured time is not used
    /// there: it ends with the last answer, so of two arms that serve all requests well the one with the longer last answer would have less.
    /// In a closed loop the server's answers make the rate, so the time divides. It also does where the requests have no rate, because they
    /// were all due at once.
    pub fn goodput_per_s(&self, good: f64) -> f64 {
        let measured = self.records.iter().filter(|record| record.is_measured()).count();
        let seconds = self.measured.as_secs_f64();
        let has_rate = self.loop_kind != LoopKind::Closed && self.offered > 0.0;
        match has_rate {
            true if measured > 0 => good / measured as f64 * self.offered,
            false if seconds > 0.0 => good / seconds,
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{later, request, run};
    use std::time::Duration;

    /// Four requests, one each half second.
    fn four() -> Run {
        let records = (0..4).map(|at| later(request(at, &[10, 20]), f64::from(at) * 500.0));
        let mut four = run("four", records.collect());
        four.offered = 2.0;
        four
    }

    #[test]
    fn the_rate_of_an_open_loop_does_not_depend_on_how_long_the_last_answer_takes() {
        let mut slow = four();
        slow.measured = Duration::from_secs(60);
        assert_eq!(slow.goodput_per_s(3.0), 1.5);
        slow.loop_kind = LoopKind::Simulated;
        assert_eq!(slow.goodput_per_s(3.0), 1.5);
    }

    #[test]
    fn in_a_closed_loop_the_time_divides() {
        let mut closed = four();
        closed.loop_kind = LoopKind::Closed;
        closed.measured = Duration::from_secs(6);
        assert_eq!(closed.goodput_per_s(3.0), 0.5);
    }

    #[test]
    fn requests_that_were_due_at_once_are_divided_by_time() {
        let mut at_once = four();
        at_once.measured = Duration::from_secs(8);
        // As the load client has it, and as the simulator does.
        for offered in [4.0 / 8.0, 0.0] {
            at_once.offered = offered;
            assert_eq!(at_once.goodput_per_s(2.0), 0.25);
        }
    }

    #[test]
    fn without_a_measured_request_or_time_there_is_no_goodput() {
        let mut none = run("none", Vec::new());
        assert_eq!(none.goodput_per_s(0.0), 0.0);
        none.loop_kind = LoopKind::Closed;
        assert_eq!(none.goodput_per_s(0.0), 0.0);
    }
}
