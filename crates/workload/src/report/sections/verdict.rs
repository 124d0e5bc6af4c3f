//! The verdict: all headline figures of each arm, and each contrast with its interval.

use super::{each_shape, kind};
use crate::comparison::{Contrast, Finding};
use crate::record::Outcome;
use crate::report::document::{Block, Section, Table, Tone};
use crate::report::text::{maybe, number, percent, short, tick};
use crate::report::view::{ArmView, LoadView, Subject, View};
use crate::summary::dollars_per_million;
use crate::verdict::is_same_load;

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("verdict", "Verdict table");
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        section.blocks.push(Block::Table(arms(load)));
        section.text(
            "Percentiles are those of completed requests. Percentiles and rates are means over the repeats; an arm has no percentile where \
             one of its repeats has none. Refused, failed and cancelled requests meet no limit. The price is that of the whole arm in \
             all repeats together.",
        );
        if view.subject == Subject::Comparison {
            let none = "No two arms were contrasted on this shape.";
            let (here, elsewhere): (Vec<&Contrast>, Vec<&Contrast>) = shape
                .shape
                .contrasts
                .iter()
                .partition(|contrast| is_same_load(load.offered, contrast.load));
            let caption = format!("What the intervals say of each candidate at {}", load.words());
            section.table_or(contrasts(&caption, &here), none);
            if !elsewhere.is_empty() {
                section
                    .blocks
                    .push(Block::Figures(contrasts("Contrasts at the other loads", &elsewhere)));
            }
            if !shape.shape.contrasts.is_empty() {
                section.text(
                    "Findings count for all contrasts together (Holm 1979), and effects that are too small to matter count as none. So \
                     the interval of one contrast can exclude 1 where no difference is shown.",
                );
            }
        }
        let errors = errors(load);
        if !errors.rows.is_empty() {
            section.blocks.push(Block::Table(errors));
        }
    });
    section
}

fn arms(load: &LoadView<'_>) -> Table {
    let unit = load.unit();
    let mut table = Table::new(
        format!("Each arm at {}", load.words()),
        &[
            "arm",
            "#TTFT p99, ms",
            "#ITL p99, ms",
            &format!("#output tokens/s per {unit}"),
            &format!("#goodput, requests/s per {unit}"),
            "#both limits met",
            "#$ per 1M accepted tokens",
            "#completed",
            "#refused",
            "#failed",
            "#cancelled",
            "#client lag p99, ms",
        ],
    );
    for arm in &load.arms {
        let kind = arm.declared.map(kind).filter(|kind| *kind != arm.name);
        let kind = kind.map_or_else(String::new, |kind| format!(" ({kind})"));
        let count = |of: fn(&crate::summary::Counts) -> usize| arm.sum(|summary| of(&summary.counts)).to_string();
        table.row(vec![
            format!("{}{kind}", short(arm.name)),
            maybe(arm.ttft_p99()),
            maybe(arm.itl_p99()),
            number(arm.output_per()),
            number(arm.goodput_per()),
            percent(arm.mean(|summary| summary.attainment.both)),
            maybe(dollars(arm)),
            count(|counts| counts.completed),
            count(|counts| counts.refused),
            count(|counts| counts.failed),
            count(|counts| counts.cancelled),
            number(
                arm.runs
                    .iter()
                    .map(|(_, summary)| summary.lag.ms_p99)
                    .fold(0.0, f64::max),
            ),
        ]);
    }
    table
}

/// US dollars for a million output tokens that met both limits. All repeats together: one that accepted no token costs as much as the others.
fn dollars(arm: &ArmView<'_>) -> Option<f64> {
    let price = arm.declared?.resources.price_per_hour?;
    let summaries = || arm.runs.iter().map(|(_, summary)| summary);
    let tokens: u64 = summaries().map(|summary| summary.accepted_tokens).sum();
    let seconds: f64 = summaries().map(|summary| summary.duration_s).sum();
    dollars_per_million(price, seconds, tokens)
}

fn contrasts(caption: &str, contrasts: &[&Contrast]) -> Table {
    let mut table = Table::new(
        caption,
        &[
            "metric",
            "#load, requests/s",
            "candidate",
            "baseline",
            "#candidate",
            "#baseline",
            "#ratio",
            "95 % interval of the ratio",
            "finding",
        ],
    );
    for contrast in contrasts {
        let (tone, finding) = match contrast.finding {
            Finding::Wins => (Tone::Good, "✓ candidate wins"),
            Finding::Loses => (Tone::Bad, "✗ candidate loses"),
            Finding::NoDifferenceShown => (Tone::Plain, "= no difference shown"),
        };
        table.toned(
            tone,
            vec![
                metric(&contrast.metric),
                tick(contrast.load),
                short(&contrast.candidate),
                short(&contrast.baseline),
                number(contrast.candidate_value),
                number(contrast.baseline_value),
                number(contrast.ratio),
                format!("{} to {}", number(contrast.ratio_low), number(contrast.ratio_high)),
                finding.to_owned(),
            ],
        );
    }
    table
}

/// The name of a metric in words, with its unit.
fn metric(name: &str) -> String {
    match name.strip_prefix("streams_") {
        Some(of_streams) => format!("running streams: {}", of_requests(of_streams)),
        None => of_requests(name),
    }
}

fn of_requests(name: &str) -> String {
    let latency = name
        .split_once("_ms_p")
        .map(|(what, percent)| (what.to_uppercase(), percent));
    match (name, latency) {
        (_, Some((what, percent))) => format!("{} p{}, ms", short(&what), short(percent)),
        ("goodput", _) => "goodput, requests/s".to_owned(),
        ("goodput_per_core", _) => "goodput, requests/s per core".to_owned(),
        ("goodput_per_gpu", _) => "goodput, requests/s per GPU".to_owned(),
        ("output_tokens_per_s_per_core", _) => "output tokens/s per core".to_owned(),
        ("output_tokens_per_s_per_gpu", _) => "output tokens/s per GPU".to_owned(),
        (other, _) => short(other),
    }
}

/// Kinds of errors that a table lists.
const ERRORS_MAX: usize = 12;

/// The errors that requests had, each with its count.
fn errors(load: &LoadView<'_>) -> Table {
    let mut table = Table::new("Requests that were not served", &["arm", "#requests", "what happened"]);
    for arm in &load.arms {
        let mut counts = std::collections::BTreeMap::<String, usize>::new();
        for record in arm.measured() {
            let what = match &record.outcome {
                Outcome::Completed | Outcome::Cancelled => continue,
                Outcome::Refused { status } => format!("refused with status {status}"),
                Outcome::Failed { error } => short(error),
            };
            *counts.entry(what).or_default() += 1;
        }
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let further: usize = counts.iter().skip(ERRORS_MAX).map(|(_, count)| count).sum();
        for (what, count) in counts.into_iter().take(ERRORS_MAX) {
            table.row(vec![short(arm.name), count.to_string(), what]);
        }
        if further > 0 {
            table.row(vec![short(arm.name), further.to_string(), "other errors".to_owned()]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::comparison::{Arm, ArmKind, ArmRun, Comparison, Resources, Shape};
    use crate::record::Run;
    use crate::report::synthetic;
    use crate::test_kit::{request, run};

    /// One arm at 1 US dollar a second.
    fn of_repeats(runs: Vec<Run>) -> Comparison {
        let runs = (0..).zip(runs).map(|(repeat, run)| ArmRun {
            arm: "a".to_owned(),
            repeat,
            run,
        });
        Comparison {
            arms: vec![Arm {
                name: "a".to_owned(),
                kind: ArmKind::External,
                topology: "a".to_owned(),
                settings: BTreeMap::new(),
                resources: Resources {
                    price_per_hour: Some(3600.0),
                    ..Resources::default()
                },
                tuning: Vec::new(),
            }],
            shapes: vec![Shape {
                name: "s".to_owned(),
                traffic: String::new(),
                trace_hash: String::new(),
                runs: runs.collect(),
                contrasts: Vec::new(),
                verdict: String::new(),
            }],
            ..synthetic::empty()
        }
    }

    #[test]
    fn a_repeat_that_served_nobody_counts() {
        let good = run("a", vec![request(1, &[100, 120])]);
        let mut failed = run("a", vec![request(1, &[])]);
        failed.records[0].outcome = Outcome::Failed {
            error: "no answer".to_owned(),
        };
        failed.measured = Duration::from_millis(120);
        let figures = |runs: Vec<Run>| {
            let comparison = of_repeats(runs);
            let view = View::new(&comparison, Subject::Comparison);
            let arm = &view.shapes[0].loads[0].arms[0];
            (arm.ttft_p99(), arm.itl_p99(), dollars(arm).map(f64::round))
        };
        // Two tokens in 0.12 s.
        let served = figures(vec![good.clone(), good.clone()]);
        assert_eq!(served, (Some(100.0), Some(20.0), Some(60_000.0)));
        // Two tokens in 0.24 s; the percentiles of the better repeat alone would be no mean.
        let half = figures(vec![good, failed.clone()]);
        assert_eq!(half, (None, None, Some(120_000.0)));
        assert_eq!(figures(vec![failed]), (None, None, None));
    }
}
