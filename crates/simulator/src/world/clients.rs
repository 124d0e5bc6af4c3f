//! The clients: who sends which request when, and what has become of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serving_core::time::Time;
use workload::record::RequestRecord;
use workload::trace::Trace;

use super::agenda::Event;
use super::{World, start};

#[derive(Debug)]
pub(super) struct Clients {
    /// The next request of the trace.
    next: usize,
    /// When each was due: later than the trace says where an answer was awaited.
    pub scheduled: Vec<Time>,
    pub records: Vec<Option<RequestRecord>>,
    unfinished: usize,
    /// Of a conversation's turn: the turn before it, and the turn after it.
    before: BTreeMap<usize, usize>,
    after: BTreeMap<usize, usize>,
    /// Turns whose time has come before the answer that they wait for.
    waiting: BTreeSet<usize>,
}

impl Clients {
    pub fn new(trace: &Trace) -> Self {
        let turns = neighbouring_turns(trace);
        Self {
            next: 0,
            scheduled: vec![Time::ZERO; trace.requests.len()],
            records: vec![None; trace.requests.len()],
            unfinished: trace.requests.len(),
            before: turns.iter().map(|(before, after)| (*after, *before)).collect(),
            after: turns.into_iter().collect(),
            waiting: BTreeSet::new(),
        }
    }

    pub fn are_all_done(&self) -> bool {
        self.unfinished == 0
    }
}

/// Each turn with the one after it. The first turn that the trace has of a conversation waits for nobody.
fn neighbouring_turns(trace: &Trace) -> Vec<(usize, usize)> {
    let mut conversations: BTreeMap<u64, Vec<(u32, usize)>> = BTreeMap::new();
    for (index, request) in trace.requests.iter().enumerate() {
        if let Some(turn) = request.conversation {
            let turns = conversations.entry(turn.conversation).or_default();
            turns.push((turn.turn, index));
        }
    }
    let mut neighbours = Vec::new();
    for turns in conversations.values_mut() {
        turns.sort_unstable();
        neighbours.extend(turns.windows(2).map(|pair| (pair[0].1, pair[1].1)));
    }
    neighbours
}

impl World<'_> {
    /// Puts the next request of the trace on the agenda.
    pub(super) fn send_next(&mut self) {
        let next = self.clients.next;
        if let Some(planned) = self.scenario.trace.requests.get(next) {
            self.clients.next += 1;
            self.agenda.at(start() + planned.at, Event::Send(next));
        }
    }

    /// A request's time has come. A turn waits for the answer before it, and then for its client to think.
    pub(super) fn send(&mut self, index: usize) {
        if index + 1 == self.clients.next {
            self.send_next();
        }
        let now = self.now();
        if let Some(before) = self.clients.before.get(&index) {
            let Some(answer) = &self.clients.records[*before] else {
                self.clients.waiting.insert(index);
                return;
            };
            let due = start() + answer.ended + self.think_time(index);
            if due > now {
                return self.agenda.at(due, Event::Send(index));
            }
        }
        self.clients.scheduled[index] = now;
        let planned = &self.scenario.trace.requests[index];
        let edge = self.scenario.costs.overheads.edge(planned.prompt_tokens);
        self.agenda.after(edge, Event::Arrive(index));
    }

    /// An answer has ended, well or not, at `ended` for its client.
    pub(super) fn answered(&mut self, index: usize, (ended, record): (Time, RequestRecord)) {
        if self.clients.records[index].replace(record).is_none() {
            self.clients.unfinished -= 1;
        }
        let next = self.clients.after.get(&index).copied();
        if let Some(next) = next.filter(|next| self.clients.waiting.remove(next)) {
            self.agenda.at(ended + self.think_time(next), Event::Send(next));
        }
    }

    fn think_time(&self, index: usize) -> Duration {
        let turn = self.scenario.trace.requests[index].conversation;
        turn.map_or(Duration::ZERO, |turn| turn.think_time)
    }
}
