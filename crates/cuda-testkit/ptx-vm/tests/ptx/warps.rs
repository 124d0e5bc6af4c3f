//! Exchanges between the lanes of a warp.

use crate::memory::words_of;

/// A lane's value is ten times its number. The result has 1,000 more where the source was in range.
fn shuffled(instruction: &str) -> Vec<u32> {
    words_of(
        32,
        &format!(
            "mul.lo.u32 %r2, %r1, 10;\n{instruction};\nselp.u32 %r4, 1000, 0, %p1;\nadd.u32 %r3, %r3, %r4;\n\
             st.global.u32 [%rd11], %r3;"
        ),
    )
}

fn expected(source: impl Fn(u32) -> Option<u32>) -> Vec<u32> {
    (0..32)
        .map(|lane| source(lane).map_or(10 * lane, |from| 1000 + 10 * from))
        .collect()
}

#[test]
fn shuffles_of_a_whole_warp_stay_within_it() {
    assert_eq!(
        shuffled("shfl.sync.bfly.b32 %r3|%p1, %r2, 5, 31, -1"),
        expected(|lane| Some(lane ^ 5))
    );
    assert_eq!(
        shuffled("shfl.sync.up.b32 %r3|%p1, %r2, 3, 0, -1"),
        expected(|lane| lane.checked_sub(3))
    );
    let down = expected(|lane| Some(lane + 3).filter(|from| *from < 32));
    assert_eq!(shuffled("shfl.sync.down.b32 %r3|%p1, %r2, 3, 31, 0xffffffff"), down);
    assert_eq!(
        shuffled("shfl.sync.idx.b32 %r3|%p1, %r2, 9, 31, -1"),
        expected(|_| Some(9))
    );
}

#[test]
fn shuffles_of_segments_stay_within_eight_lanes() {
    let in_segment = |lane: u32, from: u32| Some(from).filter(|from| from / 8 == lane / 8);
    let down = expected(|lane| in_segment(lane, lane + 2));
    assert_eq!(shuffled("shfl.sync.down.b32 %r3|%p1, %r2, 2, 0x181f, -1"), down);
    let up = expected(|lane| lane.checked_sub(2).and_then(|from| in_segment(lane, from)));
    assert_eq!(shuffled("shfl.sync.up.b32 %r3|%p1, %r2, 2, 0x1800, -1"), up);
    let index = expected(|lane| Some(lane / 8 * 8 + 3));
    assert_eq!(shuffled("shfl.sync.idx.b32 %r3|%p1, %r2, 3, 0x181f, -1"), index);
}

#[test]
fn votes_and_reductions_give_every_lane_the_same() {
    let words = words_of(
        32,
        "setp.lt.u32 %p1, %r1, 3;\nvote.sync.ballot.b32 %r2, %p1, -1;\nvote.sync.ballot.b32 %r3, !%p1, -1;\n\
         xor.b32 %r3, %r3, -1;\nvote.sync.all.pred %p2, %p1, -1;\nvote.sync.any.pred %p3, %p1, -1;\n\
         vote.sync.uni.pred %p4, %p1, -1;\nselp.u32 %r4, 100, 0, %p2;\nselp.u32 %r5, 200, 0, %p3;\n\
         selp.u32 %r6, 400, 0, %p4;\nredux.sync.add.u32 %r7, %r1, -1;\nredux.sync.min.s32 %r8, %r1, -1;\n\
         add.u32 %r2, %r2, %r3;\nadd.u32 %r2, %r2, %r4;\nadd.u32 %r2, %r2, %r5;\nadd.u32 %r2, %r2, %r6;\n\
         add.u32 %r2, %r2, %r7;\nadd.u32 %r2, %r2, %r8;\nst.global.u32 [%rd11], %r2;",
    );
    assert_eq!(words, [7 + 7 + 200 + 496; 32]);
}

#[test]
fn halves_of_a_warp_exchange_in_different_branches() {
    let words = words_of(
        32,
        "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $LOW;\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffff0000;\n\
         add.u32 %r2, %r2, 100;\nbra $OUT;\n$LOW:\nshfl.sync.bfly.b32 %r2, %r1, 2, 31, 0xffff;\n$OUT:\n\
         bar.warp.sync -1;\nst.global.u32 [%rd11], %r2;",
    );
    let value = |lane: u32| if lane < 16 { lane ^ 2 } else { (lane ^ 1) + 100 };
    assert_eq!(words, (0..32).map(value).collect::<Vec<_>>());
}

#[test]
fn lanes_that_have_ended_are_not_waited_for() {
    let words = words_of(
        32,
        "st.global.u32 [%rd11], 5;\nsetp.ge.u32 %p1, %r1, 8;\n@%p1 ret;\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n\
         st.global.u32 [%rd11], %r2;",
    );
    assert_eq!(words[..8], [1, 0, 3, 2, 5, 4, 7, 6]);
    assert_eq!(words[8..], [5; 24]);
}
