//! Carries out a plan: sends each request when it is due, and collects the records.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use hyper::body::Bytes;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use workload::record::{Outcome, RequestRecord};

use super::bodies::Bodies;
use super::connections::Connections;
use super::exchange::{Exchanged, Exchanges, Prepared};
use super::plan::{LoadPlan, Observer, Progress};
use super::processes::Processes;
use super::processes::monotonic_ns;
use super::schedule::{Due, Schedule};
use super::timer::Timer;

/// How often the processes are read and the progress is told.
const TICK: Duration = Duration::from_millis(250);
/// Bodies that are made before they are due. It is room for a thousand prompts of ten thousand tokens.
const READY_BYTES_MAX: usize = 64 << 20;
/// With less time than this before the next request no body is made.
const TIME_TO_PREPARE: Duration = Duration::from_millis(5);
/// Requests before the run that are under way at the same time.
const WARM_UPS_AT_ONCE: usize = 8;

/// What came of a run.
#[derive(Debug)]
pub(super) struct Outcomes {
    /// In the order of the trace.
    pub exchanged: Vec<(RequestRecord, String)>,
    pub processes: Processes,
    /// When the run started, on the clock that all processes of this machine share.
    pub started_ns: u64,
    /// The user ended the run.
    pub is_interrupted: bool,
    /// Requests whose answer had not ended by then.
    pub unfinished: usize,
}

pub(super) struct Session<'a> {
    plan: &'a LoadPlan,
    bodies: Bodies<'a>,
    connections: Connections,
    /// Part of every id, so that two runs against one server differ.
    run_id: u32,
    ready: BTreeMap<usize, Bytes>,
    ready_bytes: usize,
    /// The next request of the trace for which a body may be made.
    next_to_prepare: usize,
}

impl<'a> Session<'a> {
    pub(super) fn new(plan: &'a LoadPlan, model: &'a str, connections: Connections) -> anyhow::Result<Self> {
        Ok(Self {
            plan,
            bodies: Bodies::new(plan, model)?,
            connections,
            run_id: rand::random(),
            ready: BTreeMap::new(),
            ready_bytes: 0,
            next_to_prepare: 0,
        })
    }

    pub(super) async fn run(
        mut self,
        mut processes: Processes,
        mut observer: Observer<'_>,
    ) -> anyhow::Result<Outcomes> {
        self.warm_up(&observer).await?;
        while !observer.stop.is_cancelled() && self.prepare_one() {}
        let mut timer = Timer::new().context("cannot start the timer's thread")?;
        let mut schedule = Schedule::new(&self.plan.trace, self.plan.pace);
        let started_ns = monotonic_ns();
        let exchanges = self.exchanges();
        let mut tasks = JoinSet::new();
        let mut exchanged: BTreeMap<usize, (RequestRecord, String)> = BTreeMap::new();
        let mut progress = Progress {
            requests: self.plan.trace.requests.len(),
            ..Progress::default()
        };
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
        processes.sample(Duration::ZERO);
        let is_interrupted = loop {
            if observer.stop.is_cancelled() {
                break !(tasks.is_empty() && schedule.is_empty());
            }
            while let Some(due) = schedule.take(exchanges.start.elapsed()) {
                let request = self.prepared(due);
                tasks.spawn(Arc::clone(&exchanges).exchange(request, due.scheduled));
                progress.sent += 1;
            }
            if tasks.is_empty() && schedule.is_empty() {
                break false;
            }
            let due = schedule.next_due().map(|due| exchanges.start + due);
            let is_soon = due.is_some_and(|due| due < Instant::now() + TIME_TO_PREPARE);
            if !is_soon && self.prepare_one() {
                tokio::task::yield_now().await;
                continue;
            }
            tokio::select! {
                biased;
                () = observer.stop.cancelled() => break true,
                Some(done) = tasks.join_next() => {
                    let done: Exchanged = done.context("a request's task panicked")?;
                    schedule.ended(done.index, exchanges.start.elapsed());
                    match done.record.outcome {
                        Outcome::Completed => progress.completed += 1,
                        _ => progress.not_completed += 1,
                    }
                    self.bodies.answered(done.index, &done.text);
                    exchanged.insert(done.index, (done.record, done.text));
                }
                () = timer.until(due.unwrap_or(exchanges.start)), if due.is_some() => {}
                _ = tick.tick() => {
                    processes.sample(exchanges.start.elapsed());
                    (observer.on_progress)(progress);
                }
            }
        };
        processes.sample(exchanges.start.elapsed());
        (observer.on_progress)(progress);
        Ok(Outcomes {
            exchanged: exchanged.into_values().collect(),
            processes,
            started_ns,
            is_interrupted,
            unfinished: tasks.len(),
        })
    }

    fn exchanges(&self) -> Arc<Exchanges> {
        Arc::new(Exchanges {
            connections: self.connections.clone(),
            endpoint: self.plan.server.endpoint,
            start: Instant::now(),
            timeout: self.plan.request_timeout,
        })
    }

    /// Sends requests that do not count and waits for their answers.
    async fn warm_up(&mut self, observer: &Observer<'_>) -> anyhow::Result<()> {
        let exchanges = self.exchanges();
        let mut tasks = JoinSet::new();
        let mut outcomes = Vec::new();
        let prefixes = self.plan.prefixes.as_ref().map_or(0, |trace| trace.requests.len());
        let mut before = self.bodies.before().into_iter().enumerate();
        loop {
            let next = before.next();
            // Prefixes one after the other, so that each is computed by itself.
            let is_prefix = next.as_ref().is_some_and(|(number, _)| *number < prefixes);
            let at_once = if is_prefix { 1 } else { WARM_UPS_AT_ONCE };
            while tasks.len() >= at_once || (next.is_none() && !tasks.is_empty()) {
                let done = tokio::select! {
                    () = observer.stop.cancelled() => return Ok(()),
                    done = tasks.join_next() => done,
                };
                let done: Option<Exchanged> = done.transpose().context("a request's task panicked")?;
                outcomes.extend(done.map(|done| done.record.outcome));
            }
            let Some((number, (request, body))) = next else {
                break;
            };
            let prepared = Prepared {
                index: 0,
                id: format!("bench-{:08x}-warm-{number}", self.run_id),
                lane: request.lane,
                prompt_tokens: request.prompt_tokens,
                output_tokens: request.output_tokens,
                cancel_after: None,
                body,
            };
            tasks.spawn(Arc::clone(&exchanges).exchange(prepared, Duration::ZERO));
        }
        let failure = outcomes.iter().find(|outcome| **outcome != Outcome::Completed);
        ensure!(
            outcomes.is_empty() || outcomes.contains(&Outcome::Completed),
            "no request of the warm-up was answered; the first one: {failure:?}"
        );
        Ok(())
    }

    /// Makes the next body ahead of its time. False if there is none to make, or no room.
    fn prepare_one(&mut self) -> bool {
        let requests = &self.plan.trace.requests;
        while requests
            .get(self.next_to_prepare)
            .is_some_and(|request| self.bodies.needs_history(request))
        {
            self.next_to_prepare += 1;
        }
        if self.next_to_prepare >= requests.len() || self.ready_bytes >= READY_BYTES_MAX {
            return false;
        }
        let body = self.bodies.body(self.next_to_prepare);
        self.ready_bytes += body.len();
        self.ready.insert(self.next_to_prepare, body);
        self.next_to_prepare += 1;
        true
    }

    fn prepared(&mut self, due: Due) -> Prepared {
        let index = due.index;
        let request = &self.plan.trace.requests[index];
        let body = match self.ready.remove(&index) {
            Some(body) => {
                self.ready_bytes -= body.len();
                body
            }
            None => self.bodies.body(index),
        };
        // It may have been made although it stands later in the trace.
        if index >= self.next_to_prepare {
            self.next_to_prepare = index + 1;
        }
        Prepared {
            index,
            id: format!("bench-{:08x}-{index}", self.run_id),
            body,
            lane: request.lane,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            cancel_after: self.bodies.cancel_after(index),
        }
    }
}
