//! The figures of two sets of simulations side by side, and whether the change moves each of them.

use serde::Serialize;
use workload::statistics::{Distribution, Samples};
use workload::summary::Summary;

/// A smaller difference is within what two simulations of the same cluster can differ by through rounding.
const NONE_BELOW: f64 = 0.005;

#[derive(Clone, Debug, Serialize)]
pub(super) struct Prediction {
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// With its unit.
    pub metric: &'static str,
    /// Medians over the simulations. `None`: one of them has no such figure.
    pub base: Option<f64>,
    pub changed: Option<f64>,
    /// As a share of `base`.
    pub difference: Option<f64>,
    pub direction: Direction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Direction {
    Lower,
    Higher,
    /// No simulation shows one, the simulations with other draws do not agree, or one of them has no such figure.
    None,
}

impl Direction {
    pub(super) fn sign(self) -> &'static str {
        match self {
            Self::Lower => "v",
            Self::Higher => "^",
            Self::None => "=",
        }
    }
}

type Figure = fn(&Summary) -> Option<f64>;

fn of(distribution: Option<Distribution>, value: fn(Distribution) -> f64) -> Option<f64> {
    distribution.map(value)
}

const FIGURES: &[(&str, Figure)] = &[
    ("ttft_ms_p50", |s| of(s.ttft_ms, |d| d.p50)),
    ("ttft_ms_p90", |s| of(s.ttft_ms, |d| d.p90)),
    ("ttft_ms_p99", |s| of(s.ttft_ms, |d| d.p99)),
    ("second_token_ms_p50", |s| of(s.second_token_ms, |d| d.p50)),
    ("itl_ms_p50", |s| of(s.itl_ms, |d| d.p50)),
    ("itl_ms_p90", |s| of(s.itl_ms, |d| d.p90)),
    ("itl_ms_p99", |s| of(s.itl_ms, |d| d.p99)),
    ("e2e_ms_p50", |s| of(s.e2e_ms, |d| d.p50)),
    ("e2e_ms_p90", |s| of(s.e2e_ms, |d| d.p90)),
    ("goodput_per_s", |s| Some(s.goodput_per_s)),
    ("output_tokens_per_s", |s| Some(s.throughput.output_tokens_per_s)),
    ("completed", |s| Some(s.counts.completed as f64)),
    ("refused", |s| Some(s.counts.refused as f64)),
];

impl Prediction {
    pub(super) fn of(base: &[Summary], changed: &[Summary]) -> Self {
        let row = |(metric, figure): &(&'static str, Figure)| Row::of(metric, (base, changed), *figure);
        Self {
            rows: FIGURES.iter().map(row).collect(),
        }
    }
}

impl Row {
    fn of(metric: &'static str, (base, changed): (&[Summary], &[Summary]), figure: Figure) -> Self {
        // A simulation that completed nothing has no times. What the others say without it would be too good.
        let median = |summaries: &[Summary]| {
            let all: Option<Vec<f64>> = summaries.iter().map(figure).collect();
            Samples::new(all?).percentile(50.0)
        };
        let (before, after) = (median(base), median(changed));
        let difference = before.zip(after).and_then(|(before, after)| share(before, after));
        // The same draws in pairs: most of what the draws do cancels out.
        let pairs = base.iter().zip(changed);
        let moves: Option<Vec<f64>> = pairs
            .map(|(base, changed)| Some(moved(figure(base)?, figure(changed)?)))
            .collect();
        Self {
            metric,
            base: before,
            changed: after,
            difference,
            direction: moves.map_or(Direction::None, |moves| direction(&moves)),
        }
    }
}

/// `None` where nothing becomes something.
fn share(before: f64, after: f64) -> Option<f64> {
    match before == 0.0 {
        true => (after == 0.0).then_some(0.0),
        false => Some((after - before) / before),
    }
}

/// As [`share`]; where nothing becomes something, as if it had doubled.
fn moved(before: f64, after: f64) -> f64 {
    share(before, after).unwrap_or(1.0)
}

fn direction(shares: &[f64]) -> Direction {
    let is_all = |is_so: fn(f64) -> bool| !shares.is_empty() && shares.iter().all(|share| is_so(*share));
    if is_all(|share| share > NONE_BELOW) {
        Direction::Higher
    } else if is_all(|share| share < -NONE_BELOW) {
        Direction::Lower
    } else {
        Direction::None
    }
}

#[cfg(test)]
mod tests {
    use workload::record::Outcome;

    use super::*;
    use crate::compare::test_kit::{comparison, record, run};

    /// Of a run with one request. `None`: it was refused.
    fn with_ttft(ttft_ms: Option<f64>) -> Summary {
        let mut request = record(0, ttft_ms.as_slice());
        if ttft_ms.is_none() {
            request.outcome = Outcome::Refused { status: 429 };
        }
        Summary::of(&run("test", vec![request]), &comparison().slo)
    }

    #[test]
    fn a_simulation_that_completed_nothing_leaves_no_figure_of_a_latency() {
        let shown = |metric: &str, changed: [Option<f64>; 3]| {
            let prediction = Prediction::of(&[Some(10.0); 3].map(with_ttft), &changed.map(with_ttft));
            let row = prediction.rows.into_iter().find(|row| row.metric == metric);
            row.map(|row| (row.changed, row.direction))
        };
        let (all, some, none) = ([Some(5.0); 3], [Some(5.0), Some(5.0), None], [None; 3]);
        assert_eq!(shown("ttft_ms_p50", all), Some((Some(5.0), Direction::Lower)));
        assert_eq!(shown("ttft_ms_p50", some), Some((None, Direction::None)));
        assert_eq!(shown("ttft_ms_p50", none), Some((None, Direction::None)));
        assert_eq!(shown("completed", some), Some((Some(1.0), Direction::None)));
        assert_eq!(shown("completed", none), Some((Some(0.0), Direction::Lower)));
    }

    #[test]
    fn a_direction_is_one_that_all_draws_show() {
        assert_eq!(direction(&[0.1, 0.02, 0.3]), Direction::Higher);
        assert_eq!(direction(&[-0.1, -0.02]), Direction::Lower);
        assert_eq!(direction(&[-0.1, 0.02]), Direction::None);
        assert_eq!(direction(&[0.001, 0.02]), Direction::None);
        assert_eq!(direction(&[]), Direction::None);
    }

    #[test]
    fn a_share_of_nothing_is_not_known() {
        assert_eq!(share(2.0, 3.0), Some(0.5));
        assert_eq!(share(0.0, 0.0), Some(0.0));
        assert_eq!(share(0.0, 1.0), None);
        assert_eq!(direction(&[moved(0.0, 7.0)]), Direction::Higher, "the first refusals");
    }
}
