//! The nodes' membership streams: registration, statuses, what is cached.

use std::time::Duration;

use serving_core::cluster::{ClusterEvent, StreamId};
use serving_core::ids::NodeId;
use serving_core::node::NodeStatus;
use serving_core::scheduler::permit_shares::{PermitShares, ShareId};
use serving_core::time::Time;

use super::World;
use super::agenda::{Event, Place, ToNode};
use super::leg::COORDINATOR;

/// Two statuses within this time are sent as one (`service-runtime/src/membership/link.rs`).
const COALESCE: Duration = Duration::from_millis(2);
/// A node reports at least so many times in a lease (`coordinator/src/config.rs`).
const STATUSES_PER_LEASE: u32 = 20;
/// Of the statuses that say nothing new, only each fourth one is sent here: they renew the lease and do nothing else, and with
/// hundreds of nodes they would be most of the agenda. What a node had still said before it fell silent is made up for
/// (`World::last_words`).
const UNCHANGED_SENT: u32 = 4;
/// A registration that was refused is tried again.
const JOIN_AGAIN: Duration = Duration::from_secs(1);
/// The one coordinator's share of a node's permits.
const SHARE: ShareId = ShareId(0);

impl World<'_> {
    fn status_interval(&self) -> Duration {
        self.scenario.cluster.lease / STATUSES_PER_LEASE
    }

    /// Registers on a new stream.
    pub(super) fn join(&mut self, node: usize) {
        let stream = StreamId(self.next_stream);
        self.next_stream += 1;
        let place = self.place(node);
        self.streams.insert(stream, place);
        let own = &mut self.nodes[node];
        own.stream = Some(stream);
        own.shares = PermitShares::default();
        (own.prefixes_told, own.reported, own.report_at) = (None, None, None);
        let record = own.record(self.scenario);
        self.membership(ClusterEvent::NodeJoined { record, stream });
    }

    /// What a node says reaches the coordinator a message later.
    fn membership(&mut self, event: ClusterEvent) {
        self.agenda.after(self.hop, Event::Membership(Box::new(event)));
    }

    pub(super) fn tell_stream(&mut self, stream: StreamId, what: ToNode) {
        if let Some(place) = self.streams.get(&stream).copied() {
            self.agenda.after(self.hop, Event::Node { place, what });
        }
    }

    pub(super) fn refused(&mut self, stream: StreamId) {
        if let Some(place) = self.streams.remove(&stream) {
            let what = ToNode::Join;
            self.agenda.after(JOIN_AGAIN, Event::Node { place, what });
        }
    }

    pub(super) fn place_of(&self, id: &NodeId) -> Option<Place> {
        let node = self.by_name.get(id.name.as_str()).copied()?;
        let lives = 0..=self.nodes[node].life;
        let life = lives.rev().find(|life| self.epoch_of(node, *life) == id.epoch)?;
        Some(Place { node, life })
    }

    fn epoch_of(&self, node: usize, life: u32) -> serving_core::ids::NodeEpoch {
        self.nodes[node].id_of_life(self.scenario.seed, life).epoch
    }

    pub(super) fn welcomed(&mut self, node: usize) {
        self.nodes[node].shares.connect(SHARE, COORDINATOR);
        self.report(node);
    }

    /// The loop has gone round: the coordinator hears of it soon, if anything has changed.
    pub(super) fn publish(&mut self, node: usize) {
        let own = &mut self.nodes[node];
        if let Some(changes) = own.scheduler.take_prefix_changes() {
            own.prefixes.apply(changes);
        }
        let soon = (own.reported_at + COALESCE).max(self.agenda.now());
        self.report_by(node, soon);
    }

    fn report_by(&mut self, node: usize, at: Time) {
        let own = &mut self.nodes[node];
        if own.reported.is_some() && own.report_at.is_none_or(|due| at < due) {
            own.report_at = Some(at);
            let (place, what) = (self.place(node), ToNode::Report);
            self.agenda.at(at, Event::Node { place, what });
        }
    }

    /// The status, as the coordinator's stream may report it.
    fn status(&mut self, node: usize) -> NodeStatus {
        let now = self.now();
        let own = &mut self.nodes[node];
        let mut status = own.scheduler.status(own.state());
        own.shares.divide(now, &status);
        let said = own.shares.of(SHARE);
        status.coordinators = own.shares.count();
        status.permits_granted_total = said.granted_total;
        status.permits_received_total = said.received_total;
        status.permits_recalled_total = said.recalled_total;
        status.permits_received_by.clear();
        status
    }

    /// A status is due; one that was put off meanwhile is not.
    pub(super) fn report(&mut self, node: usize) {
        let now = self.now();
        let own = &mut self.nodes[node];
        let Some(stream) = own.stream else {
            return;
        };
        let is_first = own.reported.is_none();
        if !is_first && own.report_at.take_if(|due| *due <= now).is_none() {
            return;
        }
        let unchanged_interval = self.status_interval() * UNCHANGED_SENT;
        let status = self.status(node);
        let own = &mut self.nodes[node];
        let is_due = now.since(own.reported_at) >= unchanged_interval;
        // That it computes is worth a word only now and then.
        let is_news = own.reported.as_ref().is_none_or(|reported| {
            let computed_tokens_total = status.computed_tokens_total;
            let as_before = NodeStatus {
                computed_tokens_total,
                ..reported.clone()
            };
            as_before != status
        });
        if is_first || is_due || is_news {
            if let Some((report, told)) = own.prefixes.since(own.prefixes_told) {
                own.prefixes_told = Some(told);
                self.membership(ClusterEvent::PrefixesReported { stream, report });
            }
            self.send_status(node, (stream, now), status);
        }
        let next = self.nodes[node].reported_at + unchanged_interval;
        self.report_by(node, next);
    }

    fn send_status(&mut self, node: usize, (stream, at): (StreamId, Time), status: NodeStatus) {
        let own = &mut self.nodes[node];
        own.reported = Some(status.clone());
        own.reported_at = at;
        self.membership(ClusterEvent::NodeReported {
            stream,
            read_at: at + self.hop,
            status,
        });
    }

    /// A node falls silent now: the last of the statuses that were not sent because they said nothing new still renews its lease.
    pub(super) fn last_words(&mut self, node: usize) {
        let (now, interval) = (self.now(), self.status_interval());
        let own = &self.nodes[node];
        let (Some(stream), Some(reported)) = (own.stream, own.reported.clone()) else {
            return;
        };
        let nanos = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX).max(1);
        let since = u64::try_from(now.since(own.reported_at).as_nanos()).unwrap_or(u64::MAX);
        let at = Time(own.reported_at.0 + since / nanos * nanos);
        if at > own.reported_at {
            self.send_status(node, (stream, at), reported);
        }
    }
}
