//! How each arm was tuned: all points that were tried, the rejected ones as well.

use std::collections::BTreeMap;

use super::kind;
use crate::report::document::{Block, Section, Table, Tone};
use crate::report::text::{number, short, value};
use crate::report::view::View;

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("tuning", "Tuning");
    if view.comparison.arms.is_empty() {
        section.empty("No arm was declared.");
        return section;
    }
    section.text("Each arm got a sweep of its own. The chosen point is marked, and rejected ones are kept.");
    for arm in &view.comparison.arms {
        section.heading(format!(
            "{} ({}, {})",
            short(&arm.name),
            kind(arm),
            short(&arm.topology)
        ));
        section.text(format!("Settings: {}", settings(&arm.settings)));
        let mut table = Table::new(
            format!("Points tried for {}", short(&arm.name)),
            &[
                "settings",
                "#goodput, requests/s",
                "#TTFT p99, ms",
                "#ITL p99, ms",
                "choice",
            ],
        );
        for point in &arm.tuning {
            let (tone, choice) = if point.is_chosen {
                (Tone::Chosen, "chosen")
            } else {
                (Tone::Faint, "rejected")
            };
            table.toned(
                tone,
                vec![
                    settings(&point.settings),
                    number(point.goodput),
                    number(point.ttft_ms_p99),
                    number(point.itl_ms_p99),
                    choice.to_owned(),
                ],
            );
        }
        match table.rows.is_empty() {
            true => section.empty("No point of a sweep was recorded for this arm."),
            false => section.blocks.push(Block::Table(table)),
        }
    }
    section
}

fn settings(settings: &BTreeMap<String, serde_json::Value>) -> String {
    let pairs: Vec<String> = settings
        .iter()
        .map(|(name, set)| format!("{}={}", short(name), short(&value(set))))
        .collect();
    match pairs.is_empty() {
        true => "none recorded".to_owned(),
        false => pairs.join(", "),
    }
}
