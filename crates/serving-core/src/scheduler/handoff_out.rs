//! The KV of a prompt on its way out: how long its blocks are kept for the decode node, and how its push ends.

use crate::request::AttemptKey;
use crate::scheduler::entry::{AfterPrompt, ChoiceState, Phase};
use crate::scheduler::{HOLDS_MAX, NodeFailure, Outcome, PushEnd, Scheduler, SchedulerEvent};
use crate::time::Time;

impl Scheduler {
    /// The first tokens of a request that goes on elsewhere are drawn: its blocks stay until the decode node has them.
    pub(super) fn hold(&mut self, now: Time, serial: u64) {
        let hold = self.config.hold;
        if let Some(entry) = self.entries.get_mut(&serial) {
            entry.phase = Phase::Held {
                since: now,
                until: now + hold,
            };
            entry.choices[0].state = ChoiceState::Held;
            let (key, timings) = (entry.key, entry.timings.clone());
            self.events.push_back(SchedulerEvent::Held { key, timings });
        }
    }

    /// A block of the request's push left for the decode node at `at`: the decode node is there, and its hold starts anew.
    /// What left before the hold began says nothing more: the hold has its whole length then.
    pub fn push_progressed(&mut self, at: Time, key: AttemptKey) {
        let hold = self.config.hold;
        if let Some(entry) = self.entry_mut(key)
            && let Phase::Held { since, until } = &mut entry.phase
        {
            let last = *since + hold.saturating_mul(HOLDS_MAX);
            *until = (at + hold).min(last).max(*until);
        }
    }

    /// The push of a request has ended: its blocks are released, or it is the end of their quarantine. An
    /// acknowledgement that comes before the first tokens were handed on is a broken peer and fails the request.
    pub fn push_ended(&mut self, key: AttemptKey, end: PushEnd) {
        self.leave_quarantine(&super::Quarantined::Push(key));
        if let Some(serial) = self.keys.get(&key).copied()
            && let Some(entry) = self.entries.get_mut(&serial)
            && let AfterPrompt::HandOver(push) = &mut entry.after_prompt
        {
            push.is_pushing = false;
            let is_held = matches!(entry.phase, Phase::Held { .. });
            match end {
                PushEnd::Acked if is_held => self.finish(serial, Outcome::HandedOver),
                PushEnd::Failed { reason, detail } => self.end(serial, Some(NodeFailure::Transfer { reason, detail })),
                PushEnd::Acked | PushEnd::Aborted => {
                    let (reason, detail) = ("protocol".to_owned(), "the push ended before its last frame".to_owned());
                    self.end(serial, Some(NodeFailure::Transfer { reason, detail }));
                }
            }
        }
        self.grant();
    }
}
