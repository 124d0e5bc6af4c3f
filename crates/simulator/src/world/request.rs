//! One request in the coordinator's shell: its legs, what has reached its client, and the marks of its stages.

use std::collections::BTreeMap;
use std::time::Duration;

use serving_core::cluster::{Delivered, Leg, PlacementFacts};
use serving_core::ids::{Attempt, RequestId};
use serving_core::request::LocalPrefillReason;
use serving_core::stage::{Stage, StageTimings};
use serving_core::time::Time;
use workload::record::{Outcome as RequestOutcome, RequestRecord, RunPart, ServerRecord};
use workload::trace::TraceRequest;

use super::agenda::Place;
use super::prompts::output_token;
use super::start;

#[derive(Debug)]
pub(super) struct Live {
    pub index: usize,
    /// Only tokens of this attempt count; `None` between attempts.
    pub attempt: Option<Attempt>,
    pub legs: BTreeMap<Leg, Place>,
    /// When each output token reached the coordinator, in order. The last ones may lie ahead.
    pub arrivals: Vec<Time>,
    /// Of `arrivals`, those that earlier attempts delivered.
    pub earlier: usize,
    marks: Marks,
    nodes: BTreeMap<Stage, Duration>,
    placement: Placement,
    pub cached_tokens: Option<u32>,
    pub kv_bytes: u64,
    pub kv_transfer: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    submitted: Time,
    placed: Option<Time>,
    opened: Option<Time>,
    /// When the prefill node had taken the prompt on.
    accepted_there: Option<Time>,
}

#[derive(Clone, Debug, Default)]
struct Placement {
    prefill: Option<String>,
    decode: Option<String>,
    local: Option<LocalPrefillReason>,
}

impl Live {
    pub fn new(index: usize, submitted: Time) -> Self {
        Self {
            index,
            attempt: None,
            legs: BTreeMap::new(),
            arrivals: Vec::new(),
            earlier: 0,
            marks: Marks {
                submitted,
                ..Marks::default()
            },
            nodes: BTreeMap::new(),
            placement: Placement::default(),
            cached_tokens: None,
            kv_bytes: 0,
            kv_transfer: Duration::ZERO,
        }
    }

    pub fn placed(&mut self, attempt: Attempt, (facts, now): (PlacementFacts, Time)) {
        self.attempt = Some(attempt);
        (self.kv_bytes, self.kv_transfer) = (0, Duration::ZERO);
        let name = |node: Option<serving_core::ids::NodeId>| node.map(|node| node.name.to_string());
        self.placement = Placement {
            prefill: name(facts.prefill),
            decode: name(facts.decode),
            local: facts.local,
        };
        // Attempts that failed before the first token were still waiting for a place that works.
        if self.arrivals.is_empty() {
            self.nodes.clear();
            self.cached_tokens = None;
            let submitted = self.marks.submitted;
            self.marks = Marks {
                submitted,
                placed: Some(now),
                ..Marks::default()
            };
        }
    }

    pub fn opened(&mut self, at: Time) {
        if self.arrivals.is_empty() {
            self.marks.opened.get_or_insert(at);
        }
    }
    pub fn accepted(&mut self, there: Time) {
        if self.arrivals.is_empty() {
            self.marks.accepted_there.get_or_insert(there);
        }
    }
    pub fn cached(&mut self, tokens: u32) {
        if self.arrivals.is_empty() {
            self.cached_tokens = Some(tokens);
        }
    }

    pub fn node_reported(&mut self, timings: &StageTimings) {
        // A later attempt is no part of the time to the first token.
        let is_past = self.earlier > 0;
        let of_first = timings.0.iter().copied();
        self.nodes
            .extend(of_first.filter(|(stage, _)| !(is_past && stage.is_before_first_token())));
    }

    /// An output token is on its way and will be at the coordinator at `at`.
    pub fn token(&mut self, index: u32, at: Time) {
        let (index, next) = (index as usize, self.arrivals.len());
        match self.arrivals.get_mut(index) {
            // It comes from both nodes: the first one counts.
            Some(earlier) => *earlier = (*earlier).min(at),
            None if index == next => self.arrivals.push(at),
            // One that came out of turn is lost with its attempt.
            None => {}
        }
    }

    /// What of this attempt has arrived by now; what has not never will.
    pub fn end_attempt(&mut self, now: Time, (id, output_tokens, vocab_size): (RequestId, u32, u32)) -> Delivered {
        self.attempt = None;
        let had = self.arrivals.iter().take_while(|at| **at <= now).count();
        self.arrivals.truncate(had.max(self.earlier));
        let indices = self.earlier..self.arrivals.len();
        self.earlier = self.arrivals.len();
        let tokens: Vec<_> = indices
            .filter_map(|index| u32::try_from(index).ok())
            .map(|index| output_token(id, index, vocab_size))
            .collect();
        Delivered {
            token_count: tokens.len() as u64,
            tokens,
            is_complete: self.arrivals.len() >= output_tokens as usize,
        }
    }

    /// The stages of the time to the first token, and those after it.
    fn stages(&self, edges: &Edges) -> Vec<(String, f64)> {
        let mut stages = StageTimings::default();
        let marks = &self.marks;
        let node = |stage: Stage| self.nodes.get(&stage).copied();
        stages.push(Stage::Tokenize, edges.before);
        if let Some(placed) = marks.placed {
            stages.push(Stage::Queue, placed.since(marks.submitted));
            match (self.placement.local, marks.opened) {
                (Some(_), _) => stages.push(Stage::Reserve, edges.hop_with_prompt),
                (None, Some(opened)) => stages.push(Stage::Reserve, opened.since(placed)),
                (None, None) => {}
            }
            if let Some(accepted) = marks.accepted_there {
                stages.push(Stage::Dispatch, accepted.since(marks.opened.unwrap_or(placed)));
            }
        }
        for stage in [Stage::StepWait, Stage::PrefillQueue, Stage::PrefillForward] {
            if let Some(took) = node(stage) {
                stages.push(stage, took);
            }
        }
        if !self.arrivals.is_empty() {
            stages.push(Stage::FirstTokenReturn, edges.hop);
            stages.push(Stage::Egress, edges.after);
        }
        for (stage, took) in self.nodes.iter().filter(|(stage, _)| !stage.is_before_first_token()) {
            stages.push(*stage, *took);
        }
        let in_ms = |(stage, took): (Stage, Duration)| (stage.name().to_owned(), took.as_secs_f64() * 1e3);
        stages.0.into_iter().map(in_ms).collect()
    }

    /// What the client has to tell of it.
    pub fn record(self, sent: &Sent<'_>, outcome: RequestOutcome) -> RequestRecord {
        let since_start = |at: Time| at.since(start());
        let at_client = |at: &Time| since_start(*at + sent.edges.after);
        let (is_answered, stages) = (!self.arrivals.is_empty(), self.stages(&sent.edges));
        let is_handoff = self.kv_bytes > 0;
        RequestRecord {
            id: format!("sim-{}", self.index),
            // Which part it is in is known when all requests were due.
            part: RunPart::Measured,
            lane: sent.planned.lane,
            prompt_tokens: sent.planned.prompt_tokens,
            cached_tokens: self.cached_tokens,
            output_tokens: u32::try_from(self.arrivals.len()).unwrap_or(u32::MAX),
            scheduled: since_start(sent.scheduled),
            sent: since_start(sent.scheduled),
            tokens: self.arrivals.iter().map(at_client).collect(),
            ended: since_start(sent.ended),
            outcome,
            output_hash: None,
            server: is_answered.then(|| ServerRecord {
                prefill_node: self.placement.prefill,
                decode_node: self.placement.decode,
                local_prefill: self.placement.local.map(|reason| reason.name().to_owned()),
                kv_bytes: is_handoff.then_some(self.kv_bytes),
                kv_transfer_ms: is_handoff.then_some(self.kv_transfer.as_secs_f64() * 1e3),
                stages,
            }),
        }
    }
}

/// Of one request, what its client knows.
#[derive(Debug)]
pub(super) struct Sent<'a> {
    pub planned: &'a TraceRequest,
    pub scheduled: Time,
    pub ended: Time,
    pub edges: Edges,
}

/// Times that every request has alike.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edges {
    pub before: Duration,
    pub hop: Duration,
    pub hop_with_prompt: Duration,
    pub after: Duration,
}
