//! The tokens of one request. This file merges the tokens of the request's legs and hands each token to the client once and in order
//! (`choice`). It keeps what the legs report for the request's summary (`leg_reports`). Tokens never pass through the control loop.

mod choice;
mod leg_reports;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proto::messages::{PromptLogprobs, StepNote};
use serving_core::cluster::{Delivered, Leg, PlacementFacts};
use serving_core::ids::{Attempt, ChoiceIndex, TokenId};
use serving_core::request::{AttemptKey, Request, RequestError, TokenEvent};
use tokio::sync::mpsc;

use crate::metrics::Metrics;
use crate::node_clocks::NodeInstant;
use crate::request_handle::{ClientEvent, Placement, RequestSummary, TokenTimes};
use crate::stage_clock::StageClock;

use choice::Choice;

/// A client may be behind by so many tokens. If it is behind by more, its request is ended. At 100 tokens a second this is 40 s of
/// silence, and the edge closes a connection after 30 s without a byte. With 20 logprobs for each token it is about 1.5 MB.
const TOKENS_BEHIND_MAX: usize = 4096;
/// Room besides tokens: placements, prompt logprobs, the end.
const EVENTS_BESIDES_TOKENS: usize = 64;

/// The result of a batch of tokens.
#[derive(Debug, PartialEq)]
pub enum Delivery {
    /// The attempt is over. Its tokens reach no client.
    Stale,
    Delivered {
        /// Choices whose last token was in the batch.
        finished: Vec<ChoiceIndex>,
    },
    /// The client is gone or too slow.
    Broken(RequestError),
    /// The node broke the contract.
    Violation(String),
}

/// The tokens of one message of a node, with the node's report on the step that made them.
#[derive(Clone, Debug, Default)]
pub struct ReceivedTokens {
    pub tokens: Vec<TokenEvent>,
    /// `None` while the offset of the node's clock is not known.
    pub sampled_at: Option<NodeInstant>,
    pub step: Option<StepNote>,
}

/// A batch of tokens, as it came.
#[derive(Debug)]
struct Held {
    leg: Leg,
    received_at: Instant,
    batch: ReceivedTokens,
}

/// Shared by the legs of a request and the control loop.
#[derive(Debug)]
pub struct RequestStream {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct State {
    sender: mpsc::Sender<ClientEvent>,
    /// Only tokens of this attempt are taken. `None` between attempts and after the end.
    live: Option<Attempt>,
    /// Set when a token was lost because the client is gone or too slow. Every later delivery is told of it: the leg that found out may
    /// have been ended before the brain heard of it, and another attempt would leave the lost token out of the answer.
    broken: Option<RequestError>,
    choices: Vec<Choice>,
    /// The tokens of choice 0 of the live attempt. They are added to the prompt of the next attempt.
    attempt_tokens: Vec<TokenId>,
    attempt_token_count: u64,
    /// Tokens that the client has received and that the brain has not been told of.
    untold: u32,
    prompt_logprobs_from: u32,
    /// Where the prompt ends, if its logprobs are wanted. No token goes to the client before all of them are there, because the decode
    /// node's tokens may come before the prefill node's logprobs.
    prompt_logprobs_end: u32,
    /// Batches that wait for these logprobs, and the number of their tokens.
    held: Vec<Held>,
    held_tokens: usize,
    clock: StageClock,
    summary: RequestSummary,
    /// When the first token came, and the attempt that it is of.
    first_token: Option<(Instant, Attempt)>,
    /// The time since when the client has been behind.
    behind_since: Option<Instant>,
}

impl RequestStream {
    /// The receiver is the client's side.
    pub fn new(request: &Request, submitted_at: Instant, metrics: Arc<Metrics>) -> (Self, mpsc::Receiver<ClientEvent>) {
        let (sender, receiver) = mpsc::channel(TOKENS_BEHIND_MAX + EVENTS_BESIDES_TOKENS);
        let state = State {
            sender,
            live: None,
            broken: None,
            choices: (0..request.choice_count).map(|_| Choice::default()).collect(),
            attempt_tokens: Vec::new(),
            attempt_token_count: 0,
            untold: 0,
            // The first token of a prompt has none.
            prompt_logprobs_from: 1,
            prompt_logprobs_end: request.prompt_logprobs.map_or(0, |_| request.client_prompt_tokens),
            held: Vec::new(),
            held_tokens: 0,
            clock: StageClock::new(submitted_at),
            summary: RequestSummary::default(),
            first_token: None,
            behind_since: None,
        };
        (
            Self {
                state: Mutex::new(state),
                metrics,
            },
            receiver,
        )
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new attempt starts; `placed_at` is when the brain chose its nodes.
    pub fn place(&self, key: AttemptKey, facts: PlacementFacts, placed_at: Instant) {
        let mut s = self.state();
        s.live = Some(key.attempt);
        s.attempt_tokens.clear();
        s.attempt_token_count = 0;
        s.held.clear();
        s.held_tokens = 0;
        s.summary.attempts += 1;
        // The bytes that an earlier attempt moved are of no use, and went between other nodes.
        (s.summary.kv_bytes, s.summary.transfer, s.summary.transport) = (0, Duration::ZERO, None);
        for choice in &mut s.choices {
            choice.forget_early();
        }
        // Before the first token each failed attempt was also waiting. After it only the wait of this placement counts.
        let queued_for = s.clock.waited_until(placed_at).unwrap_or(facts.queued_for);
        s.clock.placed(facts.local.is_some(), placed_at);
        let placement = Placement {
            attempt: key.attempt,
            prefill_node: facts.prefill.map(|n| n.name),
            decode_node: facts.decode.map(|n| n.name),
            route_reason: facts.route_reason,
            local_prefill: facts.local,
            queued_for,
        };
        s.tell(ClientEvent::Placed(placement));
    }

    /// Tokens that waited for these logprobs are delivered with them.
    pub fn prompt_logprobs(&self, key: AttemptKey, mut logprobs: PromptLogprobs) -> Delivery {
        let mut s = self.state();
        if s.live != Some(key.attempt) {
            return Delivery::Stale;
        }
        // Each position counts once: a retry computes them again, perhaps in other chunks.
        let known = s.prompt_logprobs_from.saturating_sub(logprobs.first_position);
        logprobs.tokens.drain(..logprobs.tokens.len().min(known as usize));
        if !logprobs.tokens.is_empty() {
            let first_position = logprobs.first_position + known;
            let count = u32::try_from(logprobs.tokens.len()).unwrap_or(u32::MAX);
            s.prompt_logprobs_from = first_position.saturating_add(count);
            s.tell(ClientEvent::PromptLogprobs {
                first_position,
                tokens: logprobs.tokens,
            });
        }
        let held = match s.lacks_prompt_logprobs() {
            true => Vec::new(),
            false => {
                s.held_tokens = 0;
                std::mem::take(&mut s.held)
            }
        };
        self.take_in(s, key, held)
    }

    /// Each (choice, index) reaches the client once, from whichever leg brings it first.
    pub fn deliver(&self, key: AttemptKey, leg: Leg, batch: impl Into<ReceivedTokens>) -> Delivery {
        let mut s = self.state();
        if let Some(error) = s.broken.clone() {
            return Delivery::Broken(error);
        }
        if s.live != Some(key.attempt) {
            return Delivery::Stale;
        }
        let came = Held {
            leg,
            received_at: Instant::now(),
            batch: batch.into(),
        };
        if s.lacks_prompt_logprobs() {
            s.held_tokens += came.batch.tokens.len();
            // More would not fit into the client's channel afterwards.
            if s.held_tokens > TOKENS_BEHIND_MAX {
                return Delivery::Violation(format!(
                    "{} leg: tokens came without logprobs of the prompt",
                    leg.name()
                ));
            }
            s.held.push(came);
            return Delivery::Delivered { finished: Vec::new() };
        }
        self.take_in(s, key, [came])
    }

    fn take_in(&self, mut s: MutexGuard<'_, State>, key: AttemptKey, came: impl IntoIterator<Item = Held>) -> Delivery {
        let now = Instant::now();
        let mut finished = Vec::new();
        for Held {
            leg,
            received_at,
            batch,
        } in came
        {
            let times = TokenTimes {
                received_at,
                sampled_at: batch.sampled_at,
                step: batch.step,
                attempt: key.attempt,
            };
            for token in batch.tokens {
                let ready = match s.put_in_order(token, times) {
                    Ok(ready) => ready,
                    Err(violation) => return Delivery::Violation(format!("{} leg: {violation}", leg.name())),
                };
                for token in ready {
                    if let Err(error) = s.hand_over(token, &mut finished) {
                        s.live = None;
                        s.broken = Some(error.clone());
                        return Delivery::Broken(error);
                    }
                }
            }
        }
        if !finished.is_empty() && s.choices.iter().all(|choice| choice.is_finished) {
            s.tell_known();
        }
        if let Some(gap) = s.take_second_token_gap(now) {
            drop(s);
            self.metrics.first_to_second_token(gap);
        }
        Delivery::Delivered { finished }
    }

    /// A stop string ended this choice at the edge: its further tokens are dropped here.
    pub fn finish_choice(&self, choice: ChoiceIndex) {
        if let Some(choice) = self.state().choices.get_mut(choice.0 as usize) {
            choice.is_finished = true;
        }
    }

    /// Nothing of this attempt reaches the client any more. Returns the tokens that did.
    pub fn end_attempt(&self, attempt: Attempt) -> Delivered {
        let mut s = self.state();
        if s.live == Some(attempt) {
            s.live = None;
        }
        Delivered {
            tokens: std::mem::take(&mut s.attempt_tokens),
            token_count: std::mem::take(&mut s.attempt_token_count),
            is_complete: s.broken.is_none() && s.choices.iter().all(|c| c.is_finished),
        }
    }

    /// Tokens that the client has had since the last time that somebody asked.
    pub fn take_untold(&self) -> u32 {
        std::mem::take(&mut self.state().untold)
    }

    /// Over all choices and attempts.
    pub fn delivered_tokens(&self) -> u64 {
        let s = self.state();
        s.choices.iter().map(|choice| u64::from(choice.next_index)).sum()
    }

    pub fn complete(&self) {
        let mut s = self.state();
        s.live = None;
        let summary = s.known();
        s.tell(ClientEvent::Done(Box::new(summary)));
    }

    pub fn fail(&self, error: RequestError) {
        let mut s = self.state();
        s.live = None;
        let summary = s.known();
        s.tell(ClientEvent::BrokeOff(Box::new(summary)));
        s.tell(ClientEvent::Failed(error));
    }

    /// The client is gone. It gets no more events.
    pub fn forget(&self) {
        self.state().live = None;
    }
}

impl State {
    /// A client that is gone is noticed when its handle is dropped, not here.
    fn tell(&mut self, event: ClientEvent) {
        let _ = self.sender.try_send(event);
    }

    fn lacks_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs_from < self.prompt_logprobs_end
    }

    fn known(&self) -> RequestSummary {
        RequestSummary {
            timings: self.clock.timings(),
            clock_error: self.clock.error(),
            ..self.summary.clone()
        }
    }

    fn tell_known(&mut self) {
        let summary = self.known();
        self.tell(ClientEvent::Known(Box::new(summary)));
    }

    /// Puts one token into its place in its choice. Returns the tokens that can be handed over now, in order.
    fn put_in_order(&mut self, token: TokenEvent, times: TokenTimes) -> Result<Vec<(TokenEvent, TokenTimes)>, String> {
        match self.choices.get_mut(token.choice.0 as usize) {
            Some(choice) => choice.accept(token, times),
            None => Err(format!("token for choice {}, which does not exist", token.choice)),
        }
    }

    fn hand_over(
        &mut self,
        (token, times): (TokenEvent, TokenTimes),
        finished: &mut Vec<ChoiceIndex>,
    ) -> Result<(), RequestError> {
        let now = times.received_at;
        let free = self.sender.capacity();
        if free == self.sender.max_capacity() {
            self.behind_since = None;
        } else {
            self.behind_since.get_or_insert(now);
        }
        if free <= EVENTS_BESIDES_TOKENS {
            let waited = self.behind_since.map_or(Duration::ZERO, |since| now - since);
            return Err(RequestError::SlowReader {
                behind_tokens: u32::try_from(self.sender.max_capacity() - free).unwrap_or(u32::MAX),
                waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
            });
        }
        if token.choice.0 == 0 {
            self.attempt_tokens.push(token.token);
        }
        self.attempt_token_count += 1;
        self.untold = self.untold.saturating_add(1);
        if self.first_token.is_none() {
            self.first_token = Some((now, times.attempt));
            self.clock.first_token(now, times.sampled_at);
            self.tell_known();
        }
        if token.finish.is_some() {
            finished.push(token.choice);
        }
        self.tell(ClientEvent::Token(token, times));
        Ok(())
    }

    fn take_second_token_gap(&mut self, now: Instant) -> Option<Duration> {
        let is_second = self.choices.first().is_some_and(|c| c.next_index >= 2);
        if !is_second || self.clock.second_token_seen() {
            return None;
        }
        self.clock.second_token();
        self.first_token.map(|(first, _)| now - first)
    }
}

#[cfg(test)]
#[path = "token_stream_tests.rs"]
pub(crate) mod tests;
