//! The engine against the golden outputs: exact arithmetic and 8-bit inputs, through the prefill and the decode path.
//!
//! Thresholds are those of `integration-tests/data/golden/README.md`. "Decode path" is one row a step for
//! every output, after the prompt in chunks. The default run takes the short cases only for the exact decode path;
//! `BATON_FULL=1` takes all.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

mod common;

use common::{Golden, Setup, argmax, data, feed, goldens, open, open_file, setup, table};
use engine::{CpuEngine, LogitsWanted, Numerics, prompt_logprob};
use model_files::arch::SUPPORTED;
use model_files::model::Model;
use model_files::test_kit::TinyModel;
use serving_core::ids::TokenId;

/// What the default run's exact decode path covers, in total rows of a case.
const SHORT_CASE_ROWS: usize = 80;

#[derive(Default)]
struct Comparison {
    differences: Vec<f32>,
    flips: usize,
    largest_flip_margin: f32,
}

impl Comparison {
    fn step(&mut self, golden: &Golden, index: usize, logits: &[f32]) {
        let right = golden.output_token_ids[index];
        let logprob = prompt_logprob(logits, TokenId(right), 0).unwrap().logprob;
        self.differences.push((logprob - golden.logprob[index]).abs());
        if argmax(logits) != right {
            self.flips += 1;
            self.largest_flip_margin = self.largest_flip_margin.max(golden.margin[index]);
        }
    }

    fn quantile(&mut self, q: f64) -> f32 {
        self.differences.sort_by(f32::total_cmp);
        self.differences[((self.differences.len() - 1) as f64 * q).round() as usize]
    }

    fn report(&mut self, name: &str) {
        println!(
            "{name}: {} steps, |logprob difference| p50 {:.5} p99 {:.5} max {:.5}, {} flips, largest flip margin {:.4}",
            self.differences.len(),
            self.quantile(0.5),
            self.quantile(0.99),
            self.quantile(1.0),
            self.flips,
            self.largest_flip_margin
        );
    }

    fn assert_exact(&mut self) {
        assert!(self.quantile(1.0) <= 0.001);
        assert!(self.flips == 0 || self.largest_flip_margin < 0.002);
    }

    fn assert_int8(&mut self) {
        assert!(self.quantile(1.0) <= 0.4);
        assert!(self.quantile(0.99) <= 0.2);
        assert!(self.flips * 100 <= self.differences.len() * 3);
        assert!(self.largest_flip_margin < 0.3);
    }
}

fn is_full_run() -> bool {
    std::env::var_os("BATON_FULL").is_some()
}

fn teacher_forced(engine: &mut CpuEngine, cases: &[Golden], chunk: usize) -> Comparison {
    let mut comparison = Comparison::default();
    for case in cases {
        let tokens = case.forced();
        let first_wanted = case.prompt_token_ids.len() as u32 - 1;
        if chunk == 1 {
            let (prompt, outputs) = tokens.split_at(first_wanted as usize);
            let blocks = table(0, tokens.len());
            feed(engine, (prompt, 0, &blocks), (512, LogitsWanted::None), |_, _| {});
            feed(
                engine,
                (outputs, first_wanted, &blocks),
                (1, LogitsWanted::Last),
                |position, logits| {
                    comparison.step(case, (position - first_wanted) as usize, logits);
                },
            );
            continue;
        }
        feed(
            engine,
            (&tokens, 0, &table(0, tokens.len())),
            (chunk, LogitsWanted::All),
            |position, logits| {
                if let Some(index) = position.checked_sub(first_wanted) {
                    comparison.step(case, index as usize, logits);
                }
            },
        );
    }
    comparison
}

/// Greedy without forcing: each case may leave the golden text only at a step with a margin below `threshold`.
fn free_running(engine: &mut CpuEngine, cases: &[Golden], threshold: f32) -> (usize, usize) {
    let (mut followed, mut total) = (0, 0);
    for case in cases {
        let prompt: Vec<TokenId> = case.prompt_token_ids.iter().map(|id| TokenId(*id)).collect();
        let blocks = table(0, prompt.len() + case.output_token_ids.len());
        let mut next = 0;
        feed(engine, (&prompt, 0, &blocks), (512, LogitsWanted::Last), |_, logits| {
            next = argmax(logits)
        });
        total += case.output_token_ids.len();
        for (index, right) in case.output_token_ids.iter().enumerate() {
            if next != *right {
                let margin = case.margin[index];
                assert!(
                    margin < threshold,
                    "{}: token {index} is {next}, not {right}; margin {margin}",
                    case.id
                );
                break;
            }
            followed += 1;
            let position = (prompt.len() + index) as u32;
            let row = [TokenId(next)];
            feed(
                engine,
                (&row, position, &blocks),
                (1, LogitsWanted::Last),
                |_, logits| next = argmax(logits),
            );
        }
    }
    (followed, total)
}

#[test]
fn int8_prefill_and_decode_match_the_goldens() {
    let cases = goldens();
    let mut engine = open(setup(Numerics::Int8Blocks));
    let mut prefill = teacher_forced(&mut engine, &cases, 2_048);
    prefill.report("int8 blocks, prefill path");
    prefill.assert_int8();
    let mut decode = teacher_forced(&mut engine, &cases, 1);
    decode.report("int8 blocks, decode path");
    decode.assert_int8();
    assert!(
        prefill.differences == decode.differences,
        "decode steps give other bits than prefill"
    );
    let (followed, total) = free_running(&mut engine, &cases, 0.3);
    println!("int8 blocks, free running: {followed} of {total} tokens before the first difference of each case");
}

#[test]
fn exact_prefill_and_decode_match_the_goldens() {
    let mut cases = goldens();
    let mut engine = open(Setup {
        threads: 2,
        ..setup(Numerics::Exact)
    });
    let mut prefill = teacher_forced(&mut engine, &cases, 2_048);
    prefill.report("exact, prefill path");
    prefill.assert_exact();
    if !is_full_run() {
        cases.retain(|case| case.forced().len() <= SHORT_CASE_ROWS);
    }
    assert!(cases.len() >= 3);
    let mut decode = teacher_forced(&mut engine, &cases, 1);
    decode.report("exact, decode path");
    decode.assert_exact();
    let (followed, total) = free_running(&mut engine, &cases, 0.002);
    println!("exact, free running: {followed} of {total} tokens before the first difference of each case");
}

/// `integration-tests/python/reference_model.py` computed these goldens; its header has the command.
#[test]
fn every_architecture_matches_an_independent_program() {
    for architecture in SUPPORTED {
        let text = std::fs::read_to_string(data(&format!("architecture-{}.jsonl", architecture.name))).unwrap();
        for (tied, lines) in [true, false]
            .into_iter()
            .zip(text.lines().collect::<Vec<_>>().chunks(3))
        {
            let cases: Vec<Golden> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(cases.len(), 3);
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("tiny.gguf");
            TinyModel::of_golden(architecture, tied).build().write(&path).unwrap();
            let file = Model::open(&path).unwrap();
            let mut engine = open_file(&file, setup(Numerics::Exact));
            for chunk in [256, 1] {
                let mut comparison = teacher_forced(&mut engine, &cases, chunk);
                comparison.report(&format!("{}, tied {tied}, chunks of {chunk}", architecture.name));
                comparison.assert_exact();
            }
            free_running(&mut engine, &cases, 0.002);
        }
        assert_eq!(text.lines().count(), 6);
    }
}
