//! The waiting queue: bounded, interactive before batch, within a lane by priority and then in order of arrival. Whoever is
//! overtaken waits no longer than `queue_wait_max`, then it is turned away. A client's own time limit ends its wait and buys no
//! place: ordered by deadline, clients with short limits would overtake all others for as long as there is more work than the
//! nodes can do.

use std::collections::{BTreeMap, BTreeSet};

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
    priority: i64,
    arrived_at: Time,
    /// Order of arrival within one instant.
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

    fn insert(&mut self, request: &Request, arrived_at: Time, turn: Turn) {
        let place = Place {
            lane: request.lane,
            turn,
            // Requests that were put back keep the order of their arrival.
            priority: match turn {
                Turn::Returned => 0,
                Turn::New => request.priority,
            },
            arrived_at,
            sequence_no: self.next_sequence_no,
            request: request.id,
        };
        self.next_sequence_no += 1;
        self.order.insert(place);
        self.places.insert(request.id, place);
    }

    /// The limit is tested with the arrival counted in. When full, the last batch request makes room for an interactive one;
    /// requests that were put back are never displaced.
    pub(super) fn push_new(&mut self, request: &Request, arrived_at: Time) -> Enqueued {
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
        self.insert(request, arrived_at, Turn::New);
        outcome
    }

    /// A request that was placed before goes to the front of its lane. Not counted against the limit: it was
    /// admitted, and the number of admitted requests is bounded by what the nodes granted.
    pub(super) fn push_returned(&mut self, request: &Request, arrived_at: Time) {
        self.insert(request, arrived_at, Turn::Returned);
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

#[cfg(test)]
mod tests {
    use super::super::fixtures::request;
    use super::*;

    fn queued(queue: &mut WaitingQueue, id: u128, lane: Lane, arrived_ms: u64) -> Enqueued {
        let mut r = request(id, 10, 10);
        r.lane = lane;
        queue.push_new(&r, Time::from_millis(arrived_ms))
    }

    fn order(queue: &WaitingQueue) -> Vec<u128> {
        queue.in_order().into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn interactive_first_then_arrival() {
        let mut q = WaitingQueue::new(10);
        queued(&mut q, 1, Lane::Batch, 10);
        queued(&mut q, 3, Lane::Interactive, 50);
        queued(&mut q, 5, Lane::Interactive, 50);
        queued(&mut q, 4, Lane::Interactive, 50);
        queued(&mut q, 2, Lane::Interactive, 90);
        assert_eq!(order(&q), [3, 5, 4, 2, 1]);
        q.push_returned(&request(9, 10, 10), Time::from_millis(99));
        q.push_returned(&request(8, 10, 10), Time::from_millis(20));
        assert_eq!(order(&q), [8, 9, 3, 5, 4, 2, 1]);
        assert!(q.remove(RequestId(8)));
        assert_eq!(q.next_after(None), Some(RequestId(9)));
        assert_eq!(q.next_after(Some(RequestId(4))), Some(RequestId(2)));
        assert_eq!(q.next_after(Some(RequestId(1))), None);
    }

    #[test]
    fn a_lower_priority_number_goes_first_and_never_before_another_lane_or_a_returned_request() {
        let mut q = WaitingQueue::new(10);
        for (id, lane, priority) in [
            (1, Lane::Batch, -9),
            (2, Lane::Interactive, 0),
            (3, Lane::Interactive, 7),
            (4, Lane::Interactive, -1),
            (5, Lane::Interactive, 0),
        ] {
            let mut r = request(id, 10, 10);
            (r.lane, r.priority) = (lane, priority);
            q.push_new(&r, Time::from_millis(10));
        }
        let mut returned = request(6, 10, 10);
        returned.priority = 9;
        q.push_returned(&returned, Time::from_millis(20));
        assert_eq!(order(&q), [6, 4, 2, 5, 3, 1]);
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
}
