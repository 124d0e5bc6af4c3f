//! What somebody needs to measure it again: command, versions, hardware, flags, seeds, hashes.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::report::document::{Block, Section, Table};
use crate::report::text::{bytes, number, short, value};
use crate::report::view::View;

pub fn section(view: &View<'_>) -> Section {
    let comparison = view.comparison;
    let mut section = Section::new("reproduce", "Command, versions, hardware, seeds");
    section.blocks.push(Block::Code(comparison.command.clone()));
    let mut traces = Table::new("Traffic", &["shape", "traffic", "trace and seed hash"]);
    for shape in &comparison.shapes {
        traces.row(vec![
            short(&shape.name),
            shape.traffic.clone(),
            shape.trace_hash.clone(),
        ]);
    }
    section.table_or(traces, "No trace was recorded.");
    let mut arms = Table::new(
        "Resources",
        &["arm", "#cores", "#GPUs", "#memory", "#$ per hour", "source"],
    );
    for arm in &comparison.arms {
        let resources = &arm.resources;
        arms.row(vec![
            short(&arm.name),
            resources.cores.to_string(),
            resources.gpus.to_string(),
            bytes(resources.memory_bytes as f64),
            resources.price_per_hour.map_or_else(|| "–".to_owned(), number),
            if resources.is_measured {
                "measured"
            } else {
                "declared, not measured"
            }
            .to_owned(),
        ]);
    }
    section.table_or(arms, "No resources were recorded.");
    let environment = environment("Machine and versions", &comparison.environment);
    section.table_or(environment, "No environment was recorded.");
    for table in differences(view) {
        section.blocks.push(Block::Figures(table));
    }
    let usage = usage(view);
    match usage.rows.is_empty() {
        true => section.empty("No processor time was recorded."),
        false => section.blocks.push(Block::Figures(usage)),
    }
    section
}

fn environment(caption: &str, facts: &BTreeMap<String, Value>) -> Table {
    let mut table = Table::new(caption, &["what", "value"]);
    for (name, fact) in facts {
        flat(&mut table, name, fact);
    }
    table
}

/// Rows of one fact; the members of an object get rows of their own, one level deep.
fn flat(table: &mut Table, name: &str, fact: &Value) {
    match fact {
        Value::Object(members) if !members.is_empty() => {
            for (member, fact) in members {
                table.row(vec![short(&format!("{name}.{member}")), short(&value(fact))]);
            }
        }
        fact => table.row(vec![short(name), short(&value(fact))]),
    }
}

/// What the first run of each arm tells beyond the comparison's own facts.
fn differences(view: &View<'_>) -> Vec<Table> {
    let mut tables = Vec::new();
    for name in &view.arms {
        let runs = view.comparison.shapes.iter().flat_map(|shape| &shape.runs);
        let Some(first) = runs.into_iter().find(|run| run.arm == *name) else {
            continue;
        };
        let mut facts = first.run.environment.clone();
        facts.retain(|key, fact| view.comparison.environment.get(key) != Some(fact));
        let table = environment(&format!("Facts of the first run of {}", short(name)), &facts);
        if !table.rows.is_empty() {
            tables.push(table);
        }
    }
    tables
}

fn usage(view: &View<'_>) -> Table {
    let mut table = Table::new(
        "Processor time and memory of the runs, measured part",
        &[
            "arm",
            "shape",
            "#repeat",
            "process",
            "#CPU, s",
            "#cores busy",
            "#memory",
        ],
    );
    for shape in &view.comparison.shapes {
        for run in &shape.runs {
            let seconds = run.run.measured.as_secs_f64();
            let client = ("load client".to_owned(), run.run.client);
            let server = run.run.server.iter().map(|(name, usage)| (short(name), *usage));
            for (process, usage) in std::iter::once(client).chain(server) {
                let cpu = usage.cpu.as_secs_f64();
                if cpu == 0.0 && usage.memory_bytes_max == 0 {
                    continue;
                }
                table.row(vec![
                    short(&run.arm),
                    short(&shape.name),
                    run.repeat.to_string(),
                    process,
                    number(cpu),
                    number(cpu / seconds),
                    bytes(usage.memory_bytes_max as f64),
                ]);
            }
        }
    }
    table
}
