//! Perplexity of both numerics on the first chunks of the golden text; `docs/measurements/engine-accuracy.md` has the whole text.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

mod common;
#[path = "common/perplexity.rs"]
mod perplexity;

use common::{data, open, setup};
use engine::Numerics;
use model_files::model::Model;
use model_files::test_kit::model_path;
use perplexity::{Score, score_chunk};

/// Perplexity after the first two chunks of 512 in the full exact run, whose total of 43.390 over 42 chunks agrees
/// with the reference's 43.391.
const EXACT_AFTER_TWO_CHUNKS: f64 = 35.1923;

fn after_two_chunks(numerics: Numerics) -> f64 {
    let text = std::fs::read_to_string(data("ppl.txt")).unwrap();
    let file = Model::open(&model_path()).unwrap();
    let tokens = file.tokenizer().unwrap().encode(&text, false).unwrap();
    assert_eq!(tokens.len() / 512, 42, "the text must be cut as the reference cut it");
    let (mut engine, mut score) = (open(setup(numerics)), Score::default());
    for chunk in tokens.chunks_exact(512).take(2) {
        score_chunk(&mut engine, chunk, &mut score).unwrap();
    }
    assert_eq!(score.tokens, 2 * 255);
    println!(
        "{}: perplexity {:.4} after two chunks",
        numerics.id(),
        score.perplexity()
    );
    score.perplexity()
}

#[test]
fn exact_arithmetic_matches_the_reference() {
    let ratio = after_two_chunks(Numerics::Exact) / EXACT_AFTER_TWO_CHUNKS;
    assert!((ratio - 1.0).abs() < 0.001, "{ratio}");
}

#[test]
fn int8_blocks_stay_within_two_thousandths() {
    // Over the whole text it is 1.5 thousandths. The bits are the same on every machine, so nothing scatters.
    let ratio = after_two_chunks(Numerics::Int8Blocks) / EXACT_AFTER_TWO_CHUNKS;
    assert!((ratio - 1.0).abs() < 0.002, "{ratio}");
}
