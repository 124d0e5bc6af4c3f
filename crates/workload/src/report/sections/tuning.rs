//! How each arm was tuned: all points that were tried, the rejected ones as well.

use std::collections::BTreeMap;

use super::kind;
use crate::report::document::{Block, Section, Table, Tone};
use crate::report::text::{maybe, number, short, value};
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
            let [ttft, itl] = point.p99s_ms().map(maybe);
            table.toned(
                tone,
                vec![
                    settings(&point.settings),
                    number(point.goodput),
                    ttft,
                    itl,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comparison::{Arm, ArmKind, Resources, TuningPoint};
    use crate::report::synthetic;
    use crate::report::view::Subject;

    #[test]
    fn a_point_without_an_answer_has_no_times() {
        let point = |goodput, ttft_ms_p99| TuningPoint {
            settings: BTreeMap::new(),
            goodput,
            ttft_ms_p99,
            itl_ms_p99: 0.0,
            is_chosen: false,
        };
        let mut comparison = synthetic::empty();
        comparison.arms.push(Arm {
            name: "a".to_owned(),
            kind: ArmKind::CoLocated,
            topology: "2c".to_owned(),
            settings: BTreeMap::new(),
            resources: Resources::default(),
            tuning: vec![point(0.0, 0.0), point(1.0, 250.0)],
        });
        let blocks = section(&View::new(&comparison, Subject::Comparison)).blocks;
        let table = blocks.iter().find_map(|block| match block {
            Block::Table(table) => Some(table),
            _ => None,
        });
        let rows = &table.expect("the points").rows;
        assert_eq!(rows[0].cells[1..4], ["0", "–", "–"]);
        assert_eq!(rows[1].cells[1..4], ["1.00", "250", "–"]);
    }
}
