//! Makes a trace fit a smaller model, a slower machine or a shorter test, so that order, bursts and prefixes stay.

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;

use super::reading::TIME_NS_MAX;
use super::{Trace, TraceRequest, block_count};

/// The longest time that the readers of traces take, too. A clock cannot hold every `Duration`.
const TIME_MAX: Duration = Duration::from_nanos(TIME_NS_MAX);

/// What is done to a trace, in the order of the fields. `Scaling::default()` changes nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaling {
    /// Prompts, answers and blocks are divided by it. Lengths are rounded to the nearest token, and stay at least 1.
    pub length_divisor: u32,
    /// Where times are whole steps (Mooncake's are of 3 s), the requests of a step may be spread over it.
    pub spread: Option<StepSpread>,
    /// 2 sends the requests at twice the rate. Times are divided, no request is dropped: the pattern of reuse stays.
    pub rate_factor: f64,
    /// Requests that arrive later, after the division of the times, are cut off.
    pub duration_max: Option<Duration>,
    pub requests_max: Option<usize>,
    /// Prompt and answer together are shortened to the model's context: the answer to half of it, then the prompt to the rest.
    pub context_tokens_max: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSpread {
    pub step: Duration,
    pub seed: u64,
}

impl Default for Scaling {
    fn default() -> Self {
        Self {
            length_divisor: 1,
            spread: None,
            rate_factor: 1.0,
            duration_max: None,
            requests_max: None,
            context_tokens_max: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Scaled {
    /// Its name says what was done.
    pub trace: Trace,
    /// Requests that were shortened to the model's context.
    pub shortened: usize,
    /// Requests that were cut off at the end.
    pub cut: usize,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScalingError {
    #[error("lengths cannot be divided by {divisor}: {}", divisor_advice(*block_tokens))]
    LengthDivisor { divisor: u32, block_tokens: u32 },
    #[error("{factor} is no factor for a rate: it is a number above 0, and 1 leaves the times as they are")]
    RateFactor { factor: f64 },
    #[error("a context of {context_tokens_max} tokens has no room for a prompt and an answer. It has at least 2")]
    Context { context_tokens_max: u32 },
    #[error(
        "with a rate factor of {factor} a request would come after more than 100 years: give a higher factor or fewer requests"
    )]
    TooLate { factor: f64 },
    #[error("nothing is left of the trace: no request comes within the duration, or the number of requests is 0")]
    NothingLeft,
}

fn divisor_advice(block_tokens: u32) -> String {
    match block_tokens {
        0 => "it is at least 1".to_owned(),
        _ => format!(
            "the trace's blocks of {block_tokens} tokens would not be whole. Take a number that divides {block_tokens}"
        ),
    }
}

impl Scaling {
    pub fn apply(&self, trace: &Trace) -> Result<Scaled, ScalingError> {
        self.check(trace)?;
        let block_tokens = trace.block_tokens / self.length_divisor;
        let mut requests = trace.requests.clone();
        if let Some(spread) = self.spread {
            spread_steps(&mut requests, spread);
        }
        for request in &mut requests {
            request.at = divided(request.at, self.rate_factor);
            if let Some(turn) = &mut request.conversation {
                turn.think_time = divided(turn.think_time, self.rate_factor);
            }
            request.prompt_tokens = rounded(request.prompt_tokens, self.length_divisor);
            request.output_tokens = rounded(request.output_tokens, self.length_divisor);
        }
        let before = requests.len();
        requests.truncate(self.requests_max.unwrap_or(usize::MAX));
        if let Some(duration_max) = self.duration_max {
            requests.truncate(requests.partition_point(|request| request.at < duration_max));
        }
        if requests.is_empty() {
            return Err(ScalingError::NothingLeft);
        }
        if requests.iter().any(is_too_late) {
            let factor = self.rate_factor;
            return Err(ScalingError::TooLate { factor });
        }
        let mut shortened = 0;
        for request in &mut requests {
            if let Some(context_tokens_max) = self.context_tokens_max {
                shortened += usize::from(shorten(request, context_tokens_max));
            }
            let blocks = block_count(request.prompt_tokens, block_tokens);
            request.prefix_blocks.truncate(blocks);
        }
        let cut = before - requests.len();
        Ok(Scaled {
            trace: Trace {
                name: self.name(&trace.name, shortened, cut),
                block_tokens,
                requests,
            },
            shortened,
            cut,
        })
    }

    fn check(&self, trace: &Trace) -> Result<(), ScalingError> {
        let (divisor, block_tokens) = (self.length_divisor, trace.block_tokens);
        if divisor == 0 || block_tokens % divisor != 0 {
            return Err(ScalingError::LengthDivisor { divisor, block_tokens });
        }
        let factor = self.rate_factor;
        if !factor.is_finite() || factor <= 0.0 {
            return Err(ScalingError::RateFactor { factor });
        }
        match self.context_tokens_max {
            Some(context_tokens_max @ ..2) => Err(ScalingError::Context { context_tokens_max }),
            _ => Ok(()),
        }
    }

    /// `conversation_trace.jsonl, lengths / 32, rate x 0.25, first 120 s, 7 requests shortened to 2048 tokens`.
    fn name(&self, name: &str, shortened: usize, cut: usize) -> String {
        let mut words = vec![name.to_owned()];
        if self.length_divisor > 1 {
            words.push(format!("lengths / {}", self.length_divisor));
        }
        if let Some(StepSpread { step, seed }) = self.spread {
            words.push(format!("steps of {} s spread with seed {seed}", step.as_secs_f64()));
        }
        if self.rate_factor != 1.0 {
            words.push(format!("rate x {}", self.rate_factor));
        }
        if cut > 0 {
            let duration = self
                .duration_max
                .map(|duration| format!("first {} s", duration.as_secs_f64()));
            let requests = self.requests_max.map(|requests| format!("at most {requests} requests"));
            words.extend(duration.into_iter().chain(requests));
        }
        if let Some(context) = self.context_tokens_max.filter(|_| shortened > 0) {
            let requests = if shortened == 1 { "request" } else { "requests" };
            words.push(format!("{shortened} {requests} shortened to {context} tokens"));
        }
        words.join(", ")
    }
}

/// Each request gets a time between its step and the next one. Those of one step keep their order.
fn spread_steps(requests: &mut [TraceRequest], spread: StepSpread) {
    let mut random = ChaCha12Rng::seed_from_u64(spread.seed);
    let mut start = 0;
    while let Some(step) = requests.get(start).map(|request| request.at) {
        let end = start + requests[start..].partition_point(|request| request.at == step);
        let room = requests
            .get(end)
            .map_or(spread.step, |next| (next.at - step).min(spread.step));
        let mut offsets: Vec<f64> = (start..end).map(|_| random.random()).collect();
        offsets.sort_by(f64::total_cmp);
        for (request, offset) in requests[start..end].iter_mut().zip(offsets) {
            request.at += room.mul_f64(offset);
        }
        start = end;
    }
}

/// Saturates at the longest time, which [`Scaling::apply`] refuses.
fn divided(time: Duration, factor: f64) -> Duration {
    match factor == 1.0 {
        true => time,
        false => Duration::try_from_secs_f64(time.as_secs_f64() / factor).unwrap_or(Duration::MAX),
    }
}

/// Whether the time of a request, or the time that its user thinks before it, is too long for a clock.
fn is_too_late(request: &TraceRequest) -> bool {
    request.at > TIME_MAX || request.conversation.is_some_and(|turn| turn.think_time > TIME_MAX)
}

fn rounded(tokens: u32, divisor: u32) -> u32 {
    let half = divisor / 2;
    (tokens.saturating_add(half) / divisor).max(1)
}

fn shorten(request: &mut TraceRequest, context_tokens_max: u32) -> bool {
    let (prompt, output) = (request.prompt_tokens, request.output_tokens);
    if prompt.saturating_add(output) <= context_tokens_max {
        return false;
    }
    request.output_tokens = output.min(context_tokens_max / 2);
    request.prompt_tokens = prompt.min(context_tokens_max - request.output_tokens);
    true
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use serving_core::request::Lane;

    use super::super::Turn;
    use super::super::facts::TraceFacts;
    use super::*;

    fn request(at_ms: u64, prompt_tokens: u32, output_tokens: u32) -> TraceRequest {
        let blocks = u64::from(prompt_tokens.div_ceil(512));
        TraceRequest {
            at: Duration::from_millis(at_ms),
            prompt_tokens,
            output_tokens,
            prefix_blocks: (0..blocks).collect(),
            lane: Lane::Interactive,
            conversation: None,
        }
    }

    fn trace(requests: Vec<TraceRequest>) -> Trace {
        Trace {
            name: "t".to_owned(),
            block_tokens: 512,
            requests,
        }
    }

    #[test]
    fn the_default_changes_nothing() {
        let trace = trace(vec![request(0, 5_000, 12), request(10, 1, 1)]);
        let scaled = Scaling::default().apply(&trace).expect("the identity is possible");
        assert_eq!((scaled.trace, scaled.shortened, scaled.cut), (trace, 0, 0));
    }

    #[test]
    fn lengths_are_divided_and_cut_to_the_context() {
        let trace = trace(vec![
            request(0, 6_909, 350),
            request(3_000, 513, 7),
            request(9_000, 126_195, 2_000),
        ]);
        let scaling = Scaling {
            length_divisor: 32,
            rate_factor: 0.5,
            context_tokens_max: Some(2_048),
            ..Scaling::default()
        };
        let scaled = scaling.apply(&trace).expect("32 divides 512");
        let lengths = scaled.trace.requests.iter().map(|request| {
            let blocks = request.prefix_blocks.len();
            (
                request.at.as_secs(),
                request.prompt_tokens,
                request.output_tokens,
                blocks,
            )
        });
        let expected = [(0, 216, 11, 14), (6, 16, 1, 1), (18, 1_985, 63, 125)];
        assert_eq!(lengths.collect::<Vec<_>>(), expected);
        assert_eq!((scaled.shortened, scaled.trace.block_tokens), (1, 16));
        assert_eq!(
            scaled.trace.name,
            "t, lengths / 32, rate x 0.5, 1 request shortened to 2048 tokens"
        );
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        let trace = trace(vec![request(0, 1_000, 10)]);
        let refused = |scaling: Scaling| scaling.apply(&trace).expect_err("it is impossible");
        let usual = Scaling::default;
        let divisor = refused(Scaling {
            length_divisor: 100,
            ..usual()
        });
        assert!(matches!(divisor, ScalingError::LengthDivisor { divisor: 100, .. }));
        for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = refused(Scaling {
                rate_factor: factor,
                ..usual()
            });
            assert!(matches!(error, ScalingError::RateFactor { .. }));
        }
        let context = refused(Scaling {
            context_tokens_max: Some(1),
            ..usual()
        });
        assert!(matches!(context, ScalingError::Context { .. }));
        let nothing = refused(Scaling {
            requests_max: Some(0),
            ..usual()
        });
        assert_eq!(nothing, ScalingError::NothingLeft);
    }

    #[test]
    fn times_after_more_than_a_century_are_refused_unless_they_are_cut_off() {
        let trace = trace(vec![request(0, 1_000, 10), request(1_000, 1_000, 10)]);
        let slow = |rate_factor, requests_max| Scaling {
            rate_factor,
            requests_max,
            ..Scaling::default()
        };
        for factor in [1e-300, 1e-10] {
            let error = slow(factor, None)
                .apply(&trace)
                .expect_err("a second becomes centuries");
            assert_eq!(error, ScalingError::TooLate { factor });
            assert!(
                slow(factor, Some(1)).apply(&trace).is_ok(),
                "the first one comes at once"
            );
        }
        assert!(slow(1e-9, None).apply(&trace).is_ok(), "31 years");
    }

    #[test]
    fn a_user_who_would_think_for_more_than_a_century_is_refused() {
        let mut turn = request(0, 1_000, 10);
        turn.conversation = Some(Turn {
            conversation: 0,
            turn: 1,
            think_time: Duration::from_secs(1),
        });
        let slow = Scaling {
            rate_factor: 1e-300,
            ..Scaling::default()
        };
        let error = slow.apply(&trace(vec![turn])).expect_err("a second becomes centuries");
        assert_eq!(error, ScalingError::TooLate { factor: 1e-300 });
    }

    proptest! {
        /// Lengths, order and prefixes keep what scaling promises, for every trace.
        #[test]
        fn a_scaled_trace_is_a_trace(
            rows in vec((0_u64..20, 1_u32..200_000, 1_u32..5_000), 1..60),
            divisor in prop::sample::select(vec![1_u32, 4, 32, 512]),
            seed in any::<u64>(),
            context in 2_u32..5_000,
        ) {
            let mut at = 0;
            let requests = rows.iter().map(|(gap, prompt, output)| {
                at += gap / 10 * 3_000;
                request(at, *prompt, *output)
            });
            let trace = trace(requests.collect());
            let scaling = Scaling {
                length_divisor: divisor,
                spread: Some(StepSpread { step: Duration::from_secs(3), seed }),
                context_tokens_max: Some(context),
                ..Scaling::default()
            };
            let scaled = scaling.apply(&trace).expect("all of it is possible");
            prop_assert_eq!(&scaled, &scaling.apply(&trace).expect("and again"));
            let after = &scaled.trace.requests;
            prop_assert_eq!(after.len(), trace.requests.len());
            for (request, before) in after.iter().zip(&trace.requests) {
                prop_assert!(request.prompt_tokens >= 1 && request.output_tokens >= 1);
                prop_assert!(request.prompt_tokens + request.output_tokens <= context);
                prop_assert_eq!(request.prefix_blocks.len(), block_count(request.prompt_tokens, 512 / divisor));
                prop_assert!(request.at >= before.at && request.at < before.at + Duration::from_secs(3));
            }
            prop_assert!(after.windows(2).all(|pair| pair[0].at <= pair[1].at));
            prop_assert!(TraceFacts::of(&scaled.trace).hash != TraceFacts::of(&trace).hash);
        }
    }
}
