//! Splits one request's time at the coordinator into stages. Every stage lies between two marks. Where the two marks are of
//! two processes, the node's mark has been put on this process's clock by its measured offset (`node_clocks`).
//!
//! ```text
//! submitted -queue-> placed -route-> sent -reserve-> opened -dispatch-> accepted there -(node)-> sampled there -return-> received
//! ```
//! `queue` ends at the placement whose attempt brought the first token: attempts that failed before it were still waiting
//! for a place that works. The node's own stages (`step_wait`, `prefill_queue`, `prefill_forward`) are durations that it measured. With
//! local prefill the decode node begins as soon as it has reserved, so `reserve` ends there and not when `Opened` has come
//! back. No stage is a remainder: the part of TTFT that no stage covers is `unattributed`, a field of its own. While the
//! offset of a node's clock is unknown (its first tens of milliseconds as a member), `first_token_return` and a local
//! `reserve` are unknown too.
//!
//! A node's marks may be wrong by the error of its offset, all in the same direction. A mark that would lie before its cause or
//! after its effect is moved there, as far as that error explains it, and the node's other mark is moved with it. So no stage is
//! below zero, and no other stage is longer for it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serving_core::stage::{Stage, StageTimings};

use crate::node_clocks::NodeInstant;

#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    is_local: bool,
    placed: Option<Instant>,
    /// `Open` sent; `Prefill` sent where there is no `Open`.
    sent: Option<Instant>,
    opened: Option<Instant>,
    opened_there: Option<NodeInstant>,
    accepted: Option<Instant>,
    accepted_there: Option<NodeInstant>,
}

/// When the first token was sampled.
#[derive(Clone, Copy, Debug)]
struct Sampled {
    there: NodeInstant,
    /// The node that computed the prompt has reported this time. If false, it is from the decode node through which the token came.
    is_told_by_prompts_node: bool,
}

#[derive(Debug)]
pub struct StageClock {
    submitted: Instant,
    /// The marks of the attempt that brought the first token, or of the latest attempt until then.
    marks: Marks,
    first_token: Option<Instant>,
    sampled: Option<Sampled>,
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
            sampled: None,
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
        self.sampled = None;
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
    pub fn opened(&mut self, at: Instant, there: Option<NodeInstant>) {
        if !self.is_past_first_token && self.marks.opened.is_none() {
            self.marks.opened = Some(at);
            self.marks.opened_there = there;
        }
    }
    /// `Accepted` came back at `at`. The node had received `Prefill` at `there`.
    pub fn accepted(&mut self, at: Instant, there: Option<NodeInstant>) {
        if !self.is_past_first_token && self.marks.accepted.is_none() {
            self.marks.accepted = Some(at);
            self.marks.accepted_there = there;
        }
    }
    /// The first token was received at `at`, from a node that had it at `there`.
    pub fn first_token(&mut self, at: Instant, there: Option<NodeInstant>) {
        if self.first_token.is_none() {
            self.first_token = Some(at);
            let sampled = there.map(|there| Sampled {
                there,
                is_told_by_prompts_node: self.marks.is_local,
            });
            self.sampled = self.sampled.or(sampled);
        }
    }
    /// The prefill node says when the token was sampled. This may come after the token itself, because the token may have
    /// come through the decode node. The time that it waited there belongs to its way back.
    pub fn sampled(&mut self, there: Option<NodeInstant>) {
        if !self.is_past_first_token {
            let sampled = there.map(|there| Sampled {
                there,
                is_told_by_prompts_node: true,
            });
            self.sampled = sampled.or(self.sampled);
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
        let (received, sampled) = self.at_prompts_node();
        push(Stage::Queue, between(Some(self.submitted), m.placed));
        push(Stage::Route, between(m.placed, m.sent));
        if m.is_local {
            push(Stage::Reserve, between(m.sent, received));
        } else {
            push(Stage::Reserve, m.opened.and(between(m.sent, m.opened)));
            // Without an offset the node's answer stands for its acceptance. That is too long by the way back.
            push(Stage::Dispatch, between(m.opened.or(m.sent), received.or(m.accepted)));
        }
        for stage in [Stage::StepWait, Stage::PrefillQueue, Stage::PrefillForward] {
            push(stage, self.nodes.get(&stage).copied());
        }
        push(Stage::FirstTokenReturn, between(sampled, self.first_token));
        for (stage, duration) in self.nodes.iter().filter(|(stage, _)| !stage.is_before_first_token()) {
            push(*stage, Some(*duration));
        }
        out
    }

    /// By how much the stages between two processes may be wrong.
    pub fn error(&self) -> Duration {
        let received = match self.marks.is_local {
            true => self.marks.opened_there,
            false => self.marks.accepted_there,
        };
        let marks = [received, self.sampled.map(|sampled| sampled.there)];
        let errors = marks.into_iter().flatten().map(|mark| mark.error);
        errors.max().unwrap_or_default()
    }

    /// When the node that computed the prompt had received it, and when the first token was sampled.
    fn at_prompts_node(&self) -> (Option<Instant>, Option<Instant>) {
        let m = &self.marks;
        let (cause, received) = match m.is_local {
            true => (m.sent, m.opened_there),
            false => (m.opened.or(m.sent), m.accepted_there),
        };
        if let (Some(cause), Some(received), Some(sampled), Some(effect)) =
            (cause, received, self.sampled, self.first_token)
            && sampled.is_told_by_prompts_node
        {
            let (received, sampled) = in_order((cause, effect), (received, sampled.there));
            return (Some(received), Some(sampled));
        }
        let at = |mark: NodeInstant| mark.at;
        (received.map(at), self.sampled.map(|sampled| sampled.there.at))
    }
}

/// Moves two marks of one node by the same time, so that neither is before `cause` nor after `effect`. They are moved by no more
/// than their error, and never so far that the other one gets out of order.
fn in_order(
    (cause, effect): (Instant, Instant),
    (received, sampled): (NodeInstant, NodeInstant),
) -> (Instant, Instant) {
    let error = received.error.max(sampled.error);
    let later = cause.saturating_duration_since(received.at);
    let later = later.min(effect.saturating_duration_since(sampled.at)).min(error);
    let earlier = sampled.at.saturating_duration_since(effect);
    let earlier = earlier.min(received.at.saturating_duration_since(cause)).min(error);
    let moved = |mark: NodeInstant| (mark.at + later).checked_sub(earlier).unwrap_or(mark.at);
    (moved(received), moved(sampled))
}

/// The stages that nodes measure.
fn is_node_stage(stage: Stage) -> bool {
    matches!(
        stage,
        Stage::StepWait
            | Stage::PrefillQueue
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

    /// A mark of a node whose clock is known exactly.
    fn there(at: Instant) -> Option<NodeInstant> {
        within(at, Duration::ZERO)
    }

    fn within(at: Instant, error: Duration) -> Option<NodeInstant> {
        Some(NodeInstant { at, error })
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
        clock.opened(t + ms(9), there(t + ms(6)));
        // 12 ms there, 30 ms back. `Accepted` comes late, and this delay must not count as dispatch.
        clock.accepted(t + ms(60), there(t + ms(21)));
        clock.node_reported(&node(5, 100));
        clock.first_token(t + ms(156), there(t + ms(126)));
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
        clock.first_token(t + ms(105), there(t + ms(104)));
        clock.accepted(t + ms(120), there(t));
        clock.node_reported(&node(0, 100));
        clock.sampled(there(t + ms(100)));
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
        clock.accepted(t + ms(1), there(t + ms(1)));
        clock.node_reported(&node(0, 100));
        clock.first_token(t + ms(151), there(t + ms(150)));
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
        clock.opened(t + ms(12), there(t + ms(4)));
        clock.first_token(t + ms(500), there(t + ms(500)));
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
        clock.opened(t + ms(31), there(t + ms(31)));
        clock.first_token(t + ms(50), there(t + ms(49)));
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
        clock.accepted(t + ms(4), there(t + ms(3)));
        clock.node_reported(&node(1, 10));
        clock.first_token(t + ms(20), there(t + ms(14)));
        let timings = clock.timings();
        assert_eq!(timings.get(Stage::Reserve), None);
        assert_eq!(before_first_token(&timings), ms(20));
    }

    /// One request on its way: 5 ms there, 100 ms of computing, 5 ms back, seen through a clock that is `off` by some ms.
    fn seen_with(off_ms: i64, error_ms: u64) -> StageTimings {
        let t = Instant::now();
        let seen = |at_ms: u64| {
            let at_ms = u64::try_from(i64::try_from(at_ms).unwrap() + off_ms).unwrap();
            within(t + ms(at_ms), ms(error_ms))
        };
        let mut clock = StageClock::new(t);
        clock.placed(false, t + ms(50));
        clock.sent(t + ms(50));
        clock.opened(t + ms(50), None);
        clock.accepted(t + ms(60), seen(55));
        clock.node_reported(&node(0, 100));
        clock.sampled(seen(155));
        clock.first_token(t + ms(160), seen(155));
        assert_eq!(clock.error(), ms(error_ms));
        clock.timings()
    }

    #[test]
    fn a_clock_that_is_off_within_its_error_makes_no_stage_longer_than_both_ways_are() {
        for off in -8..=8 {
            let timings = seen_with(off, 8);
            let ways = [Stage::Dispatch, Stage::FirstTokenReturn].map(|stage| timings.get(stage).unwrap());
            assert_eq!(ways[0] + ways[1], ms(10), "{off}: {ways:?}");
            assert_eq!(before_first_token(&timings), ms(160), "{off}");
        }
    }

    #[test]
    fn a_clock_that_is_off_by_more_than_its_error_has_no_stage_below_zero() {
        let timings = seen_with(-30, 8);
        assert_eq!(timings.get(Stage::Dispatch), Some(ms(0)));
        // 30 ms of it are wrong, of which the error explains 8.
        assert_eq!(timings.get(Stage::FirstTokenReturn), Some(ms(27)));
        assert_eq!(seen_with(30, 8).get(Stage::FirstTokenReturn), Some(ms(0)));
    }
}
