//! Starts an attempt on the nodes that were chosen for it: takes the permits, and opens the first leg.

use std::sync::Arc;

use crate::ids::{NodeId, RequestId};
use crate::request::{AttemptKey, LocalPrefillReason, Request};
use crate::routing::{Choice, Pool};
use crate::time::Time;

use super::Cluster;
use super::action::{ClusterAction, PlacementFacts, Target};
use super::capacity::{decode_permit, prefill_permit};
use super::event::Leg;
use super::handoff::{AdmittedRequest, OpenLeg, Phase};
use super::stats::count;

/// The nodes that were chosen for one request.
#[derive(Debug)]
pub(super) struct ChosenNodes {
    pub prefill: Option<NodeId>,
    pub decode: Option<NodeId>,
    pub local: Option<LocalPrefillReason>,
    /// The policy's reasons, in the order in which it was asked.
    pub reasons: Vec<(Pool, Choice)>,
}

impl Cluster {
    /// Takes the permits (prefill, then decode) and starts the attempt.
    pub(super) fn place(&mut self, now: Time, request: &Arc<Request>, plan: ChosenNodes) {
        self.queue.placed(request.id);
        let prefill = plan
            .prefill
            .as_ref()
            .and_then(|id| self.take_leg(id, request, Leg::Prefill));
        let decode = plan
            .decode
            .as_ref()
            .and_then(|id| self.take_leg(id, request, Leg::Decode));
        let group = decode
            .as_ref()
            .or(prefill.as_ref())
            .and_then(|l| self.members.get(&l.node))
            .map(|n| n.record.compatibility.hash);
        let Some(tracked) = self.requests.get_mut(&request.id) else {
            return;
        };
        tracked.placements += 1;
        tracked.is_handoff_counted = false;
        tracked.has_prefill_word = false;
        tracked.group = tracked.group.or(group);
        tracked.local = plan.local;
        tracked.is_prefill_only = plan.decode.is_none();
        tracked.pair = (plan.prefill.clone(), plan.decode.clone());
        if let Some(pair) = plan.prefill.clone().zip(plan.decode.clone()) {
            self.breaker.placed(&pair, request.id);
        }
        tracked.legs.prefill = prefill;
        tracked.legs.decode = decode;
        let key = tracked.key();
        let placement = PlacementFacts {
            prefill: plan.prefill,
            decode: plan.decode,
            local: plan.local,
            route_reason: describe(self.config.routing.name(), &plan.reasons),
            queued_for: now.since(tracked.queued_since),
        };
        if let Some(reason) = plan.local {
            count(&mut self.stats.local_prefills, reason);
        }
        self.act(ClusterAction::Place { key, placement });
        let is_prefill_only = self.requests.get(&request.id).is_some_and(|t| t.is_prefill_only);
        if is_prefill_only {
            self.advance(now, request.id, Phase::Opened);
            self.start_prefill(now, key, None);
        } else {
            self.advance(now, request.id, Phase::Opening);
            self.start_open(now, key);
        }
    }

    fn take_leg(&mut self, id: &NodeId, request: &Request, leg: Leg) -> Option<OpenLeg> {
        let node = self.members.get_mut(id)?;
        let cost = match leg {
            Leg::Prefill => prefill_permit(request, node),
            Leg::Decode => decode_permit(request, &node.record.capacity),
        };
        let charge = node.permits.take(u64::from(cost))?;
        node.suspicion.trust.placed(request.id);
        node.breaker.placed(request.id);
        let sequences = match leg {
            Leg::Prefill => {
                node.sent_tokens += u64::from(request.prompt_tokens());
                0
            }
            Leg::Decode => request.choice_count,
        };
        node.sequences += sequences;
        Some(OpenLeg {
            node: id.clone(),
            cost,
            charge: Some(charge),
            started_at: None,
            sequences,
        })
    }

    pub(super) fn target(&self, id: &NodeId) -> Option<Target> {
        let address = self.members.get(id)?.record.address.clone();
        Some(Target {
            node: id.clone(),
            address,
        })
    }

    fn start_open(&mut self, now: Time, key: AttemptKey) {
        let Some(tracked) = self.requests.get(&key.request) else {
            return;
        };
        let Some(leg) = tracked.legs.decode.as_ref() else {
            return;
        };
        let Some(decode) = self.target(&leg.node) else {
            return;
        };
        let action = ClusterAction::StartOpen {
            key,
            request: tracked.request.clone(),
            decode,
            prefill: tracked.pair.0.clone(),
            local: tracked.local,
            permit_blocks: leg.cost,
            time_left: tracked.deadline.remaining(now),
        };
        self.mark_started(now, key.request, Leg::Decode);
        self.act(action);
        self.set_wait(key.request, Some(now + self.config.open_timeout));
    }

    pub(super) fn mark_started(&mut self, now: Time, request: RequestId, leg: Leg) {
        let slot = self
            .requests
            .get_mut(&request)
            .and_then(|t: &mut AdmittedRequest| t.legs.slot(leg).as_mut());
        if let Some(open) = slot {
            open.started_at = Some(now);
        }
    }
}

fn describe(policy: &str, reasons: &[(Pool, Choice)]) -> String {
    let parts: Vec<String> = reasons
        .iter()
        .map(|(pool, choice)| {
            let pool = match pool {
                Pool::Decode => "decode",
                Pool::Prefill => "prefill",
            };
            format!("{pool} {}", choice.reason.name())
        })
        .collect();
    format!("{policy}: {}", parts.join(", "))
}
