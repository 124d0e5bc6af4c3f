//! The waiting queue. It is bounded, and interactive requests come before batch requests. Within a lane the owners take turns by the
//! work that they have had (`fair_share.rs`). Of one owner's requests the one with the lowest priority is next, and of equals the oldest.
//! A request that is overtaken waits no longer than `queue_wait_max`; then it is turned away. A client's own time limit ends its wait
//! and gives it no better place: if the queue were ordered by deadline, clients with short limits would overtake all others for as long
//! as there is more work than the nodes can do.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Bound;

use crate::ids::RequestId;
use crate::request::{Lane, Request};
use crate::time::Time;

use super::fair_share::{FairShare, Owner, Work};

/// Whether a request waits for the first time or was put back by a refusal or a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// It is ahead of all others of its lane, because it has waited already.
    Returned,
    New,
}

/// A line of requests, which are taken one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    lane: Lane,
    turn: Turn,
    /// Those that were put back stand in one line, in order of arrival.
    owner: Owner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    priority: i64,
    arrived_at: Time,
    /// Order of arrival within one instant.
    sequence_no: u64,
    request: RequestId,
    prompt: Work,
}

#[derive(Debug)]
pub(super) struct WaitingQueue {
    requests_max: usize,
    /// No line here is empty.
    lines: BTreeMap<Line, BTreeSet<Place>>,
    places: BTreeMap<RequestId, (Line, Place)>,
    /// Requests of each lane, over all its lines.
    waiting: BTreeMap<Lane, usize>,
    shares: BTreeMap<Lane, FairShare>,
    next_sequence_no: u64,
}

/// What happened to a new arrival.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Enqueued {
    Waiting,
    /// It waits, and this request had to leave for it.
    Displaced(RequestId),
    Full,
}

impl WaitingQueue {
    pub(super) fn new(requests_max: usize) -> Self {
        Self {
            requests_max,
            lines: BTreeMap::new(),
            places: BTreeMap::new(),
            waiting: BTreeMap::new(),
            shares: BTreeMap::new(),
            next_sequence_no: 0,
        }
    }

    pub(super) fn len_of(&self, lane: Lane) -> usize {
        self.waiting.get(&lane).copied().unwrap_or(0)
    }

    fn insert(&mut self, request: &Request, arrived_at: Time, turn: Turn) {
        let (owner, priority) = match turn {
            Turn::Returned => (None, 0),
            Turn::New => (owner_of(request), request.priority),
        };
        let lane = request.lane;
        let line = Line { lane, turn, owner };
        let place = Place {
            priority,
            arrived_at,
            sequence_no: self.next_sequence_no,
            request: request.id,
            prompt: Work::of_prompt(request),
        };
        self.next_sequence_no += 1;
        let lines = &self.lines;
        let is_waiting = |owner| lines.contains_key(&new_line(lane, owner));
        if turn == Turn::New && !is_waiting(owner) {
            self.shares.entry(lane).or_default().begins_to_wait(owner, is_waiting);
        }
        self.lines.entry(line).or_default().insert(place);
        self.places.insert(request.id, (line, place));
        *self.waiting.entry(lane).or_default() += 1;
    }

    /// Puts a new request into the queue. When the queue is full, another request may have to leave for it.
    pub(super) fn push_new(&mut self, request: &Request, arrived_at: Time) -> Enqueued {
        let mut outcome = Enqueued::Waiting;
        if self.places.len() + 1 > self.requests_max {
            let Some(victim) = self.who_leaves_for(request) else {
                return Enqueued::Full;
            };
            self.remove(victim);
            outcome = Enqueued::Displaced(victim);
        }
        self.insert(request, arrived_at, Turn::New);
        outcome
    }

    /// A batch request leaves for an interactive request. Within a lane the owner with the most requests gives a place to an owner that has
    /// at least two fewer, so that one client cannot fill the queue for all others. The last request of that owner leaves. A request that
    /// was put back never leaves.
    fn who_leaves_for(&self, request: &Request) -> Option<RequestId> {
        let longest = |lane| {
            let of_lane = |(line, _): &(&Line, _)| line.lane == lane && line.turn == Turn::New;
            let lines = self.lines.iter().filter(of_lane).map(|(_, places)| places);
            lines.max_by_key(|places| places.len())
        };
        let batch = longest(Lane::Batch).filter(|_| request.lane == Lane::Interactive);
        let victims = batch.or_else(|| {
            let own = self.lines.get(&new_line(request.lane, owner_of(request)));
            let own_requests = own.map_or(0, BTreeSet::len) + 1;
            longest(request.lane).filter(|places| places.len() > own_requests)
        })?;
        victims.last().map(|place| place.request)
    }

    /// A request that was placed before goes to the front of its lane. The queue's limit does not count for it: it was admitted, and what
    /// the nodes granted bounds the number of such requests.
    pub(super) fn push_returned(&mut self, request: &Request, arrived_at: Time) {
        self.insert(request, arrived_at, Turn::Returned);
    }

    pub(super) fn remove(&mut self, request: RequestId) {
        self.take(request);
    }

    fn take(&mut self, request: RequestId) -> Option<(Line, Place)> {
        let (line, place) = self.places.remove(&request)?;
        if let Some(waiting) = self.waiting.get_mut(&line.lane) {
            *waiting = waiting.saturating_sub(1);
        }
        if let Some(places) = self.lines.get_mut(&line) {
            places.remove(&place);
            if places.is_empty() {
                self.lines.remove(&line);
            }
        }
        Some((line, place))
    }

    /// The request has its place on the nodes. Its prompt counts as work of its owner, only once, however often the request is placed.
    pub(super) fn placed(&mut self, request: RequestId) {
        if let Some((line, place)) = self.take(request)
            && line.turn == Turn::New
        {
            self.shares
                .entry(line.lane)
                .or_default()
                .placed(line.owner, place.prompt);
        }
    }

    /// Output tokens of a request came.
    pub(super) fn answered(&mut self, request: &Request, tokens: u32) {
        self.shares
            .entry(request.lane)
            .or_default()
            .answered(request.share, tokens);
    }

    /// A walk over the queue in the order of placement. Permits are kept for `saver`. While it is the next request of its owner, it comes
    /// before the other owners of its lane. Otherwise a new saver could come at each turn, and the permits that were kept would go to others.
    pub(super) fn walk(&self, saver: Option<RequestId>) -> Walk {
        let mut walk = Walk {
            saver,
            ..Walk::default()
        };
        for line in self.lines.keys() {
            let had = match line.turn {
                Turn::Returned => Work::default(),
                Turn::New => self
                    .shares
                    .get(&line.lane)
                    .map_or(Work::default(), |shares| shares.had(line.owner)),
            };
            walk.reach(self, (*line, Bound::Unbounded), had);
        }
        walk
    }

    /// In the order in which they should be placed.
    #[cfg(test)]
    pub(super) fn in_order(&self) -> Vec<RequestId> {
        let mut walk = self.walk(None);
        std::iter::from_fn(|| walk.next(self)).collect()
    }
}

fn owner_of(request: &Request) -> Owner {
    request.share.map(|share| share.owner)
}

fn new_line(lane: Lane, owner: Owner) -> Line {
    Line {
        lane,
        turn: Turn::New,
        owner,
    }
}

/// The next request of a line. Between owners that have had the same, the older request is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Head {
    lane: Lane,
    turn: Turn,
    had: Work,
    arrived_at: Time,
    sequence_no: u64,
    line: Line,
    place: Place,
}

/// How far a walk has come in each line. The requests that it has passed may leave the queue meanwhile.
#[derive(Debug, Default)]
pub(super) struct Walk {
    heads: BinaryHeap<Reverse<Head>>,
    saver: Option<RequestId>,
    /// The saver was next before its turn.
    is_ahead: bool,
}

impl Walk {
    pub(super) fn next(&mut self, queue: &WaitingQueue) -> Option<RequestId> {
        if let Some(saver) = self
            .saver
            .filter(|saver| !self.is_ahead && self.may_be_ahead(queue, *saver))
        {
            self.is_ahead = true;
            return Some(saver);
        }
        let Reverse(head) = self.heads.pop()?;
        let (line, place) = (head.line, head.place);
        // The walk goes on as if this request were placed: owners that have had less by then come before this owner's next request.
        self.reach(queue, (line, Bound::Excluded(place)), head.had.and(place.prompt));
        match self.is_ahead && self.saver == Some(place.request) {
            true => self.next(queue),
            false => Some(place.request),
        }
    }

    /// Whether the saver is its owner's next request and no request of an earlier lane is left.
    fn may_be_ahead(&self, queue: &WaitingQueue, saver: RequestId) -> bool {
        let Some((line, place)) = queue.places.get(&saver) else {
            return false;
        };
        let of_owner = queue.lines.get(line).and_then(BTreeSet::first);
        let next = self.heads.peek().map(|Reverse(head)| (head.lane, head.turn));
        of_owner == Some(place) && next == Some((line.lane, line.turn))
    }

    fn reach(&mut self, queue: &WaitingQueue, (line, after): (Line, Bound<Place>), had: Work) {
        let places = queue.lines.get(&line);
        let Some(place) = places.and_then(|places| places.range((after, Bound::Unbounded)).next()) else {
            return;
        };
        self.heads.push(Reverse(Head {
            lane: line.lane,
            turn: line.turn,
            had,
            arrived_at: place.arrived_at,
            sequence_no: place.sequence_no,
            line,
            place: *place,
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::super::fixtures::request;
    use super::*;
    use crate::ids::{QueueOwner, TokenId};
    use crate::request::QueueShare;

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
        q.remove(RequestId(8));
        let mut walk = q.walk(None);
        assert_eq!(walk.next(&q), Some(RequestId(9)));
        // Leaving the queue does not disturb a walk, whether it has passed the request or not.
        q.placed(RequestId(9));
        q.remove(RequestId(3));
        q.remove(RequestId(5));
        let rest: Vec<u128> = std::iter::from_fn(|| walk.next(&q)).map(|id| id.0).collect();
        assert_eq!(rest, [3, 4, 2, 1], "the walk stood before 3 when it left");
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

    fn owned(id: u128, owner: u64, weight: u32) -> Request {
        let mut r = request(id, 10, 10);
        r.share = Some(QueueShare {
            owner: QueueOwner(owner),
            weight: NonZeroU32::new(weight).expect("not zero"),
        });
        r
    }

    #[test]
    fn owners_take_turns_by_weight_and_a_flood_waits_behind_itself() {
        let mut q = WaitingQueue::new(100);
        for id in 0..12 {
            q.push_new(&owned(id, 1, 1), Time::ZERO);
        }
        for id in 20..26 {
            q.push_new(&owned(id, 2, 2), Time::from_millis(5));
        }
        // Two requests of the second owner to one of the first, although the first's came before.
        assert_eq!(order(&q)[..9], [0, 20, 21, 1, 22, 23, 2, 24, 25]);
        for id in [0, 20, 21] {
            q.placed(RequestId(id));
        }
        // Who comes now gets the next turn, and what it did not use before is not saved up.
        q.push_new(&owned(40, 3, 1), Time::from_millis(9));
        q.push_new(&owned(41, 3, 1), Time::from_millis(9));
        assert_eq!(order(&q)[..4], [40, 1, 22, 23]);
        // A long answer is work, too.
        q.answered(&owned(22, 2, 2), 100);
        assert_eq!(order(&q)[..3], [40, 1, 41]);
    }

    #[test]
    fn work_that_was_done_while_nobody_waited_is_neither_a_debt_nor_a_right() {
        let mut q = WaitingQueue::new(100);
        // Two owners are served at once whenever they ask: the first much, the second a little, and both early.
        q.push_new(&owned(0, 2, 1), Time::ZERO);
        q.placed(RequestId(0));
        for id in 1..5 {
            q.push_new(&owned(id, 1, 1), Time::from_millis(1));
            q.placed(RequestId(id));
            q.answered(&owned(id, 1, 1), 500);
        }
        // After a while with an empty queue both come back, and so does one who was never seen.
        for round in 0..3 {
            for owner in 1..=3 {
                let id = 10 + 3 * round + owner;
                q.push_new(&owned(u128::from(id), owner, 1), Time::from_millis(60_000));
            }
        }
        assert_eq!(order(&q), (11..20).collect::<Vec<u128>>(), "they take turns");
        // What is done while others wait counts.
        q.placed(RequestId(11));
        q.answered(&owned(11, 1, 1), 500);
        assert_eq!(order(&q), [12, 13, 15, 16, 18, 19, 14, 17]);
        // It does no longer when all of them are gone.
        for id in 12..20 {
            q.remove(RequestId(id));
        }
        for (id, owner) in [(20, 2), (21, 1), (22, 2), (23, 1)] {
            q.push_new(&owned(id, owner, 1), Time::from_millis(90_000));
        }
        assert_eq!(order(&q), [20, 21, 22, 23]);
    }

    #[test]
    fn what_an_owner_had_in_one_lane_is_nothing_in_the_other() {
        let batch = |id, owner| {
            let mut r = owned(id, owner, 1);
            r.lane = Lane::Batch;
            r
        };
        let mut q = WaitingQueue::new(100);
        // Owner 1 waits in the batch lane while owner 3 has much in the interactive one. Owner 2 comes later.
        q.push_new(&batch(1, 1), Time::ZERO);
        q.push_new(&batch(2, 1), Time::ZERO);
        q.push_new(&batch(3, 1), Time::ZERO);
        for id in 30..40 {
            q.push_new(&owned(id, 3, 1), Time::ZERO);
            q.placed(RequestId(id));
        }
        q.push_new(&batch(4, 2), Time::from_millis(1));
        assert_eq!(order(&q), [1, 4, 2, 3]);
        // Waiting there is no credit here.
        q.push_new(&owned(5, 1, 1), Time::from_millis(2));
        q.push_new(&owned(6, 1, 1), Time::from_millis(2));
        q.push_new(&owned(7, 2, 1), Time::from_millis(2));
        assert_eq!(order(&q)[..3], [5, 7, 6]);
    }

    #[test]
    fn who_saves_up_is_first_of_its_lane_and_only_once() {
        let mut q = WaitingQueue::new(100);
        for (id, owner) in [(1, 1), (2, 2), (3, 2)] {
            q.push_new(&owned(id, owner, 1), Time::ZERO);
        }
        let walked = |q: &WaitingQueue, saver| {
            let mut walk = q.walk(Some(RequestId(saver)));
            std::iter::from_fn(|| walk.next(q)).map(|id| id.0).collect::<Vec<_>>()
        };
        assert_eq!(walked(&q, 2), [2, 1, 3]);
        assert_eq!(walked(&q, 9), [1, 2, 3]);
        q.push_returned(&owned(4, 3, 1), Time::ZERO);
        assert_eq!(walked(&q, 2), [4, 2, 1, 3]);
    }

    #[test]
    fn a_priority_orders_the_requests_of_its_owner_only() {
        let mut q = WaitingQueue::new(100);
        q.push_new(&owned(1, 1, 1), Time::ZERO);
        q.push_new(&owned(2, 1, 1), Time::ZERO);
        for (id, priority) in [(3, 9), (4, i64::MIN)] {
            let mut r = owned(id, 2, 1);
            r.priority = priority;
            q.push_new(&r, Time::from_millis(1));
        }
        assert_eq!(order(&q), [1, 4, 2, 3]);
    }

    #[test]
    fn a_full_queue_takes_a_place_from_the_owner_with_the_most() {
        let mut q = WaitingQueue::new(4);
        for id in 0..4 {
            assert_eq!(q.push_new(&owned(id, 1, 1), Time::ZERO), Enqueued::Waiting);
        }
        assert_eq!(q.push_new(&owned(4, 1, 1), Time::ZERO), Enqueued::Full);
        assert_eq!(
            q.push_new(&owned(5, 2, 1), Time::ZERO),
            Enqueued::Displaced(RequestId(3))
        );
        assert_eq!(
            q.push_new(&owned(6, 2, 1), Time::ZERO),
            Enqueued::Displaced(RequestId(2))
        );
        assert_eq!(q.push_new(&owned(7, 2, 1), Time::ZERO), Enqueued::Full, "two each");
    }

    proptest! {
        /// While two owners always have something waiting, neither gets more than its share by more than one request of each.
        #[test]
        fn no_owner_gets_more_than_its_share(
            weights in (1u32..5, 1u32..5),
            prompts in prop::collection::vec((1u32..200, 1u32..200), 20..60),
        ) {
            let mut q = WaitingQueue::new(1_000);
            let longest = prompts.iter().map(|(a, b)| *a.max(b)).max().unwrap_or(1);
            let (mut of_first, mut of_second) = (0u64, 0u64);
            for (number, (first, second)) in prompts.iter().enumerate() {
                for (owner, weight, tokens) in [(1, weights.0, *first), (2, weights.1, *second)] {
                    let mut r = owned(2 * number as u128 + u128::from(owner), owner, weight);
                    r.prompt = vec![TokenId(0); tokens as usize].into();
                    q.push_new(&r, Time::ZERO);
                }
            }
            while [1, 2].iter().all(|owner| q.lines.contains_key(&new_line(Lane::Interactive, Some(QueueOwner(*owner))))) {
                let next = q.walk(None).next(&q).expect("both wait");
                let tokens = prompts[(next.0 as usize - 1) / 2];
                match next.0 % 2 {
                    1 => of_first += u64::from(tokens.0),
                    _ => of_second += u64::from(tokens.1),
                }
                q.placed(next);
                let apart = (of_first as f64 / f64::from(weights.0) - of_second as f64 / f64::from(weights.1)).abs();
                let most = f64::from(longest) / f64::from(weights.0) + f64::from(longest) / f64::from(weights.1) + 1e-3;
                prop_assert!(apart <= most, "{apart} of {most}");
            }
        }
    }
}
