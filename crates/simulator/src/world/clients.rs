//! The clients: who sends which request when, and what has become of it.

use std::collections::BTreeMap;
use std::time::Duration;

use serving_core::time::Time;
use workload::record::RequestRecord;
use workload::trace::{Trace, Turn};

use super::agenda::Event;
use super::{World, start};

/// How far a conversation is.
#[derive(Debug, Default)]
struct Conversation {
    /// When its latest answer ended, and of which turn that was.
    answered: Option<(u32, Time)>,
    /// The next turn's request, if its time has come and the answer before it has not.
    waiting: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Clients {
    /// The next request of the trace.
    next: usize,
    /// When each was due: later than the trace says where an answer was awaited.
    pub scheduled: Vec<Time>,
    pub records: Vec<Option<RequestRecord>>,
    unfinished: usize,
    conversations: BTreeMap<u64, Conversation>,
}

impl Clients {
    pub fn new(trace: &Trace) -> Self {
        Self {
            next: 0,
            scheduled: vec![Time::ZERO; trace.requests.len()],
            records: vec![None; trace.requests.len()],
            unfinished: trace.requests.len(),
            conversations: BTreeMap::new(),
        }
    }

    pub fn are_all_done(&self) -> bool {
        self.unfinished == 0
    }
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
        let planned = &self.scenario.trace.requests[index];
        if let Some(turn) = planned.conversation.filter(|turn| turn.turn > 0) {
            let conversation = self.clients.conversations.entry(turn.conversation).or_default();
            match conversation.answered.filter(|(answered, _)| answered + 1 >= turn.turn) {
                None => {
                    conversation.waiting = Some(index);
                    return;
                }
                Some((_, at)) if at + turn.think_time > now => {
                    return self.agenda.at(at + turn.think_time, Event::Send(index));
                }
                Some(_) => {}
            }
        }
        self.clients.scheduled[index] = now;
        let edge = self.scenario.costs.overheads.edge(planned.prompt_tokens);
        self.agenda.after(edge, Event::Arrive(index));
    }

    /// An answer has ended, well or not, at `ended` for its client.
    pub(super) fn answered(&mut self, index: usize, (ended, record): (Time, RequestRecord)) {
        if self.clients.records[index].replace(record).is_none() {
            self.clients.unfinished -= 1;
        }
        let Some(Turn { conversation, turn, .. }) = self.scenario.trace.requests[index].conversation else {
            return;
        };
        let state = self.clients.conversations.entry(conversation).or_default();
        state.answered = Some((turn, ended));
        if let Some(next) = state.waiting.take() {
            let think = self.scenario.trace.requests[next].conversation;
            let think = think.map_or(Duration::ZERO, |turn| turn.think_time);
            self.agenda.at(ended + think, Event::Send(next));
        }
    }
}
