//! Traces that are made: lengths, prefixes and turns from a seed. They have no arrivals of their own: `Arrivals::apply` gives
//! them times.

pub mod conversations;
pub mod interference;
pub mod named;
pub mod prefixes;

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use serving_core::request::Lane;

use crate::trace::{Trace, TraceRequest};

/// Made prompts and answers are at most this long, so that sums of them cannot overflow.
const TOKENS_MAX: u32 = 1 << 22;
/// Made requests of one trace. They are all in memory, each with a hundred bytes and more.
const REQUESTS_MAX: u64 = 10_000_000;

/// A length that is drawn evenly from `tokens` x (1 - `range_ratio`) to `tokens` x (1 + `range_ratio`), both ends included and
/// rounded outwards, at least 1: as `--random-range-ratio` of `vllm bench serve`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Length {
    pub tokens: u32,
    /// From 0 (always `tokens`) to below 1.
    pub range_ratio: f64,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ShapeError {
    #[error("a range ratio of {range_ratio} is impossible: it is 0 or more, and below 1")]
    RangeRatio { range_ratio: f64 },
    #[error("{what} is {tokens} tokens: it is 1 to {TOKENS_MAX}")]
    Tokens { what: &'static str, tokens: u32 },
    #[error("{what} is 0")]
    Zero { what: &'static str },
    #[error("{what} is {count}, at most {max} is possible")]
    TooMany { what: &'static str, count: u64, max: u64 },
    #[error("traces with blocks of {one} and of {other} tokens cannot be merged")]
    BlockSizes { one: u32, other: u32 },
    #[error(
        "the shape needs a context of {needed} tokens, and the model has {context_tokens_max}: make the shape smaller"
    )]
    Context { needed: u32, context_tokens_max: u32 },
}

impl Length {
    pub const fn exactly(tokens: u32) -> Self {
        Self {
            tokens,
            range_ratio: 0.0,
        }
    }

    /// Both ends.
    fn range(self, what: &'static str) -> Result<(u32, u32), ShapeError> {
        let Self { tokens, range_ratio } = self;
        if !(1..=TOKENS_MAX).contains(&tokens) {
            return Err(ShapeError::Tokens { what, tokens });
        }
        if !(0.0..1.0).contains(&range_ratio) {
            return Err(ShapeError::RangeRatio { range_ratio });
        }
        let low = (f64::from(tokens) * (1.0 - range_ratio)).floor() as u32;
        let high = (f64::from(tokens) * (1.0 + range_ratio)).ceil() as u32;
        Ok((low.max(1), high))
    }

    fn words(self) -> String {
        match self.range("") {
            Ok((low, high)) if low != high => format!("{low} to {high}"),
            _ => self.tokens.to_string(),
        }
    }
}

/// Random lengths of one kind of request or of several. No prompt shares anything with another one.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix {
    pub kinds: Vec<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kind {
    /// A kind of weight 2 comes twice as often as one of weight 1.
    pub weight: u32,
    pub prompt: Length,
    pub output: Length,
}

impl Mix {
    pub fn one(prompt: Length, output: Length) -> Self {
        let weight = 1;
        Self {
            kinds: vec![Kind { weight, prompt, output }],
        }
    }

    pub fn trace(&self, requests: usize, seed: u64) -> Result<Trace, ShapeError> {
        let mut ranges = Vec::new();
        let mut weights: u32 = 0;
        for kind in &self.kinds {
            let ranges_of_kind = (kind.prompt.range("a prompt")?, kind.output.range("an answer")?);
            weights = weights.saturating_add(kind.weight);
            ranges.push((weights, ranges_of_kind));
        }
        let what = "the number of requests, or the weight of all kinds,";
        if requests == 0 || weights == 0 {
            return Err(ShapeError::Zero { what });
        }
        check_requests(requests as u64)?;
        let mut random = ChaCha12Rng::seed_from_u64(seed);
        let requests = (0..requests).map(|_| {
            let drawn = random.random_range(0..weights);
            let kind = ranges
                .iter()
                .find(|(up_to, _)| drawn < *up_to)
                .expect("drawn is below the last sum");
            let (prompt, output) = kind.1;
            let prompt = random.random_range(prompt.0..=prompt.1);
            request(prompt, random.random_range(output.0..=output.1))
        });
        Ok(Trace {
            requests: requests.collect(),
            name: format!("{}, seed {seed}", self.words()),
            block_tokens: 0,
        })
    }

    fn words(&self) -> String {
        let one = |kind: &Kind| {
            let (prompt, output) = (kind.prompt.words(), kind.output.words());
            match self.kinds.len() {
                1 => format!("prompts of {prompt} and answers of {output} tokens"),
                _ => format!("{}: {prompt}/{output}", kind.weight),
            }
        };
        let words: Vec<String> = self.kinds.iter().map(one).collect();
        match self.kinds.len() {
            1 => words.concat(),
            _ => format!("a mix of prompt/answer tokens ({})", words.join("; ")),
        }
    }
}

/// More of them would fill the memory before anything says that they are too many.
fn check_requests(count: u64) -> Result<(), ShapeError> {
    let (what, max) = ("the number of requests", REQUESTS_MAX);
    match count <= max {
        true => Ok(()),
        false => Err(ShapeError::TooMany { what, count, max }),
    }
}

fn request(prompt_tokens: u32, output_tokens: u32) -> TraceRequest {
    TraceRequest {
        at: Duration::ZERO,
        prompt_tokens,
        output_tokens,
        prefix_blocks: Vec::new(),
        lane: Lane::Interactive,
        conversation: None,
    }
}

/// Ids of blocks of different kinds never meet, so that made traces may be merged. All are below 2^53.
const BLOCK_OF_PREFIX: u64 = 1 << 50;
const BLOCK_OF_CONVERSATION: u64 = 1 << 51;
/// Blocks of one prefix or conversation.
const BLOCKS_MAX: u32 = 1 << 22;
/// Prefixes or conversations.
const OWNERS_MAX: u32 = 1 << 27;

fn block_id(kind: u64, owner: u32, block: u32) -> u64 {
    kind + (u64::from(owner) << 22) + u64::from(block)
}

/// Requests of several traces, in the order of their times. Made traces of one kind have the same ids: merge those of different kinds.
pub fn merged(name: &str, traces: Vec<Trace>) -> Result<Trace, ShapeError> {
    let block_tokens = traces.iter().map(|trace| trace.block_tokens).max().unwrap_or(0);
    if let Some(trace) = traces
        .iter()
        .find(|trace| ![0, block_tokens].contains(&trace.block_tokens))
    {
        let (one, other) = (trace.block_tokens, block_tokens);
        return Err(ShapeError::BlockSizes { one, other });
    }
    let mut requests: Vec<TraceRequest> = traces.into_iter().flat_map(|trace| trace.requests).collect();
    requests.sort_by_key(|request| request.at);
    Ok(Trace {
        name: name.to_owned(),
        block_tokens,
        requests,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn impossible_lengths_are_refused() {
        let trace = |tokens, range_ratio| {
            let length = Length { tokens, range_ratio };
            Mix::one(length, length).trace(1, 0)
        };
        assert!(matches!(trace(0, 0.0), Err(ShapeError::Tokens { tokens: 0, .. })));
        assert!(matches!(trace(u32::MAX, 0.0), Err(ShapeError::Tokens { .. })));
        for range_ratio in [1.0, -0.1, f64::NAN] {
            assert!(matches!(trace(9, range_ratio), Err(ShapeError::RangeRatio { .. })));
        }
        let length = Length::exactly(3);
        assert!(matches!(
            Mix::one(length, length).trace(0, 0),
            Err(ShapeError::Zero { .. })
        ));
        assert!(matches!(
            Mix { kinds: Vec::new() }.trace(1, 0),
            Err(ShapeError::Zero { .. })
        ));
    }

    #[test]
    fn more_requests_than_memory_holds_are_refused() {
        let length = Length::exactly(3);
        let error = Mix::one(length, length).trace(usize::MAX, 0).expect_err("too many");
        assert!(matches!(error, ShapeError::TooMany { count: u64::MAX, .. }), "{error}");
        assert_eq!(check_requests(REQUESTS_MAX), Ok(()));
    }

    #[test]
    fn kinds_come_as_often_as_their_weights_say() {
        let kind = |weight, tokens| Kind {
            weight,
            prompt: Length::exactly(tokens),
            output: Length::exactly(1),
        };
        let mix = Mix {
            kinds: vec![kind(3, 10), kind(0, 20), kind(1, 30)],
        };
        let trace = mix.trace(4_000, 5).expect("the mix is possible");
        let count = |tokens| {
            trace
                .requests
                .iter()
                .filter(|request| request.prompt_tokens == tokens)
                .count()
        };
        // 3,000 are expected, and the standard deviation is 27.
        assert!((2_860..3_140).contains(&count(10)), "{}", count(10));
        assert_eq!((count(20), count(10) + count(30)), (0, 4_000));
    }

    proptest! {
        /// Lengths are even over the whole range: of 3,000 the mean is within six standard errors, and the ends are not crossed.
        #[test]
        fn lengths_are_even_over_their_range(tokens in 1_u32..5_000, range_ratio in 0.0_f64..0.99, seed in any::<u64>()) {
            let length = Length { tokens, range_ratio };
            let (low, high) = length.range("").expect("the range is possible");
            let trace = Mix::one(length, Length::exactly(7)).trace(3_000, seed).expect("the mix is possible");
            let drawn: Vec<f64> = trace.requests.iter().map(|request| f64::from(request.prompt_tokens)).collect();
            prop_assert!(drawn.iter().all(|tokens| (f64::from(low)..=f64::from(high)).contains(tokens)));
            let mean = drawn.iter().sum::<f64>() / 3_000.0;
            let width = f64::from(high - low + 1);
            let error = (width * width / 12.0 / 3_000.0).sqrt();
            prop_assert!((mean - f64::from(low + high) / 2.0).abs() <= 6.0 * error);
            prop_assert!(trace.requests.iter().all(|request| request.output_tokens == 7));
        }
    }
}
