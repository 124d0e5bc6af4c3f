//! Predicted and measured: what arithmetic says that the machine could do, beside what it did.

use serde::Deserialize;
use serde_json::Value;

use super::each_shape;
use crate::record::RequestRecord;
use crate::report::document::{Section, Table, Tone};
use crate::report::text::{maybe, number, percent, short};
use crate::report::view::{ArmView, View};
use crate::statistics::Samples;

/// A measurement that is within this share of its prediction confirms it.
const NEAR: f64 = 0.2;

/// A prediction that somebody made before: `environment.predictions` is a list of them.
#[derive(Deserialize)]
struct Prediction {
    what: String,
    predicted: f64,
    measured: Option<f64>,
    unit: String,
    /// The formula or the tool.
    from: String,
}

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("predicted", "Predicted and measured");
    section.text(
        "A decode step reads all weights once, so one stream alone cannot be faster than memory bandwidth by weights. A prompt token \
         costs about 2 FLOP for each parameter. KV cannot move faster than its link.",
    );
    let given = given(view);
    if !given.rows.is_empty() {
        section.table_or(given, "");
    }
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        let mut table = columns(&format!("Bounds at {}", load.words()));
        load.arms.iter().for_each(|arm| bounds(view, arm, &mut table));
        section.table_or(
            table,
            "Nothing can be predicted: the data name neither memory_bytes_per_s and weights_bytes, nor flops_per_s and parameters, nor \
             link_bytes_per_s.",
        );
    });
    section
}

fn columns(caption: &str) -> Table {
    Table::new(
        caption,
        &[
            "what",
            "arm",
            "#predicted",
            "#measured",
            "unit",
            "#measured by predicted",
            "reading",
        ],
    )
}

fn given(view: &View<'_>) -> Table {
    let mut table = columns("Predictions that were made before");
    let list = view.comparison.environment.get("predictions").and_then(Value::as_array);
    for prediction in list.into_iter().flatten() {
        let Ok(prediction) = Prediction::deserialize(prediction) else {
            continue;
        };
        let what = format!("{} ({})", short(&prediction.what), short(&prediction.from));
        let ratio = prediction.measured.map(|measured| measured / prediction.predicted);
        let reading = match ratio {
            Some(ratio) if (ratio - 1.0).abs() <= NEAR => (Tone::Good, "as predicted"),
            Some(_) => (Tone::Bad, "not as predicted"),
            None => (Tone::Plain, "not measured"),
        };
        let cells = [
            maybe(Some(prediction.predicted)),
            maybe(prediction.measured),
            short(&prediction.unit),
        ];
        let [predicted, measured, unit] = cells;
        let ratio = ratio.map_or_else(|| "–".to_owned(), percent);
        table.toned(
            reading.0,
            vec![
                what,
                "–".to_owned(),
                predicted,
                measured,
                unit,
                ratio,
                reading.1.to_owned(),
            ],
        );
    }
    table
}

/// What physics allows at most, beside the median of what an arm did.
fn bounds(view: &View<'_>, arm: &ArmView<'_>, table: &mut Table) {
    let fact = |name: &str| view.fact(arm, name);
    let weights = fact("weights_bytes").or_else(|| fact("model_bytes"));
    if let (Some(weights), Some(bandwidth)) = (weights, fact("memory_bytes_per_s")) {
        let measured = arm.tpot_ms().percentile(50.0).map(|tpot| 1000.0 / tpot);
        bound(
            table,
            ("tokens of one stream: bandwidth by weights", "tokens/s"),
            arm,
            (bandwidth / weights, measured),
        );
    }
    if let (Some(parameters), Some(flops)) = (fact("parameters"), fact("flops_per_s")) {
        let rates = Samples::new(arm.completed().filter_map(prefill_tokens_per_s)).percentile(50.0);
        bound(
            table,
            ("prompt tokens: FLOP/s by 2 x parameters", "tokens/s"),
            arm,
            (flops / (2.0 * parameters), rates),
        );
    }
    if let Some(link) = fact("link_bytes_per_s") {
        let rates = Samples::new(arm.completed().filter_map(kv_bytes_per_s)).percentile(50.0);
        if rates.is_some() {
            bound(
                table,
                ("KV transfer: speed of the link", "GB/s"),
                arm,
                (link / 1e9, rates.map(|rate| rate / 1e9)),
            );
        }
    }
}

fn bound(table: &mut Table, (what, unit): (&str, &str), arm: &ArmView<'_>, (predicted, measured): (f64, Option<f64>)) {
    let ratio = measured.map(|measured| measured / predicted);
    let reading = match ratio {
        Some(ratio) if ratio > 1.0 + NEAR => "above the bound: check the inputs",
        Some(ratio) if ratio >= 0.5 => "near the bound",
        Some(_) => "far below the bound: something else limits it (batching, waiting, other work)",
        None => "not measured",
    };
    table.row(vec![
        what.to_owned(),
        short(arm.name),
        number(predicted),
        maybe(measured),
        unit.to_owned(),
        ratio.map_or_else(|| "–".to_owned(), percent),
        reading.to_owned(),
    ]);
}

/// Prompt tokens that were computed, by the time of their forward passes.
fn prefill_tokens_per_s(record: &RequestRecord) -> Option<f64> {
    let stages = &record.server.as_ref()?.stages;
    let ms = stages
        .iter()
        .find(|(name, _)| name == "prefill_forward")
        .map(|(_, ms)| *ms)?;
    let computed = record.prompt_tokens.saturating_sub(record.cached_tokens.unwrap_or(0));
    (ms > 0.0 && computed > 0).then(|| f64::from(computed) / ms * 1e3)
}

fn kv_bytes_per_s(record: &RequestRecord) -> Option<f64> {
    let server = record.server.as_ref()?;
    let ms = server.kv_transfer_ms.filter(|ms| *ms > 0.0)?;
    Some(server.kv_bytes? as f64 / ms * 1e3)
}
