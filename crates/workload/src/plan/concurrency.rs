//! From a measured table of concurrency and latency: where the tail breaks its limit, and where to add servers before that.
//!
//! A rule on GPU utilisation reacts too late; a rule on requests at once reacts at three quarters of the highest concurrency
//! that keeps the limit.

use super::PlanError;
use super::check::positive;

/// Share of the highest good concurrency at which servers are added, and at which they must have been.
const ADD_AT: (f64, f64) = (0.75, 0.875);

/// One measured point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Requests at once.
    pub concurrency: u32,
    pub p50_ms: f64,
    pub p99_ms: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ScalePoint {
    /// The 99th percentile by the median, for each point: interference shows as a ratio that grows.
    pub ratios: Vec<f64>,
    /// The highest measured concurrency whose 99th percentile keeps the limit, before the first that breaks it.
    pub highest_good: Option<u32>,
    /// Add servers from here (75 %) to there (87.5 %).
    pub add_at: Option<(u32, u32)>,
    /// False when no point breaks the limit: the true edge is higher.
    pub is_edge_seen: bool,
}

/// # Errors
/// There is no point, a latency is not above 0, or the points do not rise in concurrency.
pub fn scale_point(points: &[Point], p99_limit_ms: f64) -> Result<ScalePoint, PlanError> {
    let limit = positive("the limit of the response time", p99_limit_ms)?;
    let ratio = |point: &Point| {
        positive("the concurrency", f64::from(point.concurrency))?;
        Ok(positive("the 99th percentile", point.p99_ms)? / positive("the median", point.p50_ms)?)
    };
    let ratios = points.iter().map(ratio).collect::<Result<Vec<f64>, PlanError>>()?;
    if let Some(pair) = points
        .windows(2)
        .find(|pair| pair[0].concurrency >= pair[1].concurrency)
    {
        return Err(PlanError::RowsNotRising {
            earlier: pair[0].concurrency,
            later: pair[1].concurrency,
        });
    }
    if points.is_empty() {
        return Err(PlanError::NoRows);
    }
    let good = points.iter().take_while(|point| point.p99_ms <= limit);
    let good: Vec<u32> = good.map(|point| point.concurrency).collect();
    let highest_good = good.last().copied();
    // Not below one request: a rule at none would add servers for ever.
    let at = |share: f64, highest: u32| ((f64::from(highest) * share).floor() as u32).max(1);
    Ok(ScalePoint {
        ratios,
        highest_good,
        add_at: highest_good.map(|highest| (at(ADD_AT.0, highest), at(ADD_AT.1, highest))),
        is_edge_seen: good.len() < points.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(concurrency: u32, p99_ms: f64) -> Point {
        Point {
            concurrency,
            p50_ms: 10.0,
            p99_ms,
        }
    }

    #[test]
    fn the_edge_may_lie_outside_of_the_table() {
        let all_good = scale_point(&[point(8, 20.0), point(16, 30.0)], 300.0).unwrap();
        assert_eq!((all_good.highest_good, all_good.is_edge_seen), (Some(16), false));
        let none = scale_point(&[point(8, 400.0), point(16, 30.0)], 300.0).unwrap();
        assert_eq!((none.highest_good, none.add_at, none.is_edge_seen), (None, None, true));
    }

    #[test]
    fn servers_are_added_from_one_request_on_at_the_least() {
        let one = scale_point(&[point(1, 20.0), point(2, 400.0)], 300.0).unwrap();
        assert_eq!((one.highest_good, one.add_at), (Some(1), Some((1, 1))));
        let three = scale_point(&[point(3, 20.0), point(4, 400.0)], 300.0).unwrap();
        assert_eq!(three.add_at, Some((2, 2)));
    }

    #[test]
    fn odd_tables_are_errors() {
        assert_eq!(scale_point(&[], 300.0), Err(PlanError::NoRows));
        assert!(matches!(
            scale_point(&[point(16, 1.0), point(8, 1.0)], 300.0),
            Err(PlanError::RowsNotRising { .. })
        ));
        assert!(scale_point(&[point(0, 1.0)], 300.0).is_err());
        assert!(scale_point(&[point(8, f64::NAN)], 300.0).is_err());
        assert!(scale_point(&[point(8, 1.0)], 0.0).is_err());
    }
}
