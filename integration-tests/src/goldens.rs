//! The golden rows of the real model (`data/golden/`), and what an answer over HTTP is compared with.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::MODEL;

/// One row of `smollm2-135m-q4_1.jsonl`; its README gives every field's meaning.
#[derive(Clone, Debug, Deserialize)]
pub struct Golden {
    pub id: String,
    #[serde(default)]
    pub prompt: Option<String>,
    #[serde(default)]
    pub messages: Option<Value>,
    pub prompt_token_ids: Vec<u32>,
    pub output_token_ids: Vec<u32>,
    pub margin: Vec<f64>,
    pub logprob: Vec<f64>,
}

pub fn load() -> Result<Vec<Golden>> {
    let rows = include_str!("../data/golden/smollm2-135m-q4_1.jsonl");
    rows.lines()
        .map(|line| serde_json::from_str(line).context("golden row"))
        .collect()
}

/// How far an engine's numerics may stray from exact arithmetic (golden README, measured there).
#[derive(Clone, Copy, Debug)]
pub struct Thresholds {
    pub numerics: &'static str,
    /// A step may choose another token only where the reference's margin is below this.
    pub margin: f64,
    pub logprob_max: f64,
    pub logprob_p99: f64,
    /// Share of steps whose best token may differ.
    pub flips: f64,
}

pub const EXACT: Thresholds = Thresholds {
    numerics: "exact",
    margin: 0.002,
    logprob_max: 0.001,
    logprob_p99: 0.001,
    flips: 0.0,
};
pub const INT8_BLOCKS: Thresholds = Thresholds {
    numerics: "int8-blocks",
    margin: 0.3,
    logprob_max: 0.25,
    logprob_p99: 0.15,
    flips: 0.03,
};

/// The GPU engine: weights, KV and activations are bf16. About twice what docs/measurements/engine-accuracy.md measured.
pub const BF16: Thresholds = Thresholds {
    numerics: "bf16",
    margin: 0.1,
    logprob_max: 0.25,
    logprob_p99: 0.1,
    flips: 0.03,
};

/// What a comparison of all rows measured.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    pub differences: Vec<f64>,
    /// Margins of the steps whose best token differed.
    pub flips: Vec<f64>,
    /// Free running: leading tokens equal, of the tokens compared; rows that left the reference at a step above the margin.
    pub same_prefix: usize,
    pub tokens: usize,
    pub strays: Vec<String>,
}

impl Measured {
    /// The figures against the thresholds, as text when one is exceeded.
    pub fn check(&mut self, t: &Thresholds) -> Result<(), String> {
        self.differences.sort_by(f64::total_cmp);
        let n = self.differences.len();
        let at = |q: f64| self.differences[((n - 1) as f64 * q) as usize];
        let largest_flip = self.flips.iter().copied().fold(0.0, f64::max);
        let line = format!(
            "{}: {n} steps, |logprob difference| p50 {:.5} p99 {:.5} max {:.5}; {} flips, largest margin {largest_flip:.4}; free running {} of {} tokens equal",
            t.numerics,
            at(0.5),
            at(0.99),
            at(1.0),
            self.flips.len(),
            self.same_prefix,
            self.tokens
        );
        println!("{line}");
        let is_good = at(1.0) <= t.logprob_max
            && at(0.99) <= t.logprob_p99
            && largest_flip < t.margin
            && self.flips.len() as f64 <= t.flips * n as f64 + if t.flips == 0.0 { 1.0 } else { 0.0 }
            && self.strays.is_empty();
        if is_good {
            Ok(())
        } else {
            Err(format!("{line}; strays: {:?}", self.strays))
        }
    }
}

/// Teacher-forces the golden output through the prefill path: `echo` with logprobs, nothing generated.
pub async fn teacher_force(client: &reqwest::Client, base_url: &str, row: &Golden, into: &mut Measured) -> Result<()> {
    let prompt: Vec<u32> = row
        .prompt_token_ids
        .iter()
        .chain(&row.output_token_ids)
        .copied()
        .collect();
    let body =
        json!({ "model": MODEL, "prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 2, "temperature": 0 });
    let answer = post(client, &format!("{base_url}/v1/completions"), &body).await?;
    let logprobs = &answer["choices"][0]["logprobs"];
    let chosen = logprobs["token_logprobs"].as_array().context("no token_logprobs")?;
    let top = logprobs["top_logprobs"].as_array().context("no top_logprobs")?;
    for (step, reference) in row.logprob.iter().enumerate() {
        let position = row.prompt_token_ids.len() + step;
        let got = chosen
            .get(position)
            .and_then(Value::as_f64)
            .with_context(|| format!("{}: step {step}", row.id))?;
        into.differences.push((got - reference).abs());
        let best = top[position]
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(_, v)| v.as_f64())
            .fold(f64::MIN, f64::max);
        if got < best {
            into.flips.push(row.margin[step]);
        }
    }
    Ok(())
}

/// Runs the row freely (greedy) and compares up to the first difference.
pub async fn run_free(
    client: &reqwest::Client,
    base_url: &str,
    row: &Golden,
    margin: f64,
    into: &mut Measured,
) -> Result<()> {
    let body = json!({ "model": MODEL, "prompt": row.prompt_token_ids, "max_tokens": row.output_token_ids.len(), "temperature": 0, "return_token_ids": true });
    let answer = post(client, &format!("{base_url}/v1/completions"), &body).await?;
    let tokens = answer["choices"][0]["token_ids"].as_array().context("no token_ids")?;
    let equal = tokens
        .iter()
        .zip(&row.output_token_ids)
        .take_while(|(a, b)| a.as_u64() == Some(u64::from(**b)))
        .count();
    into.same_prefix += equal;
    into.tokens += row.output_token_ids.len();
    if equal < row.output_token_ids.len() && row.margin[equal] >= margin {
        into.strays.push(format!(
            "{} leaves the reference at step {equal}, margin {}",
            row.id, row.margin[equal]
        ));
    }
    Ok(())
}

/// Token ids the server makes of the row's text or messages.
pub async fn tokenize(client: &reqwest::Client, base_url: &str, row: &Golden) -> Result<Vec<u32>> {
    let body = match &row.messages {
        Some(messages) => json!({ "model": MODEL, "messages": messages, "add_generation_prompt": true }),
        None => json!({ "model": MODEL, "prompt": row.prompt, "add_special_tokens": false }),
    };
    let answer = post(client, &format!("{base_url}/tokenize"), &body).await?;
    let tokens = answer["tokens"].as_array().context("no tokens")?;
    Ok(tokens
        .iter()
        .filter_map(Value::as_u64)
        .filter_map(|t| u32::try_from(t).ok())
        .collect())
}

async fn post(client: &reqwest::Client, url: &str, body: &Value) -> Result<Value> {
    let response = client.post(url).json(body).send().await?;
    let status = response.status();
    let body: Value = response.json().await?;
    anyhow::ensure!(status.is_success(), "{status}: {body}");
    Ok(body)
}
