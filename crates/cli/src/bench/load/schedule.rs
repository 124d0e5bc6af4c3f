//! Which request is due when. Pure: the time is an argument.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use workload::trace::Trace;

use super::plan::Pace;

/// A request that is to be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// Its place in the trace.
    pub index: usize,
    pub scheduled: Duration,
}

/// Times of one request in the trace.
#[derive(Clone, Copy, Debug)]
struct Times {
    at: Duration,
    think_time: Duration,
    /// The turn after it.
    next: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Schedule {
    pace: Pace,
    requests: Vec<Times>,
    /// Closed loop: the first requests of conversations that no user has taken.
    waiting: VecDeque<usize>,
    /// Times that are known, the earliest first.
    due: BinaryHeap<Reverse<(Duration, usize)>>,
    running: u32,
    /// Closed loop: users who are in a conversation. One that thinks is in it, too.
    busy: u32,
    left: usize,
}

impl Schedule {
    pub(super) fn new(trace: &Trace, pace: Pace) -> Self {
        let mut requests: Vec<Times> = trace
            .requests
            .iter()
            .map(|request| Times {
                at: request.at,
                think_time: request.conversation.map_or(Duration::ZERO, |turn| turn.think_time),
                next: None,
            })
            .collect();
        let mut conversations: BTreeMap<u64, Vec<(u32, usize)>> = BTreeMap::new();
        let mut first = Vec::new();
        for (index, request) in trace.requests.iter().enumerate() {
            match request.conversation {
                Some(turn) => conversations
                    .entry(turn.conversation)
                    .or_default()
                    .push((turn.turn, index)),
                None => first.push(index),
            }
        }
        for turns in conversations.values_mut() {
            turns.sort_unstable();
            first.extend(turns.first().map(|(_, index)| *index));
            for pair in turns.windows(2) {
                requests[pair[0].1].next = Some(pair[1].1);
            }
        }
        first.sort_by_key(|index| (requests[*index].at, *index));
        let mut schedule = Self {
            pace,
            left: requests.len(),
            waiting: VecDeque::new(),
            due: BinaryHeap::new(),
            running: 0,
            busy: 0,
            requests,
        };
        match pace {
            Pace::Open { .. } => {
                let due = first
                    .iter()
                    .map(|index| Reverse((schedule.requests[*index].at, *index)));
                schedule.due = due.collect();
            }
            Pace::Closed { .. } => schedule.waiting = first.into(),
        }
        schedule
    }

    /// True when every request has been sent.
    pub(super) fn is_empty(&self) -> bool {
        self.left == 0
    }

    /// When the next request is due. `None`: something has to end before.
    pub(super) fn next_due(&self) -> Option<Duration> {
        match self.pace {
            Pace::Open {
                max_concurrency: Some(max),
            } if self.running >= max => None,
            Pace::Closed { users } if self.busy < users && !self.waiting.is_empty() => Some(Duration::ZERO),
            _ => self.due.peek().map(|Reverse((due, _))| *due),
        }
    }

    pub(super) fn take(&mut self, now: Duration) -> Option<Due> {
        if self.next_due().is_none_or(|due| due > now) {
            return None;
        }
        let is_due = self.due.peek().is_some_and(|Reverse((due, _))| *due <= now);
        let (scheduled, index) = if is_due {
            self.due.pop()?.0
        } else {
            self.busy += 1;
            (now, self.waiting.pop_front()?)
        };
        self.running += 1;
        self.left -= 1;
        let scheduled = match self.pace {
            Pace::Open { .. } => scheduled,
            Pace::Closed { .. } => now,
        };
        Some(Due { index, scheduled })
    }

    /// The request at `index` has ended, well or not.
    pub(super) fn ended(&mut self, index: usize, now: Duration) {
        self.running -= 1;
        let next = self.requests[index].next;
        match (next, self.pace) {
            (Some(next), pace) => {
                let after_answer = now + self.requests[next].think_time;
                let due = match pace {
                    Pace::Open { .. } => after_answer.max(self.requests[next].at),
                    Pace::Closed { .. } => after_answer,
                };
                self.due.push(Reverse((due, next)));
            }
            (None, Pace::Closed { .. }) => self.busy -= 1,
            (None, Pace::Open { .. }) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serving_core::request::Lane;
    use workload::trace::{TraceRequest, Turn};

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// When it is due, and its conversation, turn and think time.
    type Planned = (u64, Option<(u64, u32, u64)>);

    fn trace(requests: &[Planned]) -> Trace {
        let request = |(at, turn): &Planned| TraceRequest {
            at: ms(*at),
            prompt_tokens: 10,
            output_tokens: 5,
            prefix_blocks: Vec::new(),
            lane: Lane::Interactive,
            conversation: turn.map(|(conversation, turn, think)| Turn {
                conversation,
                turn,
                think_time: ms(think),
            }),
        };
        Trace {
            name: "test".to_owned(),
            block_tokens: 0,
            requests: requests.iter().map(request).collect(),
        }
    }

    fn take_all(schedule: &mut Schedule, now: u64) -> Vec<(usize, u64)> {
        std::iter::from_fn(|| schedule.take(ms(now)))
            .map(|due| (due.index, due.scheduled.as_millis() as u64))
            .collect()
    }

    #[test]
    fn an_open_loop_does_not_wait_for_answers() {
        let trace = trace(&[(0, None), (10, None), (20, None)]);
        let mut schedule = Schedule::new(&trace, Pace::Open { max_concurrency: None });
        assert_eq!(take_all(&mut schedule, 15), [(0, 0), (1, 10)]);
        assert_eq!(schedule.next_due(), Some(ms(20)));
        // The client was late: the request keeps its time.
        assert_eq!(take_all(&mut schedule, 90), [(2, 20)]);
        assert!(schedule.is_empty());
    }

    #[test]
    fn a_limit_of_an_open_loop_delays_requests_and_not_their_times() {
        let trace = trace(&[(0, None), (10, None)]);
        let mut schedule = Schedule::new(
            &trace,
            Pace::Open {
                max_concurrency: Some(1),
            },
        );
        assert_eq!(take_all(&mut schedule, 50), [(0, 0)]);
        assert_eq!(schedule.next_due(), None);
        schedule.ended(0, ms(70));
        assert_eq!(take_all(&mut schedule, 70), [(1, 10)]);
    }

    #[test]
    fn a_turn_follows_the_answer_before_it_and_its_think_time() {
        let requests = [
            (0, Some((7, 0, 0))),
            (5, Some((7, 1, 30))),
            (500, Some((7, 2, 30))),
            (6, None),
        ];
        let trace = trace(&requests);
        let mut open = Schedule::new(&trace, Pace::Open { max_concurrency: None });
        assert_eq!(take_all(&mut open, 100), [(0, 0), (3, 6)]);
        open.ended(0, ms(100));
        assert_eq!((open.next_due(), take_all(&mut open, 129)), (Some(ms(130)), vec![]));
        assert_eq!(take_all(&mut open, 131), [(1, 130)]);
        open.ended(1, ms(140));
        // Not before its own time.
        assert_eq!(open.next_due(), Some(ms(500)));
        assert_eq!(take_all(&mut open, 500), [(2, 500)]);
        assert!(open.is_empty());
    }

    #[test]
    fn users_of_a_closed_loop_take_whole_conversations() {
        let requests = [(0, Some((7, 0, 0))), (0, Some((7, 1, 50))), (900, None), (901, None)];
        let trace = trace(&requests);
        let mut schedule = Schedule::new(&trace, Pace::Closed { users: 2 });
        assert_eq!(take_all(&mut schedule, 0), [(0, 0), (2, 0)]);
        assert_eq!(schedule.next_due(), None);
        schedule.ended(0, ms(10));
        // The user thinks, and takes no other request meanwhile.
        assert_eq!(
            (schedule.next_due(), take_all(&mut schedule, 20)),
            (Some(ms(60)), vec![])
        );
        schedule.ended(2, ms(30));
        assert_eq!(take_all(&mut schedule, 30), [(3, 30)]);
        assert_eq!(take_all(&mut schedule, 65), [(1, 65)]);
        assert!(schedule.is_empty());
    }
}
