//! The distributions of TTFT, TPOT and ITL, on a logarithmic scale, with the limits.

use super::{arms_legend, each_shape, legend};
use crate::comparison::Slo;
use crate::report::chart::{Axis, Dash, Mark, Plot};
use crate::report::document::{Block, Picture, Section, Table};
use crate::report::text::{number, short, tick};
use crate::report::view::{ArmView, LoadView, View};
use crate::statistics::Samples;

/// The name, the limit, and the samples of an arm.
type Metric = (&'static str, fn(&Slo) -> f64, fn(&ArmView<'_>) -> Samples);

const METRICS: [Metric; 3] = [
    ("TTFT", |slo| slo.ttft_ms_max, |arm| arm.ttft_ms()),
    ("TPOT", |slo| slo.itl_ms_max, |arm| arm.tpot_ms()),
    ("ITL", |slo| slo.itl_ms_max, |arm| arm.itl_ms()),
];

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("distributions", "Distributions of TTFT, TPOT and ITL");
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        section.blocks.push(legend(arms_legend(&load.arms)));
        let pictures = METRICS
            .iter()
            .filter_map(|metric| picture(metric, load, &view.comparison.slo, &shape.shape.name));
        let pictures: Vec<Picture> = pictures.collect();
        if pictures.is_empty() {
            section.empty("No request completed, so there is no distribution.");
            return;
        }
        section.blocks.push(Block::Pictures(pictures));
        section.blocks.push(Block::Figures(figures(load)));
    });
    section
}

fn picture(metric: &Metric, load: &LoadView<'_>, slo: &Slo, shape: &str) -> Option<Picture> {
    let (name, limit, samples) = metric;
    let mut marks = vec![
        Mark::Limit {
            x: limit(slo),
            label: format!("SLO {} ms", tick(limit(slo))),
        },
        Mark::Level {
            y: 99.0,
            label: "p99".to_owned(),
        },
    ];
    let mut values = vec![limit(slo)];
    for arm in &load.arms {
        let points = curve(&samples(arm));
        values.extend(points.iter().map(|(value, _)| *value));
        if !points.is_empty() {
            marks.push(Mark::Line {
                arm: arm.arm,
                dash: Dash::Solid,
                points,
                title: format!("{name} of {}", short(arm.name)),
                has_markers: false,
            });
        }
    }
    if values.len() == 1 {
        return None;
    }
    let shape = short(shape);
    let samples = if *name == "ITL" { "gaps" } else { "requests" };
    let plot = Plot {
        title: format!("Cumulative distribution of {name} at {}, shape {shape}", load.words()),
        x: Axis::log(format!("{name}, ms (logarithmic)"), values),
        y: Axis::between(format!("{samples} at or below, %"), 0.0, 100.0),
        marks,
    };
    Some(Picture {
        caption: format!("{name} at {}; shape: {shape}", load.words()),
        svg: plot.svg(),
        is_wide: false,
    })
}

/// Every half percent, and every twentieth of a percent above the 99th percentile. The same samples give the same points.
fn curve(samples: &Samples) -> Vec<(f64, f64)> {
    let body = (0..198).map(|step| f64::from(step) / 2.0);
    let tail = (0..=20).map(|step| 99.0 + f64::from(step) / 20.0);
    let percents = body.chain(tail);
    percents
        .filter_map(|percent| Some((samples.percentile(percent)?, percent)))
        .collect()
}

fn figures(load: &LoadView<'_>) -> Table {
    let mut table = Table::new(
        format!("Percentiles at {}, in ms", load.words()),
        &[
            "metric", "arm", "#samples", "#mean", "#p50", "#p90", "#p95", "#p99", "#max",
        ],
    );
    for (name, _, samples) in METRICS {
        for arm in &load.arms {
            let Some(all) = samples(arm).distribution() else {
                continue;
            };
            let mut cells = vec![name.to_owned(), short(arm.name), number(all.count as f64)];
            cells.extend([all.mean, all.p50, all.p90, all.p95, all.p99, all.max].map(number));
            table.row(cells);
        }
    }
    table
}
