//! The virtual clock: what happens next. At one instant, in the order in which it was put down.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use serving_core::cluster::{ClusterEvent, Leg, LegEvent};
use serving_core::ids::TransferId;
use serving_core::node::{AssignedRole, Ticket};
use serving_core::request::{AttemptKey, Request};
use serving_core::time::Time;

/// A node in one of its lives: what was sent to an earlier one reaches nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub node: usize,
    pub life: u32,
}

#[derive(Debug)]
pub(super) enum Event {
    /// A client sends request number so-and-so of the trace.
    Send(usize),
    /// It has reached the coordinator's brain.
    Arrive(usize),
    /// A timer of the coordinator's brain.
    Wake,
    /// What nodes tell on their membership streams.
    Membership(Box<ClusterEvent>),
    /// What comes in on a leg.
    Leg {
        key: AttemptKey,
        leg: Leg,
        event: Box<LegEvent>,
    },
    Node {
        place: Place,
        what: ToNode,
    },
    /// Number so-and-so of the scenario.
    Intervene(usize),
    /// The end of a pause.
    Resume(Place),
    /// A process is started anew.
    Start {
        node: usize,
        role: AssignedRole,
    },
}

#[derive(Debug)]
pub(super) enum ToNode {
    Leg(Box<StartLeg>),
    /// The leg's stream was closed.
    Cancel(AttemptKey),
    /// The loop goes round: plan a step, look at the drain.
    Turn,
    StepEnd {
        serial: u64,
    },
    Tick,
    /// A status is due.
    Report,
    /// The membership stream stands.
    Welcome,
    /// Register again.
    Join,
    Drain {
        next_role: Option<AssignedRole>,
    },
    Handoff {
        transfer: TransferId,
        sign: Sign,
    },
    /// Nothing of this transfer comes any more: the sender is gone.
    ReceiveBroken(TransferId),
    /// Nothing of this push is taken any more: the receiver is gone, or does not want it.
    PushBroken {
        key: AttemptKey,
        reason: &'static str,
    },
}

/// Signs of a transfer, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Began,
    Blocks(u32),
    Last,
    Acked,
}

/// Work for a node.
#[derive(Debug)]
pub(super) struct StartLeg {
    pub key: AttemptKey,
    pub request: Arc<Request>,
    pub permits: u64,
    pub work: LegWork,
}

#[derive(Debug)]
pub(super) enum LegWork {
    Prefill(Option<Ticket>),
    Decode,
    Whole,
}

impl LegWork {
    pub fn leg(&self) -> Leg {
        match self {
            LegWork::Prefill(_) => Leg::Prefill,
            LegWork::Decode | LegWork::Whole => Leg::Decode,
        }
    }
}

#[derive(Debug)]
struct Entry {
    at: Time,
    order: u64,
    event: Event,
}

impl Entry {
    fn rank(&self) -> (Time, u64) {
        (self.at, self.order)
    }
}
impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank().cmp(&other.rank())
    }
}

#[derive(Debug, Default)]
pub(super) struct Agenda {
    entries: BinaryHeap<Reverse<Entry>>,
    now: Time,
    /// Entries ever: the order within one instant.
    put: u64,
    taken: u64,
}

impl Agenda {
    pub fn now(&self) -> Time {
        self.now
    }
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// What should have been in the past happens now.
    pub fn at(&mut self, at: Time, event: Event) {
        let entry = Entry {
            at: at.max(self.now),
            order: self.put,
            event,
        };
        self.put += 1;
        self.entries.push(Reverse(entry));
    }

    pub fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    /// The clock moves to it.
    pub fn take(&mut self) -> Option<Event> {
        let Reverse(entry) = self.entries.pop()?;
        self.now = entry.at;
        self.taken += 1;
        Some(entry.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_decides_and_then_the_order_in_which_it_was_put_down() {
        let mut agenda = Agenda::default();
        for (ms, number) in [(5, 0), (3, 1), (5, 2), (3, 3)] {
            agenda.at(Time::from_millis(ms), Event::Send(number));
        }
        let mut order = Vec::new();
        while let Some(Event::Send(number)) = agenda.take() {
            order.push(number);
            if number == 3 {
                agenda.at(Time::ZERO, Event::Send(4));
            }
        }
        assert_eq!(order, [1, 3, 4, 0, 2], "what lies in the past happens now");
        assert_eq!((agenda.now(), agenda.taken()), (Time::from_millis(5), 5));
    }
}
