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

/// Good requests for each second of the measured part, as `vllm bench serve` divides, so that it is never above the request throughput.
/// `Run::goodput_per_s` is that of comparisons: with an open loop it leaves out how long the last answers take.
pub(super) fn request_goodput(run: &Run, limits: &[(Metric, f64)]) -> f64 {
    let seconds = run.measured.as_secs_f64();
    match seconds > 0.0 {
        true => good(run, limits).count() as f64 / seconds,
        false => 0.0,
    }
}

/// Tokens of the requests that kept all limits.
pub(super) fn accepted_tokens(run: &Run, limits: &[(Metric, f64)]) -> u64 {
    good(run, limits).map(|record| u64::from(record.output_tokens)).sum()
}

/// The requests that kept all limits. Only those with a whole answer can.
fn good<'a>(run: &'a Run, limits: &'a [(Metric, f64)]) -> impl Iterator<Item = &'a RequestRecord> {
    completed(run).filter(move |record| {
        let kept = |(metric, limit): &(Metric, f64)| judged(record, *metric).is_some_and(|value| value <= *limit);
        limits.iter().all(kept)
    })
}

/// The value of a request that a limit is for. One token alone has no gap, so it keeps every limit of gaps; several tokens whose gaps nobody
/// knows keep none, as in `RequestRecord::met`.
fn judged(record: &RequestRecord, metric: Metric) -> Option<f64> {
    match metric {
        Metric::Ttft => record.ttft_ms(),
        // One token has no TPOT, in however many events it came.
        Metric::Tpot => record.tpot_ms().or((record.output_tokens <= 1).then_some(0.0)),
        Metric::Itl => Samples::new(record.gaps_ms())
            .percentile(ITL_PERCENT)
            .or(record.has_one_token().then_some(0.0)),
        Metric::E2el => Some(record.e2e_ms()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::compare::test_kit::{record, run};

    #[test]
    fn several_tokens_whose_gaps_nobody_knows_keep_no_limit_of_gaps() {
        let mut whole = record(1, &[900.0]);
        whole.output_tokens = 20;
        let held_back = record(2, &[900.0; 64]);
        let unknown = run("a", vec![whole, held_back]);
        for metric in [Metric::Itl, Metric::Tpot] {
            assert_eq!(good(&unknown, &[(metric, 50.0)]).count(), 0, "{metric:?}");
        }
        assert_eq!(good(&unknown, &[(Metric::Ttft, 1000.0)]).count(), 2);
        let mut known = run("b", vec![record(1, &[5.0]), record(2, &[5.0, 15.0, 15.0])]);
        assert_eq!(good(&known, &[(Metric::Itl, 50.0), (Metric::Tpot, 50.0)]).count(), 2);
        known.records[1].tokens[2] += Duration::from_millis(200);
        assert_eq!(good(&known, &[(Metric::Itl, 50.0)]).count(), 1);
    }
}
