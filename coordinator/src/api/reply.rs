//! Turns tokens into the JSON that a client sees: one chunk per token when streaming, else one body.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use serving_core::request::FinishReason;

use super::calls::{Calls, Said};
use super::facts::Reader;
use super::logprobs::{CompletionLogprobs, PromptLogprobs, chat_logprobs};
use super::request::{CheckedRequest, Endpoint};
use super::run::{OutToken, Run};
use super::shapes::{
    Answer, ChoiceBody, EdgeTimes, Head, Message, PromptTokensDetails, Usage, ids, kv_hashes, metrics, one_or_list,
};
use crate::text::TextModel;

/// Everything that decides the form of one answer.
#[derive(Debug)]
pub struct Reply {
    pub head: Head,
    pub plan: CheckedRequest,
    /// With `echo`: each prompt's text.
    pub echo: Vec<Option<String>>,
    /// Where the request has tools.
    pub calls: Option<Calls>,
    pub text: Arc<TextModel>,
}

impl Head {
    pub fn new(plan: &CheckedRequest, fingerprint: &str, reader: Reader) -> Self {
        let (prefix, object) = match (plan.endpoint, plan.fields.stream.0) {
            (Endpoint::Completions, _) => ("cmpl-", "text_completion"),
            (Endpoint::Chat, false) => ("chatcmpl-", "chat.completion"),
            (Endpoint::Chat, true) => ("chatcmpl-", "chat.completion.chunk"),
            (Endpoint::Responses, _) => ("resp_", "response"),
        };
        Self {
            id: format!("{prefix}{:032x}", rand::random::<u128>()),
            object,
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            model: plan.model.clone(),
            system_fingerprint: fingerprint.to_owned(),
            reader,
        }
    }
}

impl Reply {
    /// The chunk of one token.
    pub fn chunk(&mut self, run: &Run, out: &OutToken) -> Answer<'_> {
        let mut body = self.choice(run, std::slice::from_ref(out));
        if self.plan.endpoint == Endpoint::Chat {
            body.delta = body.message.take().map(|message| Message {
                role: if out.is_first { Some("assistant") } else { None },
                ..message
            });
        }
        let usage = self
            .plan
            .stream_options
            .continuous_usage_stats
            .0
            .then(|| self.usage(run, false));
        let prompt_token_ids = out.is_first.then(|| self.prompt_ids(run)).flatten();
        Answer {
            prompt_token_ids,
            ..self.answer(vec![body], usage)
        }
    }

    /// The chunk after the last token: `choices: []`. `None` when the client asked for nothing that belongs there.
    pub fn last_chunk(&self, run: &Run, times: &EdgeTimes) -> Option<Answer<'_>> {
        let usage = self.plan.stream_options.include_usage.0.then(|| self.usage(run, true));
        let extras = self.with_extras(self.answer(Vec::new(), usage), run, times);
        (extras.usage.is_some() || extras.metrics.is_some() || extras.kv_hashes.is_some()).then_some(extras)
    }

    /// The whole answer. `tokens` holds the steps of each choice.
    pub fn whole(&mut self, run: &Run, tokens: &[Vec<OutToken>], times: &EdgeTimes) -> Answer<'_> {
        let bodies = tokens
            .iter()
            .map(|steps| {
                let mut body = self.choice(run, steps);
                if let Some(message) = &mut body.message {
                    message.role = Some("assistant");
                }
                body
            })
            .collect();
        let prompt_token_ids = self.prompt_ids(run);
        let answer = Answer {
            prompt_token_ids,
            prompt_logprobs: PromptLogprobs::of(&self.text, &self.plan, Endpoint::Chat, (run, 0)),
            ..self.answer(bodies, Some(self.usage(run, true)))
        };
        self.with_extras(answer, run, times)
    }

    fn answer(&self, choices: Vec<ChoiceBody>, usage: Option<Usage>) -> Answer<'_> {
        Answer {
            head: &self.head,
            choices,
            usage,
            prompt_token_ids: None,
            prompt_logprobs: None,
            metrics: None,
            kv_hashes: None,
        }
    }

    fn choice(&mut self, run: &Run, steps: &[OutToken]) -> ChoiceBody {
        let content: String = steps.iter().map(|step| step.text.as_str()).collect();
        let finish = steps.last().and_then(|step| step.finish);
        let first = steps.first().filter(|step| step.is_first);
        let (prompt, index) = steps.first().map_or((0, 0), |step| (step.prompt, step.choice));
        let echo = self.echo.get(prompt).and_then(Option::as_deref);
        let logprobs = self.plan.logprobs.map(|_| match self.plan.endpoint {
            Endpoint::Chat | Endpoint::Responses => chat_logprobs(&self.text, steps.iter()),
            Endpoint::Completions => self.completion_logprobs(run, steps, prompt),
        });
        let (text, message) = match self.plan.endpoint {
            Endpoint::Chat | Endpoint::Responses => (None, Some(self.message((index, content), finish.is_some()))),
            Endpoint::Completions => {
                let text = match echo.filter(|_| first.is_some()) {
                    Some(echo) => format!("{echo}{content}"),
                    None => content,
                };
                (Some(text), None)
            }
        };
        let finish_reason = finish.map(FinishReason::openai_name);
        let finish_reason = match &self.calls {
            Some(calls) => finish_reason.map(|reason| calls.finish(index, reason)),
            None => finish_reason,
        };
        let wants_ids = self.plan.fields.return_token_ids.0;
        ChoiceBody {
            index,
            text,
            message,
            delta: None,
            logprobs,
            finish_reason,
            stop_reason: finish.map(|_| steps.last().and_then(|step| step.stop_reason.clone())),
            token_ids: wants_ids.then(|| {
                steps
                    .iter()
                    .filter_map(|step| step.token.map(|token| token.0))
                    .collect()
            }),
            prompt_token_ids: first
                .filter(|_| wants_ids)
                .map(|_| ids(&run.prompts[prompt].request.prompt)),
            prompt_logprobs: PromptLogprobs::of(&self.text, &self.plan, Endpoint::Completions, (run, index)),
        }
    }

    fn message(&mut self, (choice, content): (u32, String), is_last: bool) -> Message {
        let said = match &mut self.calls {
            Some(calls) => calls.take(choice, &content, is_last),
            None => Said::of_text(content),
        };
        let (text, tool_calls) = said.text_and_calls();
        Message {
            role: None,
            content: (tool_calls.is_empty() || !text.is_empty()).then_some(text),
            tool_calls,
        }
    }

    fn completion_logprobs(&self, run: &Run, steps: &[OutToken], prompt: usize) -> Value {
        let mut lists = CompletionLogprobs::default();
        let echo = self.echo.get(prompt).and_then(Option::as_deref);
        if let Some(echo) = echo.filter(|_| steps.first().is_some_and(|step| step.is_first)) {
            lists.push_prompt(&self.text, &run.prompts[prompt], echo);
        }
        let offset = echo.map_or(0, |echo| echo.chars().count());
        for step in steps {
            lists.push_token(&self.text, step, offset);
        }
        lists.into_value()
    }

    fn prompt_ids(&self, run: &Run) -> Option<Vec<u32>> {
        (self.plan.fields.return_token_ids.0 && run.prompts.len() == 1).then(|| ids(&run.prompts[0].request.prompt))
    }

    fn with_extras<'a>(&self, answer: Answer<'a>, run: &Run, times: &EdgeTimes) -> Answer<'a> {
        let of_prompts = |wanted: bool, value: &dyn Fn(&super::run::PromptRun) -> Value| {
            wanted.then(|| one_or_list(run.prompts.iter().map(value).collect()))
        };
        Answer {
            metrics: of_prompts(self.plan.fields.include_metrics.0, &|prompt| {
                serde_json::to_value(metrics(prompt, times, self.head.reader)).unwrap_or(Value::Null)
            }),
            kv_hashes: of_prompts(self.plan.fields.return_kv_hashes.0, &kv_hashes),
            ..answer
        }
    }

    fn usage(&self, run: &Run, is_final: bool) -> Usage {
        let (prompt_tokens, completion_tokens) = (run.prompt_tokens(), run.output_tokens());
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: is_final.then(|| PromptTokensDetails {
                cached_tokens: run.cached_tokens(),
            }),
        }
    }
}
