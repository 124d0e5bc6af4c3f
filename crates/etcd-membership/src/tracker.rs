//! Computes the registered members from etcd's messages and their times. Pure code, so that every order of events can be
//! tested.
//!
//! - **By revision.** A list is the truth as of its revision. An event counts only if it is newer than the list and than
//!   what is known of its key, deleted keys included. So events that are sent late, twice or out of order change nothing.
//! - **Gone, or only gone from etcd.** A single entry that goes is reported at once: its process died or left. Entries that
//!   go in a way that points to etcd are kept for a grace period, marked as vanished: (a) more than half of at least two
//!   entries within one lease; (b) any entry within one lease after a silence of etcd, during which nobody could renew; (c)
//!   all entries that are missing in a list whose revision is lower than one seen before, because etcd has lost its data. The
//!   grace period does not run while etcd is silent. A member that was draining is never kept, because it wanted to leave.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serving_core::node::NodeState;

use crate::connection::KeyRecord;
use crate::entry::{BadRecord, Entry, decode_at};
use crate::trouble::EtcdTrouble;
use crate::view::View;

/// etcd revokes expired leases in bursts, one event each. A single event is therefore shown after this time, so that a
/// burst is judged as one. The bursts took some 10 ms; a lease takes seconds.
const SETTLE: Duration = Duration::from_millis(200);
/// Ten times the largest cluster that is planned. Further members are skipped and counted; those that are known stay.
pub(crate) const MEMBERS_MAX: usize = 10_000;
/// Deleted keys that are remembered between two lists, and bad records. Beyond this number the oldest revision is
/// forgotten. Then a replay of an event that old would show until the next list, or a bad record would be counted twice.
const REVISIONS_MAX: usize = 4096;

/// A message of etcd.
#[derive(Clone, Debug)]
pub(crate) enum Heard {
    Listed {
        revision: i64,
        records: Vec<KeyRecord>,
        is_cut: bool,
    },
    Changed(Vec<Change>),
    /// A sign of life.
    Progress,
}

#[derive(Clone, Debug)]
pub(crate) enum Change {
    Put(KeyRecord),
    Delete { key: Vec<u8>, mod_revision: i64 },
}

/// A record that was just skipped, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Skipped {
    pub key: String,
    pub why: BadRecord,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct TrackerTiming {
    /// The TTL with which members register.
    pub lease: Duration,
    /// How long vanished members are kept.
    pub vanished_grace: Duration,
    /// A silence of this length may have cost leases.
    pub silence: Duration,
}

#[derive(Clone, Debug)]
struct Member<T> {
    entry: T,
    mod_revision: i64,
}

#[derive(Clone, Debug)]
struct Departed<T> {
    entry: T,
    at: Instant,
    /// `Some`: the member has vanished, and is shown until then.
    kept_until: Option<Instant>,
}

#[derive(Debug)]
pub(crate) struct Tracker<T> {
    prefix: Vec<u8>,
    timing: TrackerTiming,
    members: BTreeMap<String, Member<T>>,
    /// Members that went within the last lease, or vanished.
    departed: BTreeMap<String, Departed<T>>,
    deleted_at: BTreeMap<Vec<u8>, i64>,
    bad_at: BTreeMap<Vec<u8>, i64>,
    /// The revision of the last list.
    list_revision: i64,
    /// The highest revision seen in any message.
    seen_revision: i64,
    heard_at: Option<Instant>,
    /// A member that goes before this time may have lost its lease to a silence of etcd.
    doubt_until: Option<Instant>,
    skipped: u64,
    trouble: Option<EtcdTrouble>,
}

impl<T: Entry> Tracker<T> {
    /// `prefix` is the folder with its closing slash.
    pub(crate) fn new(prefix: &str, timing: TrackerTiming) -> Self {
        Self {
            prefix: prefix.as_bytes().to_vec(),
            timing,
            members: BTreeMap::new(),
            departed: BTreeMap::new(),
            deleted_at: BTreeMap::new(),
            bad_at: BTreeMap::new(),
            list_revision: 0,
            seen_revision: 0,
            heard_at: None,
            doubt_until: None,
            skipped: 0,
            trouble: None,
        }
    }

    pub(crate) fn fail(&mut self, trouble: EtcdTrouble) {
        self.trouble = Some(trouble);
    }

    pub(crate) fn apply(&mut self, now: Instant, heard: Heard) -> Vec<Skipped> {
        self.note_life(now);
        self.trouble = None;
        let mut skipped = Vec::new();
        match heard {
            Heard::Listed {
                revision,
                records,
                is_cut,
            } => {
                if revision < self.seen_revision {
                    // Data was lost and revisions start again: rule (c).
                    self.doubt_until = Some(now + self.timing.lease);
                    self.bad_at.clear();
                }
                let missing = self.apply_list(revision, (records, is_cut), &mut skipped);
                for (name, member) in missing {
                    self.depart(now, name, member.entry);
                }
            }
            Heard::Changed(changes) => {
                for change in changes {
                    self.apply_change(now, change, &mut skipped);
                }
            }
            Heard::Progress => {}
        }
        self.tick(now);
        skipped
    }

    /// Forgets what is over. Returns when to call it again if no message comes.
    pub(crate) fn tick(&mut self, now: Instant) -> Option<Instant> {
        self.judge(now);
        let is_silent = self.is_silent(now);
        let lease = self.timing.lease;
        self.departed.retain(|_, departed| match departed.kept_until {
            Some(until) => now < until || is_silent,
            None => now < departed.at + lease,
        });
        let of_departed = self.departed.values().flat_map(|departed| match departed.kept_until {
            Some(until) => [until, until],
            None => [departed.at + SETTLE, departed.at + lease],
        });
        let stale_at = self.heard_at.map(|at| at + lease);
        of_departed.chain(stale_at).filter(|at| *at > now).min()
    }

    pub(crate) fn view(&self, now: Instant) -> View<T> {
        let is_shown = |departed: &Departed<T>| departed.kept_until.is_some() || now < departed.at + SETTLE;
        let present = self.members.iter().map(|(name, member)| (name, &member.entry));
        let gone = self.departed.iter().filter(|(_, departed)| is_shown(departed));
        let members = present.chain(gone.clone().map(|(name, departed)| (name, &departed.entry)));
        let vanished = gone.filter(|(_, departed)| departed.kept_until.is_some());
        View {
            members: members.map(|(name, entry)| (name.clone(), entry.clone())).collect(),
            as_of: self.heard_at,
            is_stale: self
                .heard_at
                .is_none_or(|at| now.saturating_duration_since(at) >= self.timing.lease),
            skipped: self.skipped,
            vanished: vanished.map(|(name, departed)| (name.clone(), departed.at)).collect(),
            trouble: self.trouble.clone(),
        }
    }

    fn is_silent(&self, now: Instant) -> bool {
        self.heard_at
            .is_none_or(|at| now.saturating_duration_since(at) > self.timing.silence)
    }

    fn note_life(&mut self, now: Instant) {
        if self.heard_at.is_some() && self.is_silent(now) {
            self.doubt_until = Some(now + self.timing.lease);
            for departed in self
                .departed
                .values_mut()
                .filter(|departed| departed.kept_until.is_some())
            {
                departed.kept_until = Some(now + self.timing.vanished_grace);
            }
        }
        self.heard_at = Some(now);
    }

    /// Returns the members that are no longer in etcd. A member that would come after the end of a cut list may still be there, so it
    /// stays. Known members go before new ones, so there are never more than [`MEMBERS_MAX`].
    fn apply_list(
        &mut self,
        revision: i64,
        (records, is_cut): (Vec<KeyRecord>, bool),
        skipped: &mut Vec<Skipped>,
    ) -> BTreeMap<String, Member<T>> {
        self.list_revision = revision;
        self.seen_revision = revision;
        self.deleted_at.clear();
        let mut missing: BTreeMap<String, Member<T>> = std::mem::take(&mut self.members);
        if is_cut {
            // etcd lists by key. If the last key is no name, nobody knows who would come before it, and all members stay.
            let last = records.last().and_then(|record| self.name_of(&record.key));
            self.members = missing.split_off(&last.unwrap_or_default());
            let why = BadRecord::TooMany { max: MEMBERS_MAX };
            self.skip(self.prefix.clone(), revision, why, skipped);
        }
        for record in &records {
            // The known entry is put back first: a record that has become unreadable leaves the last good one.
            if let Some((name, member)) = self.name_of(&record.key).and_then(|name| missing.remove_entry(&name)) {
                self.members.insert(name, member);
            }
        }
        for record in records {
            self.put(record, skipped);
        }
        missing
    }

    fn apply_change(&mut self, now: Instant, change: Change, skipped: &mut Vec<Skipped>) {
        let (key, mod_revision) = match &change {
            Change::Put(record) => (&record.key, record.mod_revision),
            Change::Delete { key, mod_revision } => (key, *mod_revision),
        };
        let name = self.name_of(key);
        let member = name.as_ref().and_then(|name| self.members.get(name));
        let known = [
            member.map(|member| member.mod_revision),
            self.deleted_at.get(key).copied(),
        ];
        let newest_known = known.into_iter().flatten().fold(self.list_revision, i64::max);
        if mod_revision <= newest_known {
            return;
        }
        self.seen_revision = self.seen_revision.max(mod_revision);
        match change {
            Change::Put(record) => self.put(record, skipped),
            Change::Delete { key, mod_revision } => {
                remember(&mut self.deleted_at, key, mod_revision);
                if let Some((name, member)) = name.and_then(|name| self.members.remove_entry(&name)) {
                    self.depart(now, name, member.entry);
                }
            }
        }
    }

    fn put(&mut self, record: KeyRecord, skipped: &mut Vec<Skipped>) {
        let revision = record.mod_revision;
        let name = self.name_of(&record.key);
        let member = name.as_ref().and_then(|name| self.members.get_mut(name));
        let is_room = member.is_some() || self.members.len() < MEMBERS_MAX;
        let entry = match (&name, is_room) {
            (_, false) => Err(BadRecord::TooMany { max: MEMBERS_MAX }),
            (Some(name), _) => decode_at::<T>(name.as_bytes(), &record.value),
            (None, _) => decode_at::<T>(record.key.get(self.prefix.len()..).unwrap_or_default(), &record.value),
        };
        match (entry, name) {
            (Ok(entry), Some(name)) => {
                self.bad_at.remove(&record.key);
                self.departed.remove(&name);
                let mod_revision = revision;
                self.members.insert(name, Member { entry, mod_revision });
            }
            (Err(why), name) => {
                // The last good entry stays, but events older than this record no longer count for it.
                if let Some(member) = name.and_then(|name| self.members.get_mut(&name)) {
                    member.mod_revision = revision;
                }
                self.skip(record.key, revision, why, skipped);
            }
            // A record under a key that is no name cannot be read.
            (Ok(_), None) => {}
        }
    }

    fn skip(&mut self, key: Vec<u8>, revision: i64, why: BadRecord, skipped: &mut Vec<Skipped>) {
        if self.bad_at.get(&key) == Some(&revision) {
            return;
        }
        self.skipped = self.skipped.saturating_add(1);
        skipped.push(Skipped {
            key: crate::entry_fields::shown(&String::from_utf8_lossy(&key)),
            why,
        });
        remember(&mut self.bad_at, key, revision);
    }

    fn depart(&mut self, now: Instant, name: String, entry: T) {
        if entry.state() == NodeState::Draining {
            return;
        }
        let is_in_doubt = self.doubt_until.is_some_and(|until| now < until);
        let departed = Departed {
            entry,
            at: now,
            kept_until: is_in_doubt.then_some(now + self.timing.vanished_grace),
        };
        self.departed.insert(name, departed);
    }

    /// Rule (a). Members that were reported as gone within the last lease come back as vanished, because they are part of
    /// the loss.
    fn judge(&mut self, now: Instant) {
        let lease = self.timing.lease;
        let is_recent = |departed: &Departed<T>| now < departed.at + lease;
        let lost = self.departed.values().filter(|departed| is_recent(departed)).count();
        let all = self.members.len() + lost;
        if all < 2 || lost * 2 <= all {
            return;
        }
        for departed in self.departed.values_mut().filter(|departed| now < departed.at + lease) {
            departed.kept_until.get_or_insert(now + self.timing.vanished_grace);
        }
    }

    /// `None` for keys of another folder and for names that are not UTF-8: no record can be valid there.
    fn name_of(&self, key: &[u8]) -> Option<String> {
        let name = key.strip_prefix(self.prefix.as_slice())?;
        String::from_utf8(name.to_vec()).ok()
    }
}

fn remember(revisions: &mut BTreeMap<Vec<u8>, i64>, key: Vec<u8>, revision: i64) {
    revisions.insert(key, revision);
    if revisions.len() > REVISIONS_MAX {
        let oldest = revisions
            .iter()
            .min_by_key(|(_, revision)| **revision)
            .map(|(key, _)| key.clone());
        if let Some(oldest) = oldest {
            revisions.remove(&oldest);
        }
    }
}

#[cfg(test)]
#[path = "tracker_tests.rs"]
mod tests;
