//! Splits one request's time at the coordinator into stages. Every stage lies between two marks. Where the two marks are of
//! two processes, the node's mark has been put on this process's clock by its measured offset (`node_clocks`).
//!
//! ```text
//! submitted -queue-> placed -route-> sent -reserve-> opened -dispatch-> accepted there -(node)-> sampled there -return-> received
//! ```
//! `queue` ends at the placement whose attempt brought the first token: attempts that failed before it were still waiting
//! for a place that works. The node's part (`prefill_queue`, `prefill_forward`) is a duration that the node measured. With
//! local prefill the decode node begins as soon as it has reserved, so `reserve` ends there and not when `Opened` has come
//! back. No stage is a remainder: the part of TTFT that no stage covers is `unattributed`, a field of its own. While the
//! offset of a node's clock is unknown (its first tens of milliseconds as a member), `first_token_return` and a local
//! `reserve` are unknown too.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serving_core::stage::{Stage, StageTimings};

#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    is_local: bool,
    placed: Option<Instant>,
    /// `Open` sent; `Prefill` sent where there is no `Open`.
    sent: Option<Instant>,
    opened: Option<Instant>,
    opened_there: Option<Instant>,
    accepted: Option<Instant>,
    accepted_there: Option<Instant>,
}

#[derive(Debug)]
pub struct StageClock {
    submitted: Instant,
    /// The marks of the attempt that brought the first token, or of the latest attempt until then.
    marks: Marks,
    first_token: Option<Instant>,
    sampled_there: Option<Instant>,
    /// An attempt after the first token has started. Its time is not part of TTFT.
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
            sampled_there: None,
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
        self.sampled_there = None;
        self.marks = Marks {
            is_local,
            placed: Some(at),
            ..Marks::default()
        };
    }

    /// The `queue` stage, if this placement brings the first token. `None` once there is a first token.
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
    /// `Opened` came back at `at`. The node had received `Open` at `there`.
    pub fn opened(&mut self, at: Instant, there: Option<Instant>) {
        if !self.is_past_first_token && self.marks.opened.is_none() {
            self.marks.opened = Some(at);
            self.marks.opened_there = there;
        }
    }
    /// `Accepted` came back at `at`. The node had received `Prefill` at `there`.
    pub fn accepted(&mut self, at: Instant, there: Option<Instant>) {
        if !self.is_past_first_token && self.marks.accepted.is_none() {
            self.marks.accepted = Some(at);
            self.marks.accepted_there = there;
        }
    }
    /// The first token was received at `at`, from a node that had it at `there`.
    pub fn first_token(&mut self, at: Instant, there: Option<Instant>) {
        if self.first_token.is_none() {
            self.first_token = Some(at);
            self.sampled_there = self.sampled_there.or(there);
        }
    }
    /// The prefill node says when the token was sampled. This may come after the token itself, because the token may have
    /// come through the decode node. The time that it waited there belongs to its way back.
    pub fn sampled(&mut self, there: Option<Instant>) {
        if !self.is_past_first_token {
            self.sampled_there = there.or(self.sampled_there);
        }
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
        if m.is_local {
            push(Stage::Reserve, between(m.sent, m.opened_there));
        } else {
            push(Stage::Reserve, m.opened.and(between(m.sent, m.opened)));
            // Without an offset the node's answer stands for its acceptance. That is too long by the way back.
            let accepted = m.accepted_there.or(m.accepted);
            push(Stage::Dispatch, between(m.opened.or(m.sent), accepted));
        }
        for stage in [Stage::PrefillQueue, Stage::PrefillForward] {
            push(stage, self.nodes.get(&stage).copied());
        }
        push(Stage::FirstTokenReturn, between(self.sampled_there, self.first_token));
        for (stage, duration) in self.nodes.iter().filter(|(stage, _)| !stage.is_before_first_token()) {
            push(*stage, Some(*duration));
        }
        out
    }
}

/// The stages that nodes measure.
fn is_node_stage(stage: Stage) -> bool {
    matches!(
        stage,
        Stage::PrefillQueue
            | Stage::PrefillForward
            | Stage::TransferTail
            | Stage::Commit
            | Stage::DecodeQueue
            | Stage::Decode
    )
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
    fn a_slow_way_back_is_seen_as_such_and_the_parts_fill_ttft() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t + ms(3));
        clock.sent(t + ms(4));
        clock.opened(t + ms(9), Some(t + ms(6)));
        // 12 ms there, 30 ms back. `Accepted` comes late, and this delay must not count as dispatch.
        clock.accepted(t + ms(60), Some(t + ms(21)));
        clock.node_reported(&node(5, 100));
        clock.first_token(t + ms(156), Some(t + ms(126)));
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Reserve), Some(ms(5)));
        assert_eq!(timings.get(Stage::Dispatch), Some(ms(12)));
        assert_eq!(timings.get(Stage::FirstTokenReturn), Some(ms(30)));
        assert_eq!(before_first_token(&timings), ms(156));
    }

    #[test]
    fn a_first_token_that_came_by_the_decode_node_counts_from_where_it_was_sampled() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t);
        clock.sent(t);
        clock.opened(t, None);
        clock.first_token(t + ms(105), Some(t + ms(104)));
        clock.accepted(t + ms(120), Some(t));
        clock.node_reported(&node(0, 100));
        clock.sampled(Some(t + ms(100)));
        assert_eq!(clock.timings().get(Stage::FirstTokenReturn), Some(ms(5)));
        assert_eq!(before_first_token(&clock.timings()), ms(105));
    }

    #[test]
    fn what_the_node_does_not_account_for_is_left_over() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t);
        clock.sent(t);
        clock.opened(t, None);
        clock.accepted(t + ms(1), Some(t + ms(1)));
        clock.node_reported(&node(0, 100));
        clock.first_token(t + ms(151), Some(t + ms(150)));
        assert_eq!(before_first_token(&clock.timings()), ms(102));
    }

    #[test]
    fn with_an_unknown_offset_nothing_is_made_up() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t);
        clock.sent(t);
        clock.opened(t, None);
        clock.accepted(t + ms(2), None);
        clock.node_reported(&node(0, 10));
        clock.first_token(t + ms(13), None);
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Dispatch), Some(ms(2)));
        assert_eq!(timings.get(Stage::FirstTokenReturn), None);
    }

    #[test]
    fn a_local_prefill_begins_where_it_was_reserved() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(true, t + ms(1));
        clock.sent(t + ms(2));
        clock.opened(t + ms(12), Some(t + ms(4)));
        clock.first_token(t + ms(500), Some(t + ms(500)));
        clock.node_reported(&node(1, 495));
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Reserve), Some(ms(2)));
        assert_eq!(timings.get(Stage::Dispatch), None);
        assert_eq!(before_first_token(&timings), ms(500));
    }

    #[test]
    fn a_failed_attempt_counts_as_queue_and_a_migration_as_nothing_of_ttft() {
        let t = Instant::now();
        let mut clock = StageClock::new(t);
        clock.placed(false, t + ms(1));
        clock.sent(t + ms(1));
        clock.opened(t + ms(2), None);
        clock.node_reported(&node(9, 9));
        clock.placed(true, t + ms(30));
        clock.sent(t + ms(30));
        clock.opened(t + ms(31), Some(t + ms(31)));
        clock.first_token(t + ms(50), Some(t + ms(49)));
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
        clock.accepted(t + ms(4), Some(t + ms(3)));
        clock.node_reported(&node(1, 10));
        clock.first_token(t + ms(20), Some(t + ms(14)));
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Reserve), None);
        assert_eq!(before_first_token(&timings), ms(20));
    }
}
