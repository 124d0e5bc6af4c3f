//! Runs the same seeded requests on two clusters and compares token ids, text and the hashes of the committed KV.

pub mod report;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::MODEL;

/// Output tokens of a request, unless a run says otherwise. A test that compares modes needs at least 64.
pub const OUTPUT_TOKENS: u32 = 64;
/// Requests in flight at once.
pub const CONCURRENCY: usize = 16;

/// How many prompts, and how long the longest is.
#[derive(Clone, Copy, Debug)]
pub struct Prompts {
    pub count: usize,
    pub tokens_max: usize,
}

/// One request of the comparison.
#[derive(Clone, Debug)]
pub struct Case {
    pub prompt: Vec<u32>,
    pub output_tokens: u32,
    pub temperature: f64,
    pub top_p: f64,
    pub seed: u64,
    /// The output is constrained to [`ENDLESS`].
    pub is_constrained: bool,
}

/// More lower-case text than an output has room for, so that constrained outputs have their full length, too.
const ENDLESS: &str = "[a-z ,]{2000}";

impl Case {
    /// The request, for `/v1/completions`. A grammar decides where an output ends, so it does not go with `ignore_eos`.
    pub fn body(&self) -> Value {
        let mut body = json!({
            "model": MODEL, "prompt": self.prompt, "max_tokens": self.output_tokens, "temperature": self.temperature,
            "top_p": self.top_p, "seed": self.seed >> 1, "return_token_ids": true, "return_kv_hashes": true,
        });
        match self.is_constrained {
            true => body["guided_regex"] = json!(ENDLESS),
            false => body["ignore_eos"] = json!(true),
        }
        body
    }
}

/// What is compared of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub kv_hashes: Vec<String>,
}

/// Cuts prompts out of `text` (token ids): lengths log-uniform from 1 to the longest, so that short ones are as well
/// covered as long ones, and both ends are among the first two; every fourth prompt begins like an earlier one, so that prefix caches have something to hit;
/// half are greedy, half sampled; half of both follow a grammar.
pub fn cases(text: &[u32], prompts: Prompts, seed: u64) -> Vec<Case> {
    let mut rng = StdRng::seed_from_u64(seed);
    let Prompts { count, tokens_max } = prompts;
    let longest = tokens_max.min(text.len());
    let mut cases: Vec<Case> = Vec::with_capacity(count);
    for i in 0..count {
        let length = match i {
            0 => 1,
            1 => longest,
            _ => ((longest as f64).ln() * rng.random::<f64>()).exp().round() as usize,
        }
        .clamp(1, longest);
        let start = rng.random_range(0..=text.len() - length);
        let mut prompt = text[start..start + length].to_vec();
        if i % 4 == 3 {
            let earlier = &cases[rng.random_range(0..i)].prompt;
            let shared = earlier.len().min(length);
            prompt[..shared].copy_from_slice(&earlier[..shared]);
        }
        let is_greedy = i % 2 == 0;
        cases.push(Case {
            prompt,
            output_tokens: OUTPUT_TOKENS,
            temperature: if is_greedy { 0.0 } else { 0.8 },
            top_p: if is_greedy { 1.0 } else { 0.95 },
            seed: rng.random(),
            // Of the greedy ones and of the sampled ones.
            is_constrained: i % 4 >= 2,
        });
    }
    cases
}

/// Token ids of `text`, from the server's own `/tokenize`.
pub async fn tokenize(client: &reqwest::Client, base_url: &str, text: &str) -> Result<Vec<u32>> {
    let body: Value = client
        .post(format!("{base_url}/tokenize"))
        .json(&json!({ "model": MODEL, "prompt": text, "add_special_tokens": false }))
        .send()
        .await?
        .error_for_status()?
        .json()
        .await?;
    let tokens = body["tokens"]
        .as_array()
        .context("no tokens in the answer of /tokenize")?;
    Ok(tokens
        .iter()
        .filter_map(Value::as_u64)
        .filter_map(|t| u32::try_from(t).ok())
        .collect())
}

/// Runs every case against the cluster at `base_url`, `CONCURRENCY` at a time; answers come in the order of the cases.
pub async fn run(base_url: &str, cases: &[Case]) -> Result<Vec<Answer>> {
    let client = reqwest::Client::new();
    let mut answers: BTreeMap<usize, Answer> = BTreeMap::new();
    let mut running = futures::stream::iter(cases.iter().cloned().enumerate())
        .map(|(i, case)| {
            let (client, url) = (client.clone(), format!("{base_url}/v1/completions"));
            async move { (i, ask(&client, &url, &case).await) }
        })
        .buffer_unordered(CONCURRENCY);
    while let Some((i, answer)) = running.next().await {
        answers.insert(i, answer.with_context(|| format!("case {i}"))?);
    }
    Ok(answers.into_values().collect())
}

async fn ask(client: &reqwest::Client, url: &str, case: &Case) -> Result<Answer> {
    let response = client
        .post(url)
        .json(&case.body())
        .timeout(Duration::from_secs(600))
        .send()
        .await?;
    let status = response.status();
    let body: Value = response.json().await?;
    if !status.is_success() {
        bail!("{status}: {body}");
    }
    let ids = body["choices"][0]["token_ids"]
        .as_array()
        .context("no token_ids in the answer")?;
    ensure!(body["kv_hashes"].is_array(), "no kv_hashes in the answer");
    Ok(Answer {
        tokens: ids
            .iter()
            .filter_map(Value::as_u64)
            .filter_map(|t| u32::try_from(t).ok())
            .collect(),
        kv_hashes: kv_hashes(&body).collect(),
    })
}

/// What an answer, or an event of one, tells of its prompt's KV.
pub fn kv_hashes(body: &Value) -> impl Iterator<Item = String> {
    let hashes = body["kv_hashes"].as_array().into_iter().flatten();
    hashes.filter_map(|hash| hash.as_str().map(str::to_owned))
}

/// How two runs of the same cases differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    pub requests: usize,
    pub tokens_compared: usize,
    pub tokens_differing: usize,
    pub blocks_compared: usize,
    pub blocks_differing: usize,
    /// Answers that are incomplete on either side: fewer tokens than asked for, or fewer hashes than prompt blocks.
    pub incomplete: usize,
}

impl Differences {
    pub fn is_exact(&self) -> bool {
        self.tokens_differing == 0 && self.blocks_differing == 0 && self.incomplete == 0
    }
}

/// What an answer is compared with.
#[derive(Clone, Copy, Debug)]
pub struct Baseline<'a> {
    pub tokens: &'a [Answer],
    /// Of the first run with the same tokens in a block: other blocks have other hashes.
    pub kv_hashes: &'a [Answer],
    pub block_tokens: usize,
}

/// Compares answers of the same cases, given in the same order.
pub fn compare(cases: &[Case], baseline: Baseline<'_>, other: &[Answer]) -> Differences {
    let mut d = Differences {
        requests: cases.len(),
        ..Differences::default()
    };
    for (i, case) in cases.iter().enumerate() {
        let references = (baseline.tokens.get(i), baseline.kv_hashes.get(i));
        let ((Some(tokens), Some(hashes)), Some(answer)) = (references, other.get(i)) else {
            d.incomplete += 1;
            continue;
        };
        let blocks = case.prompt.len().div_ceil(baseline.block_tokens);
        let has_tokens = |x: &Answer| x.tokens.len() == case.output_tokens as usize;
        let has_hashes = |x: &Answer| x.kv_hashes.len() == blocks;
        if !(has_tokens(tokens) && has_tokens(answer) && has_hashes(hashes) && has_hashes(answer)) {
            d.incomplete += 1;
        }
        let (tokens, hashes) = (&tokens.tokens, &hashes.kv_hashes);
        d.tokens_compared += tokens.len().min(answer.tokens.len());
        d.tokens_differing += tokens.iter().zip(&answer.tokens).filter(|(x, y)| x != y).count();
        d.blocks_compared += hashes.len().min(answer.kv_hashes.len());
        d.blocks_differing += hashes.iter().zip(&answer.kv_hashes).filter(|(x, y)| x != y).count();
    }
    d
}

/// Wall time of a run, for the report's column; never asserted on.
pub async fn timed_run(base_url: &str, cases: &[Case]) -> Result<(Vec<Answer>, Duration)> {
    let started = Instant::now();
    Ok((run(base_url, cases).await?, started.elapsed()))
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref as one;

    use super::*;

    fn answer(tokens: usize) -> Answer {
        Answer {
            tokens: vec![7; tokens],
            kv_hashes: vec!["a".into(), "b".into()],
        }
    }

    #[test]
    fn a_differing_token_hash_or_length_is_seen() {
        let case = Case {
            prompt: vec![1; 20],
            output_tokens: OUTPUT_TOKENS,
            temperature: 0.0,
            top_p: 1.0,
            seed: 1,
            is_constrained: false,
        };
        let good = answer(64);
        let baseline = Baseline {
            tokens: one(&good),
            kv_hashes: one(&good),
            block_tokens: 16,
        };
        assert!(compare(one(&case), baseline, one(&good)).is_exact());
        let mut token = good.clone();
        token.tokens[63] = 8;
        assert_eq!(compare(one(&case), baseline, one(&token)).tokens_differing, 1);
        let mut hash = good.clone();
        hash.kv_hashes[1] = "c".into();
        assert_eq!(compare(one(&case), baseline, one(&hash)).blocks_differing, 1);
        assert_eq!(compare(one(&case), baseline, one(&answer(63))).incomplete, 1);
    }

    #[test]
    fn cases_are_the_same_for_the_same_seed_and_span_the_lengths() {
        let text: Vec<u32> = (0..5_000).collect();
        let prompts = Prompts {
            count: 200,
            tokens_max: 2_000,
        };
        let first = cases(&text, prompts, 3);
        let second = cases(&text, prompts, 3);
        assert!(
            first
                .iter()
                .zip(&second)
                .all(|(a, b)| a.prompt == b.prompt && a.seed == b.seed)
        );
        assert_eq!(first[0].prompt.len(), 1);
        assert_eq!(first[1].prompt.len(), prompts.tokens_max);
        assert!(first.iter().filter(|c| c.prompt.len() > 512).count() > 10);
    }
}
