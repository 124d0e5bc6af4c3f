//! The result with the keys of `vllm bench serve` (`vllm/benchmarks/serve.py`), in its units: seconds in the lists of a request's
//! times, milliseconds in the statistics. Times count from when a request was due.

use std::time::Duration;

use serde_json::{Map, Value, json};
use workload::record::{Outcome, RequestRecord, Run};
use workload::summary::Lag;

use super::args::{Metric, OutputArgs};
use super::metrics::{completed, request_goodput, samples};

/// What the flags say that the run does not.
#[derive(Clone, Debug)]
pub(super) struct Labels<'a> {
    pub backend: &'static str,
    pub tokenizer: Option<&'a str>,
    pub request_rate: Option<f64>,
    pub burstiness: f64,
    pub max_concurrency: Option<u32>,
    pub scenario: Option<String>,
    /// `YYYYMMDD-HHMMSS`.
    pub date: String,
}

pub(super) fn result(run: &Run, texts: &[String], output: &OutputArgs, labels: &Labels<'_>) -> Value {
    let mut result = Map::new();
    let mut set = |key: &str, value: Value| {
        result.insert(key.to_owned(), value);
    };
    set("date", json!(labels.date));
    set("endpoint_type", json!(labels.backend));
    set("backend", json!(labels.backend));
    set("label", json!(output.label.as_deref().unwrap_or(labels.backend)));
    set("model_id", run.environment.get("model").cloned().unwrap_or_default());
    set("tokenizer_id", json!(labels.tokenizer));
    set("num_prompts", json!(run.records.len()));
    for (key, value) in &output.metadata {
        set(key, json!(value));
    }
    let rate = labels
        .request_rate
        .map(|rate| if rate.is_finite() { json!(rate) } else { json!("inf") });
    set("request_rate", rate.unwrap_or_default());
    set("burstiness", json!(labels.burstiness));
    set("max_concurrency", json!(labels.max_concurrency));
    set("scenario", json!(labels.scenario));
    set("hypothesis", json!(output.hypothesis));
    totals(run, output, &mut set);
    for metric in Metric::ALL
        .into_iter()
        .filter(|metric| output.percentile_metrics.contains(metric))
    {
        let (samples, name) = (samples(run, metric), metric.name());
        set(&format!("mean_{name}_ms"), json!(samples.mean().unwrap_or(0.0)));
        set(
            &format!("median_{name}_ms"),
            json!(samples.percentile(50.0).unwrap_or(0.0)),
        );
        set(&format!("std_{name}_ms"), json!(samples.std().unwrap_or(0.0)));
        for percent in &output.metric_percentiles {
            let value = samples.percentile(*percent).unwrap_or(0.0);
            set(&format!("p{percent}_{name}_ms"), json!(value));
        }
    }
    if output.save_detailed {
        details(run, texts, &mut set);
    }
    ours(run, &mut set);
    Value::Object(result)
}

fn totals(run: &Run, output: &OutputArgs, set: &mut impl FnMut(&str, Value)) {
    let seconds = run.measured.as_secs_f64();
    let per_second = |amount: f64| amount / seconds.max(f64::MIN_POSITIVE);
    let whole = completed(run).count();
    let measured = run.records.iter().filter(|record| record.is_measured()).count();
    let sum = |tokens: fn(&RequestRecord) -> u32| completed(run).map(|record| u64::from(tokens(record))).sum::<u64>();
    let (input, generated) = (sum(|record| record.prompt_tokens), sum(|record| record.output_tokens));
    set("duration", json!(seconds));
    set("completed", json!(whole));
    set("failed", json!(measured - whole));
    set("total_input_tokens", json!(input));
    set("total_output_tokens", json!(generated));
    set("request_throughput", json!(per_second(whole as f64)));
    let goodput = (!output.goodput.is_empty()).then(|| request_goodput(run, &output.goodput));
    set("request_goodput", json!(goodput));
    set("output_throughput", json!(per_second(generated as f64)));
    set("total_token_throughput", json!(per_second((input + generated) as f64)));
    let (tokens, requests) = peaks(run);
    set("max_output_tokens_per_s", json!(tokens));
    set("max_concurrent_requests", json!(requests));
}

/// The most tokens in one second of the run, and the most requests that ran in one.
fn peaks(run: &Run) -> (u64, u64) {
    let first = completed(run).map(|record| record.scheduled).min().unwrap_or_default();
    let second = |time: Duration| time.saturating_sub(first).as_secs() as usize;
    let last = completed(run).map(|record| second(record.ended)).max().unwrap_or(0);
    let mut tokens = vec![0_u64; last + 1];
    let mut requests = vec![0_u64; last + 1];
    for record in completed(run) {
        record
            .tokens
            .iter()
            .for_each(|time| tokens[second(*time).min(last)] += 1);
        let until = record.tokens.last().copied().unwrap_or(record.ended);
        (second(record.scheduled)..=second(until)).for_each(|at| requests[at.min(last)] += 1);
    }
    let most = |counts: Vec<u64>| counts.into_iter().max().unwrap_or(0);
    (most(tokens), most(requests))
}

fn details(run: &Run, texts: &[String], set: &mut impl FnMut(&str, Value)) {
    let measured = || run.records.iter().zip(texts).filter(|(record, _)| record.is_measured());
    let list = |of: &dyn Fn(&RequestRecord) -> Value| Value::Array(measured().map(|(record, _)| of(record)).collect());
    let error = |record: &RequestRecord| match &record.outcome {
        Outcome::Completed => String::new(),
        Outcome::Refused { status } => format!("refused with {status}"),
        Outcome::Failed { error } => error.clone(),
        Outcome::Cancelled => "cancelled by the client".to_owned(),
    };
    set("input_lens", list(&|record| json!(record.prompt_tokens)));
    set("output_lens", list(&|record| json!(record.output_tokens)));
    set("ttfts", list(&|record| json!(record.ttft_ms().unwrap_or(0.0) / 1e3)));
    let gaps = |record: &RequestRecord| record.gaps_ms().map(|gap| gap / 1e3).collect::<Vec<_>>();
    set("itls", list(&|record| json!(gaps(record))));
    set("latencies", list(&|record| json!(record.e2e_ms() / 1e3)));
    set("start_times", list(&|record| json!(record.scheduled.as_secs_f64())));
    set("queue_times", list(&|record| json!(record.lag_ms() / 1e3)));
    set(
        "generated_texts",
        json!(measured().map(|(_, text)| text).collect::<Vec<_>>()),
    );
    set("errors", list(&|record| json!(error(record))));
}

/// Keys that `vllm bench serve` does not have.
fn ours(run: &Run, set: &mut impl FnMut(&str, Value)) {
    let lag = Lag::of(run);
    set("loop", json!(run.loop_kind));
    set(
        "client_lag_ms",
        json!({"p50": lag.ms_p50, "p99": lag.ms_p99, "max": lag.ms_max}),
    );
    set("is_valid", json!(Lag::of(run).is_valid));
    set("client_cpu_s", json!(run.client.cpu.as_secs_f64()));
    let server = run
        .server
        .iter()
        .map(|(name, usage)| (name.clone(), json!(usage.cpu.as_secs_f64())));
    set("server_cpu_s", Value::Object(server.collect()));
    set("environment", json!(run.environment));
}
