//! Where the time to the first token went: the stages of the median and of the p99 request.

use super::{each_shape, legend};
use crate::record::RequestRecord;
use crate::report::chart::axis::Axis;
use crate::report::chart::bars::{Bar, Bars, Part};
use crate::report::document::{Block, LegendItem, Picture, Section, Swatch, Table};
use crate::report::text::{number, short};
use crate::report::view::{ArmView, LoadView, View};

/// A colour, its name, and the stages that it stands for (docs/reference/stages.md).
type Group = (&'static str, &'static str, &'static [&'static str]);

const GROUPS: [Group; 7] = [
    ("s0", "coordinator", &["parse", "tokenize", "route", "egress"]),
    ("s1", "queue", &["queue"]),
    ("s2", "reserve", &["reserve"]),
    ("s3", "dispatch", &["dispatch"]),
    ("s4", "wait on the node", &["step_wait", "prefill_queue"]),
    ("s5", "prefill", &["prefill_forward"]),
    ("s6", "first token's way back", &["first_token_return"]),
];
const REST: (&str, &str) = ("s7", "outside the server, or not measured");

/// A request's TTFT in milliseconds, by group; the last one is what no stage explains.
struct Split {
    ttft_ms: f64,
    groups: [f64; GROUPS.len() + 1],
}

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("stages", "Stages of the time to first token");
    section.text(
        "The request at the median and the one at the 99th percentile of TTFT, as the coordinator recorded their stages. What \
         is left is the client's wait, the network, and time that no stage measured.",
    );
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        let rows = rows(load);
        if rows.is_empty() {
            section.empty("The server told of no stage: only a coordinator of baton keeps records of them.");
            return;
        }
        let groups = GROUPS.iter().map(|(class, name, _)| (*class, *name)).chain([REST]);
        let items = groups.map(|(class, text)| LegendItem {
            text: text.to_owned(),
            swatch: Swatch::Box(class),
        });
        section.blocks.push(legend(items.collect()));
        section
            .blocks
            .push(Block::Pictures(vec![picture(&rows, load, &shape.shape.name)]));
        section.blocks.push(Block::Figures(figures(&rows)));
    });
    section
}

fn rows(load: &LoadView<'_>) -> Vec<(String, Split)> {
    let mut rows = Vec::new();
    for arm in &load.arms {
        let splits = splits(arm);
        for (name, percent) in [("median request", 50.0), ("p99 request", 99.0)] {
            rows.extend(nearest(&splits, percent).map(|split| (format!("{}: {name}", short(arm.name)), split)));
        }
    }
    rows
}

fn splits<'a>(arm: &ArmView<'a>) -> Vec<&'a RequestRecord> {
    let told = |record: &&RequestRecord| record.server.as_ref().is_some_and(|server| !server.stages.is_empty());
    let mut records: Vec<&'a RequestRecord> = arm
        .completed()
        .filter(told)
        .filter(|record| record.ttft_ms().is_some())
        .collect();
    let ttft = |record: &RequestRecord| record.ttft_ms().unwrap_or(0.0);
    records.sort_by(|a, b| ttft(a).total_cmp(&ttft(b)));
    records
}

/// The request at the nearest rank of the percentile.
fn nearest(sorted: &[&RequestRecord], percent: f64) -> Option<Split> {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).and_then(|record| split(record))
}

fn split(record: &RequestRecord) -> Option<Split> {
    let ttft_ms = record.ttft_ms()?;
    let mut groups = [0.0; GROUPS.len() + 1];
    let mut seen: Vec<&str> = Vec::new();
    for (stage, ms) in &record.server.as_ref()?.stages {
        // A name comes a second time when the rest of the answer has a stage of the same name, as `egress` does.
        let group = GROUPS
            .iter()
            .position(|(_, _, stages)| stages.contains(&stage.as_str()));
        if let Some(group) = group.filter(|_| !seen.contains(&stage.as_str())) {
            groups[group] += ms.max(0.0);
            seen.push(stage);
        }
    }
    groups[GROUPS.len()] = (ttft_ms - groups.iter().sum::<f64>()).max(0.0);
    Some(Split { ttft_ms, groups })
}

fn picture(rows: &[(String, Split)], load: &LoadView<'_>, shape: &str) -> Picture {
    let classes: Vec<(&str, &str)> = GROUPS
        .iter()
        .map(|(class, name, _)| (*class, *name))
        .chain([REST])
        .collect();
    let caption = format!("Stages of TTFT at {}; shape: {}", load.words(), short(shape));
    let bars = Bars {
        title: caption.clone(),
        axis: Axis::linear(
            "time since the request was due, ms",
            rows.iter().map(|(_, split)| split.groups.iter().sum::<f64>()),
        ),
        rows: rows
            .iter()
            .map(|(name, split)| Bar {
                name: name.clone(),
                parts: classes
                    .iter()
                    .zip(split.groups)
                    .map(|((class, name), value)| Part { class, name, value })
                    .collect(),
            })
            .collect(),
    };
    Picture {
        caption,
        svg: bars.svg("ms"),
        is_wide: false,
    }
}

fn figures(rows: &[(String, Split)]) -> Table {
    let mut names = vec!["request".to_owned(), "#TTFT, ms".to_owned()];
    names.extend(GROUPS.iter().map(|(_, name, _)| format!("#{name}, ms")));
    names.push("#rest, ms".to_owned());
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut table = Table::new("Stages of TTFT", &names);
    for (name, split) in rows {
        let mut cells = vec![name.clone(), number(split.ttft_ms)];
        cells.extend(split.groups.map(number));
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::ServerRecord;
    use crate::test_kit::request;

    #[test]
    fn stages_and_the_rest_add_up_to_ttft() {
        let mut record = request(1, &[100, 120]);
        let stages = [
            ("queue", 30.0),
            ("prefill_forward", 50.0),
            ("egress", 1.0),
            ("decode", 900.0),
            ("egress", 7.0),
        ];
        record.server = Some(ServerRecord {
            stages: stages.map(|(name, ms)| (name.to_owned(), ms)).into(),
            ..ServerRecord::default()
        });
        let split = split(&record).expect("it has a first token");
        assert_eq!(split.groups, [1.0, 30.0, 0.0, 0.0, 0.0, 50.0, 0.0, 19.0]);
        assert_eq!(split.groups.iter().sum::<f64>(), split.ttft_ms);
    }
}
