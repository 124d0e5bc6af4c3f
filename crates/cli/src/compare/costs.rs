//! What a prefill on the decode node costs against a handoff, measured; and the threshold that follows.
//!
//! Two idle clusters get the same prompts one after the other: one hands every prompt off, in the other the decode node computes
//! each itself. A prompt is worth a handoff when computing it there takes longer than handing it off.

use serde::{Deserialize, Serialize};
use serving_core::request::Lane;
use std::time::Duration;
use workload::record::{RequestRecord, Run};
use workload::statistics::Samples;
use workload::trace::{Trace, TraceRequest};

/// Prompt lengths that are measured, and how often each.
const LENGTHS: [u32; 5] = [32, 64, 128, 256, 512];
const TIMES: u32 = 3;
const OUTPUT_TOKENS: u32 = 8;
/// Prefill works on whole blocks of 16 tokens, and no threshold below one means anything.
const STEP_TOKENS: u32 = 16;
/// A threshold above the longest prompt that was measured would be a guess.
const THRESHOLD_MAX: u32 = 512;

/// Milliseconds on one idle cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Costs {
    /// Time to the first token of a prompt with n tokens: `first_ms + n * per_prompt_token_ms`, on the decode node.
    pub first_ms: f64,
    pub per_prompt_token_ms: f64,
    /// Median gap between two tokens of a single stream.
    pub per_output_token_ms: f64,
    /// How much later the second token comes when the prompt was handed off.
    pub handoff_ms: f64,
    pub requests: u32,
}

/// The prompts of both runs. They share no prefix.
pub(super) fn trace() -> Trace {
    let all = (0..TIMES).flat_map(|_| LENGTHS);
    let requests = all.map(|prompt_tokens| TraceRequest {
        at: Duration::ZERO,
        prompt_tokens,
        output_tokens: OUTPUT_TOKENS,
        prefix_blocks: Vec::new(),
        lane: Lane::Interactive,
        conversation: None,
    });
    Trace {
        name: "costs of prefill and handoff".to_owned(),
        block_tokens: 0,
        requests: requests.collect(),
    }
}

impl Costs {
    /// # Errors
    /// A run has too few answers to tell.
    pub fn of(local: &Run, handed_off: &Run) -> anyhow::Result<Self> {
        let told = |run: &Run| -> Vec<(u32, f64, f64)> {
            let completed = run.records.iter().filter(|record| record.is_completed());
            let times = completed
                .filter_map(|record| Some((record.prompt_tokens, record.ttft_ms()?, record.second_token_ms()?)));
            times.collect()
        };
        let (ours, theirs) = (told(local), told(handed_off));
        let line = line(
            &ours
                .iter()
                .map(|(n, first, _)| (f64::from(*n), *first))
                .collect::<Vec<_>>(),
        );
        let gaps = local.records.iter().flat_map(RequestRecord::gaps_ms);
        let median_second = |times: &[(u32, f64, f64)], n: u32| {
            let seconds = times
                .iter()
                .filter(|(tokens, ..)| *tokens == n)
                .map(|(_, _, second)| *second);
            Samples::new(seconds).percentile(50.0)
        };
        let mut lengths: Vec<u32> = ours.iter().map(|(n, ..)| *n).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let later = lengths
            .iter()
            .filter_map(|n| Some(median_second(&theirs, *n)? - median_second(&ours, *n)?));
        let handoff = Samples::new(later).percentile(50.0);
        let (Some((first_ms, per_prompt_token_ms)), Some(gap), Some(handoff_ms)) =
            (line, Samples::new(gaps).percentile(50.0), handoff)
        else {
            anyhow::bail!(
                "the costs of prefill and handoff cannot be told: {} and {} of {} requests were answered",
                ours.len(),
                theirs.len(),
                trace().requests.len()
            );
        };
        Ok(Self {
            first_ms,
            per_prompt_token_ms,
            per_output_token_ms: gap,
            handoff_ms,
            requests: (ours.len() + theirs.len()) as u32,
        })
    }

    /// Prompts with fewer tokens are computed sooner than they are handed off.
    pub fn threshold_tokens(&self) -> u32 {
        let tokens = self.handoff_ms.max(0.0) / self.per_prompt_token_ms.max(1e-3);
        let steps = (tokens / f64::from(STEP_TOKENS))
            .ceil()
            .clamp(1.0, f64::from(THRESHOLD_MAX / STEP_TOKENS));
        steps as u32 * STEP_TOKENS
    }

    /// Requests a second that so many cores may just bear, as a first guess of the knee: a decode step carries several streams, so a
    /// token is counted at a third of a lonely stream's step.
    pub fn rate_guess(&self, cores: u32, prompt_tokens: f64, output_tokens: f64) -> f64 {
        let prefill = self.per_prompt_token_ms.max(0.0) * prompt_tokens;
        let decode = self.per_output_token_ms * output_tokens / 3.0;
        let each_ms = (prefill + decode).max(1.0);
        f64::from(cores) * 700.0 / each_ms
    }

    pub fn words(&self) -> String {
        format!(
            "a prompt token costs {:.2} ms on the decode node and a handoff {:.1} ms (medians of {} requests), so prompts below {} tokens are not worth a handoff",
            self.per_prompt_token_ms,
            self.handoff_ms,
            self.requests,
            self.threshold_tokens()
        )
    }
}

/// Intercept and slope of the least squares line. `None` when all points have the same abscissa.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    if points.is_empty() || spread <= 0.0 {
        return None;
    }
    let slope = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread;
    Some((y - slope * x, slope))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::test_kit;

    /// A cluster whose prompts take 5 ms and 0.5 ms a token, and whose second token comes `handoff` later.
    fn run(handoff: f64) -> Run {
        let records = trace().requests.into_iter().enumerate().map(|(index, request)| {
            let first = 5.0 + 0.5 * f64::from(request.prompt_tokens);
            let mut record = test_kit::record(index, &[first, first + 10.0 + handoff, first + 20.0 + handoff]);
            record.prompt_tokens = request.prompt_tokens;
            record
        });
        test_kit::run("costs", records.collect())
    }

    #[test]
    fn known_costs_are_found_and_the_threshold_is_where_they_are_equal() {
        let costs = Costs::of(&run(0.0), &run(24.0)).expect("enough answers");
        assert!((costs.per_prompt_token_ms - 0.5).abs() < 1e-9, "{costs:?}");
        assert!((costs.first_ms - 5.0).abs() < 1e-9, "{costs:?}");
        assert!((costs.handoff_ms - 24.0).abs() < 1e-9, "{costs:?}");
        assert_eq!(costs.threshold_tokens(), 48);
        assert!((costs.rate_guess(2, 100.0, 30.0) - 1400.0 / 150.0).abs() < 1e-9);
    }

    #[test]
    fn a_handoff_that_costs_nothing_gives_the_smallest_threshold() {
        let costs = Costs::of(&run(3.0), &run(0.0)).expect("enough answers");
        assert_eq!(costs.threshold_tokens(), STEP_TOKENS);
        let costs = Costs::of(&run(0.0), &run(1e6)).expect("enough answers");
        assert_eq!(costs.threshold_tokens(), THRESHOLD_MAX);
    }

    #[test]
    fn without_answers_nothing_is_told() {
        let none = test_kit::run("none", Vec::new());
        assert!(Costs::of(&none, &none).is_err());
    }
}
