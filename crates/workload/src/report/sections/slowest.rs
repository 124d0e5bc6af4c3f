//! The ten slowest requests of each arm, with the cause of each.

use super::each_shape;
use crate::causes::{Usual, slowest};
use crate::record::RequestRecord;
use crate::report::document::{Section, Table};
use crate::report::text::{maybe, number, short};
use crate::report::view::{ArmView, View};

const REQUESTS_MAX: usize = 10;

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("slowest", "Slowest requests");
    section.text(
        "The ten with the longest time from due to the last token, over all repeats. The cause is the part of a request that took \
         most more than is usual in its run.",
    );
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        let mut table = Table::new(
            format!("Slowest requests at {}", load.words()),
            &[
                "arm",
                "#total, ms",
                "#TTFT, ms",
                "#longest gap, ms",
                "#prompt tokens",
                "#output tokens",
                "cause",
                "request id",
            ],
        );
        load.arms.iter().for_each(|arm| add(&mut table, arm));
        section.table_or(table, "No request completed.");
    });
    section
}

fn add(table: &mut Table, arm: &ArmView<'_>) {
    let usual: Vec<Usual> = arm.runs.iter().map(|(run, _)| Usual::of(run)).collect();
    let runs = arm.runs.iter().zip(&usual);
    let mut found: Vec<(&Usual, &RequestRecord)> = runs
        .flat_map(|((run, _), usual)| {
            slowest(run, REQUESTS_MAX)
                .into_iter()
                .map(move |record| (usual, record))
        })
        .collect();
    found.sort_by(|a, b| b.1.e2e_ms().total_cmp(&a.1.e2e_ms()));
    for (usual, record) in found.into_iter().take(REQUESTS_MAX) {
        table.row(vec![
            short(arm.name),
            number(record.e2e_ms()),
            maybe(record.ttft_ms()),
            maybe(record.gaps_ms().reduce(f64::max)),
            record.prompt_tokens.to_string(),
            record.output_tokens.to_string(),
            short(&usual.cause(record).words),
            short(&record.id),
        ]);
    }
}
