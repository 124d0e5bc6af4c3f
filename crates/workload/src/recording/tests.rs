//! A recording of a replay has the shape of the trace that was replayed.

use super::*;

const BLOCK: u32 = 16;
const SECOND: Duration = Duration::from_secs(1);

fn recorded(seq: u64, at_s: u64, tokens: u32, blocks: &[u64]) -> Recorded {
    Recorded {
        seq,
        received: SECOND * (100 + u32::try_from(at_s).unwrap()),
        ended: SECOND * (101 + u32::try_from(at_s).unwrap()),
        lane: Lane::Interactive,
        prompt_tokens: tokens,
        output_tokens: 5,
        blocks: blocks.to_vec(),
        continues: None,
    }
}

fn after(request: Recorded, continues: u64) -> Recorded {
    Recorded {
        continues: Some(continues),
        ..request
    }
}

fn turns(trace: &Trace) -> Vec<Option<(u64, u32)>> {
    let turn = |request: &TraceRequest| request.conversation.map(|turn| (turn.conversation, turn.turn));
    trace.requests.iter().map(turn).collect()
}

#[test]
fn blocks_are_numbered_and_times_count_from_the_first_request() {
    let trace = trace(
        "t",
        BLOCK,
        vec![
            recorded(2, 3, 40, &[0xdead, 0xbeef, 0xf00d]),
            recorded(1, 1, 20, &[0xdead, 0xcafe]),
        ],
    );
    assert_eq!(trace.requests[0].prefix_blocks, [1, 2]);
    assert_eq!(trace.requests[1].prefix_blocks, [1, 3, 4]);
    assert_eq!(
        (trace.requests[0].at, trace.requests[1].at),
        (Duration::ZERO, 2 * SECOND)
    );
    assert_eq!(turns(&trace), [None, None]);
}

#[test]
fn a_prompt_that_goes_on_after_an_answer_is_a_turn_and_takes_over_the_partial_block() {
    let trace = trace(
        "t",
        BLOCK,
        vec![
            recorded(1, 0, 20, &[7, 100]),
            after(recorded(2, 3, 50, &[7, 8, 9, 101]), 1),
            recorded(3, 4, 20, &[7, 200]),
            after(recorded(4, 9, 70, &[7, 8, 9, 10, 102]), 2),
        ],
    );
    assert_eq!(turns(&trace), [Some((1, 0)), Some((1, 1)), None, Some((1, 2))]);
    let think: Vec<Duration> = trace
        .requests
        .iter()
        .filter_map(|r| Some(r.conversation?.think_time))
        .collect();
    assert_eq!(think, [Duration::ZERO, 2 * SECOND, 5 * SECOND]);
    let blocks: Vec<&[u64]> = trace.requests.iter().map(|r| r.prefix_blocks.as_slice()).collect();
    assert_eq!(blocks, [&[1, 2][..], &[1, 2, 3, 4], &[1, 5], &[1, 2, 3, 4, 6]]);
}

#[test]
fn what_came_too_early_or_second_is_no_turn() {
    let early = trace(
        "t",
        BLOCK,
        vec![recorded(1, 0, 16, &[7]), after(recorded(2, 0, 32, &[7, 8]), 1)],
    );
    assert_eq!(turns(&early), [None, None], "the first answer had not ended");
    let two = trace(
        "t",
        BLOCK,
        vec![
            recorded(1, 0, 16, &[7]),
            after(recorded(2, 2, 32, &[7, 8]), 1),
            after(recorded(3, 3, 32, &[7, 9]), 1),
        ],
    );
    assert_eq!(turns(&two), [Some((1, 0)), Some((1, 1)), None]);
    let several = trace(
        "t",
        BLOCK,
        vec![
            recorded(1, 0, 16, &[7]),
            recorded(1, 0, 16, &[9]),
            after(recorded(2, 2, 32, &[7, 8]), 1),
            after(recorded(3, 5, 32, &[7, 8]), 77),
        ],
    );
    assert_eq!(
        turns(&several),
        [None; 4],
        "a list of prompts, and a request that was not recorded"
    );
}

/// What a coordinator would tell of a replay of `trace`: blocks have other names, a last block that is partial has a name of
/// its own, and each request comes a little late.
fn replay_of(trace: &Trace) -> Vec<Recorded> {
    let secret = |id: u64| (id + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let partial = |request: &TraceRequest| request.prompt_tokens % trace.block_tokens;
    let mut told: Vec<Recorded> = Vec::new();
    for (at, request) in trace.requests.iter().enumerate() {
        let mut blocks: Vec<u64> = request.prefix_blocks.iter().map(|id| secret(*id)).collect();
        if partial(request) > 0
            && let Some(last) = blocks.last_mut()
        {
            *last ^= secret(1_000_000 + u64::from(partial(request)));
        }
        let is_begin = |other: &TraceRequest| {
            other.prompt_tokens < request.prompt_tokens && request.prefix_blocks.starts_with(&other.prefix_blocks)
        };
        let earlier = trace.requests[..at]
            .iter()
            .enumerate()
            .filter(|(_, other)| is_begin(other));
        let longest = earlier.max_by_key(|(at, other)| (other.prompt_tokens, *at));
        let lag = Duration::from_micros(300 * (at as u64 % 5));
        told.push(Recorded {
            seq: at as u64,
            received: 1_000 * SECOND + request.at + lag,
            ended: 1_000 * SECOND + request.at + lag + Duration::from_millis(100),
            lane: request.lane,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            blocks,
            continues: longest.map(|(at, _)| at as u64),
        });
    }
    // Answers end in another order than they came.
    told.reverse();
    told
}

#[test]
fn a_recording_of_the_replay_of_a_recording_has_the_same_shape() {
    let live = vec![
        recorded(1, 0, 20, &[7, 100]),
        recorded(2, 1, 20, &[7, 300]),
        after(recorded(3, 3, 50, &[7, 8, 9, 101]), 1),
        Recorded {
            lane: Lane::Batch,
            ..recorded(4, 4, 33, &[50, 51, 52])
        },
        after(recorded(5, 6, 64, &[7, 18, 19, 20]), 2),
        after(recorded(6, 9, 70, &[7, 8, 9, 10, 102]), 3),
    ];
    let first = trace("live", BLOCK, live);
    assert_eq!(turns(&first).iter().flatten().count(), 5);
    let again = trace("replay", BLOCK, replay_of(&first));
    assert_eq!(same_shape(&first, &again, Duration::from_millis(2)), Ok(()));
    assert!(matches!(
        same_shape(&first, &again, Duration::from_micros(100)),
        Err(ShapeDifference::Time { .. })
    ));
}

#[test]
fn each_difference_is_found() {
    let live = || {
        vec![
            recorded(1, 0, 20, &[7, 100]),
            after(recorded(2, 3, 50, &[7, 8, 9, 101]), 1),
        ]
    };
    let first = trace("t", BLOCK, live());
    let against = |change: &dyn Fn(&mut Trace)| {
        let mut other = first.clone();
        change(&mut other);
        same_shape(&first, &other, Duration::ZERO)
    };
    assert_eq!(against(&|_| ()), Ok(()));
    assert_eq!(
        against(&|t| t.requests[1].output_tokens = 6),
        Err(ShapeDifference::Lengths { at: 1 })
    );
    assert_eq!(
        against(&|t| t.requests[1].lane = Lane::Batch),
        Err(ShapeDifference::Lengths { at: 1 })
    );
    assert_eq!(
        against(&|t| t.requests[1].prefix_blocks[0] = 9),
        Err(ShapeDifference::Prefixes { at: 1 })
    );
    assert_eq!(
        against(&|t| t.requests[1].prefix_blocks[3] = 1),
        Err(ShapeDifference::Prefixes { at: 1 })
    );
    assert_eq!(
        against(&|t| t.requests[1].conversation = None),
        Err(ShapeDifference::Turns { at: 1 })
    );
    assert!(matches!(
        against(&|t| t.requests[1].at += SECOND),
        Err(ShapeDifference::Time { at: 1, .. })
    ));
    assert!(matches!(
        against(&|t| drop(t.requests.pop())),
        Err(ShapeDifference::Requests { .. })
    ));
}
