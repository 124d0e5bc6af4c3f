//! The four metrics of a run, as samples in milliseconds, and how many requests were good.

use workload::record::{RequestRecord, Run};
use workload::statistics::Samples;

use super::args::Metric;

/// The percentile of a request's own gaps that a limit of `itl` is for.
const ITL_PERCENT: f64 = 99.0;

/// Requests that count and have a whole answer.
pub(super) fn completed(run: &Run) -> impl Iterator<Item = &RequestRecord> {
    let records = run.records.iter();
    records.filter(|record| record.is_measured() && record.is_completed())
}

pub(super) fn samples(run: &Run, metric: Metric) -> Samples {
    match metric {
        Metric::Ttft => Samples::new(completed(run).filter_map(RequestRecord::ttft_ms)),
        Metric::Tpot => Samples::new(completed(run).filter_map(RequestRecord::tpot_ms)),
        Metric::Itl => Samples::new(completed(run).flat_map(RequestRecord::gaps_ms)),
        Metric::E2el => Samples::new(completed(run).map(RequestRecord::e2e_ms)),
    }
}

/// How many requests kept all limits. Only those with a whole answer can; one token alone has no gap, so it keeps them.
pub(super) fn good(run: &Run, limits: &[(Metric, f64)]) -> usize {
    let keeps = |record: &RequestRecord, metric| match metric {
        Metric::Ttft => record.ttft_ms(),
        Metric::Tpot => Some(record.tpot_ms().unwrap_or(0.0)),
        Metric::Itl => Some(Samples::new(record.gaps_ms()).percentile(ITL_PERCENT).unwrap_or(0.0)),
        Metric::E2el => Some(record.e2e_ms()),
    };
    let is_good = |record: &&RequestRecord| {
        let kept = |(metric, limit): &(Metric, f64)| keeps(record, *metric).is_some_and(|value| value <= *limit);
        limits.iter().all(kept)
    };
    completed(run).filter(is_good).count()
}
