//! What a trace is like, in figures: rates, lengths, and how much of its prompts a prefix cache without limit would save.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Trace, TraceRequest, own_format};

/// The figures of a report's paragraph on its traffic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceFacts {
    pub name: String,
    /// Of `own_format::hash`.
    pub hash: String,
    pub requests: usize,
    pub conversations: usize,
    /// From the first arrival to the last one.
    pub duration_s: f64,
    /// Requests by duration. `None`: all arrive at once.
    pub arrivals_per_s: Option<f64>,
    /// Standard deviation of the gaps between arrivals by their mean: 0 for a metronome, 1 for a Poisson process.
    pub gap_variation: Option<f64>,
    /// Over bins that begin at the first arrival.
    pub arrivals_in_1s: Percentiles,
    pub arrivals_in_10s: Percentiles,
    pub prompt_tokens: Percentiles,
    pub output_tokens: Percentiles,
    /// `None`: the trace knows no prefixes.
    pub prefixes: Option<PrefixFacts>,
}

/// Percentiles by nearest rank: the smallest value that at least p % of the values do not exceed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    pub mean: f64,
    pub p10: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

/// What a cache without limit, empty at the start, which sees all requests, would find.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefixFacts {
    pub block_tokens: u32,
    pub blocks: usize,
    pub distinct_blocks: usize,
    /// Part of the blocks that were seen before.
    pub hit_blocks: f64,
    /// Part of the prompts' tokens that are in such blocks.
    pub hit_tokens: f64,
    /// As `hit_blocks`, without the first block of each request: often all requests share that one.
    pub hit_blocks_after_first: f64,
    /// Part of the requests of which more than one block was seen before.
    pub requests_with_hits: f64,
    pub uncached_tokens: Percentiles,
    /// Seconds between two requests with the same block, without the first blocks. `None`: none comes twice.
    pub reuse_s: Option<Percentiles>,
    /// Part of the distinct blocks that come once.
    pub once: f64,
}

impl TraceFacts {
    pub fn of(trace: &Trace) -> Self {
        let requests = &trace.requests;
        let at = |request: Option<&TraceRequest>| request.map_or(Duration::ZERO, |request| request.at);
        let duration = at(requests.last()).saturating_sub(at(requests.first()));
        let turns = requests.iter().filter_map(|request| request.conversation);
        let conversations: BTreeSet<u64> = turns.map(|turn| turn.conversation).collect();
        Self {
            name: trace.name.clone(),
            hash: own_format::hash(trace),
            requests: requests.len(),
            conversations: conversations.len(),
            duration_s: duration.as_secs_f64(),
            arrivals_per_s: (!duration.is_zero()).then(|| as_f64(requests.len()) / duration.as_secs_f64()),
            gap_variation: gap_variation(requests),
            arrivals_in_1s: arrivals(requests, duration, Duration::from_secs(1)),
            arrivals_in_10s: arrivals(requests, duration, Duration::from_secs(10)),
            prompt_tokens: Percentiles::of(requests.iter().map(|request| request.prompt_tokens.into())),
            output_tokens: Percentiles::of(requests.iter().map(|request| request.output_tokens.into())),
            prefixes: (trace.block_tokens > 0).then(|| PrefixFacts::of(trace)),
        }
    }
}

impl Percentiles {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let rank = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100).max(1);
            sorted.get(rank - 1).copied().unwrap_or_default()
        };
        Self {
            mean: sorted.iter().sum::<f64>() / as_f64(sorted.len().max(1)),
            p10: rank(10),
            p50: rank(50),
            p90: rank(90),
            p99: rank(99),
            max: rank(100),
        }
    }
}

impl PrefixFacts {
    fn of(trace: &Trace) -> Self {
        let mut last_seen: BTreeMap<u64, (Duration, usize)> = BTreeMap::new();
        let (mut blocks, mut hits, mut first_hits, mut hit_tokens, mut with_hits) = (0, 0, 0, 0, 0);
        let (mut uncached, mut reuse) = (Vec::new(), Vec::new());
        for request in &trace.requests {
            let (mut own_hits, mut own_hit_tokens) = (0, 0);
            for (index, id) in (0..).zip(&request.prefix_blocks) {
                let begin = trace.block_tokens.saturating_mul(index).min(request.prompt_tokens);
                let end = begin.saturating_add(trace.block_tokens).min(request.prompt_tokens);
                let seen = last_seen.entry(*id).or_insert((request.at, 0));
                if seen.1 > 0 {
                    own_hits += 1;
                    own_hit_tokens += u64::from(end - begin);
                    first_hits += usize::from(index == 0);
                    if index > 0 {
                        reuse.push(request.at.saturating_sub(seen.0).as_secs_f64());
                    }
                }
                *seen = (request.at, seen.1 + 1);
            }
            blocks += request.prefix_blocks.len();
            hits += own_hits;
            hit_tokens += own_hit_tokens;
            with_hits += usize::from(own_hits > 1);
            uncached.push(u64::from(request.prompt_tokens) - own_hit_tokens);
        }
        let firsts = trace
            .requests
            .iter()
            .filter(|request| !request.prefix_blocks.is_empty())
            .count();
        let tokens: u64 = trace
            .requests
            .iter()
            .map(|request| u64::from(request.prompt_tokens))
            .sum();
        Self {
            block_tokens: trace.block_tokens,
            blocks,
            distinct_blocks: last_seen.len(),
            hit_blocks: part(hits, blocks),
            hit_tokens: tokens_f64(hit_tokens) / tokens_f64(tokens.max(1)),
            hit_blocks_after_first: part(hits - first_hits, blocks - firsts),
            requests_with_hits: part(with_hits, trace.requests.len()),
            uncached_tokens: Percentiles::of(uncached.into_iter().map(tokens_f64)),
            reuse_s: (!reuse.is_empty()).then(|| Percentiles::of(reuse.into_iter())),
            once: part(last_seen.values().filter(|seen| seen.1 == 1).count(), last_seen.len()),
        }
    }
}

fn gap_variation(requests: &[TraceRequest]) -> Option<f64> {
    let gaps: Vec<f64> = requests
        .windows(2)
        .map(|pair| pair[1].at.saturating_sub(pair[0].at).as_secs_f64())
        .collect();
    let mean = gaps.iter().sum::<f64>() / as_f64(gaps.len().max(1));
    let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / as_f64(gaps.len().max(1));
    (mean > 0.0).then(|| variance.sqrt() / mean)
}

/// Arrivals in each bin, the empty ones and the last, partial one included. At most a million bins are counted: a longer trace of
/// so few requests has no bin worth a look.
fn arrivals(requests: &[TraceRequest], duration: Duration, bin: Duration) -> Percentiles {
    const BINS_MAX: usize = 1_000_000;
    let index = |time: Duration| usize::try_from(time.as_nanos() / bin.as_nanos()).unwrap_or(usize::MAX);
    let last = index(duration);
    if last >= BINS_MAX {
        return Percentiles::default();
    }
    let mut counts = vec![0_u32; last + 1];
    let first = requests.first().map_or(Duration::ZERO, |request| request.at);
    for request in requests {
        if let Some(count) = counts.get_mut(index(request.at.saturating_sub(first))) {
            *count += 1;
        }
    }
    Percentiles::of(counts.into_iter().map(f64::from))
}

fn part(some: usize, all: usize) -> f64 {
    as_f64(some) / as_f64(all.max(1))
}

fn as_f64(count: usize) -> f64 {
    count as f64
}

fn tokens_f64(tokens: u64) -> f64 {
    tokens as f64
}
