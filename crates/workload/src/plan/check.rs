//! The checks of planning inputs, and the one error type of all formulas.

/// Why a figure cannot be planned. The fault is always in the input that it names.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    #[error("{what} is {value}, and it must be a number above 0")]
    NotPositive { what: &'static str, value: f64 },
    #[error("{what} is {value}, and it must be a number, 0 or more")]
    Negative { what: &'static str, value: f64 },
    #[error("{what} is {value}, and it must be a share above 0 and below 1")]
    NotAShare { what: &'static str, value: f64 },
    #[error("{what} would be {value}, which is more than {limit}; check the units of the inputs")]
    TooLarge { what: &'static str, value: f64, limit: u32 },
    #[error(
        "no utilisation ceiling is known for a limit of {slo_ms} ms: the strictest known one is for {strictest_ms} ms; give \
         the utilisation yourself"
    )]
    NoCeiling { slo_ms: f64, strictest_ms: u32 },
    #[error("the weights take {weights_gb} GB and the memory has {memory_gb} GB; use more devices or smaller weights")]
    WeightsDoNotFit { weights_gb: f64, memory_gb: f64 },
    #[error("two pools need at least 2 nodes, and there are {nodes}")]
    TooFewNodes { nodes: u32 },
    #[error("the rows do not rise in concurrency: {earlier} comes before {later}")]
    RowsNotRising { earlier: u32, later: u32 },
    #[error("there are no rows of measurements")]
    NoRows,
}

/// Counts of servers above this are a mistake in the units, and some formulas loop over them.
const COUNT_MAX: u32 = 1_000_000;

pub(super) fn positive(what: &'static str, value: f64) -> Result<f64, PlanError> {
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(PlanError::NotPositive { what, value }),
    }
}

pub(super) fn not_negative(what: &'static str, value: f64) -> Result<f64, PlanError> {
    match value.is_finite() && value >= 0.0 {
        true => Ok(value),
        false => Err(PlanError::Negative { what, value }),
    }
}

/// A share between 0 and 1, both excluded.
pub(super) fn open_share(what: &'static str, value: f64) -> Result<f64, PlanError> {
    match value.is_finite() && value > 0.0 && value < 1.0 {
        true => Ok(value),
        false => Err(PlanError::NotAShare { what, value }),
    }
}

/// The smallest whole number that is not below `value`. A sum of rounding errors does not buy one more server: 40 / 0.8 is
/// 50 servers, also when the division gives 50.00000000000001.
pub(super) fn servers(what: &'static str, value: f64) -> Result<u32, PlanError> {
    let count = (value * (1.0 - 1e-12)).ceil();
    match count <= f64::from(COUNT_MAX) {
        true => Ok((count as u32).max(1)),
        false => Err(PlanError::TooLarge {
            what,
            value,
            limit: COUNT_MAX,
        }),
    }
}

/// A result that left the range of numbers, because the inputs were at its edge, is an error, too.
pub(super) fn finite(what: &'static str, value: f64) -> Result<f64, PlanError> {
    match value.is_finite() {
        true => Ok(value),
        false => Err(PlanError::TooLarge {
            what,
            value,
            limit: u32::MAX,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_usable_number_is_an_error() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(positive("x", bad).is_err(), "{bad}");
            assert!(open_share("x", bad).is_err(), "{bad}");
            assert_eq!(not_negative("x", bad).is_err(), bad != 0.0, "{bad}");
        }
        assert!(open_share("x", 1.0).is_err());
        assert_eq!(open_share("x", 0.99), Ok(0.99));
    }

    #[test]
    fn a_rounding_error_buys_no_server_and_a_real_rest_does() {
        assert_eq!(servers("n", 50.000_000_000_000_01), Ok(50));
        assert_eq!(servers("n", 50.000_001), Ok(51));
        assert_eq!(servers("n", 0.0), Ok(1), "a pool has at least one");
        assert!(servers("n", 1e7).is_err());
        assert!(servers("n", f64::NAN).is_err());
    }
}
