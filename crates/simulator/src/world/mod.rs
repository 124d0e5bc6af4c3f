//! The world: one agenda, one coordinator, the nodes and their links. Each file here is one part of its shells.
//! Read `agenda.rs` for what can happen, then this file for who it happens to.

mod agenda;
mod clients;
mod coordinator;
mod deliver;
mod handoff;
mod hosts;
mod leg;
mod life;
mod membership;
mod node;
mod prompts;
mod request;
mod results;
mod step;

use std::collections::BTreeMap;
use std::time::Duration;

use serving_core::cluster::{Cluster, Leg, LegEvent, StreamId};
use serving_core::ids::{RequestId, TransferId};
use serving_core::request::AttemptKey;
use serving_core::time::Time;

use crate::outcome::Outcome;
use crate::scenario::Scenario;
use agenda::{Agenda, Event, Place, ToNode};
use clients::Clients;
use handoff::{Handoff, Links};
use hosts::Hosts;
use node::Node;
use request::Live;

/// Nodes join so long before the trace begins: a cluster that has just started gives new decode nodes their share slowly.
const RUN_UP: Duration = Duration::from_secs(15);
/// After the last request's end, until what is under way has landed.
const RUN_OUT: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub(crate) struct World<'a> {
    scenario: &'a Scenario,
    agenda: Agenda,
    cluster: Cluster,
    /// The timer of the brain that is in the agenda.
    wake_at: Option<Time>,
    /// Who is at the other end of a membership stream.
    streams: BTreeMap<StreamId, Place>,
    next_stream: u64,
    /// Requests that have not ended, as the coordinator's shell knows them.
    live: BTreeMap<RequestId, Live>,
    clients: Clients,
    nodes: Vec<Node>,
    by_name: BTreeMap<String, usize>,
    hosts: Hosts,
    links: Links,
    handoffs: BTreeMap<TransferId, Handoff>,
    next_transfer: u64,
    hop: Duration,
}

impl<'a> World<'a> {
    /// The scenario must have been checked.
    pub(crate) fn new(scenario: &'a Scenario) -> Self {
        let named: Vec<_> = scenario.topology.nodes().collect();
        let nodes: Vec<Node> = named
            .iter()
            .map(|(name, role)| Node::new(scenario, (name.as_str(), *role)))
            .collect();
        Self {
            scenario,
            agenda: Agenda::default(),
            cluster: Cluster::new(scenario.cluster.clone()),
            wake_at: None,
            streams: BTreeMap::new(),
            next_stream: 0,
            live: BTreeMap::new(),
            clients: Clients::new(&scenario.trace),
            by_name: named.into_iter().map(|(name, _)| name).zip(0..).collect(),
            hosts: Hosts::new(nodes.len(), &scenario.costs.host),
            links: Links::new(nodes.len()),
            nodes,
            handoffs: BTreeMap::new(),
            next_transfer: 0,
            hop: scenario.costs.overheads.hop(),
        }
    }

    pub(crate) fn run(mut self) -> Outcome {
        for node in 0..self.nodes.len() {
            self.join(node);
        }
        for (number, intervention) in self.scenario.interventions.iter().enumerate() {
            self.agenda.at(start() + intervention.at, Event::Intervene(number));
        }
        self.send_next();
        let mut ends_at = None::<Time>;
        while let Some(event) = self.agenda.take() {
            if ends_at.is_some_and(|end| self.agenda.now() > end) {
                break;
            }
            self.happen(event);
            if ends_at.is_none() && self.clients.are_all_done() {
                ends_at = Some(self.agenda.now() + RUN_OUT);
            }
        }
        self.outcome()
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Send(request) => self.send(request),
            Event::Arrive(request) => self.arrive(request),
            Event::Wake => self.wake(),
            Event::Membership(event) => self.apply(*event),
            Event::Leg { key, leg, event } => self.leg_event((key, leg), *event),
            Event::Node { place, what } => self.reach(place, what),
            Event::Intervene(number) => self.intervene(number),
            Event::Resume(place) => self.resume(place),
            Event::Start { node, role } => self.start_anew(node, role),
        }
    }

    /// Something reaches a node, if it is still there, and when it does not stand still.
    fn reach(&mut self, place: Place, what: ToNode) {
        let node = &mut self.nodes[place.node];
        if !node.is_at(place) {
            return self.reaches_nobody(place, what);
        }
        if let Some(waiting) = &mut node.paused {
            return waiting.push(what);
        }
        self.take(place.node, what);
    }

    fn take(&mut self, node: usize, what: ToNode) {
        match what {
            ToNode::Leg(start) => self.admit(node, *start),
            ToNode::Cancel(key) => self.cancel(node, key),
            ToNode::Turn => self.turn(node),
            ToNode::StepEnd { serial } => self.end_step(node, serial),
            ToNode::Tick => self.tick(node),
            ToNode::Report => self.report(node),
            ToNode::Welcome => self.welcomed(node),
            ToNode::Join => self.join(node),
            ToNode::Drain { next_role } => self.begin_drain(node, next_role),
            ToNode::Handoff { transfer, sign } => self.sign(node, (transfer, sign)),
            ToNode::ReceiveBroken(transfer) => self.receive_broken(node, transfer),
            ToNode::PushBroken { key, reason } => self.push_broken(node, key, reason),
        }
    }

    fn now(&self) -> Time {
        self.agenda.now()
    }

    fn place(&self, node: usize) -> Place {
        Place {
            node,
            life: self.nodes[node].life,
        }
    }

    fn send_to(&mut self, delay: Duration, (node, what): (usize, ToNode)) {
        let place = self.place(node);
        self.agenda.after(delay, Event::Node { place, what });
    }

    /// What a node says on a leg reaches the coordinator a message later.
    fn tell(&mut self, (key, leg): (AttemptKey, Leg), event: LegEvent) {
        let event = Box::new(event);
        self.agenda.after(self.hop, Event::Leg { key, leg, event });
    }
}

/// The start of the trace on the virtual clock.
fn start() -> Time {
    Time::ZERO + RUN_UP
}
