//! What an engine makes of a prompt: its own greedy tokens, or log-probabilities of given ones. By the scheduler, as in a node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use engine::{Engine, Step};
use serving_core::ids::{Attempt, NodeEpoch, RequestId, TokenId};
use serving_core::request::{Lane, Request, SamplingParams, StopConditions, TokenLogprobs};
use serving_core::scheduler::{Admission, NodeLimits, Scheduler, SchedulerConfig, SchedulerEvent, Work};
use serving_core::time::Time;

/// No peer sends anything here, so nothing waits so long.
const RESERVATION: Duration = Duration::from_secs(60);
/// More than a request takes here.
const PERMITS: u64 = 1_000;

/// For each token what the engine says of it, given those before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Forced {
    pub logprobs: Vec<f64>,
    /// The token that the engine likes best in its place.
    pub best: Vec<TokenId>,
}

/// The most likely tokens, one after the other. With `logprobs` the host draws them, and so many of the best are told.
///
/// # Errors
/// The engine has failed.
pub(super) fn greedy(
    engine: &mut dyn Engine,
    (prompt, count): (&[TokenId], u32),
    logprobs: Option<u32>,
) -> anyhow::Result<Vec<(TokenId, Option<TokenLogprobs>)>> {
    let request = Request {
        logprobs,
        ..request(prompt, count)
    };
    let answer = answer(engine, request)?;
    ensure!(
        answer.drawn.len() == count as usize,
        "{} of {count} tokens came",
        answer.drawn.len()
    );
    Ok(answer.drawn)
}

/// Scores outputs that somebody else has drawn, all in one prompt.
///
/// # Errors
/// The engine has failed.
pub(super) fn forced(engine: &mut dyn Engine, prompt: &[TokenId], outputs: &[TokenId]) -> anyhow::Result<Forced> {
    let whole = [prompt, outputs].concat();
    let request = Request {
        prompt_logprobs: Some(1),
        ..request(&whole, 0)
    };
    let scored = answer(engine, request)?.scored;
    let mut forced = Forced::default();
    for at in prompt.len()..whole.len() {
        let logprobs = u32::try_from(at).ok().and_then(|at| scored.get(&at));
        let logprobs = logprobs.with_context(|| format!("token {at} was not scored"))?;
        let best = logprobs.top.first().context("no best token came")?;
        forced.logprobs.push(f64::from(logprobs.logprob));
        forced.best.push(best.0);
    }
    Ok(forced)
}

fn request(prompt: &[TokenId], max_tokens: u32) -> Request {
    Request {
        id: RequestId(1),
        prompt: prompt.into(),
        client_prompt_tokens: u32::try_from(prompt.len()).unwrap_or(u32::MAX),
        constraint: Default::default(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 1,
        seed: 0,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(3_600),
    }
}

#[derive(Default)]
struct Answer {
    drawn: Vec<(TokenId, Option<TokenLogprobs>)>,
    /// By position in the prompt.
    scored: BTreeMap<u32, TokenLogprobs>,
}

fn answer(engine: &mut dyn Engine, request: Request) -> anyhow::Result<Answer> {
    let (facts, sizes) = (engine.model(), engine.limits());
    let limits = NodeLimits {
        kv_blocks: engine.kv().block_count(),
        block_tokens: facts.kv.block_tokens,
        max_batch_tokens: sizes.max_batch_tokens,
        max_sequences: sizes.max_sequences,
        max_model_tokens: facts.context_length,
        vocab_size: facts.vocab_size,
        prefix_cache: false,
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::decode(limits, RESERVATION));
    let admission = Admission {
        request: Arc::new(request),
        attempt: Attempt(0),
        permits: PERMITS,
        coordinator: NodeEpoch(1),
        work: Work::Whole,
    };
    scheduler
        .admit(Time::ZERO, admission)
        .context("the prompt is refused")?;
    let (mut answer, mut step) = (Answer::default(), Step::default());
    while let Some(plan) = scheduler.next_step(Time::ZERO) {
        step.fill(&plan);
        engine.submit(step);
        let completed = engine.complete().context("the engine has ended")?;
        step = completed.step;
        let mut output = completed.result.context("a step")?;
        ensure!(output.unscored.is_empty(), "log-probabilities are no numbers");
        for chunk in output.prompt_logprobs {
            answer.scored.extend((chunk.first_position..).zip(chunk.tokens));
        }
        scheduler.step_done(Time::ZERO, &mut output.sampled);
        while let Some(event) = scheduler.take_event() {
            match event {
                SchedulerEvent::Token { event, .. } => answer.drawn.push((event.token, event.logprobs)),
                SchedulerEvent::Failed { failure, .. } => bail!("the request failed: {}", failure.name()),
                _ => {}
            }
        }
    }
    Ok(answer)
}
