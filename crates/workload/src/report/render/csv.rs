//! One line for each request: first the columns of a `metrics.csv`, then further ones.

use std::fmt::Write as _;

use crate::comparison::{ArmRun, Comparison, Shape};
use crate::record::{Outcome, RequestRecord, RunPart};

/// The first columns, whose names other tools know.
const HEADER: &str = "request_id,prompt_tokens,output_tokens,ttft_ms,total_ms";
/// Further ones. The first five keep their place behind the header, empty where nothing is known.
const FURTHER: &str = "concurrent_users,model,batch_size,gpu_util,kv_cache_gb,arm,shape,repeat,offered,part,outcome,error,scheduled_ms,\
                       lag_ms,tpot_ms,itl_ms_max,cached_tokens,prefill_node,decode_node,local_prefill,kv_bytes,kv_transfer_ms,output_hash";

pub fn lines(comparison: &Comparison) -> String {
    let mut out = format!("{HEADER},{FURTHER}\n");
    for shape in &comparison.shapes {
        for run in &shape.runs {
            let model = run
                .run
                .environment
                .get("model")
                .or_else(|| comparison.environment.get("model"));
            let model = model.and_then(|model| model.as_str()).unwrap_or("");
            for record in &run.run.records {
                let line = Line {
                    shape,
                    run,
                    record,
                    model,
                };
                line.write(&mut out);
            }
        }
    }
    out
}

struct Line<'a> {
    shape: &'a Shape,
    run: &'a ArmRun,
    record: &'a RequestRecord,
    model: &'a str,
}

impl Line<'_> {
    fn write(&self, out: &mut String) {
        let (record, run) = (self.record, &self.run.run);
        let server = record.server.clone().unwrap_or_default();
        let (outcome, error) = match &record.outcome {
            Outcome::Completed => ("completed", String::new()),
            Outcome::Cancelled => ("cancelled", String::new()),
            Outcome::Refused { status } => ("refused", format!("status {status}")),
            Outcome::Failed { error } => ("failed", error.clone()),
        };
        let users = (run.loop_kind == crate::record::LoopKind::Closed).then_some(run.offered);
        let part = match record.part {
            RunPart::WarmUp => "warm_up",
            RunPart::Measured => "measured",
            RunPart::CoolDown => "cool_down",
        };
        let cells = [
            text(&record.id),
            record.prompt_tokens.to_string(),
            record.output_tokens.to_string(),
            ms(record.ttft_ms()),
            ms(Some(record.e2e_ms())),
            users.map_or_else(String::new, |users| users.to_string()),
            text(self.model),
            String::new(),
            String::new(),
            String::new(),
            text(&self.run.arm),
            text(&self.shape.name),
            self.run.repeat.to_string(),
            run.offered.to_string(),
            part.to_owned(),
            outcome.to_owned(),
            text(&error),
            ms(Some(record.scheduled.as_secs_f64() * 1e3)),
            ms(Some(record.lag_ms())),
            ms(record.tpot_ms()),
            ms(record.gaps_ms().reduce(f64::max)),
            record
                .cached_tokens
                .map_or_else(String::new, |tokens| tokens.to_string()),
            text(server.prefill_node.as_deref().unwrap_or("")),
            text(server.decode_node.as_deref().unwrap_or("")),
            text(server.local_prefill.as_deref().unwrap_or("")),
            server.kv_bytes.map_or_else(String::new, |bytes| bytes.to_string()),
            ms(server.kv_transfer_ms),
            record
                .output_hash
                .map_or_else(String::new, |hash| format!("{hash:016x}")),
        ];
        let _ = writeln!(out, "{}", cells.join(","));
    }
}

fn ms(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| format!("{value:.3}"))
}

/// A text cell (RFC 4180). A spreadsheet would run a text that begins like a formula, so that one gets an apostrophe.
fn text(value: &str) -> String {
    let is_formula = value.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let value = if is_formula {
        format!("'{value}")
    } else {
        value.to_owned()
    };
    match value.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", value.replace('"', "\"\"")),
        false => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_begins_with_the_names_that_other_tools_know() {
        let none = lines(&crate::report::synthetic::empty());
        assert!(none.starts_with("request_id,prompt_tokens,output_tokens,ttft_ms,total_ms,"));
        assert_eq!(none.lines().count(), 1);
    }

    #[test]
    fn a_text_is_one_cell_and_no_formula() {
        assert_eq!(text("=1+1"), "'=1+1");
        assert_eq!(text("a\"b,c\nd"), "\"a\"\"b,c\nd\"");
    }

    #[test]
    fn every_line_has_a_cell_for_each_column() {
        let mut comparison = crate::report::synthetic::comparison(1);
        comparison.shapes.remove(0);
        let lines = lines(&comparison);
        let columns = lines.lines().next().expect("a header").split(',').count();
        let requests: usize = comparison
            .shapes
            .iter()
            .flat_map(|shape| &shape.runs)
            .map(|run| run.run.records.len())
            .sum();
        assert_eq!(lines.lines().count(), requests + 1);
        assert!(lines.lines().all(|line| line.split(',').count() == columns));
    }
}
