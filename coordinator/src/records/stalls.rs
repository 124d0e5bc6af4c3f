//! Finds the gaps between a request's tokens that were stalls, and the cause of each, from times measured where they
//! happened.
//!
//! A gap is what the client's connection saw. It has three parts: between the two samplings on the node, between sampling
//! and arrival here, and between arrival and the connection taking the token. The longest part says where to look. The
//! node's report on the step says why.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serving_core::ids::NodeName;
use serving_core::stage::{Stage, StageTimings};

use crate::request_handle::TokenTimes;

/// A gap between two tokens is a stall when it is longer than this many times the request's median gap.
const STALL_OVER_MEDIAN: u32 = 4;
/// A shorter gap is no stall, because nobody sees it: this is one frame of a 60 Hz screen.
const STALL_MIN: Duration = Duration::from_micros(16_667);
/// Gaps that count for the median. A longer answer has the median of its first gaps.
const GAPS_KEPT: usize = 16_384;
/// Stalls that are shown for one request, the longest first.
pub const STALLS_MAX: usize = 16;
/// With fewer gaps there is no median worth comparing with.
const GAPS_MIN: usize = 3;

/// A closed list. The name is the label in `baton_itl_stalls_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StallCause {
    /// The KV cache of the prompt had not arrived yet.
    TransferTail,
    /// The decode node had too few blocks and computed the sequence again.
    Preemption,
    /// A prompt was computed in the same step.
    PrefillChunk,
    /// The step itself was slow, or the node stood still.
    StepTime,
    /// The time was spent between the node and the coordinator.
    Network,
    /// The client did not take a token that was ready.
    EgressBackPressure,
    /// The request went on on other nodes.
    Migration,
}

impl StallCause {
    pub const ALL: [Self; 7] = [
        Self::TransferTail,
        Self::Preemption,
        Self::PrefillChunk,
        Self::StepTime,
        Self::Network,
        Self::EgressBackPressure,
        Self::Migration,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::TransferTail => "transfer_tail",
            Self::Preemption => "preemption",
            Self::PrefillChunk => "prefill_chunk",
            Self::StepTime => "step_time",
            Self::Network => "network",
            Self::EgressBackPressure => "egress_back_pressure",
            Self::Migration => "migration",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Stall {
    pub choice: u32,
    /// Index of the token that came late.
    pub token: u32,
    pub ended_at: Instant,
    pub gap: Duration,
    pub cause: StallCause,
    /// One sentence for people, with the figures that decided.
    pub words: String,
}

/// The times of one token that was sent.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    pub times: TokenTimes,
    /// The time at which it was handed to the connection.
    pub at: Instant,
}

#[derive(Clone, Debug)]
struct Gap {
    choice: u32,
    token: u32,
    before: Left,
    after: Left,
}

impl Gap {
    fn length(&self) -> Duration {
        self.after.at.saturating_duration_since(self.before.at)
    }
}

/// All gaps of one request. The number of lengths is limited by `GAPS_KEPT`, that of details by `STALLS_MAX`.
#[derive(Clone, Debug, Default)]
pub struct Gaps {
    lengths_us: Vec<u32>,
    /// How many of the lengths are between tokens that one message of the node brought: there is nearly no time between them.
    within_messages: usize,
    longest: Vec<Gap>,
    max: Duration,
}

/// Facts beside the gaps that explain stalls.
#[derive(Clone, Copy, Debug)]
pub struct StallFacts<'a> {
    pub stages: &'a StageTimings,
    pub prefill_node: Option<&'a NodeName>,
    pub decode_node: Option<&'a NodeName>,
}

impl Gaps {
    /// Token `token` of `choice` was sent after the token before it.
    pub fn add(&mut self, (choice, token): (u32, u32), before: Left, after: Left) {
        let gap = Gap {
            choice,
            token,
            before,
            after,
        };
        let length = gap.length();
        self.max = self.max.max(length);
        if self.lengths_us.len() < GAPS_KEPT {
            self.lengths_us
                .push(u32::try_from(length.as_micros()).unwrap_or(u32::MAX));
            self.within_messages += usize::from(before.times.received_at == after.times.received_at);
        }
        if length < STALL_MIN {
            return;
        }
        self.longest.push(gap);
        if self.longest.len() > STALLS_MAX {
            let shortest = (0..self.longest.len()).min_by_key(|i| self.longest[*i].length());
            self.longest.swap_remove(shortest.unwrap_or(0));
        }
    }

    pub fn count(&self) -> usize {
        self.lengths_us.len()
    }

    pub fn max(&self) -> Option<Duration> {
        (!self.lengths_us.is_empty()).then_some(self.max)
    }

    /// The gap that `share` of the gaps do not exceed (nearest rank).
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let mut lengths = self.lengths_us.clone();
        let last = lengths.len().checked_sub(1)?;
        let rank = ((lengths.len() as f64 * share).ceil() as usize)
            .saturating_sub(1)
            .min(last);
        let (_, length, _) = lengths.select_nth_unstable(rank);
        Some(Duration::from_micros(u64::from(*length)))
    }

    /// The median of the gaps between messages. Where answers guess their tokens (`--speculative-tokens`), most gaps may be within one.
    fn usual_step(&self) -> Option<Duration> {
        let between = self.count() - self.within_messages;
        // Those within a message are the shortest ones.
        let share = (self.within_messages as f64 + between as f64 / 2.0) / self.count() as f64;
        self.quantile(share).filter(|_| between >= GAPS_MIN)
    }

    /// The stalls in the order in which they happened. `facts` are those of a choice.
    pub fn stalls<'a>(&self, facts: impl Fn(u32) -> StallFacts<'a>) -> Vec<Stall> {
        let Some(median) = self.usual_step() else {
            return Vec::new();
        };
        let line = (median * STALL_OVER_MEDIAN).max(STALL_MIN);
        let long = self.longest.iter().filter(|gap| gap.length() > line);
        let mut stalls: Vec<Stall> = long.map(|gap| explain(gap, facts(gap.choice))).collect();
        stalls.sort_by_key(|stall| (stall.ended_at, stall.choice));
        stalls
    }
}

fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e4).round() / 10.0
}

/// The three parts of a gap. With an unknown clock offset the way back counts as time on the node, and so does what the clocks'
/// error may have added to it.
fn parts(gap: &Gap) -> (Duration, Duration, Duration) {
    let (before, after) = (&gap.before, &gap.after);
    let egress_of = |left: &Left| left.at.saturating_duration_since(left.times.received_at);
    let egress = egress_of(after).saturating_sub(egress_of(before));
    let received = after
        .times
        .received_at
        .saturating_duration_since(before.times.received_at);
    match (before.times.sampled_at, after.times.sampled_at) {
        (Some(sampled_before), Some(sampled_after)) => {
            let node = sampled_after.at.saturating_duration_since(sampled_before.at);
            // Tokens of one node are read with one offset. The first token has no step: it may be of another node.
            let error = match before.times.step.is_some() == after.times.step.is_some() {
                true => Duration::ZERO,
                false => sampled_before.error + sampled_after.error,
            };
            let way = received.saturating_sub(node).saturating_sub(error);
            (node.max(received.saturating_sub(way)), way, egress)
        }
        _ => (received, Duration::ZERO, egress),
    }
}

fn explain(gap: &Gap, facts: StallFacts<'_>) -> Stall {
    let (node, way, egress) = parts(gap);
    let (cause, words) = if gap.before.times.attempt != gap.after.times.attempt {
        migration(gap, facts)
    } else if egress >= node && egress >= way {
        let words = format!(
            "the token was ready, and waited {} ms for the client to take it",
            ms(egress)
        );
        (StallCause::EgressBackPressure, words)
    } else if way > node {
        let words = format!(
            "the token was {} ms longer on its way from {} than the one before",
            ms(way),
            name(facts.decode_node)
        );
        (StallCause::Network, words)
    } else {
        on_the_node(gap, node, facts)
    };
    Stall {
        choice: gap.choice,
        token: gap.token,
        ended_at: gap.after.at,
        gap: gap.length(),
        cause,
        words,
    }
}

fn name(node: Option<&NodeName>) -> String {
    node.map_or_else(|| "the node".to_owned(), ToString::to_string)
}

fn migration(gap: &Gap, facts: StallFacts<'_>) -> (StallCause, String) {
    let mut words = format!("the request had to go on on {}", name(facts.decode_node));
    let _ = write!(
        words,
        " (attempt {}), which computed the prompt and the answer so far again",
        gap.after.times.attempt.0
    );
    (StallCause::Migration, words)
}

fn on_the_node(gap: &Gap, node: Duration, facts: StallFacts<'_>) -> (StallCause, String) {
    let decode = name(facts.decode_node);
    let step = gap.after.times.step;
    let preemptions = |left: &Left| left.times.step.map_or(0, |step| step.preemptions);
    if preemptions(&gap.after) > preemptions(&gap.before) {
        let words = format!(
            "{decode} ran out of KV blocks, took this request's away and computed it again ({} ms)",
            ms(node)
        );
        return (StallCause::Preemption, words);
    }
    let Some(step) = step else {
        return (StallCause::StepTime, format!("{decode} took {} ms", ms(node)));
    };
    let outside = node.saturating_sub(step.took);
    // The first token came from the prefill node. This token had to wait for the KV cache.
    let is_after_handoff = gap.before.times.step.is_none() && facts.prefill_node.is_some();
    if is_after_handoff && outside > step.took {
        let stage = |stage| facts.stages.get(stage).map_or(0.0, ms);
        let words = format!(
            "the prompt's KV cache was still on its way from {} to {decode}: {} ms of transfer after the last forward, {} ms to commit, {} ms for a place in the batch",
            name(facts.prefill_node),
            stage(Stage::TransferTail),
            stage(Stage::Commit),
            stage(Stage::DecodeQueue)
        );
        return (StallCause::TransferTail, words);
    }
    if step.prompt_tokens > 0 && step.took >= outside {
        let words = format!(
            "{decode} computed {} prompt tokens in the same step, which took {} ms",
            step.prompt_tokens,
            ms(step.took)
        );
        return (StallCause::PrefillChunk, words);
    }
    let words = match step.took >= outside {
        true => format!(
            "one step of {decode} took {} ms: the node was slow or stood still",
            ms(step.took)
        ),
        false => format!(
            "{decode} ran no step for {} ms: the node was busy with something else or stood still",
            ms(outside)
        ),
    };
    (StallCause::StepTime, words)
}

#[cfg(test)]
#[path = "stalls_tests.rs"]
mod tests;
