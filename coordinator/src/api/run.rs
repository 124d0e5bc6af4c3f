//! One HTTP request that runs: its submissions, their merged events, and the text of each choice.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use serving_core::ids::TokenId;
use serving_core::request::{FinishReason, Request, RequestError, TokenEvent, TokenLogprobs};
use tokio::time::Sleep;

use super::AppState;
use super::error::ApiError;
use super::facts::Generation;
use super::limits::{LATE_REPORTS_WAIT_MAX, REPORTS_WAIT_MAX};
use super::record::RequestRecord;
use crate::records::prompts::PromptRecord;
use crate::request_handle::{ClientEvent, Placement, Rejected, RequestHandle, RequestSummary, Submission, TokenTimes};
use crate::text::{ChoiceText, StopReason, TextModel};

/// One step of one choice, in the form in which the client sees it.
#[derive(Clone, Debug)]
pub struct OutToken {
    pub prompt: usize,
    /// The index over all prompts, prompt by prompt, as OpenAI counts.
    pub choice: u32,
    /// The first step of the choice: it carries the role, the echo and the prompt's ids.
    pub is_first: bool,
    /// `None` only when no token was asked for (`max_tokens: 0` with echo).
    pub token: Option<TokenId>,
    pub text: String,
    /// Characters of generated text before this token.
    pub text_offset: usize,
    pub logprobs: Option<TokenLogprobs>,
    pub finish: Option<FinishReason>,
    pub stop_reason: Option<StopReason>,
    /// The moments of this token in the node, here and at the client.
    pub times: TokenTimes,
}

type Submitting = Pin<Box<dyn Future<Output = Result<RequestHandle, Rejected>> + Send>>;

enum RunState {
    Submitting(Submitting),
    Running(RequestHandle),
    Ended,
}

/// One prompt's request and the state of its choices.
pub struct PromptRun {
    leg: RunState,
    pub request: Arc<Request>,
    choices: Vec<ChoiceText>,
    /// By prompt position; the first is always `None`.
    pub prompt_logprobs: Vec<Option<TokenLogprobs>>,
    pub placement: Option<Placement>,
    pub summary: RequestSummary,
    pub output_tokens: u32,
    told: SummaryState,
}

/// How complete a summary is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SummaryState {
    Nothing,
    /// It has everything that an answer shows. Only the nodes' last reports are missing.
    SoFar,
}

/// Dropping the run drops each handle and so cancels the requests. This is how a client that leaves cancels.
pub struct Run {
    text: Arc<TextModel>,
    pub prompts: Vec<PromptRun>,
    ready: VecDeque<OutToken>,
    /// Where polling starts, so that no prompt keeps the others waiting.
    turn: usize,
    /// The prompt whose token or failure came first. The time to the first token is that of this prompt.
    leading: Option<usize>,
    /// The prompt whose placements are shown while the request runs.
    record: Option<Arc<RequestRecord>>,
    ends_with: EndsWith,
    /// Called once when every choice has ended.
    reports_wait: Option<Pin<Box<Sleep>>>,
}

/// When an answer is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndsWith {
    /// Nobody waits for the nodes' reports after the end.
    LastToken,
    /// The answer shows figures of these reports, as far as they come within `REPORTS_WAIT_MAX`.
    Figures,
    /// Every report has come, or the control loop no longer waits for one.
    LastReports,
}

/// What all submissions of one HTTP request share.
pub struct RunInput {
    pub requests: Vec<Arc<Request>>,
    pub submissions: Vec<Submission>,
    pub stop_strings: Vec<String>,
    pub record: Option<Arc<RequestRecord>>,
    pub ends_with: EndsWith,
}

impl Run {
    pub fn start(state: &AppState, input: RunInput) -> Self {
        let prompts = input
            .requests
            .into_iter()
            .zip(input.submissions)
            .map(|(request, submission)| {
                let submit = state.submit.clone();
                let positions = request.prompt_logprobs.map_or(0, |_| request.prompt.len());
                PromptRun {
                    leg: RunState::Submitting(Box::pin(async move { submit.submit(submission).await })),
                    choices: (0..request.choice_count)
                        .map(|_| ChoiceText::new(&input.stop_strings, request.stop.min_tokens))
                        .collect(),
                    prompt_logprobs: vec![None; positions],
                    request,
                    placement: None,
                    summary: RequestSummary::default(),
                    output_tokens: 0,
                    told: SummaryState::Nothing,
                }
            })
            .collect();
        Self {
            text: state.text.clone(),
            prompts,
            ready: VecDeque::new(),
            turn: 0,
            leading: None,
            record: input.record,
            ends_with: input.ends_with,
            reports_wait: None,
        }
    }

    /// The rest of a run whose answer has ended, if there are reports to wait for. This run is empty afterwards.
    pub fn take_unreported(&mut self) -> Option<Self> {
        let is_missing = self.prompts.iter().any(|prompt| !matches!(prompt.leg, RunState::Ended));
        is_missing.then(|| Self {
            text: self.text.clone(),
            prompts: std::mem::take(&mut self.prompts),
            ready: VecDeque::new(),
            turn: 0,
            leading: self.leading,
            record: self.record.take(),
            ends_with: EndsWith::LastReports,
            reports_wait: None,
        })
    }

    /// Waits for the nodes' last reports when every token has come. A report that has not come by then never comes:
    /// dropping this run ends its requests.
    pub async fn reports(&mut self) {
        let all = async { while let Ok(Some(_)) = self.next().await {} };
        let _ = tokio::time::timeout(LATE_REPORTS_WAIT_MAX, all).await;
    }

    /// The next token of any choice. `None` when every request has ended well.
    pub async fn next(&mut self) -> Result<Option<OutToken>, ApiError> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<OutToken>, ApiError>> {
        loop {
            if let Some(token) = self.ready.pop_front() {
                self.leading.get_or_insert(token.prompt);
                return Poll::Ready(Ok(Some(token)));
            }
            if self.prompts.iter().all(|prompt| matches!(prompt.leg, RunState::Ended)) {
                return Poll::Ready(Ok(None));
            }
            let count = self.prompts.len();
            let mut moved = false;
            for step in 0..count {
                let index = (self.turn + step) % count;
                let Poll::Ready(event) = self.prompts[index].poll_event(cx) else {
                    continue;
                };
                if let Err(error) = event.and_then(|event| self.take(index, event)) {
                    self.leading.get_or_insert(index);
                    return Poll::Ready(Err(error));
                }
                self.turn = index + 1;
                moved = true;
                break;
            }
            if !moved {
                return match self.is_over(cx) {
                    true => Poll::Ready(Ok(None)),
                    false => Poll::Pending,
                };
            }
        }
    }

    /// Whether the answer ends now although reports are missing. Called when no event can be taken.
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        if self.ends_with == EndsWith::LastReports || !self.prompts.iter().all(PromptRun::has_all_tokens) {
            return false;
        }
        if self.ends_with == EndsWith::LastToken && self.prompts.iter().all(PromptRun::is_answered) {
            return true;
        }
        let wait = self
            .reports_wait
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(REPORTS_WAIT_MAX)));
        wait.as_mut().poll(cx).is_ready()
    }

    fn take(&mut self, index: usize, event: ClientEvent) -> Result<(), ApiError> {
        let prompt = &mut self.prompts[index];
        match event {
            ClientEvent::Placed(placement) => {
                let is_shown = index == self.leading.unwrap_or(0);
                if let Some(record) = &self.record {
                    record.update(|generation| {
                        generation.has_been_placed = true;
                        if is_shown {
                            generation.placement = Some(placement.clone());
                        }
                    });
                    if is_shown {
                        record.tell();
                    }
                }
                prompt.placement = Some(placement);
            }
            ClientEvent::Known(summary) => {
                prompt.summary = *summary;
                prompt.told = SummaryState::SoFar;
            }
            ClientEvent::BrokeOff(summary) => prompt.summary = *summary,
            ClientEvent::PromptLogprobs { first_position, tokens } => prompt.note_prompt(first_position, tokens),
            // The client has all that it asked for.
            ClientEvent::Failed(_) if prompt.has_all_tokens() => prompt.leg = RunState::Ended,
            ClientEvent::Failed(error) => return Err(error.into()),
            ClientEvent::Done(summary) => {
                prompt.summary = *summary;
                prompt.leg = RunState::Ended;
                self.ready.extend(prompt.end_without_tokens(index)?);
            }
            ClientEvent::Token(event, times) => {
                if let Some(token) = prompt.token(&self.text, index, (event, times))? {
                    self.ready.push_back(token);
                }
            }
        }
        Ok(())
    }

    /// Writes into the request's record what is known of every prompt now.
    pub fn note(&self, generation: &mut Generation) {
        generation.output_tokens = self.output_tokens();
        let Some(leading) = self.prompts.get(self.leading.unwrap_or(0)) else {
            return;
        };
        generation.placement.clone_from(&leading.placement);
        let all = self.prompts.iter().map(|prompt| &prompt.summary);
        generation.summary = RequestSummary::of_all(&leading.summary, all);
        if self.prompts.len() > 1 {
            let each = self.prompts.iter().zip(0..);
            generation.prompts = each.map(|(prompt, index)| prompt.record(index)).collect();
        }
    }

    pub fn output_tokens(&self) -> u32 {
        self.prompts.iter().map(|prompt| prompt.output_tokens).sum()
    }
    pub fn prompt_tokens(&self) -> u32 {
        self.prompts
            .iter()
            .map(|prompt| prompt.request.client_prompt_tokens)
            .sum()
    }
    pub fn cached_tokens(&self) -> u32 {
        let cached = self.prompts.iter().map(|prompt| prompt.summary.cached_tokens);
        cached.fold(0, u32::saturating_add)
    }
}

impl PromptRun {
    fn record(&self, index: u32) -> PromptRecord {
        let first_choice = index * self.request.choice_count;
        PromptRecord {
            choices: first_choice..first_choice + self.request.choice_count,
            prompt_tokens: self.request.client_prompt_tokens,
            output_tokens: self.output_tokens,
            placement: self.placement.clone(),
            summary: self.summary.clone(),
        }
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Result<ClientEvent, ApiError>> {
        if let RunState::Submitting(submitting) = &mut self.leg {
            match submitting.as_mut().poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(rejected)) => return Poll::Ready(Err(rejected.into())),
                Poll::Ready(Ok(handle)) => self.leg = RunState::Running(handle),
            }
        }
        let RunState::Running(handle) = &mut self.leg else {
            return Poll::Pending;
        };
        let gone = || RequestError::Internal("the coordinator's control loop stopped".to_owned()).into();
        pin!(handle.next()).poll(cx).map(|event| event.ok_or_else(gone))
    }

    fn note_prompt(&mut self, first_position: u32, tokens: Vec<TokenLogprobs>) {
        for (slot, entry) in self
            .prompt_logprobs
            .iter_mut()
            .skip(first_position as usize)
            .zip(tokens)
        {
            *slot = Some(entry);
        }
    }

    fn token(
        &mut self,
        text: &TextModel,
        prompt: usize,
        (event, times): (TokenEvent, TokenTimes),
    ) -> Result<Option<OutToken>, ApiError> {
        let broken = |what: &str| Err(RequestError::Internal(format!("{what} (request {})", self.request.id)).into());
        let choice_count = self.request.choice_count;
        let Some(choice) = self.choices.get_mut(event.choice.0 as usize) else {
            return broken("a token came for a choice that does not exist");
        };
        let step = match choice.take(text, &event) {
            Ok(Some(step)) => step,
            Ok(None) => return Ok(None),
            Err(what) => return broken(what),
        };
        self.output_tokens += 1;
        if step.ends_here
            && let RunState::Running(handle) = &self.leg
        {
            handle.finish_choice(event.choice, FinishReason::StopString);
        }
        Ok(Some(OutToken {
            prompt,
            choice: prompt as u32 * choice_count + event.choice.0,
            is_first: event.index.0 == 0,
            token: Some(event.token),
            text: step.text,
            text_offset: step.text_offset,
            logprobs: event.logprobs,
            finish: step.finish,
            stop_reason: step.stop_reason,
            times,
        }))
    }

    fn has_all_tokens(&self) -> bool {
        matches!(self.leg, RunState::Ended) || self.choices.iter().all(ChoiceText::is_finished)
    }

    /// Everything that an answer shows has come, except figures of the nodes' last reports.
    fn is_answered(&self) -> bool {
        matches!(self.leg, RunState::Ended) || (self.told == SummaryState::SoFar && self.has_all_tokens())
    }

    /// `Done` before any finish is right only when no token was asked for. Each choice then ends in one empty step.
    fn end_without_tokens(&mut self, prompt: usize) -> Result<Vec<OutToken>, ApiError> {
        let choice_count = self.request.choice_count;
        let open: Vec<u32> = self
            .choices
            .iter()
            .zip(0..)
            .filter(|(choice, _)| !choice.is_finished())
            .map(|(_, i)| i)
            .collect();
        if !open.is_empty() && self.request.stop.max_tokens > 0 {
            let message = format!("request {} ended without a finish reason", self.request.id);
            return Err(RequestError::Internal(message).into());
        }
        Ok(open
            .into_iter()
            .map(|choice| OutToken {
                prompt,
                choice: prompt as u32 * choice_count + choice,
                is_first: true,
                token: None,
                text: String::new(),
                text_offset: 0,
                logprobs: None,
                finish: Some(FinishReason::Length),
                stop_reason: None,
                times: TokenTimes::received(Instant::now()),
            })
            .collect())
    }
}
