//! What a table shows of one run. Every figure has its unit in its name, and the four throughputs are never added up.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::comparison::{Resources, Slo};
use crate::record::{LoopKind, Outcome, RequestRecord, Run, RunPart};
use crate::statistics::{Distribution, Samples};
use crate::times::ms;

/// A client that sends later than this at the 99th percentile measures itself, so its run counts for nothing.
pub const LAG_MS_P99_MAX: f64 = 5.0;

/// A run in figures. Only measured requests count, and percentiles are those of the completed ones: read them beside `counts`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub name: String,
    pub loop_kind: LoopKind,
    /// Requests a second that were offered, or the concurrency of a closed loop.
    pub offered: f64,
    pub duration_s: f64,
    pub counts: Counts,
    pub ttft_ms: Option<Distribution>,
    pub second_token_ms: Option<Distribution>,
    pub tpot_ms: Option<Distribution>,
    /// All gaps of all requests together.
    pub itl_ms: Option<Distribution>,
    pub e2e_ms: Option<Distribution>,
    pub lag: Lag,
    pub throughput: Throughput,
    /// Requests a second that met both limits (`Run::goodput_per_s`). What failed, was refused or was cancelled met nothing.
    pub goodput_per_s: f64,
    pub attainment: Attainment,
    /// Output tokens of the requests that met both limits.
    pub accepted_tokens: u64,
    pub stalls: Stalls,
    pub cpu: Cpu,
    pub handoffs: Handoffs,
    /// Prompt tokens from the prefix cache by all prompt tokens, of the requests for which the server tells.
    pub cached_share: Option<f64>,
}

/// Requests by part of the run, and the measured ones by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub warm_up: usize,
    pub cool_down: usize,
    pub measured: usize,
    pub completed: usize,
    pub refused: usize,
    pub failed: usize,
    pub cancelled: usize,
}

impl Counts {
    /// The share of measured requests that got no whole answer.
    pub(crate) fn unserved_share(&self) -> f64 {
        share(self.measured - self.completed, self.measured).unwrap_or(0.0)
    }
}

/// How late the client sent requests after they were due. A request that had to wait for a place (`--max-concurrency`) could be sent only
/// when one became free, so its lag counts from then. Its latencies count from when it was due.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lag {
    pub ms_p50: f64,
    pub ms_p99: f64,
    pub ms_max: f64,
    /// False: the client was too slow, so the run says nothing about the server.
    pub is_valid: bool,
}

/// Of completed requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    pub requests_per_s: f64,
    pub input_tokens_per_s: f64,
    pub output_tokens_per_s: f64,
    pub total_tokens_per_s: f64,
}

/// Shares of the measured requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attainment {
    pub both: f64,
    pub ttft: f64,
    pub itl: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stalls {
    pub count: usize,
    pub requests: usize,
    /// The longest gap of the run, a stall or not.
    pub gap_ms_max: f64,
}

/// Processor time in microseconds. `None`: not known, because the process is on another machine or nothing was counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    pub client_us_per_token: Option<f64>,
    pub client_us_per_request: Option<f64>,
    /// All processes of the server together.
    pub server_us_per_token: Option<f64>,
    pub server_us_per_request: Option<f64>,
}

/// Where prompts were computed, of the requests for which the server tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handoffs {
    pub handed_off: usize,
    /// Computed on the decode node, by reason.
    pub local_prefill: BTreeMap<String, usize>,
}

/// A run's yield for what it ran on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PerResource {
    pub goodput_per_core: Option<f64>,
    pub goodput_per_gpu: Option<f64>,
    pub output_tokens_per_s_per_core: Option<f64>,
    pub output_tokens_per_s_per_gpu: Option<f64>,
    /// US dollars for a million output tokens of requests that met both limits. `None` without a price or without such a token.
    pub dollars_per_million_accepted_tokens: Option<f64>,
}

impl Summary {
    pub fn of(run: &Run, slo: &Slo) -> Self {
        let measured: Vec<&RequestRecord> = run.records.iter().filter(|record| record.is_measured()).collect();
        let completed: Vec<&RequestRecord> = run.completed().collect();
        let duration_s = run.measured.as_secs_f64();
        let per_second = |amount: f64| if duration_s > 0.0 { amount / duration_s } else { 0.0 };
        let met: Vec<_> = measured
            .iter()
            .map(|record| (record.output_tokens, record.met(slo)))
            .collect();
        let good = met.iter().filter(|(_, met)| met.both());
        let attained = |count: usize| share(count, measured.len()).unwrap_or(0.0);
        let of = |values: &dyn Fn(&RequestRecord) -> Option<f64>| {
            Samples::new(completed.iter().filter_map(|record| values(record))).distribution()
        };
        Self {
            name: run.name.clone(),
            loop_kind: run.loop_kind,
            offered: run.offered,
            duration_s,
            counts: counts(run),
            ttft_ms: of(&RequestRecord::ttft_ms),
            second_token_ms: of(&RequestRecord::second_token_ms),
            tpot_ms: of(&RequestRecord::tpot_ms),
            itl_ms: Samples::new(completed.iter().flat_map(|record| record.gaps_ms())).distribution(),
            e2e_ms: of(&|record| Some(record.e2e_ms())),
            lag: Lag::of(run),
            throughput: throughput(&completed, per_second),
            goodput_per_s: run.goodput_per_s(good.clone().count() as f64),
            attainment: Attainment {
                both: attained(good.clone().count()),
                ttft: attained(met.iter().filter(|(_, met)| met.ttft).count()),
                itl: attained(met.iter().filter(|(_, met)| met.itl).count()),
            },
            accepted_tokens: good.map(|(tokens, _)| u64::from(*tokens)).sum(),
            stalls: stalls(&completed),
            cpu: cpu(run, &measured),
            handoffs: handoffs(&measured),
            cached_share: cached_share(&completed),
        }
    }

    /// Figures for each core, each GPU and each dollar of an arm.
    pub fn per_resource(&self, resources: &Resources) -> PerResource {
        let by = |amount: f64, count: u32| (count > 0).then(|| amount / f64::from(count));
        let output = self.throughput.output_tokens_per_s;
        PerResource {
            goodput_per_core: by(self.goodput_per_s, resources.cores),
            goodput_per_gpu: by(self.goodput_per_s, resources.gpus),
            output_tokens_per_s_per_core: by(output, resources.cores),
            output_tokens_per_s_per_gpu: by(output, resources.gpus),
            dollars_per_million_accepted_tokens: resources
                .price_per_hour
                .and_then(|price| dollars_per_million(price, self.duration_s, self.accepted_tokens)),
        }
    }
}

/// US dollars for a million of the tokens that were accepted in so many seconds. `None`: there are no such tokens.
pub(crate) fn dollars_per_million(price_per_hour: f64, seconds: f64, accepted_tokens: u64) -> Option<f64> {
    let dollars = price_per_hour * seconds / 3600.0;
    (accepted_tokens > 0).then(|| dollars / (accepted_tokens as f64 / 1e6))
}

impl Lag {
    pub fn of(run: &Run) -> Self {
        let with_places = run.records.iter().zip(places_free(run));
        let measured = with_places.filter(|(record, _)| record.is_measured());
        let lags =
            Samples::new(measured.map(|(record, free)| ms(record.sent.saturating_sub(record.scheduled.max(free)))));
        let at = |percent: f64| lags.percentile(percent).unwrap_or(0.0);
        Self {
            ms_p50: at(50.0),
            ms_p99: at(99.0),
            ms_max: at(100.0),
            is_valid: at(99.0) <= LAG_MS_P99_MAX || are_all_due_at_once(run),
        }
    }
}

/// For each record, when there was a place for it: 0 without a limit of requests at a time. With a limit, the request that is sent as number
/// k + limit needs k others to have ended.
pub(crate) fn places_free(run: &Run) -> Vec<Duration> {
    let mut free = vec![Duration::ZERO; run.records.len()];
    let Some(limit) = run.places() else {
        return free;
    };
    let mut ends: Vec<Duration> = run.records.iter().map(|record| record.ended).collect();
    ends.sort_unstable();
    let mut sent: Vec<usize> = (0..run.records.len()).collect();
    sent.sort_by_key(|index| run.records[*index].sent);
    let waiting = sent.into_iter().skip(usize::try_from(limit).unwrap_or(usize::MAX));
    waiting.zip(ends).for_each(|(index, end)| free[index] = end);
    free
}

/// Such requests cannot be sent at once, so their lag is no fault of the client.
fn are_all_due_at_once(run: &Run) -> bool {
    let mut due = run.records.iter().map(|record| record.scheduled);
    let first = due.next();
    due.all(|due| Some(due) == first)
}

fn share(count: usize, of: usize) -> Option<f64> {
    (of > 0).then(|| count as f64 / of as f64)
}

pub(crate) fn counts(run: &Run) -> Counts {
    let mut counts = Counts::default();
    for record in &run.records {
        match record.part {
            RunPart::WarmUp => counts.warm_up += 1,
            RunPart::CoolDown => counts.cool_down += 1,
            RunPart::Measured => {
                counts.measured += 1;
                match record.outcome {
                    Outcome::Completed => counts.completed += 1,
                    Outcome::Refused { .. } => counts.refused += 1,
                    Outcome::Failed { .. } => counts.failed += 1,
                    Outcome::Cancelled => counts.cancelled += 1,
                }
            }
        }
    }
    counts
}

fn throughput(completed: &[&RequestRecord], per_second: impl Fn(f64) -> f64) -> Throughput {
    let sum = |tokens: fn(&RequestRecord) -> u32| completed.iter().map(|record| f64::from(tokens(record))).sum::<f64>();
    let (input, output) = (sum(|record| record.prompt_tokens), sum(|record| record.output_tokens));
    Throughput {
        requests_per_s: per_second(completed.len() as f64),
        input_tokens_per_s: per_second(input),
        output_tokens_per_s: per_second(output),
        total_tokens_per_s: per_second(input + output),
    }
}

fn stalls(completed: &[&RequestRecord]) -> Stalls {
    let stalls: Vec<usize> = completed.iter().map(|record| record.stalls_ms().len()).collect();
    Stalls {
        count: stalls.iter().sum(),
        requests: stalls.iter().filter(|count| **count > 0).count(),
        gap_ms_max: completed.iter().flat_map(|record| record.gaps_ms()).fold(0.0, f64::max),
    }
}

/// Work for requests that failed is work, too, so all measured requests and their tokens share the processor time.
fn cpu(run: &Run, measured: &[&RequestRecord]) -> Cpu {
    let tokens: u64 = measured.iter().map(|record| u64::from(record.output_tokens)).sum();
    let by = |cpu: f64, count: f64| (cpu > 0.0 && count > 0.0).then(|| cpu * 1e6 / count);
    let client = run.client.cpu.as_secs_f64();
    let server: f64 = run.server.values().map(|usage| usage.cpu.as_secs_f64()).sum();
    Cpu {
        client_us_per_token: by(client, tokens as f64),
        client_us_per_request: by(client, measured.len() as f64),
        server_us_per_token: by(server, tokens as f64),
        server_us_per_request: by(server, measured.len() as f64),
    }
}

fn handoffs(measured: &[&RequestRecord]) -> Handoffs {
    let mut handoffs = Handoffs::default();
    for server in measured.iter().filter_map(|record| record.server.as_ref()) {
        match (&server.local_prefill, &server.prefill_node) {
            (Some(reason), _) => *handoffs.local_prefill.entry(reason.clone()).or_default() += 1,
            (None, Some(_)) => handoffs.handed_off += 1,
            (None, None) => {}
        }
    }
    handoffs
}

fn cached_share(completed: &[&RequestRecord]) -> Option<f64> {
    let told = completed
        .iter()
        .filter_map(|record| Some((record.cached_tokens?, record.prompt_tokens)));
    let (cached, prompt) = told.fold((0, 0), |sum, (cached, prompt)| {
        (sum.0 + cached as usize, sum.1 + prompt as usize)
    });
    share(cached, prompt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{ServerRecord, Usage};
    use crate::test_kit::{later, request, run, slo};

    /// One request a second for ten seconds; each has its first token after 100 ms and two gaps of 20 ms.
    fn steady() -> Run {
        let records = (0..10).map(|at| later(request(at, &[100, 120, 140]), f64::from(at) * 1000.0));
        let mut steady = run("steady", records.collect());
        steady.measured = Duration::from_secs(10);
        steady
    }

    #[test]
    fn goodput_counts_what_met_both_limits_and_nothing_that_failed() {
        let mut mixed = steady();
        mixed.records[0].outcome = Outcome::Refused { status: 429 };
        mixed.records[1].outcome = Outcome::Failed {
            error: "reset".to_owned(),
        };
        mixed.records[2].outcome = Outcome::Cancelled;
        mixed.records[3].tokens[0] -= Duration::from_millis(50); // a gap of 70 ms
        mixed.records[4].scheduled -= Duration::from_millis(50); // 150 ms to the first token
        let summary = Summary::of(&mixed, &slo(100.0, 50.0));
        assert_eq!(summary.goodput_per_s, 0.5);
        let attained = Attainment {
            both: 0.5,
            ttft: 0.6,
            itl: 0.6,
        };
        assert_eq!(summary.attainment, attained);
        let counts = summary.counts;
        assert_eq!(
            (counts.completed, counts.refused, counts.failed, counts.cancelled),
            (7, 1, 1, 1)
        );
        assert_eq!(summary.accepted_tokens, 15);
        assert!((counts.unserved_share() - 0.3).abs() < 1e-12);
    }

    #[test]
    fn the_four_throughputs_are_those_of_completed_requests() {
        let throughput = Summary::of(&steady(), &slo(1.0, 1.0)).throughput;
        assert_eq!(throughput.requests_per_s, 1.0);
        assert_eq!(throughput.input_tokens_per_s, 100.0);
        assert_eq!(throughput.output_tokens_per_s, 3.0);
        assert_eq!(throughput.total_tokens_per_s, 103.0);
    }

    #[test]
    fn warm_up_and_cool_down_are_counted_and_not_measured() {
        let mut parts = steady();
        parts.records[0].part = RunPart::WarmUp;
        parts.records[9].part = RunPart::CoolDown;
        let counts = Summary::of(&parts, &slo(1.0, 1.0)).counts;
        assert_eq!((counts.warm_up, counts.measured, counts.cool_down), (1, 8, 1));
    }

    #[test]
    fn a_late_client_makes_its_run_invalid() {
        let mut late = steady();
        assert!(Summary::of(&late, &slo(1.0, 1.0)).lag.is_valid);
        for record in &mut late.records {
            record.sent += Duration::from_millis(6);
        }
        let lag = Summary::of(&late, &slo(1.0, 1.0)).lag;
        assert!(!lag.is_valid);
        assert_eq!((lag.ms_p50, lag.ms_p99, lag.ms_max), (6.0, 6.0, 6.0));
    }

    #[test]
    fn a_wait_for_a_place_is_no_lag_and_a_wait_after_it_is() {
        // Two at a time, each for 300 ms; all are due within 5 ms.
        let turn = |id: u32| later(request(id, &[100, 300]), f64::from(id / 2) * 300.0);
        let mut limited = run("limited", (0..8).map(turn).collect());
        for (at, record) in (0..).zip(&mut limited.records) {
            record.scheduled = Duration::from_millis(at);
        }
        assert!(!Lag::of(&limited).is_valid, "without a limit the client is late");
        limited.environment.insert("max_concurrency".to_owned(), 2.into());
        assert_eq!(Lag::of(&limited).ms_max, 0.0);
        assert_eq!(limited.records[7].e2e_ms(), 1193.0, "latency counts from the due time");
        limited.records[7].sent += Duration::from_millis(9);
        assert_eq!(Lag::of(&limited).ms_max, 9.0);
    }

    #[test]
    fn figures_for_each_core_token_and_dollar() {
        let mut priced = steady();
        priced.client.cpu = Duration::from_millis(3);
        let usage = Usage {
            cpu: Duration::from_millis(15),
            memory_bytes_max: 0,
        };
        priced.server = [("a".to_owned(), usage), ("b".to_owned(), usage)].into();
        let summary = Summary::of(&priced, &slo(100.0, 20.0));
        assert_eq!(summary.cpu.client_us_per_token, Some(100.0));
        assert_eq!(summary.cpu.client_us_per_request, Some(300.0));
        assert_eq!(summary.cpu.server_us_per_token, Some(1000.0));
        let resources = Resources {
            cores: 2,
            price_per_hour: Some(3.6),
            ..Resources::default()
        };
        let each = summary.per_resource(&resources);
        assert_eq!(each.goodput_per_core, Some(0.5));
        assert_eq!(each.goodput_per_gpu, None);
        // 10 s cost one cent and gave 30 accepted tokens.
        let dollars = each.dollars_per_million_accepted_tokens.unwrap();
        assert!((dollars - 1e4 / 30.0).abs() < 1e-6, "{dollars}");
    }

    #[test]
    fn handoffs_and_cache_hits_are_counted_where_the_server_tells() {
        let mut told = steady();
        let handed_off = ServerRecord {
            prefill_node: Some("p".to_owned()),
            ..ServerRecord::default()
        };
        let local = ServerRecord {
            local_prefill: Some("short".to_owned()),
            ..handed_off.clone()
        };
        told.records[0].server = Some(handed_off);
        told.records[1].server = Some(local);
        told.records[2].cached_tokens = Some(25);
        let summary = Summary::of(&told, &slo(1.0, 1.0));
        assert_eq!(summary.handoffs.handed_off, 1);
        assert_eq!(summary.handoffs.local_prefill["short"], 1);
        assert_eq!(summary.cached_share, Some(0.25));
    }

    #[test]
    fn an_empty_run_has_no_distribution_and_no_division_by_zero() {
        let empty = Summary::of(&run("empty", Vec::new()), &slo(1.0, 1.0));
        assert_eq!(empty.ttft_ms, None);
        assert_eq!(
            (
                empty.goodput_per_s,
                empty.attainment.both,
                empty.counts.unserved_share()
            ),
            (0.0, 0.0, 0.0)
        );
        assert!(serde_json::to_string(&empty).is_ok());
    }
}
