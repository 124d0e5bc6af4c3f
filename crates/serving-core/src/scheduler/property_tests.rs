//! Random histories of both schedulers over a KV memory that notices every foreign byte: blocks are conserved, never
//! shared by mistake, all come home, each request ends exactly once, and no token depends on what else happened.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::test_kit::{FakeKv, Model, key, limits, model, repetitive, request, sample, sample_by};
use super::*;
use crate::ids::{Attempt, BlockId, CacheTenant, ChoiceIndex, NodeEpoch, OutputIndex, TokenId, TransferId};
use crate::kv::prefix_log::{PrefixLog, PrefixReport};
use crate::node::NodeState;
use crate::request::{AttemptKey, Request, TokenEvent};
use crate::time::Time;

const BLOCKS: u32 = 12;
/// Of a mixed step, where it has a limit.
const MIXED: u32 = 5;

#[derive(Clone, Debug)]
enum Op {
    Open {
        prompt: u32,
        max_tokens: u32,
        choices: u32,
        is_local: bool,
        same_prompt: bool,
    },
    Frame(usize),
    Commit(usize),
    Cancel(usize),
    /// Begins a step, or ends the one that runs. Everything else may happen between the two.
    Step {
        breaks: bool,
    },
    /// Answers one outstanding `CloseTransfer` or push.
    PeerAnswers(usize),
    Tick(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let any_index = || 0usize..8;
    prop_oneof![
        4 => (1u32..20, 0u32..12, 1u32..4, any::<bool>(), any::<bool>()).prop_map(
            |(prompt, max_tokens, choices, is_local, same_prompt)| Op::Open { prompt, max_tokens, choices, is_local, same_prompt }
        ),
        2 => any_index().prop_map(Op::Frame),
        3 => any_index().prop_map(Op::Commit),
        1 => any_index().prop_map(Op::Cancel),
        12 => proptest::bool::weighted(0.03).prop_map(|breaks| Op::Step { breaks }),
        2 => any_index().prop_map(Op::PeerAnswers),
        1 => (0u64..3000).prop_map(Op::Tick),
    ]
}

fn make_request(id: u128, op: &Op) -> Option<(Request, bool)> {
    let Op::Open {
        prompt,
        max_tokens,
        choices,
        is_local,
        same_prompt,
    } = op
    else {
        return None;
    };
    let mut made = request(if *same_prompt { 0 } else { id }, *prompt, *max_tokens);
    made.id = crate::ids::RequestId(id);
    made.choice_count = *choices;
    made.report_kv_hashes = id.is_multiple_of(3);
    made.cache_tenant = [None, Some(CacheTenant(1)), Some(CacheTenant(2))][(id / 3 % 3) as usize];
    Some((made, *is_local))
}

fn history_of(model: Model, (request, choice): (&Request, ChoiceIndex), outputs: usize) -> Vec<TokenId> {
    let mut history = request.prompt.to_vec();
    for _ in 0..outputs {
        history.push(model(&history, choice));
    }
    history
}

/// One decode node with its peers, all scripted.
struct DecodeWorld {
    scheduler: Scheduler,
    model: Model,
    log: PrefixLog,
    kv: FakeKv,
    now: Time,
    open: BTreeMap<AttemptKey, (Request, Option<(TransferId, Admitted)>)>,
    ended: BTreeMap<AttemptKey, u32>,
    produced: BTreeMap<(AttemptKey, ChoiceIndex), u32>,
    /// Transfers whose closing is not answered, with the blocks a late frame may still write.
    closing: BTreeMap<TransferId, Vec<BlockId>>,
    next_id: u128,
    /// Whether steps with decode rows have a limit of prompt tokens.
    is_limited: bool,
}

impl DecodeWorld {
    /// With guesses, and a model whose text can be guessed, or without.
    fn new(prefix_cache: bool, guesses: bool) -> Self {
        let limits = NodeLimits {
            prefix_cache,
            ..limits(BLOCKS)
        };
        let config = SchedulerConfig {
            speculative_tokens: if guesses { 4 } else { 0 },
            mixed_step_tokens: if prefix_cache { None } else { NonZeroU32::new(MIXED) },
            tenant_cached_blocks: BLOCKS / 4,
            ..SchedulerConfig::decode(limits, Duration::from_secs(5))
        };
        Self {
            scheduler: Scheduler::new(config),
            model: if guesses { repetitive } else { model },
            log: PrefixLog::default(),
            kv: FakeKv::new(&limits),
            now: Time::ZERO,
            open: BTreeMap::new(),
            ended: BTreeMap::new(),
            produced: BTreeMap::new(),
            closing: BTreeMap::new(),
            next_id: 1,
            is_limited: !prefix_cache,
        }
    }

    fn nth(&self, index: usize) -> Option<AttemptKey> {
        self.open.keys().nth(index).copied()
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Open { .. } => self.open_one(op),
            Op::Frame(index) => {
                if let Some(key) = self.nth(*index) {
                    self.scheduler.frame_arrived(self.now, key);
                }
            }
            Op::Commit(index) => self.commit_one(*index),
            Op::Cancel(index) => {
                if let Some(key) = self.nth(*index) {
                    self.cancel(key);
                }
            }
            Op::Step { breaks } => self.step(*breaks),
            Op::PeerAnswers(index) => {
                if let Some(transfer) = self.closing.keys().nth(*index).copied() {
                    self.transfer_ended(transfer);
                }
            }
            Op::Tick(ms) => {
                self.now = self.now + Duration::from_millis(*ms);
                self.scheduler.tick(self.now);
            }
        }
        self.drain();
        self.scheduler.pool().check();
        if let Some(changes) = self.scheduler.take_prefix_changes() {
            self.log.apply(changes);
        }
        if let Some((PrefixReport::Whole(told), _)) = self.log.since(None) {
            assert_eq!(
                told,
                self.scheduler.pool().listed(),
                "coordinators are told of another cache"
            );
        }
        let status = self.scheduler.status(NodeState::Ready);
        assert!(status.permits_granted_total - status.permits_received_total <= u64::from(BLOCKS));
    }

    fn open_one(&mut self, op: &Op) {
        let id = self.next_id;
        self.next_id += 1;
        let Some((request, is_local)) = make_request(id, op) else {
            return;
        };
        let work = match is_local {
            true => Work::Whole,
            false => Work::Decode(TransferId(id)),
        };
        let admission = Admission {
            request: Arc::new(request.clone()),
            attempt: Attempt(0),
            permits: 3,
            coordinator: NodeEpoch(1),
            work,
        };
        if let Ok(opened) = self.scheduler.admit(self.now, admission) {
            let transfer = (!is_local).then_some((TransferId(id), opened));
            self.open.insert(key(id), (request, transfer));
        }
    }

    fn commit_one(&mut self, index: usize) {
        let Some(key) = self.nth(index) else {
            return;
        };
        let (request, Some((transfer, opened))) = &self.open[&key] else {
            return;
        };
        if !self.scheduler.keys().any(|here| here == key) || self.closing.contains_key(transfer) {
            return;
        }
        let firsts = (0..request.choice_count).map(|choice| TokenEvent {
            choice: ChoiceIndex(choice),
            index: OutputIndex(0),
            token: (self.model)(&request.prompt, ChoiceIndex(choice)),
            logprobs: None,
            finish: None,
        });
        let commit = Commit {
            key,
            transfer: *transfer,
            last_frame_at: self.now,
            first_tokens: firsts.collect(),
        };
        if self.produced.contains_key(&(key, ChoiceIndex(0))) {
            assert!(self.scheduler.commit(self.now, commit).is_err(), "a second commit");
            return;
        }
        let block_tokens = limits(BLOCKS).block_tokens as usize;
        let sent = request.prompt.chunks(block_tokens).skip(opened.prefix_blocks as usize);
        for ((block, _), tokens) in opened.ticket_blocks.iter().zip(sent) {
            self.kv.fill(*block, tokens);
        }
        self.scheduler
            .commit(self.now, commit)
            .expect("a whole transfer commits");
    }

    fn cancel(&mut self, key: AttemptKey) {
        if self.scheduler.cancel(key) {
            *self.ended.entry(key).or_default() += 1;
            self.open.remove(&key);
        }
    }

    fn step(&mut self, breaks: bool) {
        let limits = NodeLimits {
            prefix_cache: true,
            ..limits(BLOCKS)
        };
        let Some(plan) = self.scheduler.running_step() else {
            self.scheduler.next_step(self.now);
            return;
        };
        let chunks = plan.prompt_token_count();
        let decodes =
            |(index, row): (usize, &PlannedRow)| !row.is_chunk() && row.draws > 0 && plan.output_index(index).0 > 0;
        let is_mixed = plan.rows().iter().enumerate().any(decodes);
        assert!(
            !self.is_limited || !is_mixed || chunks <= MIXED,
            "{chunks} tokens of prompts beside rows that decode"
        );
        self.kv.run(&plan);
        let mut sampled = sample_by(self.model, &plan, &limits);
        if breaks {
            self.scheduler.step_failed("the test breaks it");
        } else {
            self.scheduler.step_done(self.now, &mut sampled);
        }
    }

    /// A frame that was on its way lands, and only then is the transfer over.
    fn transfer_ended(&mut self, transfer: TransferId) {
        for block in self.closing.remove(&transfer).unwrap_or_default() {
            self.kv.fill(block, &[TokenId(u32::MAX); 4]);
        }
        self.scheduler.transfer_ended(transfer);
    }

    fn drain(&mut self) {
        while let Some(event) = self.scheduler.take_event() {
            match event {
                SchedulerEvent::CopyBlock { from, to, .. } => self.kv.copy(from, to),
                SchedulerEvent::HashPrompt { key, blocks } => {
                    if let Some((request, _)) = self.open.get(&key) {
                        self.check_prompt(request.clone(), &blocks);
                    }
                }
                SchedulerEvent::Committed { .. } => {}
                SchedulerEvent::BlocksReady { .. } | SchedulerEvent::Held { .. } | SchedulerEvent::AbortPush { .. } => {
                    panic!("a decode node pushes nothing: {event:?}")
                }
                SchedulerEvent::Token { key, event } => self.check_token(key, &event),
                SchedulerEvent::Finished { key, .. } => {
                    if let Some((request, _)) = self.open.remove(&key) {
                        for choice in (0..request.choice_count).map(ChoiceIndex) {
                            let produced = self.produced.get(&(key, choice)).copied().unwrap_or(0);
                            assert_eq!(produced, request.stop.max_tokens);
                        }
                        *self.ended.entry(key).or_default() += 1;
                    }
                }
                SchedulerEvent::Failed { key, .. } => {
                    if self.open.remove(&key).is_some() {
                        *self.ended.entry(key).or_default() += 1;
                    }
                }
                SchedulerEvent::CloseTransfer { transfer } => {
                    let blocks = self.quarantined_blocks(transfer);
                    self.closing.entry(transfer).or_insert(blocks);
                }
            }
        }
    }

    fn quarantined_blocks(&self, transfer: TransferId) -> Vec<BlockId> {
        self.scheduler.quarantine[&Quarantined::Transfer(transfer)]
            .iter()
            .map(|handle| handle.block())
            .collect()
    }

    fn check_prompt(&self, request: Request, blocks: &[BlockId]) {
        for (block, tokens) in blocks.iter().zip(request.prompt.chunks(4)) {
            let held: Vec<_> = self.kv.block(*block)[..tokens.len()].to_vec();
            assert_eq!(held, tokens.iter().copied().map(Some).collect::<Vec<_>>());
        }
    }

    fn check_token(&mut self, key: AttemptKey, event: &TokenEvent) {
        let Some((request, _)) = self.open.get(&key) else {
            return;
        };
        let produced = self.produced.entry((key, event.choice)).or_default();
        assert_eq!(event.index.0, *produced, "each index once and in order");
        *produced += 1;
        let history = history_of(self.model, (request, event.choice), *produced as usize);
        assert_eq!(
            Some(&event.token),
            history.last(),
            "a token depends on something else than its history"
        );
    }

    fn quiesce(mut self) {
        for _ in 0..2000 {
            if self.open.is_empty() && self.closing.is_empty() && self.scheduler.running_step().is_none() {
                break;
            }
            self.step(false);
            self.apply(&Op::Tick(50));
            while let Some(transfer) = self.closing.keys().next().copied() {
                self.transfer_ended(transfer);
            }
        }
        assert!(self.open.is_empty(), "left behind: {:?}", self.open.keys());
        assert!(self.ended.values().all(|times| *times == 1), "{:?}", self.ended);
        assert_quiet(self.scheduler.pool().counts());
    }
}

fn assert_quiet(counts: crate::node::KvBlockCounts) {
    assert_eq!(
        (counts.active, counts.reserved, counts.in_transfer, counts.quarantined),
        (0, 0, 0, 0)
    );
    assert_eq!(counts.free + counts.cached, BLOCKS);
}

/// Blocks given to the push of one request, with the bytes they had then.
type Pushed = Vec<(BlockId, Vec<Option<TokenId>>)>;

/// One prefill node; every push is remembered with the bytes it was promised.
struct PrefillWorld {
    scheduler: Scheduler,
    kv: FakeKv,
    now: Time,
    open: BTreeMap<AttemptKey, Request>,
    ended: BTreeMap<AttemptKey, u32>,
    pushes: BTreeMap<AttemptKey, Pushed>,
    held: Vec<AttemptKey>,
    /// Pushes that were told to stop since the last tick began.
    asked: BTreeSet<AttemptKey>,
    next_id: u128,
}

impl PrefillWorld {
    fn new(prefix_cache: bool) -> Self {
        let limits = NodeLimits {
            prefix_cache,
            ..limits(BLOCKS)
        };
        let config = SchedulerConfig {
            tenant_cached_blocks: BLOCKS / 4,
            ..SchedulerConfig::prefill(limits, Duration::from_secs(5), NonZeroU32::new(1))
        };
        Self {
            scheduler: Scheduler::new(config),
            kv: FakeKv::new(&limits),
            now: Time::ZERO,
            open: BTreeMap::new(),
            ended: BTreeMap::new(),
            pushes: BTreeMap::new(),
            held: Vec::new(),
            asked: BTreeSet::new(),
            next_id: 1,
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Open { .. } => {
                let id = self.next_id;
                self.next_id += 1;
                if let Some((request, is_local)) = make_request(id, op) {
                    let push = PushPlan {
                        skip_blocks: u32::from(id.is_multiple_of(2)),
                        is_streamed: id.is_multiple_of(3),
                    };
                    let admission = Admission {
                        permits: u64::from(request.prompt_tokens()),
                        coordinator: NodeEpoch(1),
                        request: Arc::new(request.clone()),
                        attempt: Attempt(0),
                        work: Work::Prefill((!is_local).then_some(push)),
                    };
                    if self.scheduler.admit(self.now, admission).is_ok() {
                        self.open.insert(key(id), request);
                    }
                }
            }
            Op::Cancel(index) => self.cancel(*index),
            Op::Step { breaks } => self.step(*breaks),
            Op::Frame(index) | Op::Commit(index) | Op::PeerAnswers(index) => {
                let reason = ("stalled".to_owned(), "the test says so".to_owned());
                let end = match op {
                    Op::Frame(_) => PushEnd::Failed {
                        reason: reason.0,
                        detail: reason.1,
                    },
                    _ => PushEnd::Acked,
                };
                if let Some(key) = self.pushes.keys().nth(*index).copied() {
                    let is_over = self.held.contains(&key) || !self.open.contains_key(&key);
                    if is_over || matches!(end, PushEnd::Failed { .. }) {
                        self.push_ended(key, end);
                    }
                }
            }
            Op::Tick(ms) => {
                if ms.is_multiple_of(2) {
                    let pushing = self.pushes.keys();
                    pushing.for_each(|key| self.scheduler.push_progressed(self.now, *key));
                }
                self.now = self.now + Duration::from_millis(*ms);
                self.asked.clear();
                self.scheduler.tick(self.now);
                self.drain();
                // The end of a request that is in the running step comes with the step's.
                let here: BTreeSet<AttemptKey> = self.scheduler.keys().collect();
                let gone = self.pushes.keys().filter(|key| !here.contains(key));
                let forgotten: Vec<_> = gone.filter(|key| !self.asked.contains(key)).collect();
                assert!(forgotten.is_empty(), "quarantined and not reviewed: {forgotten:?}");
            }
        }
        self.drain();
        self.scheduler.pool().check();
    }

    fn cancel(&mut self, index: usize) {
        if let Some(key) = self.open.keys().nth(index).copied()
            && self.scheduler.cancel(key)
        {
            *self.ended.entry(key).or_default() += 1;
            self.open.remove(&key);
        }
    }

    fn step(&mut self, breaks: bool) {
        let Some(plan) = self.scheduler.running_step() else {
            self.scheduler.next_step(self.now);
            return;
        };
        self.kv.run(&plan);
        let mut sampled = sample(&plan, &limits(BLOCKS));
        if breaks {
            self.scheduler.step_failed("the test breaks it");
        } else {
            self.scheduler.step_done(self.now, &mut sampled);
        }
        self.drain();
    }

    fn push_ended(&mut self, key: AttemptKey, end: PushEnd) {
        for (block, bytes) in self.pushes.remove(&key).unwrap_or_default() {
            assert_eq!(self.kv.block(block), bytes, "a block changed while it was pushed");
        }
        self.scheduler.push_ended(key, end);
    }

    fn drain(&mut self) {
        while let Some(event) = self.scheduler.take_event() {
            match event {
                SchedulerEvent::BlocksReady { key, blocks } => {
                    let held = blocks
                        .iter()
                        .map(|pushed| (pushed.block, self.kv.block(pushed.block).to_vec()));
                    self.pushes.entry(key).or_default().extend(held);
                }
                SchedulerEvent::Token { key, event } => {
                    if let Some(request) = self.open.get(&key) {
                        assert_eq!(event.token, model(&request.prompt, event.choice));
                    }
                }
                SchedulerEvent::Held { key, .. } => {
                    if self.open.contains_key(&key) {
                        self.held.push(key);
                    }
                }
                SchedulerEvent::AbortPush { key } => {
                    self.asked.insert(key);
                }
                SchedulerEvent::HashPrompt { key, blocks } => {
                    assert!(!self.pushes.contains_key(&key) || !self.held.contains(&key));
                    assert!(!blocks.is_empty());
                }
                SchedulerEvent::Committed { .. }
                | SchedulerEvent::CloseTransfer { .. }
                | SchedulerEvent::CopyBlock { .. } => {
                    panic!("a prefill node receives nothing and copies nothing: {event:?}")
                }
                SchedulerEvent::Finished { key, .. } | SchedulerEvent::Failed { key, .. } => {
                    if self.open.remove(&key).is_some() {
                        *self.ended.entry(key).or_default() += 1;
                    }
                }
            }
        }
    }

    fn quiesce(mut self) {
        for _ in 0..1000 {
            if self.open.is_empty() && self.pushes.is_empty() && self.scheduler.running_step().is_none() {
                break;
            }
            self.step(false);
            self.apply(&Op::Tick(50));
            let mut over: Vec<AttemptKey> = self.pushes.keys().copied().collect();
            over.retain(|key| self.held.contains(key) || !self.open.contains_key(key));
            for key in over {
                self.push_ended(key, PushEnd::Acked);
            }
            self.drain();
        }
        assert!(self.open.is_empty(), "left behind: {:?}", self.open.keys());
        assert!(self.ended.values().all(|times| *times == 1), "{:?}", self.ended);
        assert_quiet(self.scheduler.pool().counts());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decode_node_conserves_blocks_and_tokens(
        ops in proptest::collection::vec(op(), 1..120),
        prefix_cache: bool,
        guesses: bool,
    ) {
        let mut world = DecodeWorld::new(prefix_cache, guesses);
        for op in &ops {
            world.apply(op);
        }
        world.quiesce();
    }

    #[test]
    fn prefill_node_conserves_blocks_and_tokens(ops in proptest::collection::vec(op(), 1..120), prefix_cache: bool) {
        let mut world = PrefillWorld::new(prefix_cache);
        for op in &ops {
            world.apply(op);
        }
        world.quiesce();
    }
}
