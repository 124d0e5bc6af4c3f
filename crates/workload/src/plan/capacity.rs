//! How many servers a load needs: by a measured rate for each server, or by service time and a ceiling of utilisation.
//!
//! The ceilings are rules of thumb of capacity guides: the stricter the limit of a response time, the more idle time a server
//! needs. The waits in `queueing.rs` show what a ceiling means under stated assumptions.

use super::PlanError;
use super::check::{open_share, positive, servers};
use super::queueing::{Load, Wait, wait_alone, wait_pooled};

/// Highest utilisation for a limit of the 99th percentile of TTFT, in milliseconds, the strictest first.
pub const CEILINGS: [(u32, f64); 4] = [(200, 0.55), (300, 0.63), (400, 0.70), (500, 0.75)];

/// The ceiling for a limit: that of the next stricter limit in the table.
///
/// # Errors
/// The limit is not above 0, or stricter than every limit of the table.
pub fn ceiling(slo_ms: f64) -> Result<f64, PlanError> {
    let slo_ms = positive("the limit of the response time", slo_ms)?;
    let met = CEILINGS.iter().rev().find(|(limit, _)| f64::from(*limit) <= slo_ms);
    met.map(|(_, share)| *share).ok_or(PlanError::NoCeiling {
        slo_ms,
        strictest_ms: CEILINGS[0].0,
    })
}

/// How a number of servers is rounded up for a purchase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// From 20 servers on to a multiple of 10 (58 to 60, 38 to 40); fewer are not rounded.
    Tens,
    /// To a multiple of this number, such as the devices of one host. 0 counts as 1.
    MultipleOf(u32),
}

impl Rounding {
    pub fn up(self, count: u32) -> u32 {
        let multiple = match self {
            Rounding::Tens if count < 20 => 1,
            Rounding::Tens => 10,
            Rounding::MultipleOf(multiple) => multiple.max(1),
        };
        count.checked_next_multiple_of(multiple).unwrap_or(count)
    }
}

/// Servers for a rate, when each takes a known rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replicas {
    pub rate_each: f64,
    pub needed: u32,
    pub planned: u32,
}

/// Replicas that each run `running_max` requests at once, which take `latency_s` on average.
///
/// # Errors
/// An input is not above 0.
pub fn replicas(rate: f64, running_max: f64, latency_s: f64) -> Result<Replicas, PlanError> {
    let running_max = positive("the number of requests at once", running_max)?;
    let each = running_max / positive("the mean latency", latency_s)?;
    by_rate_each(rate, each, Rounding::MultipleOf(1))
}

/// Servers by a measured rate of one server. How busy that rate keeps a server is part of the measurement.
///
/// # Errors
/// An input is not above 0.
pub fn by_rate_each(rate: f64, rate_each: f64, rounding: Rounding) -> Result<Replicas, PlanError> {
    let rate_each = positive("the rate of one server", rate_each)?;
    let needed = servers("the number of servers", positive("the rate", rate)? / rate_each)?;
    Ok(Replicas {
        rate_each,
        needed,
        planned: rounding.up(needed),
    })
}

/// A number of servers and what it means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sized {
    pub count: u32,
    pub utilisation: f64,
    /// Each server with its own queue.
    pub alone: Wait,
    /// One queue for all servers.
    pub pooled: Wait,
}

impl Sized {
    /// # Errors
    /// An input is not above 0, or `count` servers are always busy.
    pub fn of(load: Load, count: u32) -> Result<Self, PlanError> {
        Ok(Self {
            count,
            utilisation: load.busy()? / f64::from(count),
            alone: wait_alone(load, count)?,
            pooled: wait_pooled(load, count)?,
        })
    }
}

/// Servers under a ceiling of utilisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Instances {
    /// Servers that are busy on average.
    pub busy: f64,
    pub ceiling: f64,
    /// Rate of one server at the ceiling.
    pub rate_each: f64,
    pub needed: Sized,
    pub planned: Sized,
}

/// The fewest servers whose utilisation stays at or below `ceiling`: ceil(rate / (ceiling / service time)).
///
/// # Errors
/// An input is not above 0, or the ceiling is not between 0 and 1.
pub fn instances(load: Load, ceiling: f64, rounding: Rounding) -> Result<Instances, PlanError> {
    let ceiling = open_share("the utilisation", ceiling)?;
    let busy = load.busy()?;
    let needed = servers("the number of servers", busy / ceiling)?;
    Ok(Instances {
        busy,
        ceiling,
        rate_each: ceiling / load.service_s,
        needed: Sized::of(load, needed)?,
        planned: Sized::of(load, rounding.up(needed))?,
    })
}

/// What a limit costs: one row for each ceiling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TightnessRow {
    pub slo_ms: u32,
    pub ceiling: f64,
    pub needed: u32,
    /// The servers that the plan counts with: rounded up where the row is that of the chosen limit.
    pub planned: Sized,
    pub is_chosen: bool,
}

/// The table of all ceilings for one load. Only the row of `chosen_ms` is rounded: it is what is bought, and the others show
/// what another limit would need.
///
/// # Errors
/// An input is not above 0, or no ceiling is known for the chosen limit.
pub fn tightness(load: Load, chosen_ms: f64, rounding: Rounding) -> Result<Vec<TightnessRow>, PlanError> {
    let chosen = ceiling(chosen_ms)?;
    let row = |(slo_ms, ceiling): &(u32, f64)| {
        let is_chosen = *ceiling == chosen;
        let sized = instances(load, *ceiling, rounding)?;
        Ok(TightnessRow {
            slo_ms: *slo_ms,
            ceiling: *ceiling,
            needed: sized.needed.count,
            planned: if is_chosen { sized.planned } else { sized.needed },
            is_chosen,
        })
    };
    CEILINGS.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_between_two_rows_has_the_stricter_ceiling() {
        assert_eq!(ceiling(399.0), Ok(0.63));
        assert_eq!(ceiling(5000.0), Ok(0.75));
        assert!(matches!(
            ceiling(150.0),
            Err(PlanError::NoCeiling { strictest_ms: 200, .. })
        ));
        assert!(matches!(ceiling(f64::NAN), Err(PlanError::NotPositive { .. })));
    }

    #[test]
    fn rounding_goes_up_and_never_down() {
        assert_eq!([19, 20, 21, 58].map(|n| Rounding::Tens.up(n)), [19, 20, 30, 60]);
        assert_eq!([1, 8, 9].map(|n| Rounding::MultipleOf(8).up(n)), [8, 8, 16]);
        assert_eq!(Rounding::MultipleOf(0).up(7), 7);
        assert_eq!(Rounding::MultipleOf(u32::MAX).up(u32::MAX), u32::MAX);
    }

    #[test]
    fn bad_inputs_are_typed_errors() {
        let load = Load {
            rate: 1000.0,
            service_s: 0.04,
        };
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(replicas(bad, 64.0, 4.0).is_err());
            assert!(replicas(200.0, bad, 4.0).is_err());
            assert!(replicas(200.0, 64.0, bad).is_err());
            assert!(instances(Load { rate: bad, ..load }, 0.7, Rounding::Tens).is_err());
            assert!(instances(Load { service_s: bad, ..load }, 0.7, Rounding::Tens).is_err());
            assert!(instances(load, bad, Rounding::Tens).is_err());
        }
        assert!(matches!(
            instances(load, 1.0, Rounding::Tens),
            Err(PlanError::NotAShare { .. })
        ));
        assert!(instances(Load { rate: 1e12, ..load }, 0.7, Rounding::Tens).is_err());
    }
}
