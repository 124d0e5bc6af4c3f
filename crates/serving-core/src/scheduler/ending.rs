//! How requests leave a node: cancelled, failed, late or finished. Also the quarantine, in which blocks wait that a peer may still touch.

use crate::ids::TransferId;
use crate::kv::BlockUse;
use crate::request::AttemptKey;
use crate::scheduler::entry::{AfterPrompt, Entry, Phase};
use crate::scheduler::{NodeFailure, Outcome, Report, Scheduler, SchedulerEvent};
use crate::time::Time;

/// The push or the transfer for whose end quarantined blocks wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Quarantined {
    Push(AttemptKey),
    Transfer(TransferId),
}

impl Quarantined {
    /// Asks the loop to end it.
    fn review(self) -> SchedulerEvent {
        match self {
            Quarantined::Push(key) => SchedulerEvent::AbortPush { key },
            Quarantined::Transfer(transfer) => SchedulerEvent::CloseTransfer { transfer },
        }
    }
}

impl Scheduler {
    /// The client or the coordinator is gone. Idempotent; false when the request is not here (any more).
    pub fn cancel(&mut self, key: AttemptKey) -> bool {
        let Some(serial) = self.keys.get(&key).copied() else {
            return false;
        };
        self.end(serial, None);
        true
    }

    /// The report of a request that is here. Ask for it before a cancel, because a cancel gives no event that has the report.
    pub fn report_of(&self, key: AttemptKey) -> Option<Report> {
        let serial = self.keys.get(&key)?;
        self.entries.get(serial).map(Entry::report)
    }

    /// Breaks a request off with an event.
    pub fn fail(&mut self, key: AttemptKey, failure: NodeFailure) {
        if let Some(serial) = self.keys.get(&key).copied() {
            self.end(serial, Some(failure));
        }
    }

    /// Deadlines, peers that are late, quarantine review. Call at least every second, whatever else happens.
    pub fn tick(&mut self, now: Time) {
        self.pool.reclaim_dropped();
        // Asking again is harmless, and a lost answer would otherwise keep the blocks for ever.
        self.events
            .extend(self.quarantine.keys().copied().map(Quarantined::review));
        let late = self.entries.iter().filter(|(serial, _)| !self.is_ending(**serial));
        let late = late.filter_map(|(serial, entry)| Some((*serial, self.lateness(now, entry)?)));
        for (serial, failure) in late.collect::<Vec<_>>() {
            self.end(serial, Some(failure));
        }
        self.grant();
    }

    fn lateness(&self, now: Time, entry: &Entry) -> Option<NodeFailure> {
        let since = |then: Time| u64::try_from(now.since(then).as_millis()).unwrap_or(u64::MAX);
        let is_peer_late = entry
            .peer_limit(self.config.reservation)
            .is_some_and(|limit| limit <= now);
        match entry.phase {
            Phase::Receiving {
                heard_at: Some(heard_at),
                ..
            } if is_peer_late => Some(NodeFailure::ReservationExpired {
                waited_ms: since(heard_at),
            }),
            Phase::Held { since: held_at, .. } if is_peer_late => Some(NodeFailure::HoldExpired {
                held_ms: since(held_at),
            }),
            _ if entry.deadline <= now => Some(NodeFailure::Deadline { stage: entry.stage() }),
            _ => None,
        }
    }

    /// When `tick` has something to do next. A request that only waits for the running step has no timer.
    pub fn next_timer(&self) -> Option<Time> {
        let entries = self.entries.iter().filter(|(serial, _)| !self.is_ending(**serial));
        let times = entries.map(|(_, entry)| {
            let peer = entry.peer_limit(self.config.reservation);
            peer.map_or(entry.deadline, |limit| limit.min(entry.deadline))
        });
        times.min()
    }

    /// Whether the request ends when the running step has ended.
    pub(super) fn is_ending(&self, serial: u64) -> bool {
        self.deferred.iter().any(|(ending, _)| *ending == serial)
    }

    /// Ends a request early, with an event if it failed. If it is in the running step, it ends after the step. The first reason to end it
    /// counts.
    pub(super) fn end(&mut self, serial: u64, failure: Option<NodeFailure>) {
        if self.is_ending(serial) {
            return;
        }
        if self.plan.iter().any(|row| row.serial == serial) {
            self.deferred.push((serial, failure));
            return;
        }
        self.leave(serial, |entry| {
            let failure = failure?;
            let (key, report) = (entry.key, Box::new(entry.report()));
            Some(SchedulerEvent::Failed { key, failure, report })
        });
    }

    pub(super) fn end_deferred(&mut self) {
        for (serial, failure) in std::mem::take(&mut self.deferred) {
            self.end(serial, failure);
        }
    }

    pub(super) fn finish(&mut self, serial: u64, outcome: Outcome) {
        self.leave(serial, |entry| {
            let (key, report) = (entry.key, Box::new(entry.report()));
            Some(SchedulerEvent::Finished { key, outcome, report })
        });
    }

    /// This is the only way out of the tables. The blocks are released, or put into quarantine while a peer may read or write them. The
    /// terminal event comes first, so that the loop knows why a transfer or a push is to end.
    fn leave(&mut self, serial: u64, terminal: impl FnOnce(&Entry) -> Option<SchedulerEvent>) {
        let Some(mut entry) = self.entries.remove(&serial) else {
            return;
        };
        self.keys.remove(&entry.key);
        self.events.extend(terminal(&entry));
        let under_a_peer = match (&entry.phase, &entry.after_prompt) {
            (
                Phase::Receiving {
                    transfer,
                    prefix_blocks,
                    ..
                },
                _,
            ) => Some((Quarantined::Transfer(*transfer), *prefix_blocks)),
            (_, AfterPrompt::HandOver(push)) if push.is_pushing => Some((Quarantined::Push(entry.key), 0)),
            _ => None,
        };
        if let Some((why, first)) = under_a_peer {
            let sequence = &mut entry.choices[0].sequence;
            sequence.publish(&mut self.pool);
            let mut blocks = sequence.table.split_off(first as usize);
            for handle in &mut blocks {
                self.pool.change(handle, BlockUse::Quarantined);
            }
            self.quarantine.insert(why, blocks);
            self.events.push_back(why.review());
        }
        for choice in &mut entry.choices {
            choice.sequence.release(&mut self.pool);
        }
        self.grant();
    }

    /// Nothing touches these blocks any more.
    pub(super) fn leave_quarantine(&mut self, why: &Quarantined) {
        // The last block is released first, so that the tail of a chain is evicted before its head.
        for handle in self.quarantine.remove(why).into_iter().flatten().rev() {
            self.pool.release(handle);
        }
    }
}
