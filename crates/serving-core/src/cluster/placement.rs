//! Finds nodes for waiting requests: which nodes are possible with the permits that are there, and which of them the policy chooses.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use crate::ids::{NodeId, RequestId};
use crate::node::NodeRole;
use crate::request::{LocalPrefillReason, Request};
use crate::routing::{Candidate, Pool, RequestFacts};
use crate::time::Time;

use super::Cluster;
use super::capacity::{
    Kept, decode_has_room, decode_permit, has_prompt_room, prefill_permit, prompt_fits, unless_avoided, whole_fits,
};
use super::handoff::AdmittedRequest;
use super::member::Node;
use super::prefix_directory::PromptKeys;
use super::saving::{Need, Overtaking, Saving};
use super::start::ChosenNodes;
use super::stats::count;

/// Why a waiting request was not placed.
#[derive(Debug, PartialEq, Eq)]
enum Blocked {
    /// The nodes that could take the request lack permits. They save up permits for the first such request in the queue.
    Permits,
    /// No node could take the request now, even with permits.
    NoNode,
}

/// So many requests behind the one that saves up are looked at in one round. This bounds the work of one event while the queue is
/// full. Requests further behind wait for a later round.
const PASSING_LOOKED_AT_MAX: usize = 64;

/// What one round over the queue has found so far.
#[derive(Debug, Default)]
struct Round {
    saving: Option<Saving>,
    /// The needs of the requests that lack permits.
    unmet: Vec<Need>,
    /// Requests behind the one that saves up.
    passed: usize,
}

fn facts(request: &Request) -> RequestFacts {
    RequestFacts {
        id: request.id,
        prompt_tokens: request.prompt_tokens(),
        choice_count: request.choice_count,
        lane: request.lane,
    }
}

fn candidate(node: &Node, cost: u64, keys: &PromptKeys) -> Candidate {
    let blocks = node.status.as_ref().map(|s| s.kv_blocks).unwrap_or_default();
    Candidate {
        node: node.id().clone(),
        permits_left: node.permits.available().saturating_sub(cost),
        sequences: node.sequences,
        sequences_max: node.record.capacity.max_sequences,
        waiting_tokens: node.waiting_tokens(),
        kv_blocks_used: blocks.total().saturating_sub(blocks.free + blocks.cached),
        kv_blocks: node.record.capacity.kv_blocks,
        cached_tokens: keys.cached_tokens(&node.prefixes, node.record.capacity.block_tokens),
    }
}

impl Cluster {
    /// Places waiting requests in order. Nodes save up permits for the first request that lacks them. Requests behind it may pass it while
    /// this does not delay it, or has not delayed it for long.
    pub(super) fn place_waiting(&mut self, now: Time) {
        let mut round = Round::default();
        let mut walk = self.queue.walk(self.saving.as_ref().map(|saving| saving.request));
        while let Some(id) = walk.next(&self.queue) {
            if self.look_at(now, id, &mut round).is_break() {
                break;
            }
        }
        self.saving = round.saving;
    }

    /// Places one request if this is possible. `Break`: requests behind it are not looked at in this round.
    fn look_at(&mut self, now: Time, id: RequestId, round: &mut Round) -> ControlFlow<()> {
        let Some(tracked) = self.requests.get(&id) else {
            self.queue.remove(id);
            return ControlFlow::Continue(());
        };
        let request = tracked.request.clone();
        if round.saving.is_some() {
            round.passed += 1;
            if round.passed > PASSING_LOOKED_AT_MAX {
                return ControlFlow::Break(());
            }
            if self.is_hopeless(tracked, &round.unmet) {
                return ControlFlow::Continue(());
            }
        }
        match self.plan_around(now, tracked, round.saving.as_ref()) {
            Ok(options) => {
                let plan = self.choose(&request, options);
                self.place(now, &request, plan);
            }
            // While no node can take any request, the rest of the queue is not looked at.
            Err(Blocked::NoNode) if !self.can_place_any(now) => return ControlFlow::Break(()),
            Err(Blocked::NoNode) => {}
            Err(Blocked::Permits) => {
                // A request that must stay in the group of its first attempt, or that avoids nodes, shows nothing about the other nodes.
                if tracked.avoid.is_empty() && tracked.group.is_none() {
                    round.unmet.push(Need::of(&request));
                }
                if round.saving.is_none() {
                    round.saving = Some(self.save_up(now, tracked));
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Whether another request that needs no more than this one found no place, while this one can use no node that the other cannot.
    fn is_hopeless(&self, tracked: &AdmittedRequest, unmet: &[Need]) -> bool {
        let need = Need::of(&tracked.request);
        tracked.avoid.is_empty()
            && unmet.iter().any(|other| need.is_no_less_than(*other))
            && !self.members.iter().any(|node| self.lacks_little(tracked, node))
    }

    /// Prompts of fewer tokens are computed on the decode node; 0: none are.
    fn computed_locally_below(&self) -> u32 {
        match self.config.allow_local_prefill {
            true => self.config.local_prefill_below_tokens,
            false => 0,
        }
    }

    /// Whether the decode node has most of the prompt in its cache.
    fn lacks_little(&self, tracked: &AdmittedRequest, decode: &Node) -> bool {
        let (below, prompt_tokens) = (self.computed_locally_below(), tracked.request.prompt_tokens());
        let enough = prompt_tokens.saturating_add(1).saturating_sub(below);
        let size = decode.record.capacity.block_tokens;
        below > 0 && prompt_tokens >= below && tracked.prompt_keys.has_cached(enough, (&decode.prefixes, size))
    }

    /// Plans without what is saved for an older request. If that is impossible, it also uses what a decode node has saved, as long as the
    /// older request has not waited long.
    fn plan_around(&self, now: Time, tracked: &AdmittedRequest, saving: Option<&Saving>) -> Result<Options, Blocked> {
        let Some(saving) = saving else {
            return self.plan(now, tracked, &|_| Kept::default());
        };
        let plan = |overtaking| self.plan(now, tracked, &|node| saving.kept_at(node, overtaking, &tracked.request));
        match plan(Overtaking::Nowhere) {
            Err(Blocked::Permits) if now.since(saving.since) < self.config.overtake_max => plan(Overtaking::AtDecode),
            planned => planned,
        }
    }

    /// The nodes this request may go to now: decode candidates (empty: prefill alone answers it), prefill candidates
    /// for each of them, and why the prompt would be computed locally.
    fn plan(&self, now: Time, tracked: &AdmittedRequest, kept_at: &KeptAt<'_>) -> Result<Options, Blocked> {
        let request = &tracked.request;
        let (decode, prefill) = (self.decode_nodes(now, tracked), self.prefill_nodes(now, request));
        let has_relief = decode
            .iter()
            .any(|n| !n.has_its_share(now) && decode_has_room(request, n, kept_at(n)));
        let relieved = unless_avoided(decode.clone(), |n| has_relief && n.has_its_share(now));
        match self.plan_on((now, tracked), (&relieved[..], &prefill[..]), kept_at) {
            // The nodes without their share have room, but no prefill node that could take the prompt for them now.
            Err(_) if relieved.len() < decode.len() => {
                self.plan_on((now, tracked), (&decode[..], &prefill[..]), kept_at)
            }
            planned => planned,
        }
    }

    /// The same as `plan`, but for these nodes alone.
    fn plan_on(
        &self,
        (now, tracked): (Time, &AdmittedRequest),
        (decode, prefill): (&[&Node], &[&Node]),
        kept_at: &KeptAt<'_>,
    ) -> Result<Options, Blocked> {
        let options = self.options(now, tracked, (decode, prefill));
        if options.is_empty() {
            return Err(Blocked::NoNode);
        }
        self.with_permits(&tracked.request, (options, kept_at), prefill)
    }

    fn usable(&self, now: Time, role: NodeRole) -> impl Iterator<Item = &Node> {
        self.members
            .iter()
            .filter(move |n| n.record.role == role && n.is_usable(now))
    }

    /// Decode nodes that can hold the request. Permits are not looked at here. Nodes of the request's group are taken alone, if there are
    /// any. Of the nodes that are left, those that have not failed the request are taken alone, if there are any.
    pub(super) fn decode_nodes(&self, now: Time, tracked: &AdmittedRequest) -> Vec<&Node> {
        let (request, avoid, group) = (&tracked.request, &tracked.avoid, tracked.group);
        let decode = self.usable(now, NodeRole::Decode).filter(|n| whole_fits(request, n));
        let decode = unless_avoided(decode.collect(), |n| {
            group.is_some_and(|g| g != n.record.compatibility.hash)
        });
        unless_avoided(decode, |n| avoid.nodes.contains(n.id()))
    }

    /// Prefill nodes that can hold the prompt. Permits are not looked at here.
    pub(super) fn prefill_nodes(&self, now: Time, request: &Request) -> Vec<&Node> {
        let prefill = self.usable(now, NodeRole::Prefill).filter(|n| prompt_fits(request, n));
        prefill.collect()
    }

    /// The decode nodes on which the request would be placed if there were permits. With each: why it would compute the prompt itself, or
    /// which of these prefill nodes could compute it.
    pub(super) fn options(
        &self,
        now: Time,
        tracked: &AdmittedRequest,
        (decode, prefill): (&[&Node], &[&Node]),
    ) -> Vec<DecodeOption> {
        let (request, avoid) = (&tracked.request, &tracked.avoid);
        let rests = |p: &Node, d: &Node| {
            !self.breaker.is_empty() && self.breaker.is_resting(now, &(p.id().clone(), d.id().clone()))
        };
        let partners = |d: &Node| -> Vec<NodeId> {
            let reaches = |p: &&&Node| {
                p.record.compatibility.hash == d.record.compatibility.hash
                    && p.pair_is_usable(d.id())
                    && !avoid.nodes.contains(p.id())
                    && (avoid.pairs.is_empty() || !avoid.pairs.contains(&(p.id().clone(), d.id().clone())))
                    && !rests(p, d)
            };
            if d.record.is_co_located {
                Vec::new()
            } else {
                let reached = prefill.iter().filter(reaches).copied().collect();
                let preferred = unless_avoided(reached, |p| p.is_resting(now));
                preferred.iter().map(|p| p.id().clone()).collect()
            }
        };
        let is_short = request.prompt_tokens() < self.computed_locally_below();
        let mut options = Vec::new();
        for d in decode {
            let is_cached = self.lacks_little(tracked, d);
            let partners = if is_short || is_cached { Vec::new() } else { partners(d) };
            let local = match () {
                () if d.record.is_co_located => Some(LocalPrefillReason::CoLocated),
                () if is_short => Some(LocalPrefillReason::Short),
                () if is_cached => Some(LocalPrefillReason::Cached),
                () if avoid.transfer_failures >= TRANSFER_FAILURES_MAX => Some(LocalPrefillReason::TransferFailed),
                () if !partners.is_empty() => None,
                () if avoid.transfer_failures > 0 || prefill.iter().any(|p| rests(p, d)) => {
                    Some(LocalPrefillReason::TransferFailed)
                }
                () => Some(LocalPrefillReason::NoPrefillNode),
            };
            options.push((d.id().clone(), local, partners));
        }
        self.prefer(&mut options, prefill);
        self.drop_resting(now, &mut options);
        options
    }

    /// Prefers decode nodes that have a prefill node over decode nodes that would compute the prompt only because they have none.
    fn prefer(&self, options: &mut Vec<DecodeOption>, prefill: &[&Node]) {
        let is_makeshift = |l: &Option<LocalPrefillReason>| {
            matches!(
                l,
                Some(LocalPrefillReason::NoPrefillNode | LocalPrefillReason::TransferFailed)
            )
        };
        // A cached prompt is as good as a prefill node, but not worth a wait: while no prefill node can be had, every decode node stays.
        if options
            .iter()
            .any(|(_, l, _)| !is_makeshift(l) && *l != Some(LocalPrefillReason::Cached))
        {
            options.retain(|(_, l, _)| !is_makeshift(l));
        } else if !self.config.allow_local_prefill {
            // A node that failed the request once is better than no node.
            for (decode, local, partners) in options.iter_mut() {
                let group = self.members.get(decode).map(|d| d.record.compatibility.hash);
                partners.extend(
                    prefill
                        .iter()
                        .filter(|p| Some(p.record.compatibility.hash) == group)
                        .map(|p| p.id().clone()),
                );
                *local = None;
            }
            options.retain(|(_, _, partners)| !partners.is_empty());
        }
    }

    /// The options for which there are permits and room.
    fn with_permits(
        &self,
        request: &Request,
        (mut options, kept_at): (Vec<DecodeOption>, &KeptAt<'_>),
        prefill: &[&Node],
    ) -> Result<Options, Blocked> {
        let has_permits = |n: &Node| {
            let cost = u64::from(prefill_permit(request, n)).saturating_add(kept_at(n).permits);
            cost <= n.permits.available() && has_prompt_room(request, n)
        };
        // This is computed once for each prefill node, which may be the partner of every decode node.
        let able: BTreeSet<&NodeId> = prefill.iter().filter(|n| has_permits(n)).map(|n| n.id()).collect();
        let is_prefill_only = request.ends_at_first_token() && options.iter().any(|(_, l, _)| l.is_none());
        if able.len() < prefill.len() {
            options
                .iter_mut()
                .for_each(|(_, _, partners)| partners.retain(|p| able.contains(p)));
        }
        if is_prefill_only {
            let prefill: BTreeSet<NodeId> = options.iter().flat_map(|(_, _, p)| p).cloned().collect();
            if !prefill.is_empty() {
                return Ok(Options::PrefillOnly(prefill.into_iter().collect()));
            }
            // No prefill node has permits. A decode node that would compute the prompt itself may answer it whole.
        }
        options.retain(|(d, local, partners)| {
            let has_room = self
                .members
                .get(d)
                .is_some_and(|n| decode_has_room(request, n, kept_at(n)));
            has_room && (local.is_some() || !partners.is_empty())
        });
        if options.is_empty() {
            Err(Blocked::Permits)
        } else {
            Ok(Options::Decode(options))
        }
    }

    /// Removes the decode nodes that rest, if another decode node is left then.
    fn drop_resting(&self, now: Time, options: &mut Vec<DecodeOption>) {
        let rests = |(d, _, _): &DecodeOption| self.members.get(d).is_some_and(|d| d.is_resting(now));
        if !options.iter().all(rests) {
            options.retain(|option| !rests(option));
        }
    }

    /// Asks the policy for the decode node, and then for its prefill node.
    fn choose(&mut self, request: &Request, options: Options) -> ChosenNodes {
        let facts = facts(request);
        let keys = self
            .requests
            .get(&request.id)
            .map(|t| t.prompt_keys.clone())
            .unwrap_or_default();
        let mut reasons = Vec::new();
        let mut pick = |this: &mut Self, pool: Pool, ids: &[NodeId]| {
            let nodes = ids.iter().filter_map(|id| this.members.get(id));
            let cost = |n: &Node| match pool {
                Pool::Decode => u64::from(decode_permit(request, &n.record.capacity)),
                Pool::Prefill => u64::from(prefill_permit(request, n)),
            };
            let candidates: Vec<Candidate> = nodes.map(|n| candidate(n, cost(n), &keys)).collect();
            let choice = this.router.rank(pool, &facts, &candidates)?;
            reasons.push((pool, choice));
            count(&mut this.stats.routing_decisions, choice.reason);
            candidates.get(choice.index).map(|c| c.node.clone())
        };
        match options {
            Options::PrefillOnly(ids) => {
                let prefill = pick(self, Pool::Prefill, &ids);
                ChosenNodes {
                    prefill,
                    decode: None,
                    local: None,
                    reasons,
                }
            }
            Options::Decode(options) => {
                let ids: Vec<NodeId> = options.iter().map(|(d, _, _)| d.clone()).collect();
                let decode = pick(self, Pool::Decode, &ids);
                let chosen = options.into_iter().find(|(d, _, _)| Some(d) == decode.as_ref());
                let (local, partners) = chosen.map_or((None, Vec::new()), |(_, l, p)| (l, p));
                let prefill = if local.is_none() {
                    pick(self, Pool::Prefill, &partners)
                } else {
                    None
                };
                ChosenNodes {
                    prefill,
                    decode,
                    local,
                    reasons,
                }
            }
        }
    }
}

/// PROTOCOL rules 10 and 16: a transfer is tried once more on another pair, then the prompt is recomputed.
const TRANSFER_FAILURES_MAX: u32 = 2;

/// The part of each node that is kept for an older request.
type KeptAt<'a> = dyn Fn(&Node) -> Kept + 'a;

/// A decode node, the reason why it would compute the prompt itself (if it would), and the prefill nodes that could compute it.
pub(super) type DecodeOption = (NodeId, Option<LocalPrefillReason>, Vec<NodeId>);

/// Placements that are possible now. There are permits for each.
#[derive(Debug)]
enum Options {
    PrefillOnly(Vec<NodeId>),
    Decode(Vec<DecodeOption>),
}

#[cfg(test)]
#[path = "placement_tests.rs"]
mod tests;
