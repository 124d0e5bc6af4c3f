//! The whole engine on the false driver, with a tiny random model: the same tokens and KV whatever the chunks, the phase and who
//! draws, and the end of an engine whose device is in trouble. Each test in a process of its own, whose report must have no
//! finding, and no leak as long as the device works.
//!
//! `BATON_FALSE_CUDA` names the folder that `scripts/false-cuda` makes; without it `target/false-cuda` is taken.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_engine::{CudaEngine, CudaOptions, KvRoom, Mode, ProductChoice, open_cuda_engine};
use engine::{Engine, EngineError, EngineLimits, KvAccessError, KvMemory, Step};
use model_files::model::Model;
use model_files::test_kit::{TINY_VOCAB_SIZE, TinyModel};
use serde_json::Value;
use serving_core::ids::{Attempt, BlockId, NodeEpoch, RequestId, TokenId};
use serving_core::request::{Lane, Request, SamplingParams, StopConditions};
use serving_core::scheduler::{Admission, NodeLimits, Scheduler, SchedulerConfig, SchedulerEvent, Work};
use serving_core::time::Time;

const FOLDER: &str = "BATON_FALSE_CUDA";
const TASK: &str = "BATON_ENGINE_CHECK";
const PROMPT_TOKENS: u32 = 37;
const OUTPUT_TOKENS: u32 = 5;
const CHOICES: u32 = 2;
const BLOCK_TOKENS: u32 = 16;
/// Of a step or a copy of a device that hangs.
const STEP_LIMIT: Duration = Duration::from_secs(1);
/// They name files that the false driver looks for: see its settings.
const HANG: &str = "FALSE_CUDA_HANG";
const LOST: &str = "FALSE_CUDA_LOST";

/// Runs a task in a process of its own, whose device must have done everything right.
fn check(task: &str) {
    let report = report_of(task, &[]);
    assert_nothing_was_found(&report, task);
    assert!(
        report["launches"].as_u64().unwrap() > 0,
        "{task}: no kernel ran: {report}"
    );
    for (kind, count) in report["leaks"].as_object().unwrap() {
        assert_eq!(count.as_u64(), Some(0), "{task}: leaked {kind}");
    }
}

/// The same with a device that gets into trouble. It works only while the task waits for it, so that there is work left then.
fn check_in_trouble(task: &str) -> Value {
    let report = report_of(task, &[("FALSE_CUDA_IDLE_MS", "0")]);
    assert_nothing_was_found(&report, task);
    report
}

/// Runs a task in a process of its own, until it has ended by itself, and reads the false driver's report.
fn report_of(task: &str, variables: &[(&str, &str)]) -> Value {
    let usual = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("false-cuda");
    let folder = std::env::var_os(FOLDER).map_or(usual, PathBuf::from);
    assert!(
        folder.join("libcuda.so.1").exists(),
        "{} has no false driver: `scripts/false-cuda` makes it",
        folder.display()
    );
    let scratch = tempfile::tempdir().unwrap();
    let report = scratch.path().join("report.json");
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "one_task_in_a_process_of_its_own",
            "--ignored",
            "--nocapture",
        ])
        .env(TASK, task)
        .env(
            "BATON_KERNEL_CACHE",
            Path::new(env!("CARGO_TARGET_TMPDIR")).join("compiled-kernels"),
        )
        .env("BATON_CUDA_PATH", &folder)
        .env("FALSE_CUDA_CC", "9.0")
        .env("FALSE_CUDA_REPORT", &report)
        .env(HANG, scratch.path().join("hang"))
        .env(LOST, scratch.path().join("lost"))
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&child.stdout),
        String::from_utf8_lossy(&child.stderr)
    );
    assert!(child.status.success(), "{task}: {said}");
    let text =
        std::fs::read_to_string(report).unwrap_or_else(|error| panic!("{task}: the driver left no report: {error}"));
    serde_json::from_str(&text).unwrap()
}

fn assert_nothing_was_found(report: &Value, task: &str) {
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.is_empty(), "{task}: {findings:#?}");
}

fn options(mode: Mode, max_batch_tokens: u32) -> CudaOptions<'static> {
    CudaOptions {
        ordinal: 0,
        mode,
        products: ProductChoice::Own,
        limits: EngineLimits {
            max_batch_tokens,
            max_sequences: 4,
        },
        block_tokens: BLOCK_TOKENS,
        kv: KvRoom::Bytes(1 << 20),
        step_limit: None,
        fits: None,
        progress: None,
    }
}

fn open(mode: Mode, max_batch_tokens: u32) -> CudaEngine {
    open_with(options(mode, max_batch_tokens))
}

fn open_with(options: CudaOptions<'_>) -> CudaEngine {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let model = TinyModel {
        head_dim: 64,
        ..TinyModel::default()
    };
    model.build().write(&path).unwrap();
    open_cuda_engine(&Model::open(&path).unwrap(), options).unwrap()
}

fn request(logprobs: Option<u32>) -> Request {
    Request {
        id: RequestId(1),
        prompt: (0..PROMPT_TOKENS)
            .map(|at| TokenId(at * 7 % TINY_VOCAB_SIZE as u32))
            .collect(),
        client_prompt_tokens: PROMPT_TOKENS,
        constraint: Default::default(),
        sampling: SamplingParams {
            temperature: 0.9,
            top_p: 0.95,
            repetition_penalty: 1.1,
            ..SamplingParams::greedy()
        },
        stop: StopConditions {
            max_tokens: OUTPUT_TOKENS,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: CHOICES,
        seed: 42,
        logprobs,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: true,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(60),
    }
}

/// The tokens of each choice, and the hashes of the prompt's blocks.
type Answer = (Vec<Vec<TokenId>>, Vec<u64>);

/// A scheduler that has taken the request.
fn scheduler(engine: &CudaEngine, logprobs: Option<u32>) -> Scheduler {
    let limits = NodeLimits {
        kv_blocks: engine.kv().block_count(),
        block_tokens: BLOCK_TOKENS,
        max_batch_tokens: engine.limits().max_batch_tokens,
        max_sequences: engine.limits().max_sequences,
        max_model_tokens: 200,
        vocab_size: engine.model().vocab_size,
        prefix_cache: false,
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::decode(limits, Duration::from_secs(5)));
    let admission = Admission {
        request: Arc::new(request(logprobs)),
        attempt: Attempt(0),
        permits: 9,
        coordinator: NodeEpoch(1),
        work: Work::Whole,
    };
    scheduler.admit(Time::ZERO, admission).unwrap();
    scheduler
}

/// The whole prompt.
fn first_step(engine: &CudaEngine) -> Step {
    let mut scheduler = scheduler(engine, None);
    let mut step = Step::default();
    step.fill(&scheduler.next_step(Time::ZERO).unwrap());
    step
}

fn answer(engine: &mut CudaEngine, logprobs: Option<u32>) -> Answer {
    let kv = engine.kv().clone();
    let mut scheduler = scheduler(engine, logprobs);
    let (mut tokens, mut hashes, mut step) = (vec![Vec::new(); CHOICES as usize], Vec::new(), Step::default());
    while let Some(plan) = scheduler.next_step(Time::ZERO) {
        step.fill(&plan);
        engine.submit(step);
        let completed = engine.complete().unwrap();
        assert!(engine.times().is_some());
        step = completed.step;
        scheduler.step_done(Time::ZERO, &mut completed.result.unwrap().sampled);
        while let Some(event) = scheduler.take_event() {
            match event {
                SchedulerEvent::CopyBlock { from, to, .. } => kv.copy_block(from, to).unwrap(),
                SchedulerEvent::HashPrompt { blocks, .. } => hashes = kv.prompt_hashes(&blocks, PROMPT_TOKENS).unwrap(),
                SchedulerEvent::Token { event, .. } => tokens[event.choice.0 as usize].push(event.token),
                _ => {}
            }
        }
    }
    assert!(
        tokens.iter().all(|choice| choice.len() == OUTPUT_TOKENS as usize),
        "{tokens:?}"
    );
    (tokens, hashes)
}

/// From now on the device has the trouble of the variable.
fn make_file_of(variable: &str) {
    std::fs::write(std::env::var_os(variable).unwrap(), "").unwrap();
}

/// The device's step has failed, and there are no further ones.
fn assert_has_failed(engine: &mut CudaEngine) {
    let completed = engine.complete().unwrap();
    let result = completed.result;
    assert!(matches!(result, Err(EngineError::Device(_))), "{result:?}");
    assert!(engine.complete().is_none());
    engine.submit(completed.step);
    assert!(engine.complete().is_none());
}

/// Blocks that somebody has claimed.
fn busy_blocks(kv: &KvMemory) -> u32 {
    let mut bytes = vec![0; kv.geometry().block_bytes()];
    let mut busy = 0;
    for block in (0..kv.block_count()).map(BlockId) {
        let read = kv.export_block(block, &mut bytes);
        busy += u32::from(matches!(read, Err(KvAccessError::Busy { .. })));
    }
    busy
}

fn a_device_is_lost_in_a_step() {
    let mut engine = open(Mode::Invariant, 64);
    let kv = engine.kv().clone();
    let step = first_step(&engine);
    engine.submit(step);
    make_file_of(LOST);
    assert_has_failed(&mut engine);
    drop(engine);
    // It runs nothing any more.
    assert_eq!(busy_blocks(&kv), 0);
}

fn a_device_hangs_in_a_step() {
    let mut engine = open_with(CudaOptions {
        step_limit: Some(STEP_LIMIT),
        ..options(Mode::Invariant, 64)
    });
    let kv = engine.kv().clone();
    let step = first_step(&engine);
    engine.submit(step);
    make_file_of(HANG);
    let began = Instant::now();
    assert_has_failed(&mut engine);
    drop(engine);
    let took = began.elapsed();
    // Only the step is waited for, not what comes after it.
    assert!(took >= STEP_LIMIT && took < 2 * STEP_LIMIT, "{took:?}");
    // It may go on at any time.
    assert_eq!(busy_blocks(&kv), PROMPT_TOKENS.div_ceil(BLOCK_TOKENS));
}

fn a_device_hangs_in_a_copy() {
    let mut engine = open_with(CudaOptions {
        step_limit: Some(STEP_LIMIT),
        ..options(Mode::Invariant, 64)
    });
    let kv = engine.kv().clone();
    make_file_of(HANG);
    let copied = kv.copy_block(BlockId(0), BlockId(1));
    assert!(matches!(copied, Err(KvAccessError::Device(_))), "{copied:?}");
    let step = first_step(&engine);
    engine.submit(step);
    assert_has_failed(&mut engine);
}

#[test]
#[ignore = "the other tests start it with a task"]
fn one_task_in_a_process_of_its_own() {
    match std::env::var(TASK).expect("the parent names a task").as_str() {
        "invariant" => {
            let expected = answer(&mut open(Mode::Invariant, 64), None);
            assert!(!expected.1.is_empty());
            // Chunks of other lengths, and one token at a time as in decode.
            for max_batch_tokens in [16, 4] {
                assert_eq!(
                    answer(&mut open(Mode::Invariant, max_batch_tokens), None),
                    expected,
                    "{max_batch_tokens}"
                );
            }
        }
        "draws" => {
            let mut engine = open(Mode::Invariant, 64);
            let kv_bytes = engine.device_memory().unwrap().kv_bytes;
            assert!(
                kv_bytes.is_multiple_of(2 << 20),
                "{kv_bytes} bytes: other processes that open the pool see what lies behind it"
            );
            let on_device = answer(&mut engine, None);
            assert!(engine.graphs() > 0, "decode steps became graphs");
            assert_eq!(
                answer(&mut engine, Some(2)),
                on_device,
                "the host draws the same tokens"
            );
        }
        "fast" => {
            let mut engine = open(Mode::Fast, 64);
            let first = answer(&mut engine, None);
            assert!(engine.graphs() > 0);
            // The same sizes of steps give the same bits, with a graph or without one.
            assert_eq!(answer(&mut engine, None), first);
        }
        "library" => {
            let mut engine = open_with(CudaOptions {
                products: ProductChoice::Library,
                ..options(Mode::Fast, 64)
            });
            assert!(engine.library_shapes() > 0, "cuBLASLt computes some products");
            let greedy = answer(&mut engine, None);
            assert_eq!(answer(&mut engine, None), greedy);
        }
        "lost in a step" => a_device_is_lost_in_a_step(),
        "hanging in a step" => a_device_hangs_in_a_step(),
        "hanging in a copy" => a_device_hangs_in_a_copy(),
        other => panic!("there is no task {other}"),
    }
}

#[test]
fn invariant_tokens_and_kv_do_not_depend_on_chunks() {
    check("invariant");
}

#[test]
fn the_host_and_the_device_draw_the_same_tokens() {
    check("draws");
}

#[test]
fn the_fast_mode_repeats_itself_with_and_without_a_graph() {
    check("fast");
}

#[test]
fn products_of_cublaslt_are_used_where_they_may_be() {
    check("library");
}

#[test]
fn a_lost_device_ends_the_engine() {
    let report = check_in_trouble("lost in a step");
    assert_eq!(report["faults"].as_array().unwrap().len(), 1, "{report}");
}

#[test]
fn a_device_that_hangs_ends_the_engine_and_keeps_what_it_may_still_use() {
    for task in ["hanging in a step", "hanging in a copy"] {
        let report = check_in_trouble(task);
        for count in [&report["unfinished_operations"], &report["leaks"]["allocations"]] {
            assert!(count.as_u64().unwrap() > 0, "{task}: {report}");
        }
    }
}
