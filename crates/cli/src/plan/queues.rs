//! `plan littles-law` and `plan concurrency`.

use clap::Args;
use workload::plan::concurrency::{Point, scale_point};
use workload::plan::queueing::in_system;

use super::sheet::{Item, Sheet, Unit};

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(super) struct LittlesLawArgs {
    /// Requests a second.
    #[arg(long, value_name = "RATE")]
    rps: f64,
    /// Time that a request is in the system, on average.
    #[arg(long, value_name = "MS")]
    latency_ms: f64,
}

impl LittlesLawArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let count = in_system(self.rps, self.latency_ms / 1e3)?;
        Ok(Sheet::new("littles-law")
            .input(("rate_per_s", "rate"), self.rps, Unit::Of("requests/s"))
            .input(("latency_ms", "time in the system"), self.latency_ms, Unit::Ms)
            .formula("requests in the system = rate x time in the system (L = lambda W; Little 1961)")
            .result(("in_system", "in the system at once"), count, Unit::Of("requests")))
    }
}

const CONCURRENCY_EXAMPLE: &str = "\
Example, with the tail that `baton bench sweep` measured:
  baton plan concurrency --limit-ms 300 --points 8:45:90,16:52:160,32:68:280,64:95:480";

#[derive(Debug, Args)]
#[command(before_help = CONCURRENCY_EXAMPLE, allow_negative_numbers = true)]
pub(super) struct ConcurrencyArgs {
    /// Measured rows: requests at once, median and 99th percentile in ms.
    #[arg(long, required = true, value_delimiter = ',', value_parser = point, value_name = "N:P50:P99,..")]
    points: Vec<Point>,
    /// Limit of the 99th percentile.
    #[arg(long, value_name = "MS")]
    limit_ms: f64,
}

fn point(text: &str) -> Result<Point, String> {
    let wanted = || format!("{text:?} is not of the form 8:45:90 (requests at once, median and 99th percentile in ms)");
    let parts: Vec<&str> = text.split(':').collect();
    let [concurrency, p50, p99] = parts[..] else {
        return Err(wanted());
    };
    let ms = |text: &str| text.trim().parse::<f64>().map_err(|_| wanted());
    Ok(Point {
        concurrency: concurrency.trim().parse().map_err(|_| wanted())?,
        p50_ms: ms(p50)?,
        p99_ms: ms(p99)?,
    })
}

impl ConcurrencyArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let found = scale_point(&self.points, self.limit_ms)?;
        let row = |(point, ratio): (&Point, &f64)| {
            vec![
                Item::Number(f64::from(point.concurrency), Unit::Whole("")),
                Item::Number(point.p50_ms, Unit::Ms),
                Item::Number(point.p99_ms, Unit::Ms),
                Item::Number(*ratio, Unit::Of("")),
                Item::Words(
                    if point.p99_ms <= self.limit_ms {
                        "kept"
                    } else {
                        "broken"
                    }
                    .to_owned(),
                ),
            ]
        };
        let columns = [
            ("concurrency", ">at once"),
            ("p50_ms", ">median"),
            ("p99_ms", ">99th percentile"),
            ("p99_by_p50", ">ratio"),
            ("limit", "limit"),
        ];
        let mut sheet = Sheet::new("concurrency")
            .input(("limit_ms", "limit of the 99th percentile"), self.limit_ms, Unit::Ms)
            .formula("edge = highest measured concurrency whose 99th percentile keeps the limit")
            .formula("add servers from 75 % to 87.5 % of the edge, not by GPU utilisation")
            .table(
                "points",
                &columns,
                self.points.iter().zip(&found.ratios).map(row).collect(),
            );
        if let Some(highest) = found.highest_good {
            sheet = sheet.result(("edge", "edge"), f64::from(highest), Unit::Whole("requests at once"));
        }
        if let Some((from, to)) = found.add_at {
            sheet = sheet
                .result(
                    ("add_from", "add servers from"),
                    f64::from(from),
                    Unit::Whole("requests at once"),
                )
                .result(
                    ("add_to", "have them before"),
                    f64::from(to),
                    Unit::Whole("requests at once"),
                );
        }
        Ok(match (found.highest_good, found.is_edge_seen) {
            (None, _) => sheet.warning("The first row breaks the limit already. Measure fewer requests at once."),
            (_, false) => {
                sheet.warning("No row breaks the limit. The true edge is higher: measure more requests at once.")
            }
            _ => sheet,
        })
    }
}
