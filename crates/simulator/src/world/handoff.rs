//! Handoffs: KV goes over links that have a latency and a rate, and comes back as an acknowledgement.

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

/// When each node's way out and way in are free again. Transfers of a node go one after the other, which takes together as long
/// as if they shared the rate.
#[derive(Debug)]
pub(super) struct Links {
    out_free: Vec<Time>,
    in_free: Vec<Time>,
}

impl Links {
    pub fn new(nodes: usize) -> Self {
        Self {
            out_free: vec![Time::ZERO; nodes],
            in_free: vec![Time::ZERO; nodes],
        }
    }

    /// From when to when so many bytes occupy both ends.
    fn occupy(&mut self, now: Time, (from, to): (usize, usize), took: Duration) -> (Time, Time) {
        let begins = now.max(self.out_free[from]).max(self.in_free[to]);
        let ends = begins + took;
        self.out_free[from] = ends;
        self.in_free[to] = ends;
        (begins, ends)
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
        let (begins, ends) = self.links.occupy(now, (node, handoff.to.node), took);
        handoff.began.get_or_insert(begins);
        handoff.ends = ends;
        handoff.bytes += bytes;
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
        match own.receiving.get(&transfer) {
            Some(key) => own.scheduler.prefill_began(now, *key),
            // The reservation is gone: nobody may write.
            None => self.refuse_transfer(transfer),
        }
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

    /// Takes a transfer off the link. What was to arrive does not.
    fn drop_handoff(&mut self, transfer: TransferId) -> Option<Handoff> {
        let handoff = self.handoffs.remove(&transfer)?;
        if self.nodes[handoff.from.node].is_at(handoff.from) {
            let sender = &mut self.nodes[handoff.from.node];
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

    #[test]
    fn transfers_of_a_node_share_its_way_out_and_others_do_not_wait() {
        let mut links = Links::new(4);
        let ms = Duration::from_millis;
        let at = Time::from_millis;
        assert_eq!(links.occupy(at(0), (0, 2), ms(10)), (at(0), at(10)));
        assert_eq!(links.occupy(at(1), (0, 3), ms(10)), (at(10), at(20)), "the same sender");
        assert_eq!(
            links.occupy(at(2), (1, 2), ms(5)),
            (at(10), at(15)),
            "the same receiver"
        );
        assert_eq!(links.occupy(at(40), (1, 3), ms(5)), (at(40), at(45)));
    }
}
