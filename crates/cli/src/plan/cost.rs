//! `plan cost`: dollars for servers. Prices are flags, because they change and differ between contracts.

use clap::Args;
use workload::plan::cost::{Bill, HOURS_PER_MONTH, bill, bill_with_off_peak, difference};

use super::sheet::{Sheet, Unit};

const EXAMPLES: &str = "\
Examples:
  baton plan cost --instances 60 --price 1.69
  baton plan cost --instances 60 --price 1.69 --against-instances 40 --against-price 1.89
  baton plan cost --instances 60 --price 1.69 --off-peak-instances 14 --off-peak-hours 8";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub(super) struct CostArgs {
    /// Servers.
    #[arg(long, value_name = "N")]
    instances: u32,
    /// US dollars for an hour of one server.
    #[arg(long, value_name = "DOLLARS")]
    price: f64,
    /// Servers of another kind, to compare.
    #[arg(long, value_name = "N", requires = "against_price")]
    against_instances: Option<u32>,
    /// US dollars for an hour of one of these.
    #[arg(long, value_name = "DOLLARS", requires = "against_instances")]
    against_price: Option<f64>,
    /// Servers that run off-peak.
    #[arg(long, value_name = "N")]
    off_peak_instances: Option<u32>,
    /// Off-peak hours of a day.
    #[arg(long, value_name = "HOURS", requires = "off_peak_instances")]
    off_peak_hours: Option<f64>,
}

impl CostArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let base = bill(self.instances, self.price)?;
        let mut sheet = Sheet::new("cost")
            .input(("instances", "servers"), f64::from(self.instances), Unit::Whole(""))
            .input(
                ("price_per_hour", "price of a server and hour"),
                self.price,
                Unit::DollarsAndCents,
            )
            .input(
                ("hours_per_month", "hours of a month"),
                HOURS_PER_MONTH,
                Unit::Whole(""),
            )
            .formula("an hour = servers x price; a month = an hour x 720")
            .result(("dollars_per_hour", "an hour"), base.per_hour, Unit::DollarsAndCents)
            .result(("dollars_per_month", "a month"), base.per_month, Unit::Dollars);
        if let (Some(count), Some(price)) = (self.against_instances, self.against_price) {
            sheet = against(sheet, base, (count, price))?;
        }
        if let Some(count) = self.off_peak_instances {
            sheet = self.off_peak(sheet, base, count)?;
        }
        Ok(sheet)
    }

    fn off_peak(&self, sheet: Sheet, base: Bill, count: u32) -> anyhow::Result<Sheet> {
        let off_peak = bill(count, self.price)?;
        let sheet = sheet
            .input(
                ("off_peak_instances", "servers off-peak"),
                f64::from(count),
                Unit::Whole(""),
            )
            .result(
                ("off_peak_dollars_per_hour", "an hour off-peak"),
                off_peak.per_hour,
                Unit::DollarsAndCents,
            );
        let Some(hours) = self.off_peak_hours else {
            return Ok(sheet);
        };
        let month = bill_with_off_peak(base, off_peak, hours)?;
        Ok(sheet
            .input(
                ("off_peak_hours_per_day", "off-peak hours of a day"),
                hours,
                Unit::Of("h"),
            )
            .result(
                ("dollars_per_month_with_off_peak", "a month with off-peak hours"),
                month,
                Unit::Dollars,
            ))
    }
}

fn against(sheet: Sheet, base: Bill, (count, price): (u32, f64)) -> anyhow::Result<Sheet> {
    let other = bill(count, price)?;
    Ok(sheet
        .input(
            ("against_instances", "servers of the other kind"),
            f64::from(count),
            Unit::Whole(""),
        )
        .input(
            ("against_price_per_hour", "price of the other kind"),
            price,
            Unit::DollarsAndCents,
        )
        .result(
            ("against_dollars_per_month", "a month of the other kind"),
            other.per_month,
            Unit::Dollars,
        )
        .result(
            ("difference", "the other kind, by the first"),
            difference(base, other),
            Unit::Percent,
        ))
}
