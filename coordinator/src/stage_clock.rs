//! Takes one request's time at the coordinator apart. Every stage but one lies between two marks of one process; the
//! way back of the first token lies between two processes, and is what those leave.
//!
//! ```text
//! submitted -queue-> placed -route-> sent -reserve-> opened -dispatch-> accepted -(node)-> sampled -return-> received
//! ```
//! `queue` runs to the placement whose attempt brought the first token: attempts that failed before were waiting for a
//! place that works. The node's part (`prefill_queue`, `prefill_forward`) is the node's own duration. `first_token_return`
//! is the time from `opened` to the token's arrival less the node's part and less `dispatch`. The message `Accepted`
//! travels back while the node works already, so the difference can come out short by that one way; `dispatch` is then
//! shortened by as much, and nothing is ever negative.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serving_core::stage::{Stage, StageTimings};

use crate::token_stream::is_node_stage;

#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    is_local: bool,
    placed: Option<Instant>,
    /// `Open` sent; `Prefill` sent where there is no `Open`.
    sent: Option<Instant>,
    opened: Option<Instant>,
    accepted: Option<Instant>,
}

#[derive(Debug)]
pub struct StageClock {
    submitted: Instant,
    /// Of the attempt that brought the first token, or of the latest one until then.
    marks: Marks,
    first_token: Option<Instant>,
    /// A later attempt than the first token's has started: its time is not part of TTFT.
    is_past_first_token: bool,
    second_token_seen: bool,
    nodes: BTreeMap<Stage, Duration>,
}

impl StageClock {
    pub fn new(submitted: Instant) -> Self {
        Self {
            submitted,
            marks: Marks::default(),
            first_token: None,
            is_past_first_token: false,
            second_token_seen: false,
            nodes: BTreeMap::new(),
        }
    }

    pub fn placed(&mut self, is_local: bool, at: Instant) {
        if self.first_token.is_some() {
            self.is_past_first_token = true;
            return;
        }
        self.nodes.clear();
        self.marks = Marks {
            is_local,
            placed: Some(at),
            ..Marks::default()
        };
    }

    /// The `queue` stage if this placement brings the first token; `None` once there is one.
    pub fn waited_until(&self, placed_at: Instant) -> Option<Duration> {
        let is_before = self.first_token.is_none();
        is_before.then(|| placed_at.saturating_duration_since(self.submitted))
    }

    /// The first call of the attempt went out; later ones change nothing.
    pub fn sent(&mut self, at: Instant) {
        if !self.is_past_first_token {
            self.marks.sent.get_or_insert(at);
        }
    }
    pub fn opened(&mut self, at: Instant) {
        if !self.is_past_first_token {
            self.marks.opened.get_or_insert(at);
        }
    }
    pub fn accepted(&mut self, at: Instant) {
        if !self.is_past_first_token {
            self.marks.accepted.get_or_insert(at);
        }
    }
    pub fn first_token(&mut self, at: Instant) {
        self.first_token.get_or_insert(at);
    }
    pub fn second_token(&mut self) {
        self.second_token_seen = true;
    }
    pub fn second_token_seen(&self) -> bool {
        self.second_token_seen
    }

    /// A node may report a stage again with its final value.
    pub fn node_reported(&mut self, timings: &StageTimings) {
        for (stage, duration) in &timings.0 {
            let is_wanted = is_node_stage(*stage) && !(stage.is_before_first_token() && self.is_past_first_token);
            if is_wanted {
                self.nodes.insert(*stage, *duration);
            }
        }
    }

    pub fn timings(&self) -> StageTimings {
        let mut out = StageTimings::default();
        let between = |from: Option<Instant>, to: Option<Instant>| Some(to?.saturating_duration_since(from?));
        let m = &self.marks;
        let mut push = |stage, duration: Option<Duration>| {
            if let Some(duration) = duration {
                out.push(stage, duration);
            }
        };
        push(Stage::Queue, between(Some(self.submitted), m.placed));
        push(Stage::Route, between(m.placed, m.sent));
        let reserve = m.opened.and(between(m.sent, m.opened));
        let (dispatch, back) = self.dispatch_and_return();
        push(Stage::Reserve, self.reserve_before_local_prefill().or(reserve));
        push(Stage::Dispatch, dispatch);
        for stage in [Stage::PrefillQueue, Stage::PrefillForward] {
            push(stage, self.nodes.get(&stage).copied());
        }
        push(Stage::FirstTokenReturn, back);
        for (stage, duration) in self.nodes.iter().filter(|(stage, _)| !stage.is_before_first_token()) {
            push(*stage, Some(*duration));
        }
        out
    }

    fn since_sent(&self) -> Option<Duration> {
        Some(self.first_token?.saturating_duration_since(self.marks.sent?))
    }

    /// A decode node that computes the prompt itself begins while its `Opened` is still on the way: what overlaps is the
    /// node's time, not the reservation's.
    fn reserve_before_local_prefill(&self) -> Option<Duration> {
        let (sent, opened) = (self.marks.sent?, self.marks.opened?);
        let of = |stage| self.nodes.get(&stage).copied();
        let node = of(Stage::PrefillQueue)? + of(Stage::PrefillForward)?;
        let left = self.since_sent()?.saturating_sub(node);
        self.marks
            .is_local
            .then(|| opened.saturating_duration_since(sent).min(left))
    }

    /// Both from the same stretch, so that they and the node's part fill it exactly.
    fn dispatch_and_return(&self) -> (Option<Duration>, Option<Duration>) {
        let m = &self.marks;
        let (Some(start), Some(end)) = (m.opened.or(m.sent), self.first_token) else {
            return (None, None);
        };
        let total = end.saturating_duration_since(start);
        let accepted = m
            .accepted
            .filter(|at| *at <= end)
            .map(|at| at.saturating_duration_since(start));
        let of = |stage| self.nodes.get(&stage).copied();
        let (Some(queue), Some(forward)) = (of(Stage::PrefillQueue), of(Stage::PrefillForward)) else {
            // The node died before it told: what it did cannot be told from the way back.
            return (accepted.filter(|_| !m.is_local), None);
        };
        let rest = total.saturating_sub(queue + forward);
        if m.is_local {
            let reserve = self.reserve_before_local_prefill().unwrap_or_default();
            let since_sent = self.since_sent().unwrap_or(total);
            return (None, Some(since_sent.saturating_sub(reserve + queue + forward)));
        }
        let dispatch = accepted.unwrap_or_default().min(rest);
        (Some(dispatch), Some(rest - dispatch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn node(queue: u64, forward: u64) -> StageTimings {
        StageTimings(vec![
            (Stage::PrefillQueue, ms(queue)),
            (Stage::PrefillForward, ms(forward)),
        ])
    }

    fn before_first_token(timings: &StageTimings) -> Duration {
        timings
            .0
            .iter()
            .filter(|(s, _)| s.is_before_first_token())
            .map(|(_, d)| *d)
            .sum()
    }

    #[test]
    fn the_stages_fill_the_time_to_the_first_token_exactly() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t + ms(5));
        clock.sent(t + ms(6));
        clock.opened(t + ms(8));
        clock.accepted(t + ms(11));
        clock.node_reported(&node(2, 40));
        clock.first_token(t + ms(60));
        let timings = clock.timings();
        assert_eq!(before_first_token(&timings), ms(60));
        let expected = [
            (Stage::Queue, 5),
            (Stage::Route, 1),
            (Stage::Reserve, 2),
            (Stage::Dispatch, 3),
            (Stage::FirstTokenReturn, 7),
        ];
        for (stage, duration) in expected {
            assert_eq!(timings.get(stage), Some(ms(duration)), "{}", stage.name());
        }
    }

    #[test]
    fn an_accept_that_came_back_late_shortens_dispatch_and_nothing_is_negative() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t);
        clock.sent(t);
        clock.opened(t);
        clock.accepted(t + ms(10));
        clock.node_reported(&node(0, 15));
        clock.first_token(t + ms(20));
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Dispatch), Some(ms(5)));
        assert_eq!(timings.get(Stage::FirstTokenReturn), Some(ms(0)));
        assert_eq!(before_first_token(&timings), ms(20));
    }

    #[test]
    fn a_local_prefill_that_began_before_opened_came_back_is_not_counted_twice() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(true, t + ms(1));
        clock.sent(t + ms(2));
        clock.opened(t + ms(12));
        clock.node_reported(&node(1, 495));
        clock.first_token(t + ms(500));
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Reserve), Some(ms(2)));
        assert_eq!(timings.get(Stage::FirstTokenReturn), Some(ms(0)));
        assert_eq!(before_first_token(&timings), ms(500));
    }

    #[test]
    fn a_failed_attempt_counts_as_queue_and_a_migration_as_nothing_of_ttft() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t + ms(1));
        clock.sent(t + ms(1));
        clock.opened(t + ms(2));
        clock.node_reported(&node(9, 9));
        clock.placed(true, t + ms(30));
        clock.sent(t + ms(30));
        clock.opened(t + ms(31));
        clock.first_token(t + ms(50));
        clock.node_reported(&node(1, 17));
        clock.placed(false, t + ms(100));
        clock.sent(t + ms(101));
        clock.node_reported(&node(500, 500));
        clock.node_reported(&StageTimings(vec![(Stage::Decode, ms(70))]));
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Queue), Some(ms(30)));
        assert_eq!(timings.get(Stage::FirstTokenReturn), Some(ms(1)));
        assert_eq!(timings.get(Stage::Dispatch), None);
        assert_eq!(timings.get(Stage::Decode), Some(ms(70)));
        assert_eq!(before_first_token(&timings), ms(50));
    }

    #[test]
    fn a_request_on_the_prefill_node_alone_has_no_reserve() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t + ms(1));
        clock.sent(t + ms(2));
        clock.accepted(t + ms(4));
        clock.node_reported(&node(1, 10));
        clock.first_token(t + ms(20));
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Reserve), None);
        assert_eq!(before_first_token(&timings), ms(20));
    }
}
