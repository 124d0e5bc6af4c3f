//! The summary: exactly three numbers for each arm, for three readers, and the verdict in one sentence.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{each_shape, fairness, kind};
use crate::report::document::{Block, Card, CardNumber, Section};
use crate::report::text::{maybe, number, short, tick};
use crate::report::view::{ArmView, LoadView, Per, Subject, View};
use crate::verdict::Metric;

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("summary", "Summary");
    if let Some(hypothesis) = &view.comparison.hypothesis {
        section.text(format!("Hypothesis, written before the measurement: {hypothesis}"));
    }
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        for sentence in verdict(view, &shape.shape.verdict) {
            section.blocks.push(Block::Verdict(sentence));
        }
        let traffic = short(&shape.shape.traffic);
        section.text(format!("At {}. Traffic: {traffic}", load.words()));
        section.blocks.push(Block::Summary(cards(load)));
    });
    section
}

/// The verdict, a sentence for each paragraph.
fn verdict(view: &View<'_>, verdict: &str) -> Vec<String> {
    match view.subject {
        Subject::Run => vec!["One run. It compares nothing, so there is no verdict.".to_owned()],
        // The verdict itself says what forbids it: gaps of the list, a late client, answers that differ.
        Subject::Comparison if verdict.starts_with("No verdict") => sentences(verdict),
        Subject::Comparison if !fairness::missing(view.comparison).is_empty() => {
            vec!["No verdict: the fairness list has gaps.".to_owned()]
        }
        Subject::Comparison if verdict.is_empty() => vec!["No verdict was recorded for this shape.".to_owned()],
        Subject::Comparison => sentences(verdict),
    }
}

/// Three runs that differ much have an interval over many orders of magnitude. It says nothing but that.
const INTERVAL_FACTOR_MAX: f64 = 100.0;

/// Cut where a full stop is followed by a capital letter.
fn sentences(text: &str) -> Vec<String> {
    let mut sentences = Vec::new();
    let mut rest = text.trim();
    while let Some(end) = rest
        .match_indices(". ")
        .map(|(at, _)| at + 1)
        .find(|end| rest[*end..].trim_start().starts_with(char::is_uppercase))
    {
        sentences.push(rest[..end].to_owned());
        rest = rest[end..].trim_start();
    }
    sentences.push(rest.to_owned());
    sentences
}

fn cards(load: &LoadView<'_>) -> Vec<Card> {
    load.arms.iter().map(card).collect()
}

fn card(arm: &ArmView<'_>) -> Card {
    let topology = arm
        .declared
        .map(|declared| format!("{}, {}", kind(declared), short(&declared.topology)));
    let mut runs = match arm.runs.len() {
        1 => "1 run".to_owned(),
        count => format!("{count} runs"),
    };
    // The percentiles below are those of the other requests.
    let measured = arm.sum(|summary| summary.counts.measured);
    let unserved = measured - arm.sum(|summary| summary.counts.completed);
    if unserved > 0 {
        runs.push_str(&format!("; {unserved} of {measured} requests not answered"));
    }
    let (output, what) = match arm.per() {
        Per::Gpu(_) => (Metric::OutputTokensPerGpu, "output tokens/s per GPU"),
        Per::Core(_) => (Metric::OutputTokensPerCore, "output tokens/s per core"),
        Per::Arm => (Metric::OutputTokensPerCore, "output tokens/s of the arm"),
    };
    let number = |reader: &'static str, what: &'static str, metric: Metric, unit: &'static str| {
        let found = arm.interval(metric);
        CardNumber {
            reader,
            what,
            value: maybe(found.map(|found| found.value)),
            unit,
            interval: match found {
                None => "no interval".to_owned(),
                Some(found) if found.high > found.low * INTERVAL_FACTOR_MAX => "95 %: too wide to say".to_owned(),
                Some(found) => format!("95 %: {} to {}", number(found.low), number(found.high)),
            },
        }
    };
    Card {
        name: short(arm.name),
        arm: arm.arm,
        note: topology.map_or_else(|| runs.clone(), |topology| format!("{topology}; {runs}")),
        numbers: [
            number("User", "TTFT, p99", Metric::Ttft { percent: 99 }, "ms"),
            number("Tail engineer", "ITL, p99", Metric::Itl { percent: 99 }, "ms"),
            number("Operator", what, output, "tokens/s"),
        ],
    }
}

/// What stands above everything else, because it changes how the rest is to be read.
pub fn alerts(view: &View<'_>) -> Vec<String> {
    let mut alerts = Vec::new();
    let missing = fairness::missing(view.comparison);
    if view.subject == Subject::Comparison && !missing.is_empty() {
        alerts.push(format!(
            "No verdict: the fairness list lacks {}. The figures below may compare unequal things.",
            missing.join("; ")
        ));
    }
    let is_late = |summary: &crate::summary::Summary| !summary.lag.is_valid;
    let late: Vec<&str> = view
        .shapes
        .iter()
        .flat_map(|shape| &shape.loads)
        .flat_map(|load| &load.arms)
        .filter(|arm| arm.runs.iter().any(|(_, summary)| is_late(summary)))
        .map(|arm| arm.name)
        .collect();
    if let Some(name) = late.first() {
        alerts.push(format!(
            "The load client was late in {} of the arm-and-load pairs (first: {}): its p99 lag exceeds {} ms, so these runs \
             say nothing about the server.",
            late.len(),
            short(name),
            tick(crate::summary::LAG_MS_P99_MAX)
        ));
    }
    alerts.extend(stopped_early(view));
    if view
        .comparison
        .environment
        .get("made_up")
        .is_some_and(|value| value == true)
    {
        alerts
            .push("Made-up data: a generator wrote these figures to show the report. They measure nothing.".to_owned());
    }
    alerts
}

/// A run that was cut has the requests that had ended by then. The slow ones are missing more often than the fast ones.
fn stopped_early(view: &View<'_>) -> Option<String> {
    let runs = view.comparison.shapes.iter().flat_map(|shape| &shape.runs);
    let facts = runs.map(|run| &run.run.environment);
    let is_cut = |facts: &&BTreeMap<String, Value>| facts.get("interrupted").is_some_and(|value| *value == true);
    let unfinished = |facts: &BTreeMap<String, Value>| facts.get("unfinished").and_then(Value::as_u64).unwrap_or(0);
    let cut: Vec<u64> = facts.filter(is_cut).map(unfinished).collect();
    (!cut.is_empty()).then(|| {
        format!(
            "Stopped early: {} of the runs ended before their requests did. {} requests that were still running are left out, and a \
             slow request is more likely to be one of them.",
            cut.len(),
            cut.iter().sum::<u64>()
        )
    })
}
