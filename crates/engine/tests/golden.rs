//! The engine against the golden outputs: exact arithmetic and 8-bit inputs, through the prefill and the decode path.
//!
//! Thresholds are those of `integration-tests/data/golden/README.md`. "Decode path" is one row a step for
//! every output, after the prompt in chunks. The default run takes only the short cases for exact arithmetic, and all but the longest
//! for 8-bit inputs; `BATON_FULL=1` takes all. The cluster's tests (`goldens.rs`) take over HTTP what they can in the time: all for
//! 8-bit inputs, all but the four longest for exact arithmetic. They also run freely.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

mod common;

use common::{Golden, argmax, data, feed, file_of, goldens, open, open_file, setup, table};
use engine::{CpuEngine, LogitsWanted, Numerics, prompt_logprob};
use model_files::arch::SUPPORTED;
use model_files::gguf::GgmlType;
use model_files::test_kit::{GoldenModel, golden_models};
use serving_core::ids::TokenId;

/// What the default run covers of exact arithmetic, in total rows of a case.
const SHORT_CASE_ROWS: usize = 80;
/// The same for 8-bit inputs. The one case that is longer takes as long as all others.
const INT8_CASE_ROWS: usize = 1_000;

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
        assert!(self.quantile(1.0) <= 0.25);
        assert!(self.quantile(0.99) <= 0.15);
        assert!(self.flips * 100 <= self.differences.len() * 3);
        assert!(self.largest_flip_margin < 0.3);
    }
}

/// The cases of the default run, or all.
fn cases_within(rows_max: usize) -> Vec<Golden> {
    let mut cases = goldens();
    if std::env::var_os("BATON_FULL").is_none() {
        cases.retain(|case| case.forced().len() <= rows_max);
    }
    assert!(cases.len() >= 3);
    cases
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

/// The prefill path of the real model's cases, and the decode path after it.
fn both_paths(engine: &mut CpuEngine, cases: &[Golden]) -> (Comparison, Comparison) {
    let (mut prefill, mut decode) = (Comparison::default(), Comparison::default());
    for case in cases {
        let tokens = case.forced();
        let blocks = table(0, tokens.len());
        let first_wanted = case.prompt_token_ids.len() as u32 - 1;
        let whole = (&tokens[..], 0, &blocks[..]);
        feed(engine, whole, (2_048, LogitsWanted::All), |position, logits| {
            if let Some(index) = position.checked_sub(first_wanted) {
                prefill.step(case, index as usize, logits);
            }
        });
        // The KV of the prompt is there. Each row writes its own again before anything reads it.
        let outputs = (&tokens[first_wanted as usize..], first_wanted, &blocks[..]);
        feed(engine, outputs, (1, LogitsWanted::Last), |position, logits| {
            decode.step(case, (position - first_wanted) as usize, logits);
        });
    }
    (prefill, decode)
}

/// Greedy without forcing: each case may leave the golden text only at a step with a margin below `threshold`.
fn free_running(engine: &mut CpuEngine, cases: &[Golden], threshold: f32) {
    for case in cases {
        let prompt: Vec<TokenId> = case.prompt_token_ids.iter().map(|id| TokenId(*id)).collect();
        let blocks = table(0, prompt.len() + case.output_token_ids.len());
        let mut next = 0;
        feed(engine, (&prompt, 0, &blocks), (512, LogitsWanted::Last), |_, logits| {
            next = argmax(logits)
        });
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
}

#[test]
fn int8_prefill_and_decode_match_the_goldens() {
    let mut engine = open(setup(Numerics::Int8Blocks));
    let (mut prefill, mut decode) = both_paths(&mut engine, &cases_within(INT8_CASE_ROWS));
    prefill.report("int8 blocks, prefill path");
    prefill.assert_int8();
    decode.report("int8 blocks, decode path");
    decode.assert_int8();
    assert!(
        prefill.differences == decode.differences,
        "decode steps give other bits than prefill"
    );
}

#[test]
fn exact_prefill_and_decode_match_the_goldens() {
    let mut engine = open(setup(Numerics::Exact));
    let (mut prefill, mut decode) = both_paths(&mut engine, &cases_within(SHORT_CASE_ROWS));
    prefill.report("exact, prefill path");
    prefill.assert_exact();
    decode.report("exact, decode path");
    decode.assert_exact();
}

/// The lines of a golden file that belong to one tiny model.
fn cases_of(model: &GoldenModel) -> Vec<Golden> {
    let text = std::fs::read_to_string(data(&format!("{}.jsonl", model.file))).unwrap();
    let cases = text.lines().map(|line| serde_json::from_str::<Golden>(line).unwrap());
    let cases: Vec<Golden> = cases.filter(|case| case.model.as_ref() == Some(&model.name)).collect();
    assert_eq!(cases.len(), 3, "{} {}", model.file, model.name);
    cases
}

/// The largest difference of any logit of each case's last step, teacher-forced.
fn last_logits_difference(engine: &mut CpuEngine, cases: &[Golden], chunk: usize) -> f32 {
    let mut largest = 0.0f32;
    for case in cases {
        let (tokens, last) = (case.forced(), case.forced().len() as u32 - 1);
        let blocks = table(0, tokens.len());
        let mut see = |position, logits: &mut [f32]| {
            if position == last {
                assert_eq!(logits.len(), case.last_logits.len());
                for (logit, right) in logits.iter().zip(&case.last_logits) {
                    // A NaN must not vanish in `max`.
                    assert!(logit.is_finite());
                    largest = largest.max((logit - right).abs());
                }
            }
        };
        feed(engine, (&tokens, 0, &blocks), (chunk, LogitsWanted::Last), &mut see);
    }
    largest
}

/// `integration-tests/python/reference_model.py` computed these goldens; its header has the command.
#[test]
fn every_architecture_and_type_matches_an_independent_program() {
    let models = golden_models();
    for architecture in SUPPORTED {
        let file = format!("architecture-{}", architecture.name);
        assert!(models.iter().any(|model| model.file == file), "{file}");
    }
    for kind in GgmlType::ALL {
        assert!(models.iter().any(|model| model.name == kind.name().to_lowercase()));
    }
    for model in models {
        let cases = cases_of(&model);
        let mut engine = open_file(&file_of(&model.builder), setup(Numerics::Exact));
        for chunk in [256, 1] {
            let mut comparison = teacher_forced(&mut engine, &cases, chunk);
            let largest = last_logits_difference(&mut engine, &cases, chunk);
            comparison.report(&format!("{} {}, chunks of {chunk}", model.file, model.name));
            println!("largest logit difference {largest:.6}");
            comparison.assert_exact();
            assert!(largest <= 1e-3, "{} {}: {largest}", model.file, model.name);
        }
        free_running(&mut engine, &cases, 0.002);
    }
}

/// A text that the model itself would write: drawn token by token from its distribution, by numbers that the seed fixes.
fn drawn_text(engine: &mut CpuEngine, seed: u32, length: usize) -> Vec<TokenId> {
    let blocks = table(0, length);
    let mut text = vec![TokenId(seed % 259)];
    while text.len() < length {
        let position = text.len() as u32 - 1;
        // Knuth's multiplicative hash, as a share of one.
        let share = f64::from((position + 1000 * seed + 1).wrapping_mul(2_654_435_761)) / 2f64.powi(32);
        let mut next = 0;
        let draw = |_, logits: &mut [f32]| {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights = logits.iter().map(|logit| f64::from(logit - largest).exp());
            let mut left = share * weights.clone().sum::<f64>();
            next = weights
                .take_while(|weight| {
                    left -= weight;
                    left > 0.0
                })
                .count()
                .min(258) as u32;
        };
        feed(
            engine,
            (&text[position as usize..], position, &blocks),
            (1, LogitsWanted::Last),
            draw,
        );
        text.push(TokenId(next));
    }
    text
}

/// The engine's numerics against the exact ones: the perplexity of three texts that each model draws.
#[test]
fn the_default_numerics_stay_within_one_percent_of_the_exact_ones() {
    const LENGTH: usize = 250;
    for model in golden_models() {
        let file = file_of(&model.builder);
        let mut engine = open_file(&file, setup(Numerics::Exact));
        let texts = [1, 2, 3].map(|seed| drawn_text(&mut engine, seed, LENGTH));
        let perplexity = |numerics| {
            let mut engine = open_file(&file, setup(numerics));
            let mut sum = 0.0;
            for text in &texts {
                let see = |position: u32, logits: &mut [f32]| {
                    if let Some(next) = text.get(position as usize + 1) {
                        sum -= f64::from(prompt_logprob(logits, *next, 0).unwrap().logprob);
                    }
                };
                feed(&mut engine, (text, 0, &table(0, LENGTH)), (64, LogitsWanted::All), see);
            }
            (sum / (texts.len() * (LENGTH - 1)) as f64).exp()
        };
        let (exact, int8) = (perplexity(Numerics::Exact), perplexity(Numerics::Int8Blocks));
        let change = int8 / exact - 1.0;
        println!(
            "{} {}: perplexity {exact:.2}, {:+.3} %",
            model.file,
            model.name,
            change * 100.0
        );
        assert!(exact < 200.0, "{} {}: the model knows nothing", model.file, model.name);
        assert!(change.abs() <= 0.01, "{} {}: {exact} {int8}", model.file, model.name);
    }
}
