//! A line for each request. The first five columns are those that spreadsheets of the field have; the others stand behind them.

use std::io::Write;
use std::time::Duration;

use workload::record::{Outcome, RequestRecord, Run, RunPart, ServerRecord};
use workload::statistics::Samples;

const HEADER: [&str; 23] = [
    "request_id",
    "prompt_tokens",
    "output_tokens",
    "ttft_ms",
    "total_ms",
    "part",
    "outcome",
    "error",
    "lane",
    "scheduled_ms",
    "lag_ms",
    "ended_ms",
    "tpot_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "cached_tokens",
    "output_hash",
    "prefill_node",
    "decode_node",
    "local_prefill",
    "kv_bytes",
    "kv_transfer_ms",
];

pub(super) fn write(run: &Run, out: impl Write) -> csv::Result<()> {
    let mut lines = csv::Writer::from_writer(out);
    lines.write_record(HEADER)?;
    for record in &run.records {
        lines.write_record(row(record))?;
    }
    lines.flush()?;
    Ok(())
}

fn row(record: &RequestRecord) -> [String; HEADER.len()] {
    let number = |value: Option<f64>| value.map(|value| format!("{value:.3}")).unwrap_or_default();
    let at = |time: Duration| format!("{:.3}", time.as_secs_f64() * 1e3);
    let gaps = Samples::new(record.gaps_ms());
    let (outcome, error) = match &record.outcome {
        Outcome::Completed => ("completed", String::new()),
        Outcome::Refused { status } => ("refused", status.to_string()),
        Outcome::Failed { error } => ("failed", error.clone()),
        Outcome::Cancelled => ("cancelled", String::new()),
    };
    let part = match record.part {
        RunPart::WarmUp => "warm_up",
        RunPart::Measured => "measured",
        RunPart::CoolDown => "cool_down",
    };
    let of_server =
        |value: fn(&ServerRecord) -> Option<String>| record.server.as_ref().and_then(value).unwrap_or_default();
    [
        record.id.clone(),
        record.prompt_tokens.to_string(),
        record.output_tokens.to_string(),
        number(record.ttft_ms()),
        number(Some(record.e2e_ms())),
        part.to_owned(),
        outcome.to_owned(),
        error,
        record.lane.name().to_owned(),
        at(record.scheduled),
        number(Some(record.lag_ms())),
        at(record.ended),
        number(record.tpot_ms()),
        number(gaps.percentile(50.0)),
        number(gaps.percentile(99.0)),
        number(gaps.percentile(100.0)),
        record.cached_tokens.map(|count| count.to_string()).unwrap_or_default(),
        record
            .output_hash
            .map(|hash| format!("{hash:016x}"))
            .unwrap_or_default(),
        of_server(|server| server.prefill_node.clone()),
        of_server(|server| server.decode_node.clone()),
        of_server(|server| server.local_prefill.clone()),
        of_server(|server| server.kv_bytes.map(|bytes| bytes.to_string())),
        of_server(|server| server.kv_transfer_ms.map(|ms| format!("{ms:.3}"))),
    ]
}
