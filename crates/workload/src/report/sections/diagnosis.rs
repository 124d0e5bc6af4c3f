//! What the runs say about the servers: six patterns with their evidence, what misleads, and one next step.

use serde_json::Value;

use super::each_shape;
use crate::contract::Contract;
use crate::diagnosis::{Observations, Shown, diagnose, next_step};
use crate::lint::{Context, lint};
use crate::prediction::Prediction;
use crate::record::{LoopKind, RequestRecord, Run};
use crate::report::document::{Block, Section, Table, Tone};
use crate::report::text::short;
use crate::report::view::{ArmView, ShapeView, View};
use crate::summary::Summary;

/// What may stay without an answer.
const UNSERVED_SHARE_MAX: f64 = 0.01;

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("diagnosis", "Diagnosis");
    section.text("Each arm is looked at alone. A pattern that is not measured names the run that would show it.");
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        let mut table = Table::new("Patterns", &["pattern", "arm", "state", "evidence", "first response"]);
        for arm in &load.arms {
            patterns(view, shape, arm, &mut table);
        }
        section.table_or(table, "This shape has no run.");
        let mut steps = Table::new(format!("The one next step at {}", load.words()), &["arm", "next step"]);
        for arm in &load.arms {
            steps.row(vec![short(arm.name), step(view, arm)]);
        }
        section.blocks.push(Block::Table(steps));
    });
    section.heading("What to know of these figures");
    let mut warnings = Table::new("Warnings", &["warning"]);
    let runs: Vec<&Run> = view
        .comparison
        .shapes
        .iter()
        .flat_map(|shape| &shape.runs)
        .map(|run| &run.run)
        .collect();
    let has_prediction =
        view.comparison.hypothesis.is_some() || view.comparison.environment.contains_key("predictions");
    let context = Context {
        has_prediction,
        ..Context::default()
    };
    let mut seen: Vec<(String, usize)> = Vec::new();
    for warning in lint(&runs, &context) {
        let words = warning.to_string();
        match seen.iter_mut().find(|(known, _)| *known == words) {
            Some((_, count)) => *count += 1,
            None => seen.push((words, 1)),
        }
    }
    for (words, count) in seen {
        let times = if count > 1 {
            format!(" ({count} runs)")
        } else {
            String::new()
        };
        warnings.row(vec![format!("{words}{times}")]);
    }
    section.table_or(warnings, "No habit that misleads was found in these runs.");
    section
}

fn patterns(view: &View<'_>, shape: &ShapeView<'_>, arm: &ArmView<'_>, table: &mut Table) {
    let curve = shape.curve(arm.arm);
    let by_load: Vec<&Summary> = curve.iter().filter_map(|(_, arm)| Some(&arm.runs.first()?.1)).collect();
    let is_alone = |run: &Run| run.loop_kind == LoopKind::Closed && run.offered == 1.0;
    let alone = curve
        .iter()
        .flat_map(|(_, arm)| &arm.runs)
        .find(|(run, _)| is_alone(run))
        .map(|(_, summary)| summary);
    let lightest = curve.first().map(|(_, arm)| arm);
    let prompt = |record: &RequestRecord| Some((f64::from(record.prompt_tokens), record.ttft_ms()?));
    let seen = Observations {
        alone,
        by_prompt: lightest.map_or_else(Vec::new, |arm| arm.completed().filter_map(prompt).collect()),
        by_load,
        cold_and_warm: None,
        prediction: prediction(view, arm),
    };
    for found in diagnose(&seen, &view.comparison.slo) {
        let (tone, state) = match found.shown {
            Shown::Shown => (Tone::Chosen, "● shown"),
            Shown::NotShown => (Tone::Plain, "○ not shown"),
            Shown::NotMeasured => (Tone::Faint, "– not measured"),
        };
        let response = if found.shown == Shown::Shown {
            found.first_response
        } else {
            String::new()
        };
        let pattern = match serde_json::to_value(found.pattern) {
            Ok(Value::String(name)) => name.replace('_', " "),
            _ => String::new(),
        };
        table.toned(
            tone,
            vec![pattern, short(arm.name), state.to_owned(), found.evidence, response],
        );
    }
}

fn prediction(view: &View<'_>, arm: &ArmView<'_>) -> Option<Prediction> {
    let fact = |name: &str| view.fact(arm, name);
    Prediction::decode(
        fact("weights_bytes").or_else(|| fact("model_bytes"))?,
        fact("memory_bytes_per_s")?,
    )
}

/// The limits of the comparison as a contract for the first repeat's figures.
fn step(view: &View<'_>, arm: &ArmView<'_>) -> String {
    let Some((_, summary)) = arm.runs.first() else {
        return String::new();
    };
    let contract = Contract {
        ttft_ms_p95_max: Some(view.comparison.slo.ttft_ms_max),
        tpot_ms_p95_max: Some(view.comparison.slo.itl_ms_max),
        e2e_ms_p99_max: None,
        dollars_per_million_accepted_tokens_max: None,
        unserved_share_max: UNSERVED_SHARE_MAX,
    };
    let resources = arm.declared.map(|arm| arm.resources.clone()).unwrap_or_default();
    next_step(&contract.judge(summary, &summary.per_resource(&resources))).words()
}
