//! A Hugging Face folder gives the logits of the GGUF file with the same weights.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

mod common;

use common::{feed, open_file, setup, table};
use engine::{LogitsWanted, Numerics};
use model_files::model::Model;
use model_files::test_kit::{TinyFolder, golden_models};
use serving_core::ids::TokenId;

/// The logits of all rows. The sequence is longer than the windows of the models.
fn logits(model: &Model) -> Vec<f32> {
    let mut engine = open_file(model, setup(Numerics::Exact));
    let tokens: Vec<TokenId> = (0..100u32).map(|index| TokenId(index * 37 % 259)).collect();
    let mut all = Vec::new();
    let blocks = table(0, tokens.len());
    feed(&mut engine, (&tokens, 0, &blocks), (64, LogitsWanted::All), |_, row| {
        all.extend_from_slice(row)
    });
    assert_eq!(all.len(), tokens.len() * model.config().vocab_size);
    all
}

/// Every family with its RoPE scalings, windows and norms, and every number type, whose folder has the dequantised weights.
#[test]
fn every_golden_model_computes_the_same_from_both_forms() {
    for (index, golden) in golden_models().iter().enumerate() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("tiny.gguf");
        golden.builder.write(&path).unwrap();
        let gguf = Model::open(&path).unwrap();
        TinyFolder {
            model: &gguf,
            shards: 1 + index % 3,
        }
        .write(root.path());
        let folder = Model::open(root.path()).unwrap();
        let (one, other) = (logits(&gguf), logits(&folder));
        let differences = one.iter().zip(&other).map(|(a, b)| (a - b).abs());
        let most = differences.fold(0.0, f32::max);
        // Llama's rows of q and k have another order, and Gemma's norms are rounded once more.
        assert!(most < 1e-3, "{} {}: {most}", golden.file, golden.name);
        let (low, high) = one
            .iter()
            .fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)));
        assert!(
            high - low > 0.1,
            "{} {}: the logits are all alike",
            golden.file,
            golden.name
        );
        println!("{} {}: {most} of {}", golden.file, golden.name, high - low);
    }
}
