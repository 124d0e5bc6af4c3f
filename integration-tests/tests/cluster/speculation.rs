//! `--speculative-tokens`: answers that repeat what was said come in fewer steps, and are what they are without guesses.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use integration_tests::MODEL;
use integration_tests::cluster::{TestCluster, options};
use serde_json::{Value, json};

/// The model goes on with the text that it has seen twice.
const SENTENCE: &str =
    "Each harbour has a lamp, each lamp has a keeper, and each keeper has a book of the weather at sea. ";
const OUTPUT_TOKENS: u64 = 48;

/// What a cluster answers, and of the first request how many steps the decode node took for it, and its record.
struct Answers {
    texts: Vec<Value>,
    steps: f64,
    record: Value,
    guessed: BTreeMap<&'static str, f64>,
}

async fn answers(speculative_tokens: u32) -> Result<Answers> {
    let mut options = options("1p1d")?;
    options.settings.speculative_tokens = Some(speculative_tokens);
    let cluster = TestCluster::start_with(options).await?;
    let prompt = format!("{}{}", SENTENCE.repeat(2), &SENTENCE[..24]);
    let body =
        json!({ "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": true });
    let with = |more: Value| {
        let mut body = body.clone();
        for (name, value) in more.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    };
    let (mut texts, mut steps) = (Vec::new(), None);
    for more in [
        json!({}),
        json!({ "logprobs": 2, "frequency_penalty": 0.5 }),
        json!({ "temperature": 0.7, "seed": 3, "n": 2, "repetition_penalty": 1.05 }),
        json!({ "stop": [" weather"] }),
        json!({ "structured_outputs": { "regex": "[a-z ,]{20,40}" }, "ignore_eos": false }),
    ] {
        let answer = cluster.post("/v1/completions", &with(more)).await?;
        texts.push(answer["choices"].clone());
        if steps.is_none() {
            // Of the first request alone: a node goes on after a stop string until it hears of it.
            steps = cluster
                .node_metrics("decode-0")
                .await?
                .sum("baton_batch_size_count", &[]);
        }
    }
    let page: Value = cluster
        .http
        .get(cluster.url("/admin/requests?limit=10"))
        .send()
        .await?
        .json()
        .await?;
    let oldest = page["records"].as_array().and_then(|records| records.last());
    let metrics = cluster.node_metrics("decode-0").await?;
    let sum = |name: &str| metrics.sum(name, &[]).with_context(|| format!("no {name}"));
    let names = ["baton_drafted_tokens_total", "baton_accepted_tokens_total"];
    let guessed: Result<_> = names.into_iter().map(|name| Ok((name, sum(name)?))).collect();
    let answers = Answers {
        texts,
        steps: steps.context("no steps")?,
        record: oldest.context("no record")?.clone(),
        guessed: guessed?,
    };
    cluster.stop().await?;
    Ok(answers)
}

#[tokio::test(flavor = "multi_thread")]
async fn guesses_save_steps_and_change_no_answer() -> Result<()> {
    let without = answers(0).await?;
    ensure!(
        without.guessed.values().all(|count| *count == 0.0),
        "{:?}",
        without.guessed
    );
    ensure!(without.record.get("drafted_tokens").is_none(), "{}", without.record);
    let with = answers(8).await?;
    for (with, without) in with.texts.iter().zip(&without.texts) {
        ensure!(with == without, "{with} and {without}");
    }
    // The first request says the sentence again.
    let record = &with.record;
    let count = |name: &str| record[name].as_u64().with_context(|| format!("no {name} in {record}"));
    let (drafted, accepted) = (count("drafted_tokens")?, count("accepted_tokens")?);
    ensure!(accepted * 3 > OUTPUT_TOKENS && accepted <= drafted, "{record}");
    let [all_drafted, all_accepted] =
        ["baton_drafted_tokens_total", "baton_accepted_tokens_total"].map(|name| with.guessed[name]);
    ensure!(
        all_drafted >= drafted as f64 && all_accepted >= accepted as f64,
        "{:?}",
        with.guessed
    );
    ensure!(
        with.steps + accepted as f64 == without.steps,
        "{} and {}",
        with.steps,
        without.steps
    );
    Ok(())
}
