//! The sections of the report, one file each, in the order in which a reader needs them.

mod attainment;
mod definitions;
mod diagnosis;
mod distributions;
mod fairness;
mod interference;
mod kv;
mod predicted;
mod reproduce;
mod slowest;
mod stages;
mod summary;
mod throughput;
mod timeline;
mod tuning;
mod verdict;

pub use summary::alerts;

use super::document::{Block, LegendItem, Section, Swatch};
use super::text::short;
use super::view::{ArmView, ShapeView, View};

pub fn all(view: &View<'_>) -> Vec<Section> {
    [
        summary::section,
        verdict::section,
        attainment::section,
        distributions::section,
        throughput::section,
        throughput::pareto,
        interference::section,
        stages::section,
        kv::section,
        timeline::section,
        slowest::section,
        predicted::section,
        diagnosis::section,
        tuning::section,
        fairness::section,
        reproduce::section,
        definitions::section,
    ]
    .map(|section| section(view))
    .into()
}

/// Goes through the shapes, each under its name. A shape that was not measured says so.
fn each_shape<'v, 'a>(view: &'v View<'a>, section: &mut Section, mut add: impl FnMut(&'v ShapeView<'a>, &mut Section)) {
    if view.shapes.is_empty() {
        section.empty("No shape of traffic was measured.");
    }
    for shape in &view.shapes {
        section.heading(short(&shape.shape.name));
        match shape.headline() {
            Some(_) => add(shape, section),
            None => section.empty("This shape has no run."),
        }
    }
}

/// Each arm's line and marker, once for the pictures below it.
fn arms_legend<'a>(arms: impl IntoIterator<Item = &'a ArmView<'a>>) -> Vec<LegendItem> {
    arms.into_iter()
        .map(|arm| LegendItem {
            text: short(arm.name),
            swatch: Swatch::Arm(arm.arm),
        })
        .collect()
}

fn legend(items: Vec<LegendItem>) -> Block {
    Block::Legend(items)
}

/// `disaggregated`, `co-located`, ...: what a name means, where the arm is declared.
fn kind(arm: &crate::comparison::Arm) -> &'static str {
    use crate::comparison::ArmKind;
    match arm.kind {
        ArmKind::CoLocated => "co-located",
        ArmKind::Disaggregated => "disaggregated",
        ArmKind::Conditional => "conditional",
        ArmKind::External => "external server",
    }
}
