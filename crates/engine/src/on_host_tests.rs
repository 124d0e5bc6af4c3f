//! Tests of engines on the host: scheduler, stand-in engine and sampler together.

use std::sync::Arc;
use std::time::Duration;

use serving_core::ids::{Attempt, NodeEpoch, RequestId, TokenId};
use serving_core::request::{Lane, Request, SamplingParams, StopConditions, TokenEvent};
use serving_core::scheduler::{Admission, DraftCounts, NodeLimits, Scheduler, SchedulerConfig, SchedulerEvent, Work};
use serving_core::time::Time;

use super::*;
use crate::{EngineLimits, KvDtype, KvGeometry, StandInConfig, StandInEngine};

const VOCAB: u32 = 300;

fn engine(limits: EngineLimits, vocab_size: u32) -> impl Engine {
    let geometry = KvGeometry {
        layer_count: 2,
        kv_head_count: 1,
        head_dim: 8,
        block_tokens: 16,
        dtype: KvDtype::F16,
    };
    let config = StandInConfig {
        geometry,
        vocab_size,
        context_length: 1000,
        block_count: 40,
        kv_backing: Default::default(),
        limits,
        nanoseconds_per_token: 0,
        nanoseconds_per_step: 0,
        seed: 1,
    };
    OnHost::new(StandInEngine::new(config).expect("valid")).expect("small vocabulary")
}

fn request(prompt: u32, max_tokens: u32) -> Request {
    Request {
        id: RequestId(1),
        prompt: (0..prompt).map(|i| TokenId(i * 7 % VOCAB)).collect(),
        client_prompt_tokens: prompt,
        constraint: Default::default(),
        sampling: SamplingParams {
            temperature: 1.0,
            ..SamplingParams::greedy()
        },
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 1,
        seed: 42,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(60),
    }
}

fn node_limits(vocab_size: u32, max_batch_tokens: u32) -> NodeLimits {
    NodeLimits {
        kv_blocks: 40,
        block_tokens: 16,
        max_batch_tokens,
        max_sequences: 8,
        max_model_tokens: 1000,
        vocab_size,
        prefix_cache: true,
    }
}

fn admission(request: Arc<Request>) -> Admission {
    Admission {
        request,
        attempt: Attempt(0),
        permits: 9,
        coordinator: NodeEpoch(1),
        work: Work::Whole,
    }
}

/// What the model may say, and how many tokens an answer guesses at once.
#[derive(Clone, Copy)]
struct Setting {
    vocab_size: u32,
    speculative_tokens: u32,
}

/// Tokens per choice, and positions of the prompt that were scored.
fn run(request: Request, max_batch_tokens: u32) -> (Vec<Vec<TokenId>>, Vec<u32>) {
    let setting = Setting {
        vocab_size: VOCAB,
        speculative_tokens: 0,
    };
    let (events, scored, _) = run_in(setting, request, max_batch_tokens);
    let tokens = |choice: &Vec<TokenEvent>| choice.iter().map(|event| event.token).collect();
    (events.iter().map(tokens).collect(), scored)
}

/// The same with all that is told of a token, and what guesses have brought.
fn run_in(setting: Setting, request: Request, max_batch_tokens: u32) -> (Vec<Vec<TokenEvent>>, Vec<u32>, DraftCounts) {
    let engine_limits = EngineLimits {
        max_batch_tokens,
        max_sequences: 8,
    };
    let mut engine = engine(engine_limits, setting.vocab_size);
    let mut step = Step::default();
    let limits = node_limits(setting.vocab_size, max_batch_tokens);
    let mut scheduler = Scheduler::new(SchedulerConfig {
        speculative_tokens: setting.speculative_tokens,
        ..SchedulerConfig::decode(limits, Duration::from_secs(5))
    });
    let mut tokens = vec![Vec::new(); request.choice_count as usize];
    let mut scored = Vec::new();
    let admission = admission(Arc::new(request));
    scheduler.admit(Time::ZERO, admission).expect("fits");
    while let Some(plan) = scheduler.next_step(Time::ZERO) {
        step.fill(&plan);
        engine.submit(step);
        let completed = engine.complete().expect("one step is under way");
        let mut output = completed.result.expect("a good batch");
        step = completed.step;
        for chunk in &output.prompt_logprobs {
            scored.extend((chunk.first_position..).take(chunk.tokens.len()));
        }
        scheduler.step_done(Time::ZERO, &mut output.sampled);
        while let Some(event) = scheduler.take_event() {
            match event {
                SchedulerEvent::Token { event, .. } => tokens[event.choice.0 as usize].push(event),
                SchedulerEvent::CopyBlock { from, to, .. } => {
                    engine.kv().copy_block(from, to).expect("both are ours");
                }
                _ => {}
            }
        }
    }
    (tokens, scored, scheduler.draft_counts())
}

#[test]
fn a_step_that_is_cleared_holds_no_request() {
    let config = SchedulerConfig::decode(node_limits(VOCAB, 64), Duration::from_secs(5));
    let (mut scheduler, mut step) = (Scheduler::new(config), Step::default());
    let asked = Arc::new(request(50, 1));
    scheduler.admit(Time::ZERO, admission(asked.clone())).expect("fits");
    let holders = Arc::strong_count(&asked);
    step.fill(&scheduler.next_step(Time::ZERO).expect("a prompt to compute"));
    assert!(Arc::strong_count(&asked) > holders);
    step.clear();
    assert_eq!(Arc::strong_count(&asked), holders);
}

#[test]
fn chunk_size_does_not_change_tokens() {
    let whole = run(request(50, 20), 64).0;
    assert_eq!(whole[0].len(), 20);
    assert_eq!(run(request(50, 20), 8).0, whole);
}

#[test]
fn choices_draw_from_one_prompt_and_go_their_own_ways() {
    let mut three = request(50, 10);
    three.choice_count = 3;
    let (tokens, _) = run(three, 64);
    assert!(tokens.iter().all(|choice| choice.len() == 10));
    assert_ne!(tokens[0], tokens[1]);
    assert_eq!(
        tokens[0],
        run(request(50, 10), 64).0[0],
        "choice 0 is what a single choice is"
    );
}

#[test]
fn every_prompt_token_but_the_first_is_scored_once() {
    let mut echo = request(50, 0);
    echo.prompt_logprobs = Some(2);
    let (tokens, scored) = run(echo, 16);
    assert_eq!(scored, (1..50).collect::<Vec<u32>>());
    assert!(tokens[0].is_empty());
}

/// Of three tokens a guess is right now and then, whatever is drawn.
#[test]
fn guesses_change_neither_tokens_nor_logprobs() {
    let of_three = |change: fn(&mut Request)| {
        let mut request = request(50, 80);
        request.prompt = (0..50).map(|i| TokenId(i * 7 % 3)).collect();
        change(&mut request);
        request
    };
    for (what, request) in [
        ("sampled", of_three(|_| {})),
        ("greedy", of_three(|request| request.sampling.temperature = 0.0)),
        ("logprobs", of_three(|request| request.logprobs = Some(2))),
        ("three choices", of_three(|request| request.choice_count = 3)),
        (
            "min_tokens",
            of_three(|request| {
                request.stop.min_tokens = 60;
                request.stop.end_tokens = vec![TokenId(2)];
            }),
        ),
        (
            "penalties",
            of_three(|request| {
                request.sampling.repetition_penalty = 1.2;
                request.sampling.frequency_penalty = 1.5;
                request.sampling.presence_penalty = 0.3;
            }),
        ),
        ("echo", of_three(|request| request.prompt_logprobs = Some(1))),
    ] {
        let outcome = |speculative_tokens| {
            let setting = Setting {
                vocab_size: 3,
                speculative_tokens,
            };
            run_in(setting, request.clone(), 64)
        };
        let ((tokens, scored, none), (with, with_scored, counts)) = (outcome(0), outcome(6));
        assert_eq!((with, with_scored), (tokens, scored), "{what}");
        assert_eq!(none, DraftCounts::default());
        assert!(
            counts.accepted > 5 && counts.accepted < counts.drafted,
            "{what}: {counts:?}"
        );
    }
}
