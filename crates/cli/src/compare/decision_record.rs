//! The decision record: what was accepted and what was rejected, on which figures, at what cost, and why the search stopped.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use workload::comparison::{Comparison, Contrast, Finding, Shape};
use workload::summary::Summary;

use super::conclude::Refused;

/// # Errors
/// The file cannot be written.
pub(super) fn write(comparison: &Comparison, refused: &Refused, path: &Path) -> anyhow::Result<()> {
    std::fs::write(path, text(comparison, refused)).with_context(|| format!("cannot write --record {}", path.display()))
}

fn text(comparison: &Comparison, refused: &Refused) -> String {
    let mut text = format!("# Decision of {}: co-located or disaggregated\n\n", comparison.date);
    let _ = writeln!(text, "Made by `{}`.\n", comparison.command);
    if let Some(hypothesis) = &comparison.hypothesis {
        let _ = writeln!(text, "Expected before the first run: {hypothesis}\n");
    }
    text.push_str("## Decision\n\n");
    for shape in &comparison.shapes {
        let _ = writeln!(
            text,
            "- {}: {}\n  {}",
            shape.name,
            accepted(comparison, shape),
            shape.verdict
        );
    }
    points(&mut text, comparison);
    percentiles(&mut text, comparison);
    cost(&mut text, comparison);
    text.push_str("\n## Why it stopped\n\n");
    match refused.as_slice() {
        [] => text.push_str("Every planned run was made and every field of the fairness list is filled.\n"),
        reasons => reasons.iter().for_each(|why| {
            let _ = writeln!(text, "- {why}");
        }),
    }
    text
}

/// The contrast of the arm that the primary metric speaks for at the highest load. `None`: none wins there.
fn winner(shape: &Shape) -> Option<&Contrast> {
    let first = shape.contrasts.first()?;
    let highest = shape.contrasts.iter().map(|contrast| contrast.load).fold(0.0, f64::max);
    let primary = shape
        .contrasts
        .iter()
        .filter(|contrast| contrast.metric == first.metric && contrast.load >= highest);
    let winners = primary.filter(|contrast| contrast.finding == Finding::Wins);
    let gain = |contrast: &&Contrast| contrast.ratio.max(1.0 / contrast.ratio.max(1e-9));
    winners.max_by(|a, b| gain(a).total_cmp(&gain(b)))
}

fn accepted(comparison: &Comparison, shape: &Shape) -> String {
    let Some(first) = shape.contrasts.first() else {
        return "nothing is decided".to_owned();
    };
    match winner(shape) {
        Some(winner) => format!("accepted: {}, on {}", winner.candidate, first.metric),
        None => {
            let baseline = comparison.arms.first().map_or("the baseline", |arm| arm.name.as_str());
            format!("accepted: {baseline}; no other arm wins on {}", first.metric)
        }
    }
}

fn points(text: &mut String, comparison: &Comparison) {
    let time = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.0}"));
    text.push_str("\n## Accepted and rejected settings\n\n");
    text.push_str("| arm | settings | good requests/s | TTFT p99 ms | ITL p99 ms | |\n|---|---|---|---|---|---|\n");
    for arm in &comparison.arms {
        for point in &arm.tuning {
            let settings: Vec<String> = point
                .settings
                .iter()
                .map(|(name, value)| format!("{name} {value}"))
                .collect();
            let [ttft, itl] = point.p99s_ms().map(time);
            let _ = writeln!(
                text,
                "| {} | {} | {:.2} | {ttft} | {itl} | {} |",
                arm.name,
                settings.join(", "),
                point.goodput,
                if point.is_chosen { "accepted" } else { "rejected" }
            );
        }
        if arm.tuning.is_empty() {
            let _ = writeln!(text, "| {} | not tuned | | | | |", arm.name);
        }
    }
}

fn percentiles(text: &mut String, comparison: &Comparison) {
    text.push_str("\n## Percentiles of each run\n\n");
    text.push_str("Percentiles are those of the requests that were answered.\n\n");
    text.push_str("| shape | arm | requests/s | repeat | TTFT p50, p95, p99 ms | ITL p50, p95, p99 ms | good requests/s | not answered |\n|---|---|---|---|---|---|---|---|\n");
    for shape in &comparison.shapes {
        for run in &shape.runs {
            let summary = Summary::of(&run.run, &comparison.slo);
            let times = |of: Option<workload::statistics::Distribution>| {
                of.map_or("-".to_owned(), |of| {
                    format!("{:.1}, {:.1}, {:.1}", of.p50, of.p95, of.p99)
                })
            };
            let _ = writeln!(
                text,
                "| {} | {} | {:.2} | {} | {} | {} | {:.2} | {} of {} |",
                shape.name,
                run.arm,
                run.run.offered,
                run.repeat + 1,
                times(summary.ttft_ms),
                times(summary.itl_ms),
                summary.goodput_per_s,
                summary.counts.measured - summary.counts.completed,
                summary.counts.measured
            );
        }
    }
}

fn cost(text: &mut String, comparison: &Comparison) {
    text.push_str("\n## Cost\n\n");
    for arm in &comparison.arms {
        let own = &arm.resources;
        let whose = if own.is_measured {
            ""
        } else {
            " (declared, not measured)"
        };
        let price = match own.price_per_hour {
            Some(price) => format!("{price:.2} US dollars an hour"),
            None => "no price was given".to_owned(),
        };
        let _ = writeln!(
            text,
            "- {}: {} cores, {} GPUs, {price}{whose}{}",
            arm.name,
            own.cores,
            own.gpus,
            each_token(comparison, &arm.name)
        );
    }
}

/// Dollars for a million accepted tokens, over all runs of the arm.
fn each_token(comparison: &Comparison, arm: &str) -> String {
    let Some(price) = comparison
        .arms
        .iter()
        .find(|one| one.name == arm)
        .and_then(|arm| arm.resources.price_per_hour)
    else {
        return String::new();
    };
    let runs = comparison
        .shapes
        .iter()
        .flat_map(|shape| &shape.runs)
        .filter(|run| run.arm == arm);
    let (mut tokens, mut seconds) = (0_u64, 0.0);
    for run in runs {
        let summary = Summary::of(&run.run, &comparison.slo);
        tokens += summary.accepted_tokens;
        seconds += summary.duration_s;
    }
    match tokens {
        0 => "; no token was accepted".to_owned(),
        tokens => {
            let dollars = price * seconds / 3600.0 / tokens as f64 * 1e6;
            format!("; {dollars:.2} US dollars for a million tokens of good requests")
        }
    }
}

#[cfg(test)]
mod tests {
    use workload::record::Outcome;

    use super::*;
    use crate::compare::test_kit;

    #[test]
    fn the_record_has_what_was_accepted_and_rejected_and_why_it_stopped() {
        let mut comparison = test_kit::comparison();
        comparison.arms[1].resources.price_per_hour = Some(3.6);
        let unanswered = &mut comparison.arms[1].tuning[1];
        (unanswered.goodput, unanswered.ttft_ms_p99, unanswered.itl_ms_p99) = (0.0, 0.0, 0.0);
        let text = text(&comparison, &vec!["two repeats only".to_owned()]);
        for wanted in [
            "accepted |",
            "rejected |",
            "two repeats only",
            "3.60 US dollars",
            "TTFT p50",
            "not tuned",
            "million",
            "| 0.00 | - | - | rejected |",
        ] {
            assert!(text.contains(wanted), "{wanted} in {text}");
        }
    }

    #[test]
    fn percentiles_stand_beside_the_requests_that_were_not_answered() {
        let mut comparison = test_kit::comparison();
        let of_split = comparison.shapes[0].runs.iter_mut().find(|run| run.arm == "split");
        of_split.expect("a run").run.records[0].outcome = Outcome::Refused { status: 429 };
        let text = text(&comparison, &Refused::new());
        let row = text
            .lines()
            .find(|line| line.starts_with("| short | split | 1.00 | 1 |"));
        assert!(row.expect("its first repeat").ends_with("| 1 of 3 |"), "{text}");
        assert_eq!(text.matches("| 0 of 3 |").count(), 5);
    }

    #[test]
    fn the_winner_at_the_highest_load_is_accepted() {
        let mut comparison = test_kit::comparison();
        let contrast = |load, finding, ratio| Contrast {
            metric: "goodput_per_core".to_owned(),
            load,
            baseline: "whole".to_owned(),
            candidate: "split".to_owned(),
            baseline_value: 1.0,
            candidate_value: ratio,
            ratio,
            ratio_low: ratio,
            ratio_high: ratio,
            finding,
        };
        let shape = &mut comparison.shapes[0];
        assert_eq!(winner(shape), None);
        shape.contrasts = vec![contrast(1.0, Finding::Wins, 1.5), contrast(2.0, Finding::Loses, 0.5)];
        assert_eq!(winner(shape), None);
        shape.contrasts[1] = contrast(2.0, Finding::Wins, 1.4);
        assert_eq!(winner(shape), Some(&shape.contrasts[1]));
    }
}
