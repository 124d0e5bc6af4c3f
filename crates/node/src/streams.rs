//! What the scheduler does not know about the requests on this node: the stream that tells each, its legs, its spans. Nothing here blocks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use engine::KvMemory;
use proto::messages::{Failed, PromptLogprobs, StepNote, TokenBatch};
use service_runtime::clock::Clock;
use service_runtime::telemetry::opentelemetry::Context;
use serving_core::ids::BlockId;
use serving_core::request::{AttemptKey, Request, TokenEvent, TokenLogprobs};
use serving_core::scheduler::{NodeFailure, Report};
use serving_core::stage::Stage;
use serving_core::time::Time;
use tokio::sync::mpsc;

use crate::decode_leg::DecodeLeg;
use crate::metrics::Metrics;
use crate::prefill_leg::PrefillLeg;
use crate::request::{LegRequest, NewRequest, NodeEvent, SharedEvent};

/// Places in a stream's channel kept for its last events, which must never be lost.
const PLACES_KEPT: usize = 4;
/// Prompt logprobs in one event: 20 alternatives each stay far below the message limit.
const LOGPROBS_PER_EVENT: usize = 256;

/// One request that was let in.
#[derive(Debug)]
pub struct Stream {
    pub request: Arc<Request>,
    pub leg: LegRequest,
    events: mpsc::Sender<NodeEvent>,
    /// Drawn and not told yet.
    pub tokens: Vec<TokenEvent>,
    pub kv_hashes: Vec<u64>,
    /// Something of the answer is missing: the request fails whatever else it gives.
    pub broken: Option<NodeFailure>,
    pub trace: Context,
    /// Of the caller's span that ends with the first answer.
    pub answer_parent: Option<Context>,
    pub received_at: Time,
    admitted_at: Time,
    pub prefill: PrefillLeg,
    pub decode: DecodeLeg,
}

impl Stream {
    pub fn new(admitted_at: Time, new: NewRequest) -> Self {
        Self {
            request: new.request,
            leg: new.leg,
            events: new.events,
            tokens: Vec::new(),
            kv_hashes: Vec::new(),
            broken: None,
            trace: new.trace,
            answer_parent: new.answer_parent,
            received_at: new.received_at,
            admitted_at,
            prefill: PrefillLeg::default(),
            decode: DecodeLeg::default(),
        }
    }

    /// The client or the coordinator is gone.
    pub fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    /// How long it waited before the scheduler knew of it.
    pub fn inbox_wait(&self) -> Duration {
        self.admitted_at.since(self.received_at)
    }

    /// A decode leg has ended, whatever its end is: its spans, and the stages that it has passed. Whoever asks when the end is told
    /// finds both.
    pub fn decode_ended(&mut self, report: &mut Report, ended: Time, metrics: &Metrics) {
        report.timings.lengthen(Stage::PrefillQueue, self.inbox_wait());
        for span in self.decode.spans(report, self.received_at, ended) {
            span.record_later(&self.trace);
        }
        metrics.stages(&report.timings);
    }

    /// Queues an event, some places kept free for the last ones.
    ///
    /// # Errors
    /// The queue is full: the reader is too far behind.
    pub fn tell(&self, event: NodeEvent) -> Result<(), NodeFailure> {
        if self.events.capacity() <= PLACES_KEPT {
            let behind = self.events.max_capacity() - self.events.capacity() + self.tokens.len();
            let behind_tokens = u32::try_from(behind).unwrap_or(u32::MAX);
            return Err(NodeFailure::SlowReader { behind_tokens });
        }
        self.tell_last(event);
        Ok(())
    }

    /// Queues one of the last events. Full is impossible while places are kept; closed means a cancel that is noticed next.
    pub fn tell_last(&self, event: NodeEvent) {
        let _ = self.events.try_send(event);
    }

    pub fn tell_failed(&self, failure: &NodeFailure) {
        self.tell_last(self.leg.event(SharedEvent::Failed(Failed::from(failure))));
    }

    /// The tokens that were drawn, in one event. `step` is the step that drew them.
    ///
    /// # Errors
    /// As [`Stream::tell`].
    pub fn tell_tokens(&mut self, sampled_at: Time, step: Option<StepNote>) -> Result<(), NodeFailure> {
        let batch = TokenBatch {
            tokens: std::mem::take(&mut self.tokens),
            sampled_at,
            step,
        };
        if batch.tokens.is_empty() {
            return Ok(());
        }
        if let Some(step) = &batch.step {
            self.decode.sampled(sampled_at, step, batch.tokens.len());
        }
        self.tell(self.leg.event(SharedEvent::Tokens(batch)))
    }

    /// # Errors
    /// As [`Stream::tell`].
    pub fn tell_prompt_logprobs(&self, first_position: u32, tokens: &[TokenLogprobs]) -> Result<(), NodeFailure> {
        let mut first_position = first_position;
        for part in tokens.chunks(LOGPROBS_PER_EVENT) {
            let tokens = part.to_vec();
            let next = first_position + tokens.len() as u32;
            let scored = PromptLogprobs { first_position, tokens };
            self.tell(self.leg.event(SharedEvent::PromptLogprobs(scored)))?;
            first_position = next;
        }
        Ok(())
    }

    /// Hashes the client's prompt, also when the request has moved here with tokens of an earlier attempt behind it. The blocks'
    /// bytes are this request's until the next call of the scheduler.
    ///
    /// # Errors
    /// A block cannot be read: a bug.
    pub fn hash_prompt(&mut self, kv: &KvMemory, blocks: &[BlockId]) -> Result<(), NodeFailure> {
        let hashes = kv.prompt_hashes(blocks, self.request.client_prompt_tokens);
        self.kv_hashes = hashes.map_err(|error| NodeFailure::Engine {
            detail: error.to_string(),
        })?;
        Ok(())
    }
}

/// By key; those with tokens to send are remembered.
#[derive(Debug, Default)]
pub struct Streams {
    all: BTreeMap<AttemptKey, Stream>,
    fresh: Vec<AttemptKey>,
}

impl Streams {
    pub fn insert(&mut self, key: AttemptKey, stream: Stream) {
        self.all.insert(key, stream);
    }
    pub fn get(&self, key: AttemptKey) -> Option<&Stream> {
        self.all.get(&key)
    }
    pub fn get_mut(&mut self, key: AttemptKey) -> Option<&mut Stream> {
        self.all.get_mut(&key)
    }
    pub fn remove(&mut self, key: AttemptKey) -> Option<Stream> {
        self.all.remove(&key)
    }
    pub fn iter(&self) -> impl Iterator<Item = (&AttemptKey, &Stream)> {
        self.all.iter()
    }
    pub fn closed(&self) -> Vec<AttemptKey> {
        let closed = self.all.iter().filter(|(_, stream)| stream.is_closed());
        closed.map(|(key, _)| *key).collect()
    }
    /// Those whose answer cannot be whole any more, with the reason.
    pub fn broken(&self) -> Vec<(AttemptKey, NodeFailure)> {
        let broken = self
            .all
            .iter()
            .filter_map(|(key, stream)| Some((*key, stream.broken.clone()?)));
        broken.collect()
    }

    /// A token was drawn: it is told with the others of its step.
    pub fn drawn(&mut self, key: AttemptKey, event: TokenEvent) {
        if let Some(stream) = self.all.get_mut(&key) {
            if stream.tokens.is_empty() {
                self.fresh.push(key);
            }
            stream.tokens.push(event);
        }
    }

    /// Streams that have tokens to send.
    pub fn take_fresh(&mut self) -> Vec<AttemptKey> {
        std::mem::take(&mut self.fresh)
    }
}

/// When the tokens of a step were sampled: at its end, or now when no step of this node sampled them.
pub fn sampled_at(step: Option<(Time, StepNote)>) -> Time {
    step.map_or_else(Clock::now, |(ended, _)| ended)
}
