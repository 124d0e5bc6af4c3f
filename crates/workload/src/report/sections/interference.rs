//! Interference: the gaps of running streams by how many streams run, and by what is prefilled meanwhile.

use super::each_shape;
use crate::record::Run;
use crate::report::document::{Block, Section, Table};
use crate::report::text::{number, short, tick};
use crate::report::view::{ArmView, LoadView, View};
use crate::statistics::Samples;

/// Rows of the table: at most so many streams.
const STREAMS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// A prompt is long when it has at least this share of the tokens of the longest one.
const LONG_SHARE: f64 = 0.5;

/// One gap between two tokens of one request, and what else went on when it ended.
struct Gap {
    ms: f64,
    streams: usize,
    prompts: Prompts,
}

/// What waited for its first token during the gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Prompts {
    None,
    Short,
    Long,
}

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("interference", "Interference");
    section.text(
        "Each gap between two tokens is counted by the number of requests that ran in the client's sight at its end, and by the \
         prompts that waited for their first token then. The ratio is p99 by p50: a stream that nothing disturbs is near 1.",
    );
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        let long_from = long_from(load);
        let gaps: Vec<(&ArmView<'_>, Vec<Gap>)> = load.arms.iter().map(|arm| (arm, gaps(arm, long_from))).collect();
        if gaps.iter().all(|(_, gaps)| gaps.is_empty()) {
            section.empty("No request had two tokens, so there is no gap.");
            return;
        }
        section.blocks.push(Block::Table(by_prompts(load, &gaps, long_from)));
        section.blocks.push(Block::Table(by_streams(load, &gaps)));
    });
    section
}

fn long_from(load: &LoadView<'_>) -> u32 {
    let longest = load
        .arms
        .iter()
        .flat_map(ArmView::measured)
        .map(|record| record.prompt_tokens)
        .max();
    (f64::from(longest.unwrap_or(0)) * LONG_SHARE).ceil() as u32
}

fn gaps(arm: &ArmView<'_>, long_from: u32) -> Vec<Gap> {
    arm.runs.iter().flat_map(|(run, _)| gaps_of(run, long_from)).collect()
}

/// All known gaps of a run's measured requests. Every request counts as load, whatever part it belongs to.
fn gaps_of(run: &Run, long_from: u32) -> Vec<Gap> {
    // Times in seconds at which the number of running requests, waiting prompts and waiting long prompts changes.
    let mut changes: Vec<(f64, [i64; 3])> = Vec::new();
    for record in &run.records {
        let is_long = i64::from(record.prompt_tokens >= long_from);
        let first = record.tokens.first().unwrap_or(&record.ended).as_secs_f64();
        let (sent, ended) = (record.sent.as_secs_f64(), record.ended.as_secs_f64());
        changes.push((sent, [1, 1, is_long]));
        changes.push((first, [0, -1, -is_long]));
        changes.push((ended, [-1, 0, 0]));
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut gaps: Vec<(f64, f64)> = run
        .records
        .iter()
        .filter(|record| record.is_measured() && record.is_completed() && record.are_gaps_known())
        .flat_map(|record| record.tokens.windows(2))
        .map(|pair| (pair[1].as_secs_f64(), pair[0].as_secs_f64()))
        .collect();
    gaps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut running = [0_i64; 3];
    let mut next = changes.iter().peekable();
    gaps.into_iter()
        .map(|(end, start)| {
            while let Some((_, change)) = next.next_if(|(at, _)| *at < end) {
                for (count, by) in running.iter_mut().zip(change) {
                    *count += by;
                }
            }
            Gap {
                ms: (end - start) * 1e3,
                streams: usize::try_from(running[0]).unwrap_or(0),
                prompts: match running {
                    [_, _, long] if long > 0 => Prompts::Long,
                    [_, any, _] if any > 0 => Prompts::Short,
                    _ => Prompts::None,
                },
            }
        })
        .collect()
}

const COLUMNS: [&str; 6] = ["", "arm", "#gaps", "#ITL p50, ms", "#ITL p99, ms", "#p99 by p50"];

fn columns(first: &'static str) -> [&'static str; 6] {
    let mut columns = COLUMNS;
    columns[0] = first;
    columns
}

fn add(table: &mut Table, row: &str, arm: &ArmView<'_>, gaps: impl Iterator<Item = f64>) {
    let samples = Samples::new(gaps);
    let (Some(p50), Some(p99)) = (samples.percentile(50.0), samples.percentile(99.0)) else {
        return;
    };
    table.row(vec![
        row.to_owned(),
        short(arm.name),
        number(samples.count() as f64),
        number(p50),
        number(p99),
        number(p99 / p50),
    ]);
}

fn by_prompts(load: &LoadView<'_>, gaps: &[(&ArmView<'_>, Vec<Gap>)], long_from: u32) -> Table {
    let mut table = Table::new(
        format!(
            "ITL of running streams beside prompts that are computed, {}",
            load.words()
        ),
        &columns("beside"),
    );
    let rows = [
        (Prompts::None, "no prompt".to_owned()),
        (
            Prompts::Short,
            format!("prompts below {} tokens", tick(f64::from(long_from))),
        ),
        (
            Prompts::Long,
            format!("a prompt of {} tokens or more", tick(f64::from(long_from))),
        ),
    ];
    for (prompts, name) in rows {
        for (arm, gaps) in gaps {
            let of = gaps.iter().filter(|gap| gap.prompts == prompts).map(|gap| gap.ms);
            add(&mut table, &name, arm, of);
        }
    }
    table
}

fn by_streams(load: &LoadView<'_>, gaps: &[(&ArmView<'_>, Vec<Gap>)]) -> Table {
    let mut table = Table::new(
        format!("ITL by the number of running requests, {}", load.words()),
        &columns("requests running"),
    );
    let mut from = 1;
    for to in STREAMS.into_iter().chain([usize::MAX]) {
        let name = match to {
            usize::MAX => format!("{from} and more"),
            _ if to == from => to.to_string(),
            _ => format!("{from} to {to}"),
        };
        for (arm, gaps) in gaps {
            let of = gaps
                .iter()
                .filter(|gap| (from..=to).contains(&gap.streams))
                .map(|gap| gap.ms);
            add(&mut table, &name, arm, of);
        }
        from = to.saturating_add(1);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{later, request, run};

    #[test]
    fn a_gap_is_counted_by_what_runs_when_it_ends() {
        let mut long = later(request(2, &[60]), 25.0);
        long.prompt_tokens = 2_000;
        // The stream has gaps of 10, 10, 60 and 10 ms; the long prompt waits from 25 to 85 ms.
        let gaps = gaps_of(&run("a", vec![request(1, &[10, 20, 30, 90, 100]), long]), 1_000);
        let seen: Vec<(f64, usize, Prompts)> = gaps
            .iter()
            .map(|gap| (gap.ms.round(), gap.streams, gap.prompts))
            .collect();
        let (none, long) = (Prompts::None, Prompts::Long);
        assert_eq!(
            seen,
            [(10.0, 1, none), (10.0, 2, long), (60.0, 1, none), (10.0, 1, none)]
        );
        let at_once = run("a", vec![request(1, &[100; 32])]);
        assert_eq!(gaps_of(&at_once, 1_000).len(), 0, "a proxy held it back");
    }
}
