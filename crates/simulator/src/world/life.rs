//! How nodes live and die: failures, standstills, drains, changes of role, and the second hand of their loops.

use std::time::Duration;

use serving_core::cluster::{ClusterEvent, Leg, LegError, LegEvent};
use serving_core::ids::NodeName;
use serving_core::node::AssignedRole;
use serving_core::request::AttemptKey;
use serving_core::scheduler::NodeFailure;

use super::World;
use super::agenda::{Event, Place, ToNode};
use super::node::Draining;
use crate::arithmetic::seconds;
use crate::intervention::What;

/// The loop's period (`node/src/node_loop.rs`). It wakes earlier when a timer of the scheduler is due.
const TICK: Duration = Duration::from_secs(1);

impl World<'_> {
    pub(super) fn intervene(&mut self, number: usize) {
        let scenario = self.scenario;
        let intervention = &scenario.interventions[number];
        let Some(node) = self.by_name.get(&intervention.node).copied() else {
            return;
        };
        let drained = |next_role| ClusterEvent::DrainNode {
            name: NodeName::new(&intervention.node),
            next_role,
        };
        match intervention.what {
            What::Fail { back_after } => self.fail(node, back_after),
            What::Pause { lasts } => self.pause(node, lasts),
            What::Drain => self.apply(drained(None)),
            What::Role { role } => self.apply(drained(Some(role))),
        }
    }

    /// The process is gone. Whoever was connected to it sees that at once.
    fn fail(&mut self, node: usize, back_after: Option<Duration>) {
        if !self.nodes[node].is_alive {
            return;
        }
        self.last_words(node);
        self.stop_computing(node);
        let role = self.nodes[node].role;
        if let Some(stream) = self.nodes[node].stream.take() {
            let event = Box::new(ClusterEvent::NodeDisconnected { stream });
            self.agenda.after(self.hop, Event::Membership(event));
        }
        self.nodes[node].is_alive = false;
        let gone = self.place(node);
        self.break_legs_of(gone);
        self.break_handoffs_of(gone);
        if let Some(back_after) = back_after {
            self.agenda.after(back_after, Event::Start { node, role });
        }
    }

    fn stop_computing(&mut self, node: usize) {
        let now = self.now();
        let own = &mut self.nodes[node];
        let is_paused = own.paused.take().is_some();
        if let Some(running) = own.running.take() {
            own.busy += running.computed_by(now);
            if !is_paused {
                self.computing_changed(node, running.kind, false);
            }
        }
    }

    /// The coordinator sees the streams of the legs end.
    fn break_legs_of(&mut self, gone: Place) {
        let mut broken: Vec<(AttemptKey, Leg)> = Vec::new();
        for (request, live) in &self.live {
            let Some(attempt) = live.attempt else {
                continue;
            };
            let key = AttemptKey {
                request: *request,
                attempt,
            };
            let there = live.legs.iter().filter(|(_, place)| **place == gone);
            broken.extend(there.map(|(leg, _)| (key, *leg)));
        }
        for (key, leg) in broken {
            let error = LegError::ConnectionLost {
                detail: "the process is gone".to_owned(),
            };
            self.tell((key, leg), LegEvent::Failed { leg, error });
        }
    }

    pub(super) fn start_anew(&mut self, node: usize, role: AssignedRole) {
        if !self.nodes[node].is_alive {
            self.nodes[node].start_anew(self.scenario, role);
            self.join(node);
        }
    }

    fn pause(&mut self, node: usize, lasts: Duration) {
        if !self.nodes[node].is_alive || self.nodes[node].paused.is_some() {
            return;
        }
        self.last_words(node);
        let own = &mut self.nodes[node];
        own.paused = Some(Vec::new());
        if let Some(kind) = own.running_kind() {
            // Its own step is timed anew with the others of its machine: it has no speed now.
            self.computing_changed(node, kind, false);
            self.time_anew(node);
        }
        let place = self.place(node);
        self.agenda.after(lasts, Event::Resume(place));
    }

    pub(super) fn resume(&mut self, place: Place) {
        let node = place.node;
        if !self.nodes[node].is_at(place) {
            return;
        }
        let own = &mut self.nodes[node];
        let waiting = own.paused.take();
        if let Some(kind) = own.running_kind() {
            self.computing_changed(node, kind, true);
        }
        for what in waiting.into_iter().flatten() {
            self.take(node, what);
        }
        self.turn_soon(node);
    }

    pub(super) fn begin_drain(&mut self, node: usize, next_role: Option<AssignedRole>) {
        let until = self.now() + self.scenario.nodes.drain_grace;
        let own = &mut self.nodes[node];
        let already = own.draining.map(|draining| draining.until);
        own.draining = Some(Draining {
            until: already.unwrap_or(until),
            next_role,
        });
        own.scheduler.pause_grants(true);
        self.send_to(self.scenario.nodes.drain_grace, (node, ToNode::Turn));
        self.turn_soon(node);
    }

    pub(super) fn give_up_when_late(&mut self, node: usize) {
        let now = self.now();
        let own = &mut self.nodes[node];
        if own.draining.is_some_and(|draining| draining.until <= now) {
            let keys: Vec<AttemptKey> = own.scheduler.keys().collect();
            for key in keys {
                own.scheduler.fail(key, NodeFailure::Draining);
            }
        }
    }

    /// A drained node says goodbye, for good or to come back as something else.
    pub(super) fn leave_when_empty(&mut self, node: usize) {
        let Some(draining) = self.nodes[node].draining else {
            return;
        };
        if !self.nodes[node].is_empty() {
            return;
        }
        if let Some(stream) = self.nodes[node].stream.take() {
            let event = Box::new(ClusterEvent::NodeLeft { stream });
            self.agenda.after(self.hop, Event::Membership(event));
        }
        self.nodes[node].is_alive = false;
        if let Some(role) = draining.next_role {
            let back = seconds(self.scenario.costs.overheads.role_change_seconds);
            self.agenda.after(back, Event::Start { node, role });
        }
    }

    /// A node looks at its deadlines, holds and reservations when the first of them is over. While there is anything to look at, it looks
    /// at these and at the quarantine every second, too. To be called wherever one of them may be over sooner than the first one so far.
    /// The entry for the later time stays in the agenda for a second at most, and then does nothing.
    pub(super) fn tick_soon(&mut self, node: usize) {
        let latest = self.now() + TICK;
        let own = &mut self.nodes[node];
        let at = own.scheduler.next_timer().map_or(latest, |timer| timer.min(latest));
        if own.tick_at.is_none_or(|due| at < due) {
            own.tick_at = Some(at);
            let (place, what) = (self.place(node), ToNode::Tick);
            self.agenda.at(at, Event::Node { place, what });
        }
    }

    pub(super) fn tick(&mut self, node: usize) {
        let now = self.now();
        if self.nodes[node].tick_at.take_if(|due| *due <= now).is_none() {
            return;
        }
        self.nodes[node].scheduler.tick(now);
        self.deliver(node);
        if !self.nodes[node].is_empty() {
            self.tick_soon(node);
        }
        self.turn_soon(node);
    }
}
