//! `plan replicas`, `plan instances` and `plan slo`: how many servers a load needs.

use clap::Args;
use workload::plan::capacity::{
    CEILINGS, Instances, Rounding, Sized, by_rate_each, ceiling, instances, replicas, tightness,
};
use workload::plan::cost::bill;
use workload::plan::queueing::{Load, Wait, slowdown_alone};

use super::sheet::{Item, Sheet, Unit};

const RPS: (&str, &str) = ("rate_per_s", "rate");
const SERVICE: (&str, &str) = ("service_ms", "service time");
const PER_SECOND: Unit = Unit::Of("requests/s");

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(super) struct ReplicasArgs {
    /// Requests a second, at the peak.
    #[arg(long, value_name = "RATE")]
    rps: f64,
    /// Requests that one replica runs at once.
    #[arg(long, value_name = "N")]
    max_num_seqs: f64,
    /// Mean time of a request, from its start to its last token.
    #[arg(long, value_name = "MS")]
    latency_ms: f64,
}

impl ReplicasArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let found = replicas(self.rps, self.max_num_seqs, self.latency_ms / 1e3)?;
        Ok(Sheet::new("replicas")
            .input(RPS, self.rps, PER_SECOND)
            .input(("running_max", "requests at once in one replica"), self.max_num_seqs, Unit::Of(""))
            .input(("latency_ms", "mean latency"), self.latency_ms, Unit::Ms)
            .formula("rate of one replica = requests at once / mean latency")
            .formula("replicas = rate / rate of one replica, rounded up")
            .result(("rate_each_per_s", "rate of one replica"), found.rate_each, PER_SECOND)
            .result(("replicas", "replicas"), f64::from(found.needed), Unit::Whole(""))
            .note("This is the most that a full batch gives. Keep each replica below its knee: `baton plan instances` has ceilings."))
    }
}

/// How counts are rounded up.
#[derive(Clone, Copy, Debug, Args)]
struct RoundingArgs {
    /// Round up to a multiple of this, such as the devices of a host; 1 rounds nothing. Default: multiples of 10 from 20 servers
    /// on.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    round_to: Option<u32>,
}

impl RoundingArgs {
    fn rounding(self) -> Rounding {
        self.round_to.map_or(Rounding::Tens, Rounding::MultipleOf)
    }

    fn words(self) -> String {
        match self.round_to {
            Some(1) => "not rounded".to_owned(),
            Some(multiple) => format!("rounded up to a multiple of {multiple}"),
            None => "rounded up to a multiple of 10 from 20 on".to_owned(),
        }
    }
}

const INSTANCES_EXAMPLES: &str = "\
Examples:
  baton plan instances --rps 1000 --service-ms 40 --slo-ms 400
  baton plan instances --rps 1000 --service-ms 40 --utilisation 0.6 --round-to 8
  baton plan instances --rps 1000 --rps-per-instance 27      a rate that was measured at the limit";

#[derive(Debug, Args)]
#[command(before_help = INSTANCES_EXAMPLES, allow_negative_numbers = true)]
pub(super) struct InstancesArgs {
    /// Requests a second.
    #[arg(long, value_name = "RATE")]
    rps: f64,
    /// Time that one request keeps one server busy.
    #[arg(long, value_name = "MS", required_unless_present = "rps_per_instance")]
    service_ms: Option<f64>,
    /// Limit of the 99th percentile of TTFT; it chooses the ceiling (200 ms 55 %, 300 ms 63 %, 400 ms 70 %, 500 ms 75 %).
    #[arg(long, value_name = "MS", default_value_t = 400.0)]
    slo_ms: f64,
    /// A ceiling of your own, between 0 and 1, instead of `--slo-ms`.
    #[arg(long, value_name = "SHARE", conflicts_with = "slo_ms")]
    utilisation: Option<f64>,
    /// The rate that one server was measured to take within the limit. It is an input and is never computed.
    #[arg(long, value_name = "RATE", conflicts_with_all = ["service_ms", "slo_ms", "utilisation"])]
    rps_per_instance: Option<f64>,
    #[command(flatten)]
    rounding: RoundingArgs,
}

impl InstancesArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let sheet = Sheet::new("instances").input(RPS, self.rps, PER_SECOND);
        match (self.rps_per_instance, self.service_ms) {
            (Some(each), _) => self.by_measured_rate(sheet, each),
            (None, service_ms) => self.by_ceiling(sheet, service_ms.unwrap_or(f64::NAN)),
        }
    }

    fn by_measured_rate(&self, sheet: Sheet, each: f64) -> anyhow::Result<Sheet> {
        let found = by_rate_each(self.rps, each, self.rounding.rounding())?;
        Ok(sheet
            .input(("rate_each_per_s", "measured rate of one server"), each, PER_SECOND)
            .input_words(("rounding", "rounding"), self.rounding.words())
            .formula("instances = rate / measured rate of one server, rounded up")
            .result(("needed", "instances needed"), f64::from(found.needed), Unit::Whole(""))
            .result(
                ("planned", "instances planned"),
                f64::from(found.planned),
                Unit::Whole(""),
            )
            .note("How busy that rate keeps a server is part of the measurement, so no wait is computed."))
    }

    fn by_ceiling(&self, sheet: Sheet, service_ms: f64) -> anyhow::Result<Sheet> {
        let load = Load {
            rate: self.rps,
            service_s: service_ms / 1e3,
        };
        let sheet = sheet.input(SERVICE, service_ms, Unit::Ms);
        let (sheet, share) = match self.utilisation {
            Some(share) => (sheet, share),
            None => (
                sheet.input(
                    ("slo_ms", "limit of the 99th percentile of TTFT"),
                    self.slo_ms,
                    Unit::Ms,
                ),
                ceiling(self.slo_ms)?,
            ),
        };
        let found = instances(load, share, self.rounding.rounding())?;
        Ok(sheet
            .input(("ceiling", "ceiling of utilisation"), share, Unit::Percent)
            .input_words(("rounding", "rounding"), self.rounding.words())
            .formula("rate of one server = ceiling / service time")
            .formula("instances = rate / rate of one server, rounded up; utilisation = rate x service time / instances")
            .result(("busy", "servers busy on average"), found.busy, Unit::Of(""))
            .result(("rate_each_per_s", "rate of one server"), found.rate_each, PER_SECOND)
            .result(("needed", "instances needed"), f64::from(found.needed.count), Unit::Whole(""))
            .result(("needed_utilisation", "their utilisation"), found.needed.utilisation, Unit::Percent)
            .result(("planned", "instances planned"), f64::from(found.planned.count), Unit::Whole(""))
            .result(("planned_utilisation", "their utilisation"), found.planned.utilisation, Unit::Percent)
            .table("waits", &WAIT_COLUMNS, waits(&found))
            .note("Waits are before the service, with Poisson arrivals and exponential service times. M/M/1: each server has its")
            .note("own queue and requests are spread blindly. M/M/c: one queue for all, as baton's coordinator has."))
    }
}

const WAIT_COLUMNS: [(&str, &str); 5] = [
    ("instances", ">instances"),
    ("queue", "queue"),
    ("share_waiting", ">must wait"),
    ("wait_mean_ms", ">wait, mean"),
    ("wait_p99_ms", ">wait, 99th percentile"),
];

fn waits(found: &Instances) -> Vec<Vec<Item>> {
    let row = |sized: &Sized, queue: &str, wait: Wait| {
        vec![
            Item::Number(f64::from(sized.count), Unit::Whole("")),
            Item::Words(queue.to_owned()),
            Item::Number(wait.share_waiting, Unit::Percent),
            Item::Number(wait.mean_s * 1e3, Unit::Ms),
            Item::Number(wait.p99_s * 1e3, Unit::Ms),
        ]
    };
    let mut counts = vec![&found.needed, &found.planned];
    counts.dedup_by_key(|sized| sized.count);
    let both = |sized: &Sized| {
        [
            row(sized, "one each (M/M/1)", sized.alone),
            row(sized, "one for all (M/M/c)", sized.pooled),
        ]
    };
    counts.into_iter().flat_map(both).collect()
}

const SLO_EXAMPLE: &str = "\
Example:
  baton plan slo --rps 1000 --service-ms 40 --slo-ms 400 --price 1.69";

#[derive(Debug, Args)]
#[command(before_help = SLO_EXAMPLE, allow_negative_numbers = true)]
pub(super) struct SloArgs {
    /// Requests a second.
    #[arg(long, value_name = "RATE")]
    rps: f64,
    /// Time that one request keeps one server busy.
    #[arg(long, value_name = "MS")]
    service_ms: f64,
    /// The limit that you plan for. Its row is rounded up, because it is what you buy.
    #[arg(long, value_name = "MS", default_value_t = 400.0)]
    slo_ms: f64,
    /// US dollars for an hour of one server.
    #[arg(long, value_name = "DOLLARS")]
    price: Option<f64>,
    #[command(flatten)]
    rounding: RoundingArgs,
}

impl SloArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let load = Load {
            rate: self.rps,
            service_s: self.service_ms / 1e3,
        };
        let rows = tightness(load, self.slo_ms, self.rounding.rounding())?;
        let mut items = Vec::with_capacity(CEILINGS.len());
        for row in &rows {
            let month = self.price.map(|price| bill(row.planned.count, price)).transpose()?;
            items.push(vec![
                Item::Number(f64::from(row.slo_ms), Unit::Ms),
                Item::Number(row.ceiling, Unit::Percent),
                Item::Number(f64::from(row.needed), Unit::Whole("")),
                Item::Number(f64::from(row.planned.count), Unit::Whole("")),
                Item::Number(row.planned.utilisation, Unit::Percent),
                Item::Number(slowdown_alone(row.planned.utilisation)?, Unit::Of("x")),
                month.map_or(Item::Nothing, |month| Item::Number(month.per_month, Unit::Dollars)),
                Item::Words(if row.is_chosen { "planned for" } else { "" }.to_owned()),
            ]);
        }
        let columns = [
            ("slo_ms", ">limit"),
            ("ceiling", ">ceiling"),
            ("needed", ">needed"),
            ("planned", ">planned"),
            ("utilisation", ">utilisation"),
            ("slowdown_alone", ">M/M/1 slowdown"),
            ("dollars_per_month", ">a month"),
            ("chosen", ""),
        ];
        let sheet = Sheet::new("slo")
            .input(RPS, self.rps, PER_SECOND)
            .input(SERVICE, self.service_ms, Unit::Ms)
            .input(("slo_ms", "limit that is planned for"), self.slo_ms, Unit::Ms)
            .input_words(("rounding", "rounding of that row"), self.rounding.words());
        let sheet = match self.price {
            Some(price) => sheet.input(("price_per_hour", "price of a server"), price, Unit::DollarsAndCents),
            None => sheet,
        };
        Ok(sheet
            .formula("needed = rate / (ceiling / service time), rounded up; the ceiling belongs to the limit")
            .formula("M/M/1 slowdown = 1 / (1 - utilisation): time in queue and server, by the service time alone")
            .table("limits", &columns, items)
            .note("Only the row that is planned for is rounded up. A month has 720 hours."))
    }
}
