//! The metrics in which arms are compared, and their value in a run whose requests are drawn again.

use crate::comparison::{Resources, Slo};
use crate::record::{RequestRecord, Run};
use crate::statistics::rank;

/// A metric of a run. Percentiles are over completed requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    Ttft {
        percent: u8,
    },
    Tpot {
        percent: u8,
    },
    /// Over all gaps of all requests.
    Itl {
        percent: u8,
    },
    E2e {
        percent: u8,
    },
    /// Requests a second that met both limits.
    Goodput,
    GoodputPerCore,
    GoodputPerGpu,
    /// As the throughputs of `Summary`: it counts all tokens of the measured requests, so it divides by all of the time in which they came, up to
    /// the end of the last answer. To divide by the time of the arrivals would show an overloaded arm as fast as the load.
    OutputTokensPerCore,
    OutputTokensPerGpu,
}

impl Metric {
    /// As `Contrast::metric` has it.
    pub(crate) fn name(self) -> String {
        match self {
            Metric::Ttft { percent } => format!("ttft_ms_p{percent}"),
            Metric::Tpot { percent } => format!("tpot_ms_p{percent}"),
            Metric::Itl { percent } => format!("itl_ms_p{percent}"),
            Metric::E2e { percent } => format!("e2e_ms_p{percent}"),
            Metric::Goodput => "goodput".to_owned(),
            Metric::GoodputPerCore => "goodput_per_core".to_owned(),
            Metric::GoodputPerGpu => "goodput_per_gpu".to_owned(),
            Metric::OutputTokensPerCore => "output_tokens_per_s_per_core".to_owned(),
            Metric::OutputTokensPerGpu => "output_tokens_per_s_per_gpu".to_owned(),
        }
    }
    /// As a sentence has it.
    pub(crate) fn words(self) -> String {
        match self {
            Metric::Ttft { percent } => format!("p{percent} TTFT"),
            Metric::Tpot { percent } => format!("p{percent} TPOT"),
            Metric::Itl { percent } => format!("p{percent} ITL"),
            Metric::E2e { percent } => format!("p{percent} end-to-end time"),
            Metric::Goodput => "goodput".to_owned(),
            Metric::GoodputPerCore => "goodput per core".to_owned(),
            Metric::GoodputPerGpu => "goodput per GPU".to_owned(),
            Metric::OutputTokensPerCore => "output tokens/s per core".to_owned(),
            Metric::OutputTokensPerGpu => "output tokens/s per GPU".to_owned(),
        }
    }
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Metric::Ttft { .. } | Metric::Tpot { .. } | Metric::Itl { .. } | Metric::E2e { .. } => "ms",
            Metric::Goodput | Metric::GoodputPerCore | Metric::GoodputPerGpu => "requests/s",
            Metric::OutputTokensPerCore | Metric::OutputTokensPerGpu => "tokens/s",
        }
    }
    /// Whether a higher value is the better one.
    pub(crate) fn is_yield(self) -> bool {
        self.unit() != "ms"
    }
    /// What the yield of a run is divided by.
    fn share_of(self, resources: &Resources) -> f64 {
        let count = match self {
            Metric::GoodputPerCore | Metric::OutputTokensPerCore => resources.cores,
            Metric::GoodputPerGpu | Metric::OutputTokensPerGpu => resources.gpus,
            _ => 1,
        };
        f64::from(count.max(1))
    }
}

/// Half a request in a whole run: what a count of zero is taken as, because a ratio by zero says nothing (the continuity correction
/// of Haldane and Anscombe).
const COUNT_MIN: f64 = 0.5;

/// One metric of one run. It gives its value for any number of times that each request counts.
pub(crate) struct Observed {
    requests: usize,
    kind: Kind,
}

enum Kind {
    /// Values in rising order, each with the index of its request.
    Percentile { percent: f64, values: Vec<(f64, u32)> },
    /// What each request adds to the sum, and the rate for each 1 of the sum.
    Rate { amounts: Vec<f64>, rate_of_one: f64 },
}

impl Observed {
    pub(crate) fn of(metric: Metric, run: &Run, slo: &Slo, resources: &Resources) -> Self {
        let requests = in_order(run);
        let share = metric.share_of(resources);
        let kind = match metric {
            Metric::Ttft { percent } => percentile(&requests, percent, |record| record.ttft_ms().into_iter().collect()),
            Metric::Tpot { percent } => percentile(&requests, percent, |record| record.tpot_ms().into_iter().collect()),
            Metric::E2e { percent } => percentile(&requests, percent, |record| vec![record.e2e_ms()]),
            Metric::Itl { percent } => percentile(&requests, percent, |record| record.gaps_ms().collect()),
            Metric::Goodput | Metric::GoodputPerCore | Metric::GoodputPerGpu => {
                let rate_of_one = run.goodput_per_s(1.0) / share;
                rate(&requests, rate_of_one, |record| {
                    f64::from(u8::from(record.met(slo).both()))
                })
            }
            Metric::OutputTokensPerCore | Metric::OutputTokensPerGpu => {
                let rate_of_one = 1.0 / run.measured.as_secs_f64().max(f64::MIN_POSITIVE) / share;
                rate(&requests, rate_of_one, |record| {
                    if record.is_completed() {
                        f64::from(record.output_tokens)
                    } else {
                        0.0
                    }
                })
            }
        };
        Self {
            requests: requests.len(),
            kind,
        }
    }
    pub(crate) fn requests(&self) -> usize {
        self.requests
    }
    /// The value when each request counts once. `None`: no request was measured, or none has such a time.
    pub(crate) fn value(&self) -> Option<f64> {
        self.weighted(&vec![1; self.requests])
    }
    /// The value when the request at index i counts `times[i]` times.
    pub(crate) fn weighted(&self, times: &[u32]) -> Option<f64> {
        match &self.kind {
            Kind::Rate { .. } if self.requests == 0 => None,
            Kind::Rate { amounts, rate_of_one } => {
                let sum: f64 = amounts
                    .iter()
                    .zip(times)
                    .map(|(amount, times)| amount * f64::from(*times))
                    .sum();
                Some(sum.max(COUNT_MIN) * rate_of_one)
            }
            Kind::Percentile { percent, values } => weighted_percentile(values, times, *percent),
        }
    }
}

/// The measured requests in the order in which they were due, so that neighbours in the list were neighbours in time.
pub(crate) fn in_order(run: &Run) -> Vec<&RequestRecord> {
    let mut requests: Vec<&RequestRecord> = run.records.iter().filter(|record| record.is_measured()).collect();
    requests.sort_by(|a, b| (a.scheduled, &a.id).cmp(&(b.scheduled, &b.id)));
    requests
}

fn percentile(requests: &[&RequestRecord], percent: u8, of: impl Fn(&RequestRecord) -> Vec<f64>) -> Kind {
    let with_index = (0..).zip(requests).filter(|(_, record)| record.is_completed());
    let mut values: Vec<(f64, u32)> = with_index
        .flat_map(|(index, record)| of(record).into_iter().map(move |value| (value, index)))
        .collect();
    values.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    Kind::Percentile {
        percent: f64::from(percent),
        values,
    }
}

fn rate(requests: &[&RequestRecord], rate_of_one: f64, of: impl Fn(&RequestRecord) -> f64) -> Kind {
    Kind::Rate {
        amounts: requests.iter().map(|record| of(record)).collect(),
        rate_of_one,
    }
}

/// The percentile of the list in which each value stands as often as its request counts.
fn weighted_percentile(values: &[(f64, u32)], times: &[u32], percent: f64) -> Option<f64> {
    let count = |(_, request): &(f64, u32)| u64::from(times[*request as usize]);
    let last = values.iter().map(count).sum::<u64>().checked_sub(1)?;
    let (below, above, share) = rank(last, percent);
    let mut seen = 0;
    let mut found = None;
    for value in values {
        seen += count(value);
        if found.is_none() && seen > below {
            found = Some(value.0);
        }
        if let Some(low) = found.filter(|_| seen > above) {
            return Some(low + (value.0 - low) * share);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Samples;
    use crate::test_kit::{later, request, run, slo};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_weighted_percentile_is_that_of_the_list_written_out(
            values in prop::collection::vec((0.0..100.0_f64, 0_u32..20), 1..60),
            times in prop::collection::vec(0_u32..4, 20),
            percent in 0.0..100.0_f64,
        ) {
            let mut sorted = values;
            sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
            let long = sorted.iter().flat_map(|(value, request)| vec![*value; times[*request as usize] as usize]);
            let expected = Samples::new(long).percentile(percent);
            prop_assert_eq!(weighted_percentile(&sorted, &times, percent), expected);
        }
    }

    #[test]
    fn a_rate_is_divided_by_time_and_cores_and_zero_is_half_a_request() {
        let mut two = run("a", vec![request(1, &[10, 20]), later(request(2, &[500]), 0.0)]);
        two.measured = std::time::Duration::from_secs(2);
        let four_cores = Resources {
            cores: 4,
            ..Resources::default()
        };
        let good = Observed::of(Metric::GoodputPerCore, &two, &slo(100.0, 100.0), &four_cores);
        assert_eq!(good.value(), Some(1.0 / 2.0 / 4.0));
        assert_eq!(good.weighted(&[0, 2]), Some(0.5 / 2.0 / 4.0));
        let tokens = Observed::of(Metric::OutputTokensPerCore, &two, &slo(1.0, 1.0), &four_cores);
        assert_eq!(tokens.value(), Some(3.0 / 2.0 / 4.0));
        let none = run("a", Vec::new());
        let good = Observed::of(Metric::GoodputPerCore, &none, &slo(100.0, 100.0), &four_cores);
        assert_eq!(good.value(), None, "nothing was measured");
    }

    #[test]
    fn a_percentile_knows_no_request_that_failed() {
        let mut failed = request(2, &[900]);
        failed.outcome = crate::record::Outcome::Cancelled;
        let both = run("a", vec![request(1, &[10, 20]), failed]);
        let ttft = Observed::of(
            Metric::Ttft { percent: 99 },
            &both,
            &slo(1.0, 1.0),
            &Resources::default(),
        );
        assert_eq!(ttft.value(), Some(10.0));
        assert_eq!(ttft.weighted(&[0, 2]), None);
    }
}
