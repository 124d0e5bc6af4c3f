//! One engine on a bench: the real scheduler plans its steps, and each step is timed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::{Engine, Step};
use serving_core::ids::{Attempt, NodeEpoch, RequestId, TokenId};
use serving_core::request::{Lane, Request, SamplingParams, StopConditions};
use serving_core::scheduler::{Admission, NodeLimits, Scheduler, SchedulerConfig, Work};
use serving_core::time::Time;
use simulator::costs::StepShape;

/// More than any measurement takes.
const TIME_LIMIT: Duration = Duration::from_secs(3_600);

pub(super) struct Rig {
    engine: Box<dyn Engine>,
    step: Step,
    next_request: u128,
}

impl std::fmt::Debug for Rig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rig").finish_non_exhaustive()
    }
}

/// What one step was and how long it took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timed {
    pub shape: StepShape,
    pub seconds: f64,
}

/// Sequences on the engine, until they have ended.
pub(super) struct Load<'a> {
    rig: &'a mut Rig,
    scheduler: Scheduler,
}

impl Rig {
    pub fn new(engine: Box<dyn Engine>) -> Self {
        Self {
            engine,
            step: Step::default(),
            next_request: 0,
        }
    }

    pub fn kv_bytes_per_token(&self) -> u64 {
        let geometry = self.engine.kv().geometry();
        geometry.block_bytes() as u64 / u64::from(geometry.block_tokens)
    }

    /// Whether so many sequences of so many tokens have room.
    pub fn has_room(&self, sequences: u32, tokens: u32) -> bool {
        let (kv, model) = (self.engine.kv(), self.engine.model());
        let blocks = u64::from(tokens.div_ceil(kv.geometry().block_tokens) + 1) * u64::from(sequences);
        blocks <= u64::from(kv.block_count()) && tokens < model.context_length
    }

    /// An empty engine whose steps have at most so many tokens.
    pub fn load(&mut self, max_batch_tokens: u32) -> Load<'_> {
        let limits = NodeLimits {
            kv_blocks: self.engine.kv().block_count(),
            block_tokens: self.engine.kv().geometry().block_tokens,
            max_batch_tokens,
            max_sequences: self.engine.limits().max_sequences,
            max_model_tokens: self.engine.model().context_length,
            vocab_size: self.engine.model().vocab_size,
            prefix_cache: false,
        };
        Load {
            scheduler: Scheduler::new(SchedulerConfig::decode(limits, TIME_LIMIT)),
            rig: self,
        }
    }
}

impl Load<'_> {
    /// A prompt of any tokens, and how many tokens follow it.
    pub fn add(&mut self, prompt_tokens: u32, output_tokens: u32) -> anyhow::Result<()> {
        let rig = &mut *self.rig;
        rig.next_request += 1;
        let vocab = u64::from(rig.engine.model().vocab_size);
        let seed = rig.next_request as u64;
        // Any ids will do; neighbours must differ, as in a text.
        let token = |i: u32| TokenId(((u64::from(i) * 7_919 + seed * 104_729) % vocab) as u32);
        let prompt: Arc<[TokenId]> = (0..prompt_tokens).map(token).collect();
        let request = Request {
            id: RequestId(rig.next_request),
            client_prompt_tokens: prompt_tokens,
            constraint: Default::default(),
            prompt,
            sampling: SamplingParams::greedy(),
            stop: StopConditions {
                max_tokens: output_tokens,
                min_tokens: 0,
                end_tokens: Vec::new(),
                stop_token_ids: Vec::new(),
            },
            choice_count: 1,
            seed,
            logprobs: None,
            prompt_logprobs: None,
            prefix_salt: None,
            cache_tenant: None,
            report_kv_hashes: false,
            share: None,
            priority: 0,
            lane: Lane::Interactive,
            time_limit: TIME_LIMIT,
        };
        let admission = Admission {
            request: Arc::new(request),
            attempt: Attempt(0),
            permits: 0,
            coordinator: NodeEpoch(0),
            work: Work::Whole,
        };
        self.scheduler.admit(Time::ZERO, admission)?;
        Ok(())
    }

    /// The next step; `None` when every sequence has ended.
    pub fn step(&mut self) -> anyhow::Result<Option<Timed>> {
        let rig = &mut *self.rig;
        self.scheduler.next_step(Time::ZERO);
        let Some(plan) = self.scheduler.running_step() else {
            return Ok(None);
        };
        let mut shape = StepShape::default();
        for row in plan.rows() {
            shape.add(row.token_count, row.first_position, row.draws);
        }
        rig.step.fill(&plan);
        let step = std::mem::take(&mut rig.step);
        let began = Instant::now();
        rig.engine.submit(step);
        let completed = rig.engine.complete().context("the engine lost a step")?;
        let seconds = began.elapsed().as_secs_f64();
        rig.step = completed.step;
        let mut output = completed.result?;
        self.scheduler.step_done(Time::ZERO, &mut output.sampled);
        // Tokens go to nobody, and no KV is copied: each request has one choice.
        while self.scheduler.take_event().is_some() {}
        Ok(Some(Timed { shape, seconds }))
    }
}
