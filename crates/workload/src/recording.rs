//! Turns what a coordinator tells of ended requests into a trace (`baton record`), and compares the shapes of two traces.
//!
//! No fingerprint of a prompt is in the trace: blocks are numbered from 1 in the order in which they appear first.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serving_core::request::Lane;

use crate::trace::{Trace, TraceRequest, Turn, block_count};

/// The end of a request is noted after its client has the answer. On a busy machine the client's next turn may come first.
const NOTED_LATE_MAX: Duration = Duration::from_millis(100);

/// One prompt that was answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Number of the request on the server; the prompts of one request have the same.
    pub seq: u64,
    /// On the server's wall clock.
    pub received: Duration,
    pub ended: Duration,
    pub lane: Lane,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Fingerprints of the blocks, the last of which may be partial. Fewer than the prompt has: the rest is shared with nobody.
    pub blocks: Vec<u64>,
    /// The request whose whole prompt this one begins with.
    pub continues: Option<u64>,
}

/// The trace of what was recorded. A prompt is a turn of a conversation when it begins with the whole prompt of an earlier
/// request that had ended before it came, and when that request has no other next turn.
pub fn trace(name: &str, block_tokens: u32, mut recorded: Vec<Recorded>) -> Trace {
    recorded.sort_by_key(|request| (request.received, request.seq));
    let before = turns_before(&recorded);
    let same = partial_blocks_that_went_on(&recorded, &before, block_tokens);
    let start = recorded.first().map_or(Duration::ZERO, |request| request.received);
    let mut numbers: HashMap<u64, u64> = HashMap::new();
    let mut number = |block: &u64| {
        let block = *same.get(block).unwrap_or(block);
        let next = numbers.len() as u64 + 1;
        *numbers.entry(block).or_insert(next)
    };
    let conversations = conversations(&before);
    let request = |(at, request): (usize, &Recorded)| TraceRequest {
        at: request.received - start,
        prompt_tokens: request.prompt_tokens,
        output_tokens: request.output_tokens,
        prefix_blocks: request.blocks.iter().map(&mut number).collect(),
        lane: request.lane,
        conversation: conversations[at].map(|(conversation, turn)| Turn {
            conversation,
            turn,
            think_time: before[at].map_or(Duration::ZERO, |parent| {
                request.received.saturating_sub(recorded[parent].ended)
            }),
        }),
    };
    Trace {
        name: name.to_owned(),
        block_tokens,
        requests: recorded.iter().enumerate().map(request).collect(),
    }
}

/// For each request the one whose next turn it is.
fn turns_before(recorded: &[Recorded]) -> Vec<Option<usize>> {
    let mut by_seq: BTreeMap<u64, Option<usize>> = BTreeMap::new();
    for (at, request) in recorded.iter().enumerate() {
        // A request with several prompts is no turn of a conversation.
        by_seq
            .entry(request.seq)
            .and_modify(|first| *first = None)
            .or_insert(Some(at));
    }
    let mut has_next = vec![false; recorded.len()];
    let mut before = Vec::with_capacity(recorded.len());
    for (at, request) in recorded.iter().enumerate() {
        let is_alone = by_seq.get(&request.seq).copied().flatten().is_some();
        let parent = request.continues.and_then(|seq| by_seq.get(&seq).copied().flatten());
        let parent = parent.filter(|parent| {
            let earlier = &recorded[*parent];
            is_alone && *parent < at && !has_next[*parent] && earlier.ended <= request.received + NOTED_LATE_MAX
        });
        if let Some(parent) = parent {
            has_next[parent] = true;
        }
        before.push(parent);
    }
    before
}

/// A partial last block and the whole block that its next turn has in its place get one number: their tokens are equal as far
/// as the partial one goes, which is what equal numbers in a trace mean. So a replay makes prompts that go on, too.
fn partial_blocks_that_went_on(
    recorded: &[Recorded],
    before: &[Option<usize>],
    block_tokens: u32,
) -> HashMap<u64, u64> {
    let mut same = HashMap::new();
    // Later turns first: a last block whose successor is itself a partial one gets the number of the last of them.
    for (request, parent) in recorded.iter().zip(before).rev() {
        let Some(parent) = parent.map(|parent| &recorded[parent]) else {
            continue;
        };
        let last = parent.blocks.len().checked_sub(1);
        let is_partial = block_tokens > 0 && parent.prompt_tokens % block_tokens > 0;
        let is_whole_prompt = parent.blocks.len() == block_count(parent.prompt_tokens, block_tokens);
        if let Some(last) = last.filter(|_| is_partial && is_whole_prompt)
            && let Some(next) = request.blocks.get(last)
        {
            let next = *same.get(next).unwrap_or(next);
            same.entry(parent.blocks[last]).or_insert(next);
        }
    }
    same
}

/// The conversation and the turn of each request that has a turn before or after it.
fn conversations(before: &[Option<usize>]) -> Vec<Option<(u64, u32)>> {
    let mut found: Vec<Option<(u64, u32)>> = vec![None; before.len()];
    let mut count = 0;
    for (at, parent) in before.iter().enumerate() {
        let Some(parent) = *parent else { continue };
        let (conversation, turn) = *found[parent].get_or_insert_with(|| {
            count += 1;
            (count, 0)
        });
        found[at] = Some((conversation, turn + 1));
    }
    found
}

/// How two traces differ in what a server notices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeDifference {
    #[error("one trace has {first} requests, the other {second}")]
    Requests { first: usize, second: usize },
    #[error("request {at} differs in its lengths or its lane")]
    Lengths { at: usize },
    #[error("request {at} shares other blocks with the requests before it")]
    Prefixes { at: usize },
    #[error("request {at} has another place in a conversation")]
    Turns { at: usize },
    #[error("request {at} comes {by:?} earlier or later")]
    Time { at: usize, by: Duration },
}

/// Compares lengths, lanes, which blocks requests share, and turns, whatever the blocks and conversations are called; and times
/// within `lag_max`. Requests at times closer than `lag_max` may have changed places only if they are equal.
///
/// # Errors
/// The first difference.
pub fn same_shape(first: &Trace, second: &Trace, lag_max: Duration) -> Result<(), ShapeDifference> {
    let (a, b) = (&first.requests, &second.requests);
    if a.len() != b.len() {
        return Err(ShapeDifference::Requests {
            first: a.len(),
            second: b.len(),
        });
    }
    let (mut blocks, mut conversations) = (Renaming::default(), Renaming::default());
    let start = |requests: &[TraceRequest]| requests.first().map_or(Duration::ZERO, |request| request.at);
    for (at, (one, other)) in a.iter().zip(b).enumerate() {
        let lengths = |request: &TraceRequest| (request.prompt_tokens, request.output_tokens, request.lane);
        if lengths(one) != lengths(other) {
            return Err(ShapeDifference::Lengths { at });
        }
        let mut pairs = one.prefix_blocks.iter().zip(&other.prefix_blocks);
        if one.prefix_blocks.len() != other.prefix_blocks.len() || !pairs.all(|(x, y)| blocks.is_one(*x, *y)) {
            return Err(ShapeDifference::Prefixes { at });
        }
        let is_same_turn = match (one.conversation, other.conversation) {
            (None, None) => true,
            (Some(x), Some(y)) => x.turn == y.turn && conversations.is_one(x.conversation, y.conversation),
            _ => false,
        };
        if !is_same_turn {
            return Err(ShapeDifference::Turns { at });
        }
        let by = (one.at - start(a)).abs_diff(other.at - start(b));
        if by > lag_max {
            return Err(ShapeDifference::Time { at, by });
        }
    }
    Ok(())
}

/// A renaming that takes different names to different names.
#[derive(Default)]
struct Renaming {
    there: HashMap<u64, u64>,
    back: HashMap<u64, u64>,
}

impl Renaming {
    fn is_one(&mut self, name: u64, other: u64) -> bool {
        *self.there.entry(name).or_insert(other) == other && *self.back.entry(other).or_insert(name) == name
    }
}

#[cfg(test)]
mod tests;
