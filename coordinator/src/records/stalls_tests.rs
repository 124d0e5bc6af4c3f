//! Each cause from the times that it leaves behind.

use proto::messages::StepNote;
use serving_core::ids::Attempt;

use super::*;
use crate::node_clocks::NodeInstant;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn step(took: u64, prompt_tokens: u32, preemptions: u32) -> Option<StepNote> {
    Some(StepNote {
        took: ms(took),
        prompt_tokens,
        preemptions,
    })
}

/// A token sampled, received and taken at these times, in ms.
fn left(start: Instant, at: [u64; 3], step: Option<StepNote>) -> Left {
    Left {
        times: TokenTimes {
            received_at: start + ms(at[1]),
            sampled_at: Some(NodeInstant {
                at: start + ms(at[0]),
                error: ms(3),
            }),
            step,
            attempt: Attempt(0),
        },
        at: start + ms(at[2]),
    }
}

/// Ten gaps of 6 ms, then the one in question.
fn stall(before: impl Fn(Instant) -> Left, after: impl Fn(Instant) -> Left) -> Stall {
    let start = Instant::now();
    let mut gaps = Gaps::default();
    for i in 1..=10 {
        let at = |i: u64| [6 * i, 6 * i, 6 * i];
        gaps.add(
            (0, i),
            left(start, at(u64::from(i) - 1), step(6, 0, 0)),
            left(start, at(u64::from(i)), step(6, 0, 0)),
        );
    }
    gaps.add((0, 11), before(start), after(start));
    let (prefill, decode) = (NodeName::new("prefill-0"), NodeName::new("decode-0"));
    let stages = StageTimings(vec![(Stage::TransferTail, ms(180))]);
    let facts = StallFacts {
        stages: &stages,
        prefill_node: Some(&prefill),
        decode_node: Some(&decode),
    };
    let stalls = gaps.stalls(|_| facts);
    assert_eq!(stalls.len(), 1, "{stalls:?}");
    stalls[0].clone()
}

#[test]
fn a_late_kv_cache() {
    let found = stall(
        |t| left(t, [0, 1, 1], None),
        |t| left(t, [200, 201, 201], step(6, 0, 0)),
    );
    assert_eq!((found.cause, found.gap), (StallCause::TransferTail, ms(200)));
    assert!(found.words.contains("180"), "{}", found.words);
}

#[test]
fn a_prompt_in_the_batch_a_slow_step_and_a_node_that_stood_still() {
    let before = |t| left(t, [66, 66, 66], step(6, 0, 0));
    let chunk = stall(before, |t| left(t, [166, 166, 166], step(98, 512, 0)));
    assert_eq!(chunk.cause, StallCause::PrefillChunk);
    assert!(chunk.words.contains("512"), "{}", chunk.words);
    assert_eq!(
        stall(before, |t| left(t, [366, 366, 366], step(300, 0, 0))).cause,
        StallCause::StepTime
    );
    let outside = stall(before, |t| left(t, [366, 366, 366], step(6, 40, 0)));
    assert_eq!(outside.cause, StallCause::StepTime, "the prompt was not what took long");
}

#[test]
fn a_preemption_even_though_its_prompt_is_computed_again() {
    let before = |t| left(t, [66, 66, 66], step(6, 0, 1));
    assert_eq!(
        stall(before, |t| left(t, [166, 166, 166], step(90, 300, 2))).cause,
        StallCause::Preemption
    );
}

#[test]
fn a_slow_way_and_a_slow_reader() {
    let before = |t| left(t, [66, 66, 66], step(6, 0, 0));
    assert_eq!(
        stall(before, |t| left(t, [72, 172, 172], step(6, 0, 0))).cause,
        StallCause::Network
    );
    let reader = stall(before, |t| left(t, [72, 72, 272], step(6, 0, 0)));
    assert_eq!(reader.cause, StallCause::EgressBackPressure);
}

#[test]
fn a_migration() {
    let after = |t| {
        let mut after = left(t, [400, 400, 400], None);
        after.times.attempt = Attempt(1);
        after
    };
    assert_eq!(
        stall(|t| left(t, [66, 66, 66], step(6, 0, 0)), after).cause,
        StallCause::Migration
    );
}

#[test]
fn an_even_stream_has_no_stall_and_a_long_one_keeps_its_longest() {
    let start = Instant::now();
    let facts = StallFacts {
        stages: &StageTimings::default(),
        prefill_node: None,
        decode_node: None,
    };
    let mut gaps = Gaps::default();
    assert_eq!((gaps.quantile(0.5), gaps.max()), (None, None));
    let mut at = 0;
    for i in 0..1_000u32 {
        let length = if i % 40 == 0 { 100 + u64::from(i) } else { 20 };
        gaps.add((0, i), left(start, [at; 3], None), left(start, [at + length; 3], None));
        at += length;
    }
    let stalls = gaps.stalls(|_| facts);
    assert_eq!(stalls.len(), STALLS_MAX);
    assert_eq!(stalls.last().map(|stall| stall.gap), Some(ms(1_060)));
    assert_eq!(gaps.quantile(0.5), Some(ms(20)));
    assert_eq!(gaps.max(), Some(ms(1_060)));
    assert!(stalls.is_sorted_by_key(|stall| stall.ended_at));
}

#[test]
fn tokens_that_come_together_make_no_stall_of_the_steps_between_them() {
    let start = Instant::now();
    let no_facts = StageTimings::default();
    let facts = StallFacts {
        stages: &no_facts,
        prefill_node: None,
        decode_node: None,
    };
    let stalls_of = |last_step: u64| {
        let mut gaps = Gaps::default();
        let mut before = left(start, [0, 0, 0], step(25, 0, 0));
        let (mut token, mut at) = (0, 0);
        for took in [vec![25; 20], vec![last_step]].concat() {
            at += took;
            for _ in 0..3 {
                let after = left(start, [at, at, at], step(took, 0, 0));
                token += 1;
                gaps.add((0, token), before, after);
                before = after;
            }
        }
        gaps.stalls(|_| facts).len()
    };
    assert_eq!(stalls_of(25), 0);
    assert_eq!(stalls_of(150), 1);
}
