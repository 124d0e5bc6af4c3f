//! Draws a token from a row of logits, with the same result on every node and every machine.
//!
//! Order, as in vLLM where the OpenAI text leaves it open:
//! 1. log-probabilities are those of the raw logits;
//! 2. `logit_bias` is added; before `min_tokens` the end and stop tokens are masked; repetition penalty (prompt and outputs), then
//!    frequency and presence penalties (outputs only); tokens that are not allowed are masked;
//! 3. temperature 0 takes the largest logit, ties to the lowest id;
//! 4. otherwise logits are divided by the temperature, then min-p, top-k, top-p cut, each among the survivors of the one before;
//! 5. one token is drawn with the 64 random bits of (seed, choice, output index).
//!
//! Weights are `exp(logit - best)` as integers of [`WEIGHT_BITS`] bits. Their sums are exact, so no order of summation can
//! change a draw. A token below 2^-40 of the best one's probability cannot be drawn.

mod philox;
mod scan;
mod select;

use serving_core::ids::{ChoiceIndex, OutputIndex, TokenId};
use serving_core::request::{SamplingParams, StopConditions, TokenLogprobs};
use thiserror::Error;

use crate::Allowed;
use crate::math::{exp, ln};

/// Weight of the most likely token. 2^40 times a vocabulary of 2^23 still fits a u64.
const WEIGHT_BITS: u32 = 40;
const MOST_VOCABULARY: usize = 1 << 23;

/// So many candidates are looked at first for top-p. Most draws need fewer. The number is multiplied by 8 until the probability is
/// reached.
const TOP_P_FIRST_LOOK: usize = 64;

/// So many tokens are checked one by one before all allowed tokens are worked out. Each check looks at the row again.
const ASKED_ALONE_MAX: usize = 4;

/// Everything that determines a draw except the logits.
#[derive(Clone, Copy, Debug)]
pub struct SampleInput<'a> {
    pub params: &'a SamplingParams,
    pub stop: &'a StopConditions,
    pub seed: u64,
    pub choice: ChoiceIndex,
    /// Counted over all attempts of the request. It is the random counter, and the count for `min_tokens`.
    pub output_index: OutputIndex,
    /// The client's parameters.
    pub prompt: &'a [TokenId],
    /// Output tokens before this one, over all attempts.
    pub outputs: &'a [TokenId],
    /// `Some(k)`: report the chosen token's log-probability and the k best.
    pub logprobs: Option<u32>,
    /// `None`: every token may be drawn.
    pub allowed: Option<Allowed<'a>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: TokenId,
    pub logprobs: Option<TokenLogprobs>,
}

/// Why no token could be drawn. The request fails, and nothing is retried.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SampleError {
    #[error(
        "the model gave no usable logit for token {token} (not a number, or infinite): the weights or the KV cache are corrupt"
    )]
    NotFinite { token: u32 },
    #[error("a row of {logits} logits was given to a sampler for {vocab_size}")]
    WrongLength { logits: usize, vocab_size: usize },
    #[error(
        "no token may be drawn: every one is masked, or a bias or a penalty takes one beyond what a number holds; check min_tokens, stop_token_ids and what constrains the output"
    )]
    NothingLeft,
    #[error("token {token} is not in the vocabulary of {vocab_size}")]
    NoSuchToken { token: u32, vocab_size: usize },
    #[error("a vocabulary of {vocab_size} is beyond the {most} this sampler counts exactly")]
    VocabularyTooLarge { vocab_size: usize, most: usize },
}

/// Scratch memory for one thread's sampling. Draws do not depend on its earlier use.
#[derive(Debug)]
pub struct Sampler {
    vocab_size: usize,
    /// The raw row, kept only while log-probabilities are asked for.
    raw: Vec<f32>,
    weights: Vec<u64>,
    kept: Vec<(f32, u32)>,
    /// Occurrences of each token; all zero between calls.
    counts: Vec<u32>,
}

impl Sampler {
    pub fn new(vocab_size: u32) -> Result<Self, SampleError> {
        let vocab_size = vocab_size as usize;
        if vocab_size > MOST_VOCABULARY {
            return Err(SampleError::VocabularyTooLarge {
                vocab_size,
                most: MOST_VOCABULARY,
            });
        }
        Ok(Self {
            vocab_size,
            raw: Vec::with_capacity(vocab_size),
            weights: Vec::with_capacity(vocab_size),
            kept: Vec::with_capacity(vocab_size),
            counts: vec![0; vocab_size],
        })
    }

    /// Draws the next token. Changes `logits`.
    pub fn sample(&mut self, input: &SampleInput<'_>, logits: &mut [f32]) -> Result<Sampled, SampleError> {
        if logits.len() != self.vocab_size {
            return Err(SampleError::WrongLength {
                logits: logits.len(),
                vocab_size: self.vocab_size,
            });
        }
        check(logits)?;
        let raw_sum = match input.logprobs {
            Some(_) => {
                self.raw.clear();
                self.raw.extend_from_slice(logits);
                Some(log_sum_exp(&self.raw))
            }
            None => None,
        };
        self.adjust(input, logits);
        let best = match input.allowed {
            Some(allowed) => best_allowed(input, logits, allowed),
            None => scan::largest(logits),
        };
        // A weight is computed from the difference to the best logit, so the best logit must be finite.
        if best.0.is_infinite() {
            return Err(SampleError::NothingLeft);
        }
        let token = if input.params.temperature > 0.0 {
            self.draw(input, logits, best.0)
        } else {
            best.1
        };
        let logprobs = match (raw_sum, input.logprobs) {
            (Some(sum), Some(top)) => Some(logprobs_of(&self.raw, sum, (token, top), &mut self.kept)),
            _ => None,
        };
        Ok(Sampled {
            token: TokenId(token),
            logprobs,
        })
    }

    /// Step 2 of the module's documentation. Ids outside the vocabulary have no logit and are skipped.
    fn adjust(&mut self, input: &SampleInput<'_>, logits: &mut [f32]) {
        let params = input.params;
        for (token, bias) in &params.logit_bias {
            if let Some(logit) = logits.get_mut(token.0 as usize) {
                *logit += bias;
            }
        }
        if input.output_index.0 < input.stop.min_tokens {
            for token in input.stop.end_tokens.iter().chain(&input.stop.stop_token_ids) {
                if let Some(logit) = logits.get_mut(token.0 as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        if params.repetition_penalty != 1.0 {
            let seen = input.prompt.iter().chain(input.outputs);
            self.for_each_distinct(seen, |token, _| {
                let logit = &mut logits[token];
                *logit = if *logit > 0.0 {
                    *logit / params.repetition_penalty
                } else {
                    *logit * params.repetition_penalty
                };
            });
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            self.for_each_distinct(input.outputs.iter(), |token, count| {
                logits[token] -= params.frequency_penalty * count as f32 + params.presence_penalty;
            });
        }
    }

    /// Calls `change(token, occurrences)` once per distinct token, in order of first occurrence.
    fn for_each_distinct<'a>(
        &mut self,
        tokens: impl Iterator<Item = &'a TokenId> + Clone,
        mut change: impl FnMut(usize, u32),
    ) {
        for token in tokens.clone() {
            if let Some(count) = self.counts.get_mut(token.0 as usize) {
                *count = count.saturating_add(1);
            }
        }
        for token in tokens {
            let Some(count) = self.counts.get_mut(token.0 as usize) else {
                continue;
            };
            if *count > 0 {
                change(token.0 as usize, std::mem::take(count));
            }
        }
    }

    /// Steps 4 and 5.
    fn draw(&mut self, input: &SampleInput<'_>, logits: &mut [f32], best: f32) -> u32 {
        let params = input.params;
        let random = philox::draw(input.seed, input.choice, input.output_index);
        let weigh = Weigh {
            best,
            temperature: params.temperature,
            bar: min_p_bar(params.min_p),
        };
        let top_k = params.top_k.map(|k| k.max(1) as usize).filter(|k| *k < logits.len());
        if top_k.is_none() && params.top_p >= 1.0 {
            self.weights.clear();
            self.weights.extend(logits.iter().map(|logit| weigh.weight(*logit)));
            return pick(&self.weights, random) as u32;
        }
        let reach = match top_k {
            Some(k) => {
                select::best(logits, k, &mut self.kept);
                let total = self.kept.iter().map(|(logit, _)| weigh.weight(*logit)).sum();
                probability_bar(params.top_p, total)
            }
            None => {
                let total = logits.iter().map(|logit| weigh.weight(*logit)).sum();
                let reach = probability_bar(params.top_p, total);
                self.select_until(logits, weigh, reach);
                reach
            }
        };
        self.weights.clear();
        let mut sum = 0;
        for (logit, _) in &self.kept {
            // The best token is always kept, also if top_p is 0.
            if sum >= reach && !self.weights.is_empty() {
                break;
            }
            let weight = weigh.weight(*logit);
            sum += weight;
            self.weights.push(weight);
        }
        self.kept[pick(&self.weights, random)].1
    }

    /// Leaves enough of the best tokens in `kept` to reach the summed weight `reach`.
    fn select_until(&mut self, logits: &[f32], weigh: Weigh, reach: u64) {
        let mut look = TOP_P_FIRST_LOOK;
        loop {
            select::best(logits, look, &mut self.kept);
            let sum: u64 = self.kept.iter().map(|(logit, _)| weigh.weight(*logit)).sum();
            if sum >= reach || look >= logits.len() {
                return;
            }
            look = look.saturating_mul(8);
        }
    }
}

/// The best token that may be drawn. At temperature 0 only the best token matters, so the model's own first choices are checked one by
/// one: to work out all allowed tokens costs much more and is seldom needed. Otherwise this masks the tokens that may not be drawn.
fn best_allowed(input: &SampleInput<'_>, logits: &mut [f32], allowed: Allowed<'_>) -> (f32, u32) {
    if input.params.temperature <= 0.0 {
        let mut refused = [(0.0, 0); ASKED_ALONE_MAX];
        let mut refused_count = 0;
        while refused_count < ASKED_ALONE_MAX {
            let best = scan::largest(logits);
            match allowed.allows(TokenId(best.1)) {
                Some(true) if best.0 > f32::NEG_INFINITY => return best,
                Some(false) if best.0 > f32::NEG_INFINITY => {
                    logits[best.1 as usize] = f32::NEG_INFINITY;
                    refused[refused_count] = best;
                    refused_count += 1;
                }
                _ => break,
            }
        }
        // The list of all allowed tokens decides, also about tokens that were refused one by one.
        for (logit, token) in &refused[..refused_count] {
            logits[*token as usize] = *logit;
        }
    }
    mask(logits, allowed.words());
    scan::largest(logits)
}

fn mask(logits: &mut [f32], allowed: &[u32]) {
    let words = allowed.iter().chain(std::iter::repeat(&0));
    for (logits, word) in logits.chunks_mut(u32::BITS as usize).zip(words) {
        if *word == u32::MAX {
            continue;
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            if word & (1 << bit) == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// Logit to integer weight at a temperature; the best logit weighs 2^40.
#[derive(Clone, Copy)]
struct Weigh {
    best: f32,
    temperature: f32,
    /// Of min-p: what weighs less has no weight at all.
    bar: u64,
}

impl Weigh {
    fn weight(self, logit: f32) -> u64 {
        // A difference of 0 over a tiny temperature is still 0, so the best token keeps its full weight.
        let weight = (exp((logit - self.best) / self.temperature) * (1u64 << WEIGHT_BITS) as f32) as u64;
        if weight >= self.bar { weight } else { 0 }
    }
}

fn min_p_bar(min_p: f32) -> u64 {
    (f64::from(min_p.clamp(0.0, 1.0)) * (1u64 << WEIGHT_BITS) as f64) as u64
}

/// The summed weight that top-p must reach: at least 1, so that something is kept.
fn probability_bar(top_p: f32, total: u64) -> u64 {
    if top_p >= 1.0 {
        return total;
    }
    ((f64::from(top_p.max(0.0)) * total as f64) as u64).clamp(1, total)
}

/// An index drawn in proportion to the weights, at least one of which is not zero.
fn pick(weights: &[u64], random: u64) -> usize {
    let total: u64 = weights.iter().sum();
    // Multiply-shift maps 64 random bits onto 0..total; its bias is below 2^-16 of a weight unit.
    let mut left = ((u128::from(random) * u128::from(total)) >> 64) as u64;
    for (index, weight) in weights.iter().enumerate() {
        if left < *weight {
            return index;
        }
        left -= weight;
    }
    unreachable!("the drawn value is below the sum of the weights")
}

/// Refuses NaN and +infinity; -infinity is a mask.
fn check(logits: &[f32]) -> Result<(), SampleError> {
    // No comparison holds for NaN.
    let is_usable = |logit: f32| logit < f32::INFINITY;
    match scan::first(logits, |logit| !is_usable(logit)) {
        None => Ok(()),
        Some(token) => Err(SampleError::NotFinite { token: token as u32 }),
    }
}

/// `ln(sum(exp(logit)))`, summed in f64 over 16 lanes in a fixed order.
fn log_sum_exp(logits: &[f32]) -> f64 {
    const LANES: usize = 16;
    let best = scan::largest(logits).0;
    let mut lanes = [0f64; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, logit) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(exp(logit - best));
        }
    }
    for (lane, logit) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(exp(logit - best));
    }
    f64::from(best) + ln(lanes.iter().sum())
}

fn logprobs_of(raw: &[f32], sum: f64, (token, top): (u32, u32), kept: &mut Vec<(f32, u32)>) -> TokenLogprobs {
    let logprob = |logit: f32| (f64::from(logit) - sum) as f32;
    select::best(raw, top as usize, kept);
    TokenLogprobs {
        logprob: logprob(raw[token as usize]),
        top: kept.iter().map(|(logit, id)| (TokenId(*id), logprob(*logit))).collect(),
    }
}

/// Log-probability of a given token and the `top` best, for `echo` with logprobs. `logits` are those of the row before
/// the token.
pub fn prompt_logprob(logits: &[f32], token: TokenId, top: u32) -> Result<TokenLogprobs, SampleError> {
    check(logits)?;
    if token.0 as usize >= logits.len() {
        return Err(SampleError::NoSuchToken {
            token: token.0,
            vocab_size: logits.len(),
        });
    }
    if scan::largest(logits).0 == f32::NEG_INFINITY {
        return Err(SampleError::NothingLeft);
    }
    Ok(logprobs_of(
        logits,
        log_sum_exp(logits),
        (token.0, top),
        &mut Vec::new(),
    ))
}

#[cfg(test)]
mod tests;
