//! The waiting queue: bounded, interactive before batch, earliest deadline first within a lane.

use std::collections::{BTreeMap, BTreeSet};

use crate::batching::permits::blocks_at_open;
use crate::ids::RequestId;
use crate::request::{Lane, Request};
use crate::time::Time;

/// Whether a request waits for the first time or was put back by a refusal or a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// Ahead of everything of its lane: it has waited already.
    Returned,
    New,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    lane: Lane,
    turn: Turn,
    deadline: Time,
    /// Order of arrival, so that equal deadlines are first come, first served.
    sequence_no: u64,
    request: RequestId,
}

#[derive(Debug)]
pub(super) struct WaitingQueue {
    requests_max: usize,
    order: BTreeSet<Place>,
    places: BTreeMap<RequestId, Place>,
    next_sequence_no: u64,
}

/// What happened to a new arrival.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Enqueued {
    Waiting,
    /// It waits, and this batch request had to leave for it.
    Displaced(RequestId),
    Full,
}

impl WaitingQueue {
    pub(super) fn new(requests_max: usize) -> Self {
        Self {
            requests_max,
            order: BTreeSet::new(),
            places: BTreeMap::new(),
            next_sequence_no: 0,
        }
    }

    pub(super) fn len_of(&self, lane: Lane) -> usize {
        self.order.iter().filter(|p| p.lane == lane).count()
    }

    fn insert(&mut self, request: &Request, deadline: Time, turn: Turn) {
        let place = Place {
            lane: request.lane,
            turn,
            deadline,
            sequence_no: self.next_sequence_no,
            request: request.id,
        };
        self.next_sequence_no += 1;
        self.order.insert(place);
        self.places.insert(request.id, place);
    }

    /// The limit is tested with the arrival counted in. When full, the batch request with the latest deadline makes
    /// room for an interactive one; requests that were put back are never displaced.
    pub(super) fn push_new(&mut self, request: &Request, deadline: Time) -> Enqueued {
        let mut outcome = Enqueued::Waiting;
        if self.order.len() + 1 > self.requests_max {
            let last = self
                .order
                .last()
                .filter(|p| p.lane == Lane::Batch && p.turn == Turn::New)
                .map(|p| p.request);
            match last {
                Some(victim) if request.lane == Lane::Interactive => {
                    self.remove(victim);
                    outcome = Enqueued::Displaced(victim);
                }
                _ => return Enqueued::Full,
            }
        }
        self.insert(request, deadline, Turn::New);
        outcome
    }

    /// A request that was placed before goes to the front of its lane. Not counted against the limit: it was
    /// admitted, and the number of admitted requests is bounded by what the nodes granted.
    pub(super) fn push_returned(&mut self, request: &Request, deadline: Time) {
        self.insert(request, deadline, Turn::Returned);
    }

    pub(super) fn remove(&mut self, request: RequestId) -> bool {
        match self.places.remove(&request) {
            Some(place) => self.order.remove(&place),
            None => false,
        }
    }

    /// In the order in which they should be placed.
    #[cfg(test)]
    pub(super) fn in_order(&self) -> Vec<RequestId> {
        self.order.iter().map(|p| p.request).collect()
    }

    /// The request after `after` (or the first one) in order of placement.
    pub(super) fn next_after(&self, after: Option<RequestId>) -> Option<RequestId> {
        match after.and_then(|id| self.places.get(&id)) {
            None => self.order.first().map(|p| p.request),
            Some(place) => {
                let later = self
                    .order
                    .range((std::ops::Bound::Excluded(*place), std::ops::Bound::Unbounded));
                later.into_iter().next().map(|p| p.request)
            }
        }
    }
}

/// KV blocks the whole request may come to need on one decode node: whole prompt blocks are shared by the choices, the
/// partial last one is copied to each (PROTOCOL rule 4).
pub(super) fn blocks_needed(request: &Request, block_tokens: u32) -> u32 {
    let block = u64::from(block_tokens.max(1));
    let prompt = u64::from(request.prompt_tokens());
    let own = (prompt % block + u64::from(request.remaining_tokens())).div_ceil(block);
    let total = prompt / block + own * u64::from(request.choice_count.max(1));
    u32::try_from(total).unwrap_or(u32::MAX)
}

/// Blocks of the decode permit: what the node will reserve at `Open`. Never more than the request can come to need.
pub(super) fn decode_permit(request: &Request, block_tokens: u32) -> u32 {
    u32::try_from(blocks_at_open(request, block_tokens)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::request;
    use super::*;
    use crate::batching::{DecodeBatcher, DecodeConfig, NodeLimits, OpenCommand, PromptSource};
    use crate::ids::NodeEpoch;

    fn queued(queue: &mut WaitingQueue, id: u128, lane: Lane, deadline_ms: u64) -> Enqueued {
        let mut r = request(id, 10, 10);
        r.lane = lane;
        queue.push_new(&r, Time::from_millis(deadline_ms))
    }

    fn order(queue: &WaitingQueue) -> Vec<u128> {
        queue.in_order().into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn interactive_first_then_deadline_then_arrival() {
        let mut q = WaitingQueue::new(10);
        queued(&mut q, 1, Lane::Batch, 10);
        queued(&mut q, 2, Lane::Interactive, 90);
        queued(&mut q, 3, Lane::Interactive, 50);
        queued(&mut q, 5, Lane::Interactive, 50);
        queued(&mut q, 4, Lane::Interactive, 50);
        assert_eq!(order(&q), [3, 5, 4, 2, 1]);
        q.push_returned(&request(9, 10, 10), Time::from_millis(99));
        assert_eq!(order(&q), [9, 3, 5, 4, 2, 1]);
        assert_eq!(q.next_after(None), Some(RequestId(9)));
        assert_eq!(q.next_after(Some(RequestId(4))), Some(RequestId(2)));
        assert_eq!(q.next_after(Some(RequestId(1))), None);
    }

    #[test]
    fn a_full_queue_sheds_batch_first_and_then_refuses() {
        let mut q = WaitingQueue::new(2);
        assert_eq!(queued(&mut q, 1, Lane::Batch, 10), Enqueued::Waiting);
        assert_eq!(queued(&mut q, 2, Lane::Batch, 20), Enqueued::Waiting);
        assert_eq!(queued(&mut q, 3, Lane::Batch, 5), Enqueued::Full);
        assert_eq!(
            queued(&mut q, 4, Lane::Interactive, 90),
            Enqueued::Displaced(RequestId(2))
        );
        assert_eq!(
            queued(&mut q, 5, Lane::Interactive, 90),
            Enqueued::Displaced(RequestId(1))
        );
        assert_eq!(queued(&mut q, 6, Lane::Interactive, 1), Enqueued::Full);
        assert_eq!(order(&q), [4, 5]);
    }

    #[test]
    fn blocks_are_counted_as_the_decode_node_uses_them() {
        let mut r = request(1, 40, 24);
        assert_eq!(blocks_needed(&r, 16), 4);
        assert_eq!(decode_permit(&r, 16), 4, "the growth of 2 blocks would be one too many");
        r.stop.max_tokens = 100;
        assert_eq!(decode_permit(&r, 16), 3 + 2);
        r.stop.max_tokens = 24;
        r.choice_count = 3;
        // Two shared blocks, and (8 + 24) tokens of its own for each choice.
        assert_eq!(blocks_needed(&r, 16), 2 + 3 * 2);
        assert_eq!(decode_permit(&r, 16), 2 + 3 * 2);
        r.stop.max_tokens = 3;
        assert_eq!(decode_permit(&r, 16), 2 + 3);
    }

    #[test]
    fn a_permit_is_what_the_decode_node_will_reserve() {
        for prompt in [1, 15, 16, 17, 31, 32, 33] {
            for (max_tokens, choices) in [2, 15, 16, 17, 33, 100]
                .into_iter()
                .flat_map(|m| [1, 3].map(|n| (m, n)))
            {
                let mut r = request(1, prompt, max_tokens);
                r.choice_count = choices;
                let limits = NodeLimits {
                    kv_blocks: blocks_needed(&r, 16),
                    block_tokens: 16,
                    max_batch_tokens: 64,
                    max_sequences: 4,
                    max_model_tokens: 4096,
                    vocab_size: 4096,
                    prefix_cache: true,
                };
                let reservation = std::time::Duration::from_secs(5);
                let mut node = DecodeBatcher::new(DecodeConfig { limits, reservation });
                let permit = decode_permit(&r, 16);
                let command = OpenCommand {
                    request: std::sync::Arc::new(r),
                    attempt: crate::ids::Attempt(0),
                    permit_blocks: u64::from(permit),
                    coordinator: NodeEpoch(1),
                    source: PromptSource::Handoff(crate::ids::TransferId(1)),
                };
                node.open(Time::ZERO, command)
                    .expect("an empty pool that can hold it takes it");
                let reserved = node.pool().counts().reserved;
                assert_eq!(
                    permit, reserved,
                    "prompt {prompt}, max_tokens {max_tokens}, n {choices}"
                );
            }
        }
    }

    #[test]
    fn a_migrated_request_needs_no_more_blocks_than_before() {
        let r = request(1, 40, 24);
        let mut migrated = request(1, 50, 24);
        migrated.client_prompt_tokens = 40;
        assert_eq!(blocks_needed(&migrated, 16), blocks_needed(&r, 16));
    }
}
