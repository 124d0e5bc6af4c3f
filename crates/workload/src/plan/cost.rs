//! What servers cost for an hour and a month. Prices are inputs; none is built in.
//!
//! A month is 720 hours: 30 days.

use super::PlanError;
use super::check::{finite, not_negative, positive};

pub const HOURS_PER_MONTH: f64 = 720.0;
const HOURS_PER_DAY: f64 = 24.0;

/// Servers at one price, in US dollars.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bill {
    pub per_hour: f64,
    pub per_month: f64,
}

/// # Errors
/// An input is not above 0.
pub fn bill(count: u32, price_per_hour: f64) -> Result<Bill, PlanError> {
    let count = positive("the number of servers", f64::from(count))?;
    let per_hour = count * positive("the price", price_per_hour)?;
    Ok(Bill {
        per_hour,
        per_month: finite("the cost of a month", per_hour * HOURS_PER_MONTH)?,
    })
}

/// The bill of a month in which fewer servers run for some hours of each day.
///
/// # Errors
/// An input is negative, or a day has more than 24 hours.
pub fn bill_with_off_peak(peak: Bill, off_peak: Bill, hours_per_day: f64) -> Result<f64, PlanError> {
    let hours = not_negative("the number of off-peak hours", hours_per_day)?;
    let rest = not_negative("what the off-peak hours leave of a day", HOURS_PER_DAY - hours)?;
    Ok((peak.per_month * rest + off_peak.per_month * hours) / HOURS_PER_DAY)
}

/// By how much `other` is dearer than `base`, as a share of `base`. Below 0 it is cheaper.
pub fn difference(base: Bill, other: Bill) -> f64 {
    other.per_month / base.per_month - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_has_24_hours() {
        let (peak, off) = (bill(60, 1.69).unwrap(), bill(14, 1.69).unwrap());
        assert_eq!(bill_with_off_peak(peak, off, 0.0), Ok(peak.per_month));
        assert_eq!(bill_with_off_peak(peak, off, 24.0), Ok(off.per_month));
        assert!(bill_with_off_peak(peak, off, 24.5).is_err());
        assert!(bill_with_off_peak(peak, off, -1.0).is_err());
        assert!(bill_with_off_peak(peak, off, f64::NAN).is_err());
    }

    #[test]
    fn free_and_negative_servers_are_errors() {
        assert!(bill(0, 1.69).is_err());
        assert!(bill(60, 0.0).is_err());
        assert!(bill(60, -1.0).is_err());
        assert!(bill(60, f64::NAN).is_err());
        assert!(bill(u32::MAX, f64::MAX).is_err());
    }
}
