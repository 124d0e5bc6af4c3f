//! The shape of a trace in the figures that plans are made of.

use std::collections::BTreeSet;

use super::PlanError;
use crate::trace::Trace;

/// The bins in which the peak rate is counted.
const BIN_S: f64 = 10.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    pub requests: usize,
    pub seconds: f64,
    /// Requests a second over the whole trace.
    pub rate: f64,
    /// Requests a second in the busiest ten seconds.
    pub peak_rate: f64,
    pub prompt_tokens_mean: f64,
    pub prompt_tokens_p99: u32,
    /// Prompt tokens that remain when every block that came before is still cached: the fewest that any cache can leave.
    /// Equal to the mean prompt when the trace knows no prefixes.
    pub uncached_tokens_mean: f64,
    pub output_tokens_mean: f64,
}

impl Traffic {
    /// # Errors
    /// The trace has no two requests at different times.
    pub fn of(trace: &Trace) -> Result<Self, PlanError> {
        let requests = trace.requests.len();
        let times: Vec<f64> = trace.requests.iter().map(|request| request.at.as_secs_f64()).collect();
        let first = times.iter().copied().fold(f64::INFINITY, f64::min);
        let last = times.iter().copied().fold(0.0, f64::max);
        let seconds = last - first;
        if requests < 2 || seconds <= 0.0 {
            return Err(PlanError::TraceTooShort { requests });
        }
        let mean = |sum: f64| sum / requests as f64;
        let sum = |tokens: fn(&crate::trace::TraceRequest) -> u32| {
            trace
                .requests
                .iter()
                .map(|request| f64::from(tokens(request)))
                .sum::<f64>()
        };
        Ok(Self {
            requests,
            seconds,
            rate: (requests - 1) as f64 / seconds,
            peak_rate: peak_rate(&times, first),
            prompt_tokens_mean: mean(sum(|request| request.prompt_tokens)),
            prompt_tokens_p99: p99(trace.requests.iter().map(|request| request.prompt_tokens).collect()),
            uncached_tokens_mean: mean(uncached(trace)),
            output_tokens_mean: mean(sum(|request| request.output_tokens)),
        })
    }

    /// Prompt tokens for each output token.
    pub fn prompt_by_output(&self) -> f64 {
        self.prompt_tokens_mean / self.output_tokens_mean.max(1.0)
    }
}

fn peak_rate(times: &[f64], first: f64) -> f64 {
    let mut bins: Vec<u64> = times.iter().map(|at| ((at - first) / BIN_S) as u64).collect();
    bins.sort_unstable();
    let most = bins.chunk_by(|a, b| a == b).map(<[u64]>::len).max();
    most.unwrap_or(0) as f64 / BIN_S
}

/// Nearest rank.
fn p99(mut values: Vec<u32>) -> u32 {
    values.sort_unstable();
    let rank = (values.len() as f64 * 0.99).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

fn uncached(trace: &Trace) -> f64 {
    let mut seen: BTreeSet<u64> = BTreeSet::new();
    let mut tokens = 0.0;
    for request in &trace.requests {
        let hits = request.prefix_blocks.iter().take_while(|id| seen.contains(id)).count() as f64;
        let prompt = f64::from(request.prompt_tokens);
        tokens += prompt - (hits * f64::from(trace.block_tokens)).min(prompt);
        seen.extend(&request.prefix_blocks);
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::TraceRequest;
    use serving_core::request::Lane;
    use std::time::Duration;

    fn request(at_s: u64, tokens: (u32, u32), blocks: &[u64]) -> TraceRequest {
        TraceRequest {
            at: Duration::from_secs(at_s),
            prompt_tokens: tokens.0,
            output_tokens: tokens.1,
            prefix_blocks: blocks.to_vec(),
            lane: Lane::Interactive,
            conversation: None,
        }
    }

    #[test]
    fn rates_lengths_and_cached_prefixes_are_counted() {
        let trace = Trace {
            name: "test".to_owned(),
            block_tokens: 16,
            requests: vec![
                request(100, (40, 10), &[1, 2, 3]),
                request(101, (48, 10), &[1, 2, 4]),
                request(130, (20, 40), &[1, 5]),
            ],
        };
        let traffic = Traffic::of(&trace).unwrap();
        assert_eq!((traffic.requests, traffic.seconds), (3, 30.0));
        assert!((traffic.rate - 2.0 / 30.0).abs() < 1e-12);
        assert_eq!(traffic.peak_rate, 0.2);
        assert_eq!(traffic.prompt_tokens_mean, 36.0);
        assert_eq!(traffic.prompt_tokens_p99, 48);
        assert_eq!(traffic.uncached_tokens_mean, (40.0 + 16.0 + 4.0) / 3.0);
        assert_eq!(traffic.prompt_by_output(), 1.8);
    }

    #[test]
    fn a_trace_without_time_has_no_rate() {
        let mut trace = Trace {
            name: "test".to_owned(),
            block_tokens: 0,
            requests: vec![request(5, (1, 1), &[]); 3],
        };
        assert_eq!(Traffic::of(&trace), Err(PlanError::TraceTooShort { requests: 3 }));
        trace.requests.clear();
        assert_eq!(Traffic::of(&trace), Err(PlanError::TraceTooShort { requests: 0 }));
    }
}
