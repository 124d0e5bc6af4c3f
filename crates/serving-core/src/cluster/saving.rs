//! A request that lacks permits waits while one decode node and one prefill node save up permits for it. Other requests use other nodes.

use std::time::Duration;

use crate::ids::{NodeId, RequestId};
use crate::node::{NodeRole, PermitNote};
use crate::request::Request;
use crate::scheduler::permits::{permits_kept_for_short, prefill_capacity_tokens};
use crate::time::Time;

use super::Cluster;
use super::action::ClusterAction;
use super::capacity::{Kept, decode_permit, has_places, has_prompt_room, prefill_permit};
use super::handoff::AdmittedRequest;
use super::member::Node;

/// The first request in the queue that lacks permits, and the nodes that save up for it. Nodes save up for one request at a time. When it
/// has its place, the next one follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Saving {
    pub request: RequestId,
    /// The time since when the request waits.
    pub since: Time,
    /// `None`: the request needs no node of this role, or no such node can ever take it.
    pub decode: Option<Target>,
    pub prefill: Option<Target>,
}

/// A node, and the part of it that is kept for the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub node: NodeId,
    pub kept: Kept,
}

/// Whether others may take what a decode node has saved so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overtaking {
    /// The request has not waited long. A decode node may take as long as its longest answer until it has room. A prefill node
    /// has room again after a step or two, so only short prompts overtake there.
    AtDecode,
    Nowhere,
}

impl Saving {
    /// The part of this node that the younger `request` must not take.
    pub(super) fn kept_at(&self, node: &Node, overtaking: Overtaking, request: &Request) -> Kept {
        let wanted = self.wanted_at(node).unwrap_or_default();
        let may_overtake = match node.record.role {
            NodeRole::Decode => overtaking == Overtaking::AtDecode,
            NodeRole::Prefill => is_left_for_short(node, wanted.permits, request),
        };
        if may_overtake { Kept::default() } else { wanted }
    }

    fn wanted_at(&self, node: &Node) -> Option<Kept> {
        let target = match node.record.role {
            NodeRole::Prefill => self.prefill.as_ref(),
            NodeRole::Decode => self.decode.as_ref(),
        };
        target
            .filter(|target| target.node == *node.id())
            .map(|target| target.kept)
    }
}

/// What a request needs of the nodes, in a form that can be compared. If a request found no place, another request that needs no less
/// finds none either and need not be looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    prompt_tokens: u32,
    remaining_tokens: u32,
    choice_count: u32,
}

impl Need {
    pub(super) fn of(request: &Request) -> Self {
        Self {
            prompt_tokens: request.prompt_tokens(),
            remaining_tokens: request.remaining_tokens(),
            choice_count: request.choice_count,
        }
    }

    pub(super) fn is_no_less_than(self, other: Self) -> bool {
        self.prompt_tokens >= other.prompt_tokens
            && self.remaining_tokens >= other.remaining_tokens
            && self.choice_count >= other.choice_count
    }
}

/// The best node for a request: first a node that could take it now, then the node with the most permits for this coordinator, then the
/// first one by name.
fn best(nodes: Vec<&Node>, has_room: impl Fn(&Node) -> bool) -> Option<NodeId> {
    let rank = |node: &&Node| (has_room(node), node.permits.available());
    let mut best: Option<&Node> = None;
    for node in nodes {
        if best.is_none_or(|found| rank(&node) > rank(&found)) {
            best = Some(node);
        }
    }
    best.map(|node| node.id().clone())
}

/// Whether the node could take the request if other coordinators gave back what they hold. If this coordinator holds nothing although
/// there is room, the node saves up for an older request of another coordinator.
fn has_decode_room(request: &Request, node: &Node) -> bool {
    let needed = decode_permit(request, &node.record.capacity);
    let reported = node.status.as_ref().map(|s| s.kv_blocks.free + s.kv_blocks.cached);
    reported.is_some_and(|room| needed <= room) && node.permits.available() > 0 && has_places(request, node, 0)
}

fn needed_of_decode(request: &Request, node: &Node) -> Kept {
    Kept {
        permits: u64::from(decode_permit(request, &node.record.capacity)),
        // Places become free one by one. If they were not kept, a request that needs several would never find them free together.
        sequences: request.choice_count,
    }
}

fn needed_of_prefill(request: &Request, node: &Node) -> Kept {
    Kept {
        permits: u64::from(prefill_permit(request, node)),
        sequences: 0,
    }
}

/// Whether a short prompt may take what a prefill node has kept. While more tokens wait there than the node ever grants, it computes a
/// long prompt, and the request that saves up has to wait for this prompt in any case. As soon as fewer wait, the node saves up.
fn is_left_for_short(node: &Node, wanted: u64, request: &Request) -> bool {
    let capacity = &node.record.capacity;
    let share = permits_kept_for_short(capacity.max_batch_tokens);
    let is_short = u64::from(prefill_permit(request, node)) <= share;
    is_short && wanted > share && node.waiting_tokens() > prefill_capacity_tokens(capacity)
}

impl Cluster {
    /// The nodes that save up for this request, among those on which it would be placed if they had permits. They stay the same while they
    /// can take it and no node with room appears. Otherwise a node's savings would be lost at each report.
    pub(super) fn save_up(&self, now: Time, tracked: &AdmittedRequest) -> Saving {
        let request = &tracked.request;
        let (decode, prefill) = (self.decode_nodes(now, tracked), self.prefill_nodes(now, request));
        let options = self.options(now, tracked, (&decode[..], &prefill[..]));
        let before = self.saving.as_ref().filter(|saving| saving.request == request.id);
        let ids: Vec<NodeId> = options.iter().map(|(decode, _, _)| decode.clone()).collect();
        let room = |n: &Node| has_decode_room(request, n);
        let decode = self.who_saves(now, before.and_then(|b| b.decode.as_ref()), &ids, &room);
        let chosen = options.into_iter().find(|(id, _, _)| Some(id) == decode.as_ref());
        let partners = match chosen {
            Some((_, None, partners)) => partners,
            // The decode node computes the prompt itself.
            Some((_, Some(_), _)) | None => Vec::new(),
        };
        let room =
            |n: &Node| has_prompt_room(request, n) && u64::from(prefill_permit(request, n)) <= n.permits.available();
        let prefill = self.who_saves(now, before.and_then(|b| b.prefill.as_ref()), &partners, &room);
        let target = |node: Option<NodeId>, needed: fn(&Request, &Node) -> Kept| {
            let kept = node
                .as_ref()
                .and_then(|id| self.members.get(id))
                .map(|n| needed(request, n));
            node.zip(kept).map(|(node, kept)| Target { node, kept })
        };
        let prefill = target(prefill, needed_of_prefill);
        // A request that ends at its first token is computed on the prefill node alone.
        let is_prefill_only = request.ends_at_first_token() && prefill.is_some();
        let decode = decode.filter(|_| !is_prefill_only);
        Saving {
            request: request.id,
            since: tracked.queued_since,
            decode: target(decode, needed_of_decode),
            prefill,
        }
    }

    /// The node among these that has saved up until now, unless it rests or another node has room and it has none. Otherwise the best one.
    fn who_saves(
        &self,
        now: Time,
        before: Option<&Target>,
        ids: &[NodeId],
        has_room: &dyn Fn(&Node) -> bool,
    ) -> Option<NodeId> {
        let nodes: Vec<&Node> = ids.iter().filter_map(|id| self.members.get(id)).collect();
        let saved_before = |n: &&Node| before.is_some_and(|before| before.node == *n.id());
        let old = nodes.iter().copied().find(saved_before).filter(|n| !n.is_resting(now));
        let chosen = best(nodes, has_room);
        let is_better = chosen
            .as_ref()
            .and_then(|id| self.members.get(id))
            .is_some_and(has_room);
        match old {
            Some(old) if has_room(old) || !is_better => Some(old.id().clone()),
            _ => chosen,
        }
    }

    /// Nodes that also serve other coordinators are told what waits for their permits, and get back the permits that they recalled.
    pub(super) fn share_permits(&mut self, now: Time) {
        let saving = self.saving.clone();
        let waited = saving.as_ref().map_or(Duration::ZERO, |saving| now.since(saving.since));
        let mut notes = Vec::new();
        for (stream, node) in self.members.connected_mut() {
            let wanted = saving
                .as_ref()
                .and_then(|s| Some((s.request, s.wanted_at(node)?.permits)));
            if let Some(note) = node.share_permits(wanted) {
                notes.push((stream, PermitNote { waited, ..note }));
            }
        }
        for (stream, note) in notes {
            self.act(ClusterAction::TellPermits { stream, note });
        }
    }
}
