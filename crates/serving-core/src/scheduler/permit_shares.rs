//! How a node's permits are divided between the coordinators that are connected to it.
//!
//! A permit belongs to one coordinator at a time, so what is outstanding at all of them together never exceeds what the
//! node can take. A coordinator that is alone gets everything. Several get even shares of what is free; who waits for more
//! says so, and the node then recalls what others hold and do not need. Recalls go by age: nothing that an older request
//! waits for is taken for a younger one. Nodes may see two ages in different order, and two coordinators could then each
//! hold what the other waits for. So who holds what it wanted for a while and does not use it yields; among those that
//! have yielded, the epoch decides, which all nodes see alike, so one of them gets all it needs everywhere.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::NodeEpoch;
use crate::node::{NodeStatus, PermitNote};
use crate::time::Time;

/// A coordinator uses what it waited for as soon as it hears of it; after this long it waits for another node too.
const UNUSED_MAX: Duration = Duration::from_millis(100);

/// One coordinator's stream. Minted by the shell, never reused: permits live and die with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShareId(pub u64);

/// Totals are those of the stream: they begin at zero with it.
#[derive(Clone, Debug)]
struct Share {
    coordinator: NodeEpoch,
    /// Of the work received from this coordinator, what came before the stream. `None` until the first look.
    received_before: Option<u64>,
    granted: u64,
    received: u64,
    recalled: u64,
    returned: u64,
    wanted: u64,
    wanted_since: Time,
    /// Since when it has all it wants, and has used nothing.
    content_since: Option<Time>,
    /// It held what it wanted for too long while others waited; until it uses something, it comes after those who did not.
    has_yielded: bool,
}

impl Share {
    fn outstanding(&self) -> u64 {
        self.granted.saturating_sub(self.received.saturating_add(self.returned))
    }

    /// Asked back and still there. What was used in the meantime is not coming any more.
    fn coming_back(&self) -> u64 {
        self.recalled.saturating_sub(self.returned).min(self.outstanding())
    }

    fn lacks(&self) -> u64 {
        self.wanted.saturating_sub(self.outstanding())
    }

    fn is_content(&self) -> bool {
        self.wanted > 0 && self.lacks() == 0
    }

    /// Lowest first.
    fn rank(&self) -> (bool, Time, NodeEpoch) {
        let since = if self.has_yielded {
            Time::ZERO
        } else {
            self.wanted_since
        };
        (self.has_yielded, since, self.coordinator)
    }
}

/// What one stream's status says of permits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamPermits {
    pub granted_total: u64,
    pub received_total: u64,
    pub recalled_total: u64,
}

#[derive(Debug, Default)]
pub struct PermitShares {
    shares: BTreeMap<ShareId, Share>,
}

impl PermitShares {
    pub fn connect(&mut self, id: ShareId, coordinator: NodeEpoch) {
        let share = Share {
            coordinator,
            received_before: None,
            granted: 0,
            received: 0,
            recalled: 0,
            returned: 0,
            wanted: 0,
            wanted_since: Time::ZERO,
            content_since: None,
            has_yielded: false,
        };
        self.shares.insert(id, share);
    }

    /// Its permits are void: whoever is left gets them.
    pub fn disconnect(&mut self, id: ShareId) {
        self.shares.remove(&id);
    }

    pub fn count(&self) -> u32 {
        u32::try_from(self.shares.len()).unwrap_or(u32::MAX)
    }

    pub fn first(&self) -> Option<ShareId> {
        self.shares.keys().next().copied()
    }

    /// What a coordinator says it waits for and has returned.
    pub fn note(&mut self, now: Time, id: ShareId, note: PermitNote) {
        let Some(share) = self.shares.get_mut(&id) else {
            return;
        };
        // Nobody can return what was not granted.
        let most = share.granted.saturating_sub(share.received);
        share.returned = share.returned.max(note.returned_total.min(most));
        share.wanted = note.wanted;
        let waited_ns = u64::try_from(note.waited.as_nanos()).unwrap_or(u64::MAX);
        share.wanted_since = Time(now.0.saturating_sub(waited_ns));
    }

    pub fn of(&self, id: ShareId) -> StreamPermits {
        self.shares
            .get(&id)
            .map_or_else(StreamPermits::default, |share| StreamPermits {
                granted_total: share.granted,
                received_total: share.received,
                recalled_total: share.recalled,
            })
    }

    /// Hands out what is free and recalls what somebody waits for. `status` is the node's own: its totals run from the
    /// node's start. True when a stream has something new to hear.
    pub fn divide(&mut self, now: Time, status: &NodeStatus) -> bool {
        self.look_at_received(status);
        self.let_yield(now);
        let room = status
            .permits_granted_total
            .saturating_sub(status.permits_received_total);
        let outstanding: u64 = self.shares.values().map(Share::outstanding).sum();
        let mut free = room.saturating_sub(outstanding);
        if self.shares.len() < 2 {
            for share in self.shares.values_mut() {
                share.granted += free;
            }
            return free > 0;
        }
        let mut is_news = false;
        let mut waiting: Vec<ShareId> = self.shares.keys().copied().collect();
        waiting.retain(|id| self.shares[id].wanted > 0);
        waiting.sort_by_key(|id| self.shares[id].rank());
        for id in waiting {
            let Some(share) = self.shares.get_mut(&id) else {
                continue;
            };
            let given = share.lacks().min(free);
            share.granted += given;
            free -= given;
            is_news |= given > 0;
            if self.shares[&id].lacks() > 0 {
                // What is free later is for this one first: a large request must not wait behind ever new small ones.
                return self.recall_for(id) || is_news;
            }
        }
        self.even_out(room, free) || is_news
    }

    fn look_at_received(&mut self, status: &NodeStatus) {
        for share in self.shares.values_mut() {
            let from = |(epoch, _): &&(NodeEpoch, u64)| *epoch == share.coordinator;
            let total = status
                .permits_received_by
                .iter()
                .find(from)
                .map_or(0, |(_, total)| *total);
            let before = *share.received_before.get_or_insert(total);
            let received = total.saturating_sub(before).max(share.received);
            let received = received.min(share.granted.saturating_sub(share.returned));
            if std::mem::replace(&mut share.received, received) != received {
                share.content_since = None;
                share.has_yielded = false;
            }
        }
    }

    fn let_yield(&mut self, now: Time) {
        let is_somebody_short = self.shares.values().any(|share| share.lacks() > 0);
        for share in self.shares.values_mut() {
            if !share.is_content() {
                share.content_since = None;
                continue;
            }
            let since = *share.content_since.get_or_insert(now);
            share.has_yielded |= is_somebody_short && now.since(since) >= UNUSED_MAX;
        }
    }

    fn recall_for(&mut self, wanting: ShareId) -> bool {
        let others = |id: &ShareId| *id != wanting;
        let coming: u64 = self
            .shares
            .iter()
            .filter(|(id, _)| others(id))
            .map(|(_, s)| s.coming_back())
            .sum();
        let (rank, mut missing) = {
            let share = &self.shares[&wanting];
            (share.rank(), share.lacks().saturating_sub(coming))
        };
        let mut is_news = false;
        let mut holders: Vec<ShareId> = self.shares.keys().copied().filter(others).collect();
        // Who waits for nothing gives first.
        holders.sort_by_key(|id| self.shares[id].wanted > 0);
        for id in holders {
            let Some(share) = self.shares.get_mut(&id) else {
                continue;
            };
            let is_first = share.wanted > 0 && share.rank() < rank;
            let needed = if is_first { share.wanted } else { 0 };
            let spare = share.outstanding().saturating_sub(share.coming_back().max(needed));
            let recalled = spare.min(missing);
            share.recalled = share.recalled.max(share.returned) + recalled;
            missing -= recalled;
            is_news |= recalled > 0;
        }
        is_news
    }

    /// Even shares of what is free. A coordinator that has just come gets its share at once, from those who have more.
    fn even_out(&mut self, room: u64, mut free: u64) -> bool {
        let even = room / self.shares.len().max(1) as u64;
        let mut is_news = false;
        let mut owed = 0;
        for share in self.shares.values_mut() {
            let is_new = share.granted == 0;
            let lacks = even.saturating_sub(share.outstanding());
            let given = lacks.min(free);
            share.granted += given;
            free -= given;
            is_news |= given > 0;
            owed += if is_new { lacks - given } else { 0 };
        }
        let coming: u64 = self.shares.values().map(Share::coming_back).sum();
        let mut missing = owed.saturating_sub(coming);
        for share in self.shares.values_mut() {
            let spare = share
                .outstanding()
                .saturating_sub(even.max(share.wanted) + share.coming_back());
            let recalled = spare.min(missing);
            share.recalled = share.recalled.max(share.returned) + recalled;
            missing -= recalled;
            is_news |= recalled > 0;
        }
        is_news
    }

    #[cfg(test)]
    pub(super) fn outstanding_total(&self) -> u64 {
        self.shares.values().map(Share::outstanding).sum()
    }
}

#[cfg(test)]
#[path = "permit_shares_tests.rs"]
mod tests;
