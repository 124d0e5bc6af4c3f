//! Handoffs: KV goes over links that have a latency and a rate, and comes back as an acknowledgement.

use std::collections::VecDeque;
use std::time::Duration;

use serving_core::ids::TransferId;
use serving_core::request::{AttemptKey, TokenEvent};
use serving_core::scheduler::{Commit, NodeFailure, PushEnd};
use serving_core::stage::{Stage, StageTimings};
use serving_core::time::Time;

use super::World;
use super::agenda::{Event, Place, Sign, ToNode};
use super::node::block_bytes;
use crate::arithmetic::seconds;

/// When a line is taken: stretches in order, which do not overlap.
#[derive(Clone, Debug, Default)]
struct Line(VecDeque<(Time, Time)>);

impl Line {
    /// The first moment, not before `at`, from which on it is free for so long.
    fn free_from(&self, mut at: Time, took: Duration) -> Time {
        for (begins, ends) in &self.0 {
            if at + took <= *begins {
                break;
            }
            at = at.max(*ends);
        }
        at
    }

    /// What is over by `now` concerns nobody any more.
    fn take(&mut self, now: Time, (begins, ends): (Time, Time)) {
        while self.0.front().is_some_and(|(_, over)| *over <= now) {
            self.0.pop_front();
        }
        let place = self.0.partition_point(|(earlier, _)| *earlier < begins);
        self.0.insert(place, (begins, ends));
    }

    /// Of this stretch, what is after `now` is free again.
    fn give_back(&mut self, now: Time, stretch: (Time, Time)) {
        let Some(place) = self.0.iter().position(|taken| *taken == stretch) else {
            return;
        };
        if stretch.0 >= now {
            self.0.remove(place);
        } else if let Some((_, ends)) = self.0.get_mut(place) {
            *ends = (*ends).min(now);
        }
    }
}

/// Each node's way out and way in. Transfers of a node go one after the other, which takes together as long as if they shared the
/// rate. A line is taken only while bytes move: a transfer that waits for its other end leaves it to others.
#[derive(Debug)]
pub(super) struct Links {
    ways_out: Vec<Line>,
    ways_in: Vec<Line>,
}

impl Links {
    pub fn new(nodes: usize) -> Self {
        Self {
            ways_out: vec![Line::default(); nodes],
            ways_in: vec![Line::default(); nodes],
        }
    }

    /// From when to when so many bytes occupy both ends, not before `earliest`.
    fn occupy(&mut self, now: Time, (from, to): (usize, usize), (earliest, took): (Time, Duration)) -> (Time, Time) {
        let (way_out, way_in) = (&mut self.ways_out[from], &mut self.ways_in[to]);
        let mut begins = now.max(earliest);
        loop {
            let free = way_in.free_from(way_out.free_from(begins, took), took);
            if free == begins {
                break;
            }
            begins = free;
        }
        let stretch = (begins, begins + took);
        way_out.take(now, stretch);
        way_in.take(now, stretch);
        stretch
    }

    /// Takes back what has not moved yet by `now`.
    fn give_back(&mut self, now: Time, (from, to): (usize, usize), stretch: (Time, Time)) {
        self.ways_out[from].give_back(now, stretch);
        self.ways_in[to].give_back(now, stretch);
    }
}

/// Bytes that move over both lines of a transfer, and when.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    taken: (Time, Time),
    bytes: u64,
}

impl Stretch {
    /// Those of its bytes that have not moved by `now`.
    fn bytes_left(&self, now: Time) -> u64 {
        let (begins, ends) = self.taken;
        let (whole, left) = (ends.since(begins).as_nanos(), ends.since(now.max(begins)).as_nanos());
        let bytes = (u128::from(self.bytes) * left).checked_div(whole).unwrap_or(0);
        u64::try_from(bytes).unwrap_or(self.bytes)
    }
}

/// One transfer under way.
#[derive(Debug)]
pub(super) struct Handoff {
    key: AttemptKey,
    from: Place,
    to: Place,
    /// Blocks that have not left.
    queued: u32,
    began: Option<Time>,
    /// When the last of its bytes leaves the link.
    ends: Time,
    held_at: Time,
    bytes: u64,
    /// What it has taken of the lines and is not over.
    stretches: Vec<Stretch>,
    first_tokens: Vec<TokenEvent>,
}

impl World<'_> {
    /// The node stops asking for work while so many blocks wait (half the pool).
    pub(super) fn is_push_queue_full(&self, node: usize) -> bool {
        self.nodes[node].queued_blocks >= (self.scenario.nodes.limits.kv_blocks / 2).max(1)
    }

    fn latency(&self) -> Duration {
        seconds(self.scenario.costs.link.latency_seconds)
    }

    /// The first chunk of a prompt was submitted: the decode node is told.
    pub(super) fn begin_handoff(&mut self, node: usize, key: AttemptKey) {
        let stream = self.nodes[node].streams.get(&key);
        let ticket = stream.and_then(|stream| stream.ticket.as_ref());
        let Some((transfer, decode)) = ticket.map(|ticket| (ticket.transfer, ticket.decode_node.clone())) else {
            return;
        };
        let Some(to) = self.place_of(&decode) else {
            return;
        };
        let now = self.now();
        let handoff = Handoff {
            key,
            from: self.place(node),
            to,
            queued: 0,
            began: None,
            ends: now,
            held_at: now,
            bytes: 0,
            stretches: Vec::new(),
            first_tokens: Vec::new(),
        };
        self.handoffs.insert(transfer, handoff);
        self.nodes[node].pushes.insert(key, transfer);
        self.sign_after(self.latency(), (transfer, Sign::Began));
        // A node that is gone does not take it.
        if !self.nodes[to.node].is_at(to) {
            let reason = "pair_lost";
            self.send_to(self.latency(), (node, ToNode::PushBroken { key, reason }));
        }
    }

    /// A sign for the receiving node, or the acknowledgement for the sending one.
    fn sign_after(&mut self, delay: Duration, (transfer, sign): (TransferId, Sign)) {
        if let Some(handoff) = self.handoffs.get(&transfer) {
            let place = match sign {
                Sign::Acked => handoff.from,
                Sign::Began | Sign::Blocks(_) | Sign::Last => handoff.to,
            };
            let what = ToNode::Handoff { transfer, sign };
            self.agenda.after(delay, Event::Node { place, what });
        }
    }

    pub(super) fn push_blocks(&mut self, node: usize, key: AttemptKey, blocks: usize) {
        let now = self.now();
        let Some(transfer) = self.nodes[node].pushes.get(&key).copied() else {
            return;
        };
        let Some(handoff) = self.handoffs.get_mut(&transfer) else {
            return;
        };
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let bytes = block_bytes(self.scenario) * u64::from(blocks);
        let took = seconds(bytes as f64 / self.scenario.costs.link.bytes_per_second);
        // A push sends its blocks in their order.
        let (begins, ends) = self.links.occupy(now, (node, handoff.to.node), (handoff.ends, took));
        handoff.began.get_or_insert(begins);
        handoff.ends = ends;
        handoff.bytes += bytes;
        handoff.stretches.retain(|stretch| stretch.taken.1 > now);
        let taken = (begins, ends);
        handoff.stretches.push(Stretch { taken, bytes });
        handoff.queued += blocks;
        self.nodes[node].queued_blocks += blocks;
        self.nodes[node].kv_bytes_sent += bytes;
        let arrives = ends.since(now) + self.latency();
        self.sign_after(arrives, (transfer, Sign::Blocks(blocks)));
    }

    /// The first tokens are out: with the last frame they follow the blocks.
    pub(super) fn last_frame(&mut self, node: usize, key: AttemptKey, first_tokens: Vec<TokenEvent>) {
        let now = self.now();
        let Some(transfer) = self.nodes[node].pushes.get(&key).copied() else {
            return;
        };
        let Some(handoff) = self.handoffs.get_mut(&transfer) else {
            return;
        };
        handoff.first_tokens = first_tokens;
        handoff.held_at = now;
        let left = handoff.ends.since(now);
        let commit = seconds(self.scenario.costs.overheads.commit_seconds);
        self.sign_after(left + self.latency() + commit, (transfer, Sign::Last));
    }

    pub(super) fn sign(&mut self, node: usize, (transfer, sign): (TransferId, Sign)) {
        match sign {
            Sign::Began => self.transfer_began(node, transfer),
            Sign::Blocks(blocks) => self.blocks_arrived(node, (transfer, blocks)),
            Sign::Last => self.transfer_complete(node, transfer),
            Sign::Acked => self.acked(node, transfer),
        }
    }

    fn transfer_began(&mut self, node: usize, transfer: TransferId) {
        let (now, own) = (self.now(), &mut self.nodes[node]);
        let Some(key) = own.receiving.get(&transfer).copied() else {
            // The reservation is gone: nobody may write.
            return self.refuse_transfer(transfer);
        };
        own.scheduler.prefill_began(now, key);
        // Its reservation runs from now on.
        self.tick_soon(node);
    }

    fn blocks_arrived(&mut self, node: usize, (transfer, blocks): (TransferId, u32)) {
        let now = self.now();
        let Some(handoff) = self.handoffs.get_mut(&transfer) else {
            return;
        };
        handoff.queued = handoff.queued.saturating_sub(blocks);
        let (from, key) = (handoff.from, handoff.key);
        if self.nodes[from.node].is_at(from) {
            let sender = &mut self.nodes[from.node];
            sender.queued_blocks = sender.queued_blocks.saturating_sub(blocks);
            sender.scheduler.push_progressed(now, key);
            self.turn_soon(from.node);
        }
        if self.nodes[node].receiving.contains_key(&transfer) {
            self.nodes[node].scheduler.frame_arrived(now, key);
        }
    }

    fn transfer_complete(&mut self, node: usize, transfer: TransferId) {
        let now = self.now();
        let Some(handoff) = self.handoffs.get_mut(&transfer) else {
            return;
        };
        let (key, bytes) = (handoff.key, handoff.bytes);
        let first_tokens = std::mem::take(&mut handoff.first_tokens);
        let (ends, held_at, began) = (handoff.ends, handoff.held_at, handoff.began);
        let last_frame_at = Time(now.0.saturating_sub(
            u64::try_from(seconds(self.scenario.costs.overheads.commit_seconds).as_nanos()).unwrap_or(0),
        ));
        if let Some(live) = self.live_attempt(key) {
            live.kv_bytes = bytes;
            live.kv_transfer = began.map_or(Duration::ZERO, |began| ends.since(began));
            live.node_reported(&StageTimings(vec![(Stage::TransferTail, ends.since(held_at))]));
        }
        let commit = Commit {
            key,
            transfer,
            last_frame_at,
            first_tokens,
        };
        if let Err(error) = self.nodes[node].scheduler.commit(now, commit) {
            let (reason, detail) = ("not_committed".to_owned(), error.to_string());
            let failure = NodeFailure::Transfer { reason, detail };
            self.nodes[node].scheduler.fail(key, failure);
            self.refuse_transfer(transfer);
        } else {
            let own = &mut self.nodes[node];
            own.receiving.remove(&transfer);
            if let Some(stream) = own.streams.get_mut(&key) {
                stream.receives = None;
            }
        }
        self.deliver(node);
        // Whatever was in quarantine for it: nothing writes any more.
        self.nodes[node].scheduler.transfer_ended(transfer);
        self.turn_soon(node);
    }

    pub(super) fn acknowledge(&mut self, transfer: TransferId) {
        self.sign_after(self.latency(), (transfer, Sign::Acked));
    }

    fn acked(&mut self, node: usize, transfer: TransferId) {
        if let Some(handoff) = self.handoffs.remove(&transfer) {
            self.push_ended(node, handoff.key, PushEnd::Acked);
        }
    }

    /// Takes a transfer off the link. What was to arrive does not, and what has not left does not occupy the link. Transfers that wait
    /// behind it keep the times that they have.
    fn drop_handoff(&mut self, transfer: TransferId) -> Option<Handoff> {
        let now = self.now();
        let handoff = self.handoffs.remove(&transfer)?;
        let (from, to) = (handoff.from.node, handoff.to.node);
        let unsent: u64 = handoff.stretches.iter().map(|stretch| stretch.bytes_left(now)).sum();
        for stretch in &handoff.stretches {
            self.links.give_back(now, (from, to), stretch.taken);
        }
        let sender = &mut self.nodes[from];
        // What a node has sent counts over all its lives, so this is right also when the sender is gone.
        sender.kv_bytes_sent = sender.kv_bytes_sent.saturating_sub(unsent);
        if sender.is_at(handoff.from) {
            sender.queued_blocks = sender.queued_blocks.saturating_sub(handoff.queued);
        }
        Some(handoff)
    }

    /// The decode node wants nothing more of it, and tells the sender.
    fn refuse_transfer(&mut self, transfer: TransferId) {
        if let Some(handoff) = self.drop_handoff(transfer) {
            let (key, reason) = (handoff.key, "closed");
            let (place, what) = (handoff.from, ToNode::PushBroken { key, reason });
            self.agenda.after(self.latency(), Event::Node { place, what });
        }
    }

    /// The decode node's scheduler wants its blocks back.
    pub(super) fn close_transfer(&mut self, node: usize, transfer: TransferId) {
        self.nodes[node].receiving.remove(&transfer);
        self.refuse_transfer(transfer);
        self.nodes[node].scheduler.transfer_ended(transfer);
    }

    /// The prefill node's scheduler wants its blocks back.
    pub(super) fn abort_push(&mut self, node: usize, key: AttemptKey) {
        if let Some(transfer) = self.nodes[node].pushes.get(&key).copied() {
            self.drop_handoff(transfer);
        }
        self.push_ended(node, key, PushEnd::Aborted);
    }

    pub(super) fn push_broken(&mut self, node: usize, key: AttemptKey, reason: &'static str) {
        let Some(transfer) = self.nodes[node].pushes.get(&key).copied() else {
            return;
        };
        self.drop_handoff(transfer);
        let (reason, detail) = (reason.to_owned(), "the decode node takes no more of it".to_owned());
        self.push_ended(node, key, PushEnd::Failed { reason, detail });
    }

    pub(super) fn receive_broken(&mut self, node: usize, transfer: TransferId) {
        if let Some(key) = self.nodes[node].receiving.get(&transfer).copied() {
            let (reason, detail) = ("pair_lost".to_owned(), "the prefill node is gone".to_owned());
            let failure = NodeFailure::Transfer { reason, detail };
            self.nodes[node].scheduler.fail(key, failure);
        }
        self.deliver(node);
        self.nodes[node].scheduler.transfer_ended(transfer);
        self.turn_soon(node);
    }

    /// A node is gone: the other ends of its transfers see their connections break.
    pub(super) fn break_handoffs_of(&mut self, gone: Place) {
        let at_end = |handoff: &Handoff| handoff.from == gone || handoff.to == gone;
        let broken: Vec<TransferId> = self
            .handoffs
            .iter()
            .filter(|(_, handoff)| at_end(handoff))
            .map(|(transfer, _)| *transfer)
            .collect();
        for transfer in broken {
            let Some(handoff) = self.drop_handoff(transfer) else {
                continue;
            };
            let (place, what) = if handoff.from == gone {
                (handoff.to, ToNode::ReceiveBroken(transfer))
            } else {
                let (key, reason) = (handoff.key, "pair_lost");
                (handoff.from, ToNode::PushBroken { key, reason })
            };
            self.agenda.after(self.latency(), Event::Node { place, what });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(at: u64) -> Time {
        Time::from_millis(at)
    }

    /// One that may begin at once, and takes so many milliseconds.
    fn occupy(links: &mut Links, now: u64, ends: (usize, usize), took: u64) -> (Time, Time) {
        links.occupy(ms(now), ends, (Time::ZERO, Duration::from_millis(took)))
    }

    #[test]
    fn transfers_of_a_node_share_its_way_out_and_others_do_not_wait() {
        let mut links = Links::new(4);
        assert_eq!(occupy(&mut links, 0, (0, 2), 10), (ms(0), ms(10)));
        assert_eq!(occupy(&mut links, 1, (0, 3), 10), (ms(10), ms(20)), "the same sender");
        assert_eq!(occupy(&mut links, 2, (1, 2), 5), (ms(10), ms(15)), "the same receiver");
        assert_eq!(occupy(&mut links, 40, (1, 3), 5), (ms(40), ms(45)));
    }

    #[test]
    fn a_transfer_that_waits_for_its_receiver_leaves_the_way_out_to_others() {
        let mut links = Links::new(5);
        assert_eq!(occupy(&mut links, 0, (0, 2), 10), (ms(0), ms(10)));
        assert_eq!(occupy(&mut links, 0, (1, 2), 10), (ms(10), ms(20)), "it waits");
        assert_eq!(occupy(&mut links, 0, (1, 3), 4), (ms(0), ms(4)), "meanwhile");
        assert_eq!(occupy(&mut links, 0, (1, 4), 7), (ms(20), ms(27)), "more than was left");
        assert_eq!(occupy(&mut links, 5, (1, 4), 5), (ms(5), ms(10)), "just what was left");
    }

    #[test]
    fn a_transfer_that_is_dropped_gives_back_what_has_not_moved() {
        let mut links = Links::new(4);
        let moving = occupy(&mut links, 0, (0, 2), 10);
        let waiting = occupy(&mut links, 0, (0, 3), 10);
        assert_eq!(waiting, (ms(10), ms(20)));
        links.give_back(ms(4), (0, 3), waiting);
        assert_eq!(occupy(&mut links, 4, (1, 3), 5), (ms(4), ms(9)), "the way in is free");
        assert_eq!(
            occupy(&mut links, 4, (0, 1), 5),
            (ms(10), ms(15)),
            "the way out from when the first has left"
        );
        links.give_back(ms(6), (0, 2), moving);
        assert_eq!(occupy(&mut links, 6, (0, 2), 4), (ms(6), ms(10)), "in the middle of it");
    }

    #[test]
    fn the_bytes_of_a_stretch_move_evenly() {
        let taken = (ms(10), ms(20));
        let stretch = Stretch { taken, bytes: 1_000 };
        let left = [0, 10, 13, 20, 30].map(|now| stretch.bytes_left(ms(now)));
        assert_eq!(left, [1_000, 1_000, 700, 0, 0]);
    }

    #[test]
    fn the_blocks_of_one_push_keep_their_order() {
        let mut links = Links::new(3);
        links.occupy(ms(0), (1, 2), (ms(4), Duration::from_millis(6)));
        let (_, first) = occupy(&mut links, 0, (0, 2), 5);
        assert_eq!(first, ms(15), "it does not fit before the other one");
        let second = links.occupy(ms(1), (0, 2), (first, Duration::from_millis(1)));
        assert_eq!(second, (ms(15), ms(16)), "although there was room");
    }
}
