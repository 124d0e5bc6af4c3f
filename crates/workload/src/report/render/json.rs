//! The data inside the HTML file: the whole comparison where it is small, and else what a reader can still use.

use serde_json::{Value, json};

use crate::comparison::Comparison;
use crate::summary::Summary;

/// The HTML stays below about 3 MB with this much of data.
const BYTES_MAX: usize = 1_500_000;

const WITHOUT_TOKENS: &str =
    "The time of each token is left out because the file would be too large. The JSON beside this file has it.";
const WITHOUT_REQUESTS: &str = "The requests are left out because the file would be too large: each run has a summary instead. The JSON \
                                beside this file has them.";

/// JSON text with `left_out` and `comparison`.
pub fn embedded(comparison: &Comparison) -> String {
    embedded_within(comparison, BYTES_MAX)
}

fn embedded_within(comparison: &Comparison, bytes_max: usize) -> String {
    let whole = || json!({"left_out": Value::Null, "comparison": comparison});
    let without_tokens = || {
        let mut smaller = comparison.clone();
        for record in smaller
            .shapes
            .iter_mut()
            .flat_map(|shape| &mut shape.runs)
            .flat_map(|run| &mut run.run.records)
        {
            record.tokens = Vec::new();
        }
        json!({"left_out": WITHOUT_TOKENS, "comparison": smaller})
    };
    let forms: [&dyn Fn() -> Value; 2] = [&whole, &without_tokens];
    forms
        .iter()
        .map(|form| form().to_string())
        .find(|text| text.len() <= bytes_max)
        .unwrap_or_else(|| without_requests(comparison))
}

fn without_requests(comparison: &Comparison) -> String {
    let mut smaller = comparison.clone();
    let mut summaries = Vec::new();
    for shape in &mut smaller.shapes {
        for run in &mut shape.runs {
            let summary = Summary::of(&run.run, &comparison.slo);
            summaries.push(json!({"shape": shape.name, "arm": run.arm, "repeat": run.repeat, "summary": summary}));
            run.run.records = Vec::new();
        }
    }
    json!({"left_out": WITHOUT_REQUESTS, "comparison": smaller, "summaries": summaries}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::synthetic;

    #[test]
    fn what_is_too_large_is_left_out_and_named() {
        let comparison = synthetic::comparison(1);
        let whole = json!({"left_out": Value::Null, "comparison": comparison})
            .to_string()
            .len();
        let read = |bytes_max: usize| -> Value {
            serde_json::from_str(&embedded_within(&comparison, bytes_max)).expect("JSON")
        };
        let records = |value: &Value| value["comparison"]["shapes"][0]["runs"][0]["run"]["records"].clone();
        assert!(records(&read(whole))[0]["tokens"][0].is_object());
        assert_eq!(records(&read(whole - 1))[0]["tokens"], json!([]));
        let least = read(1_000);
        assert_eq!(records(&least), json!([]));
        assert!(least["left_out"].is_string() && least["summaries"][0]["summary"]["ttft_ms"]["p99"].is_number());
    }
}
