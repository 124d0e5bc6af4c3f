//! How many times slower requests were than on an idle server: an SLO that knows no model (after Splitwise, ISCA 2024).

use crate::record::{RequestRecord, Run};
use crate::statistics::{Distribution, Samples};

/// What a request costs when the server does nothing else: a line for the prompt, and a constant for each further token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Idle {
    ttft_ms: f64,
    prompt_ms_per_token: f64,
    tpot_ms: f64,
}

impl Idle {
    /// Fitted to a run in which each request was alone. `None` when no request of it completed.
    ///
    /// The line for the prompt is that of least squares over the tokens that were not cached. It never falls: a longer prompt
    /// does not take less time.
    pub fn of(alone: &Run) -> Option<Self> {
        let completed: Vec<&RequestRecord> = alone.completed().collect();
        let points: Vec<(f64, f64)> = completed
            .iter()
            .filter_map(|record| Some((computed(record), record.ttft_ms()?)))
            .collect();
        let tpot_ms = Samples::new(completed.iter().filter_map(|record| record.tpot_ms())).percentile(50.0);
        let (offset, slope) = line(&points)?;
        Some(Self {
            ttft_ms: offset,
            prompt_ms_per_token: slope,
            tpot_ms: tpot_ms.unwrap_or(0.0),
        })
    }
    fn e2e_ms(&self, record: &RequestRecord) -> f64 {
        let gaps = f64::from(record.output_tokens.saturating_sub(1));
        // Below the shortest prompt of the fit the line may fall under zero.
        let ttft_ms = (self.ttft_ms + self.prompt_ms_per_token * computed(record)).max(0.0);
        ttft_ms + self.tpot_ms * gaps
    }
    /// End-to-end time by the idle server's, for each completed request. 1 is the speed of the idle server.
    pub fn slowdown(&self, run: &Run) -> Option<Distribution> {
        let ratios = run.completed().map(|record| record.e2e_ms() / self.e2e_ms(record));
        Samples::new(ratios).distribution()
    }
}

fn computed(record: &RequestRecord) -> f64 {
    f64::from(record.prompt_tokens.saturating_sub(record.cached_tokens.unwrap_or(0)))
}

/// Offset and slope of the line of least squares, the slope at least 0. One point, or points above each other, give a flat line.
pub(crate) fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let count = points.len() as f64;
    if points.is_empty() {
        return None;
    }
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let common: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let slope = if spread > 0.0 { (common / spread).max(0.0) } else { 0.0 };
    Some((y - slope * x, slope))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{request, run};

    fn with_prompt(id: u32, prompt: u32, tokens_ms: &[u64]) -> RequestRecord {
        RequestRecord {
            prompt_tokens: prompt,
            ..request(id, tokens_ms)
        }
    }

    #[test]
    fn a_request_of_another_length_is_judged_by_the_line_through_the_idle_ones() {
        let alone = run(
            "alone",
            vec![with_prompt(1, 100, &[20, 30]), with_prompt(2, 300, &[40, 50])],
        );
        let idle = Idle::of(&alone).unwrap();
        // 200 tokens take 30 ms, and two further tokens 20 ms.
        let busy = run("busy", vec![with_prompt(3, 200, &[60, 80, 100])]);
        let slowdown = idle.slowdown(&busy).unwrap();
        assert!((slowdown.p50 - 2.0).abs() < 1e-9, "{slowdown:?}");
        let same = idle.slowdown(&alone).unwrap();
        assert!((same.max - 1.0).abs() < 1e-9, "{same:?}");
    }

    #[test]
    fn a_prompt_shorter_than_every_idle_one_takes_no_time_below_zero() {
        let alone = run(
            "alone",
            vec![with_prompt(1, 100, &[20, 30]), with_prompt(2, 300, &[400, 410])],
        );
        let short = run("short", vec![with_prompt(3, 10, &[5, 15])]);
        // The line is at -151 ms, so only the gap of 10 ms counts.
        let slowdown = Idle::of(&alone).unwrap().slowdown(&short).unwrap();
        assert!((slowdown.p50 - 1.5).abs() < 1e-9, "{slowdown:?}");
    }

    #[test]
    fn an_idle_run_without_answers_predicts_nothing() {
        assert_eq!(Idle::of(&run("none", Vec::new())), None);
    }
}
