//! What a set of runs says about a server: six patterns, each with its evidence and a first response, and one next step.

use serde::{Deserialize, Serialize};

use crate::comparison::Slo;
use crate::contract::Clause;
use crate::prediction::Prediction;
use crate::slowdown::line;
use crate::summary::Summary;

/// The runs that a diagnosis looks at. What was not measured is left out.
#[derive(Clone, Debug, Default)]
pub struct Observations<'a> {
    /// One request at a time.
    pub alone: Option<&'a Summary>,
    /// Prompt tokens and TTFT in ms, of requests that did not disturb each other.
    pub by_prompt: Vec<(f64, f64)>,
    /// The same shape at rising loads.
    pub by_load: Vec<&'a Summary>,
    /// The same shape with a cold cache, then with a warm one.
    pub cold_and_warm: Option<[&'a Summary; 2]>,
    /// What the hardware should give, beside `alone`.
    pub prediction: Option<Prediction>,
}

/// A pattern of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// TTFT grows with the prompt.
    PrefillBound,
    /// Tokens come slowly although the server does nothing else.
    DecodeBound,
    /// The p99 of TTFT rises while its median stays.
    QueueOrInterference,
    /// More tokens in all, each of them slower.
    Batching,
    /// A warm cache is no faster than a cold one.
    CacheMiss,
    /// Tokens come far more slowly than memory allows.
    NotMemoryBound,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shown {
    Shown,
    NotShown,
    NotMeasured,
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    pub pattern: Pattern,
    pub shown: Shown,
    /// The figures, or what would have to be measured.
    pub evidence: String,
    /// What to try first when the pattern is shown.
    pub first_response: String,
}

/// From the shortest to the longest prompt TTFT must grow by this factor...
const TTFT_GROWTH_MIN: f64 = 1.5;
/// ...and the prompt must explain this share of the longest one's TTFT.
const PROMPT_SHARE_MIN: f64 = 0.5;
/// A p99 this many times its median is a spike.
const SPIKE_MIN: f64 = 5.0;
/// A median that grew by less is flat.
const FLAT_GROWTH_MAX: f64 = 1.5;
/// Throughput that rises, and TPOT that gets worse, by at least this factor.
const BATCHING_GROWTH_MIN: f64 = 1.2;
/// A warm cache that saves less than a tenth of TTFT does not work.
const WARM_BY_COLD_MIN: f64 = 0.9;
/// A server that finds this share of its prompt tokens in its cache does not miss.
const HIT_SHARE_MIN: f64 = 0.5;

/// All six rows, in the order of `Pattern`.
pub fn diagnose(seen: &Observations, slo: &Slo) -> Vec<Diagnosis> {
    vec![
        prefill(seen),
        decode(seen, slo),
        interference(seen),
        batching(seen),
        cache(seen),
        prediction(seen),
    ]
}

fn row(pattern: Pattern, found: Option<(bool, String)>, lacks: &str) -> Diagnosis {
    let (shown, evidence) = match found {
        Some((true, evidence)) => (Shown::Shown, evidence),
        Some((false, evidence)) => (Shown::NotShown, evidence),
        None => (Shown::NotMeasured, format!("not measured: it needs {lacks}")),
    };
    Diagnosis {
        pattern,
        shown,
        evidence,
        first_response: first_response(pattern).to_owned(),
    }
}

fn first_response(pattern: Pattern) -> &'static str {
    match pattern {
        Pattern::PrefillBound => {
            "Prompts are bound by compute: add prefill nodes, share prefixes so that the cache is hit, or shorten prompts."
        }
        Pattern::DecodeBound => {
            "A decode step is bound by reading weights: use smaller or quantised weights or faster memory; other nodes do not help one request."
        }
        Pattern::QueueOrInterference => {
            "Long prompts or a queue delay a few requests: give long prompts their own pool, lower --mixed-step-tokens, or admit less."
        }
        Pattern::Batching => {
            "Larger batches buy throughput with TPOT: lower --max-num-seqs where users wait for tokens, raise it where only throughput counts."
        }
        Pattern::CacheMiss => {
            "Prefixes are not found: check that prompts share their first tokens, that requests reach the node that has the prefix, and that its cache is large enough."
        }
        Pattern::NotMemoryBound => {
            "Something other than memory bandwidth takes the time: look at threads, at the tokenizer, at the HTTP path and at other processes of the machine."
        }
    }
}

fn prefill(seen: &Observations) -> Diagnosis {
    let found = || {
        let (offset, slope) = line(&seen.by_prompt)?;
        let lengths = || seen.by_prompt.iter().map(|point| point.0);
        let (short, long) = (lengths().reduce(f64::min)?, lengths().reduce(f64::max)?);
        if short >= long {
            return None;
        }
        let at = |length: f64| offset + slope * length;
        let is_shown = at(long) >= TTFT_GROWTH_MIN * at(short) && slope * long >= PROMPT_SHARE_MIN * at(long);
        let evidence = format!(
            "TTFT is {:.0} ms with {short:.0} prompt tokens and {:.0} ms with {long:.0}: {:.3} ms a token",
            at(short),
            at(long),
            slope
        );
        Some((is_shown, evidence))
    };
    row(Pattern::PrefillBound, found(), "prompts of at least two lengths")
}

fn decode(seen: &Observations, slo: &Slo) -> Diagnosis {
    let found = seen.alone.and_then(|alone| alone.tpot_ms).map(|tpot| {
        let evidence = format!(
            "p50 TPOT of requests that are alone is {:.1} ms; the limit for gaps is {:.0} ms",
            tpot.p50, slo.itl_ms_max
        );
        (tpot.p50 > slo.itl_ms_max, evidence)
    });
    row(Pattern::DecodeBound, found, "a run with one request at a time")
}

fn interference(seen: &Observations) -> Diagnosis {
    let found = || {
        let first = seen.by_load.first()?.ttft_ms?;
        let flat = |summary: &&&Summary| {
            summary
                .ttft_ms
                .is_some_and(|ttft| ttft.p50 <= FLAT_GROWTH_MAX * first.p50)
        };
        let spike = |summary: &Summary| summary.ttft_ms.map_or(0.0, |ttft| ttft.p99 / ttft.p50);
        let worst = seen
            .by_load
            .iter()
            .filter(flat)
            .max_by(|a, b| spike(a).total_cmp(&spike(b)))?;
        let ttft = worst.ttft_ms?;
        let evidence = format!(
            "at a load of {:.2} p99 TTFT is {:.0} ms and p50 {:.0} ms; at the lowest load p50 is {:.0} ms",
            worst.offered, ttft.p99, ttft.p50, first.p50
        );
        Some((spike(worst) >= SPIKE_MIN, evidence))
    };
    row(Pattern::QueueOrInterference, found(), "at least one run under load")
}

fn batching(seen: &Observations) -> Diagnosis {
    let found = || {
        let (low, high) = (
            seen.by_load.first()?,
            seen.by_load.last().filter(|_| seen.by_load.len() > 1)?,
        );
        let (slow, fast) = (low.tpot_ms?.p50, high.tpot_ms?.p50);
        let throughputs = [low, high].map(|summary| summary.throughput.output_tokens_per_s);
        let is_shown = throughputs[1] >= BATCHING_GROWTH_MIN * throughputs[0] && fast >= BATCHING_GROWTH_MIN * slow;
        let evidence = format!(
            "from a load of {:.2} to {:.2} output tokens/s go from {:.1} to {:.1} and p50 TPOT from {slow:.1} to {fast:.1} ms",
            low.offered, high.offered, throughputs[0], throughputs[1]
        );
        Some((is_shown, evidence))
    };
    row(Pattern::Batching, found(), "runs at two loads")
}

fn cache(seen: &Observations) -> Diagnosis {
    let found = || {
        let [cold, warm] = seen.cold_and_warm?;
        let (cold_ttft, warm_ttft) = (cold.ttft_ms?.p50, warm.ttft_ms?.p50);
        let hits = match warm.cached_share {
            Some(share) => format!("{:.0} % of prompt tokens came from the cache", share * 100.0),
            None => "the server does not tell its hits".to_owned(),
        };
        let evidence = format!("p50 TTFT is {cold_ttft:.0} ms cold and {warm_ttft:.0} ms warm; {hits}");
        // With many hits an equal TTFT means that the prompt is not what takes the time.
        let is_missed = warm.cached_share.is_none_or(|share| share < HIT_SHARE_MIN);
        Some((is_missed && warm_ttft >= WARM_BY_COLD_MIN * cold_ttft, evidence))
    };
    row(
        Pattern::CacheMiss,
        found(),
        "the same prefixes with a cold and with a warm cache",
    )
}

fn prediction(seen: &Observations) -> Diagnosis {
    let found = || {
        let measured = seen.prediction?.beside(seen.alone?.tpot_ms?.p50);
        Some((measured.is_far_below(), measured.words()))
    };
    row(
        Pattern::NotMemoryBound,
        found(),
        "a run with one request at a time, the bytes of the weights and the memory bandwidth",
    )
}

/// What to work on next. The order is that of what a user notices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "step")]
pub enum NextStep {
    /// Requests do not complete.
    Serve {
        clause: Clause,
    },
    Ttft {
        clause: Clause,
    },
    Tpot {
        clause: Clause,
    },
    /// End-to-end time, throughput or cost.
    Cost {
        clause: Clause,
    },
    /// Everything is met.
    Stop,
}

/// The one next step after a contract was judged.
pub fn next_step(clauses: &[Clause]) -> NextStep {
    let unmet = |name: &str| {
        clauses
            .iter()
            .find(|clause| !clause.is_met && clause.name.starts_with(name))
            .cloned()
    };
    let steps = [
        unmet("unserved").map(|clause| NextStep::Serve { clause }),
        unmet("ttft").map(|clause| NextStep::Ttft { clause }),
        unmet("tpot").map(|clause| NextStep::Tpot { clause }),
        unmet("").map(|clause| NextStep::Cost { clause }),
    ];
    steps.into_iter().flatten().next().unwrap_or(NextStep::Stop)
}

impl NextStep {
    pub fn words(&self) -> String {
        let (what, how) = match self {
            NextStep::Stop => return "Stop: every limit of the contract is met.".to_owned(),
            NextStep::Serve { clause } => (
                clause,
                "Requests stay without an answer. Lower the rate or add nodes before anything else",
            ),
            NextStep::Ttft { clause } => (
                clause,
                "Work on TTFT: look at the queue first, then at the prefill of long prompts",
            ),
            NextStep::Tpot { clause } => (
                clause,
                "TTFT is good. Work on TPOT: batch size, chunk budget, then the decode nodes",
            ),
            NextStep::Cost { clause } => (clause, "Latency is good. Work on throughput and cost"),
        };
        let measured = what
            .measured
            .map_or("not measured".to_owned(), |measured| format!("measured {measured:.4}"));
        format!("{how} ({} is {}, {measured}).", what.name, what.limit)
    }
}

#[cfg(test)]
#[path = "diagnosis_tests.rs"]
mod tests;
