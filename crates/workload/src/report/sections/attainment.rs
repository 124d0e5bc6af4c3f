//! SLO attainment against the rate, as DistServe plots it, and against the scale of the limits.

use super::{arms_legend, each_shape, legend};
use crate::comparison::Slo;
use crate::report::chart::{Axis, Dash, Mark, Plot};
use crate::report::document::{Block, LegendItem, Picture, Section, Swatch, Table};
use crate::report::text::{maybe, number, percent, short, tick};
use crate::report::view::{ArmView, LoadView, ShapeView, View};
use crate::summary::Summary;

/// The attainment at which two arms' rates are compared.
const WANTED: f64 = 90.0;
/// Both limits are multiplied by these.
const SCALES: [f64; 13] = [0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0];

type Limit = (Dash, &'static str, fn(&Summary) -> f64);

const LIMITS: [Limit; 3] = [
    (Dash::Solid, "both limits", |summary| summary.attainment.both),
    (Dash::Dotted, "TTFT only", |summary| summary.attainment.ttft),
    (Dash::Dashed, "ITL only", |summary| summary.attainment.itl),
];

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("attainment", "SLO attainment");
    let slo = &view.comparison.slo;
    section.text(format!(
        "Limits ({}): TTFT at most {} ms; the 99th percentile of a request's own gaps between tokens at most {} ms. \
         The grey line is {WANTED:.0} %. The ratio of two arms' rates where they fall below it says how much more traffic one of \
         them takes.",
        short(&slo.name),
        tick(slo.ttft_ms_max),
        tick(slo.itl_ms_max)
    ));
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        let mut items = arms_legend(shape.loads.iter().flat_map(|load| &load.arms).fold(Vec::new(), unique));
        items.extend(LIMITS.map(|(dash, text, _)| LegendItem {
            text: text.to_owned(),
            swatch: Swatch::Line(dash.class()),
        }));
        section.blocks.push(legend(items));
        let mut pictures = Vec::new();
        if shape.loads.len() > 1 {
            pictures.push(against_rate(view, shape));
        } else {
            section.empty(format!(
                "Attainment against the rate is not drawn: this shape was measured at one load only ({}).",
                load.words()
            ));
        }
        pictures.push(against_scale(load, slo, &shape.shape.name));
        section.blocks.push(Block::Pictures(pictures));
        section.blocks.push(Block::Figures(figures(view, shape)));
    });
    section
}

fn unique<'a>(mut arms: Vec<&'a ArmView<'a>>, arm: &'a ArmView<'a>) -> Vec<&'a ArmView<'a>> {
    if arms.iter().all(|known| known.arm != arm.arm) {
        arms.push(arm);
        arms.sort_by_key(|arm| arm.arm);
    }
    arms
}

fn against_rate(view: &View<'_>, shape: &ShapeView<'_>) -> Picture {
    let mut marks = vec![Mark::Level {
        y: WANTED,
        label: format!("{WANTED:.0} %"),
    }];
    let mut rates = Vec::new();
    let mut unit = "arm";
    for arm in 0..view.arms.len() {
        let curve = shape.curve(arm);
        let Some((_, first)) = curve.first() else { continue };
        unit = first.per().word();
        let points = |of: fn(&Summary) -> f64| -> Vec<(f64, f64)> {
            curve
                .iter()
                .map(|(rate, arm)| (rate / arm.per().count(), arm.mean(of) * 100.0))
                .collect()
        };
        for (dash, name, of) in LIMITS {
            let points = points(of);
            rates.extend(points.iter().map(|(rate, _)| *rate));
            marks.push(Mark::Line {
                arm,
                dash,
                points,
                title: format!("{}, {name}", short(first.name)),
                has_markers: dash == Dash::Solid,
            });
        }
        if let Some(rate) = crossing(&points(LIMITS[0].2)) {
            marks.push(Mark::Drop {
                arm,
                at: (rate, WANTED),
                label: number(rate),
            });
        }
    }
    let name = short(&shape.shape.name);
    let plot = Plot {
        title: format!("SLO attainment against the offered rate for each {unit}, shape {name}"),
        x: Axis::linear(format!("offered rate, requests/s per {unit}"), rates),
        y: Axis::between("requests within the limits, %", 0.0, 100.0),
        marks,
    };
    Picture {
        caption: format!("Share of requests within the limits against the rate; shape: {name}"),
        svg: plot.svg(),
        is_wide: false,
    }
}

/// The rate at which a curve falls below the wanted attainment, between its points on straight lines.
fn crossing(points: &[(f64, f64)]) -> Option<f64> {
    points.windows(2).find_map(|pair| {
        let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
        (y0 >= WANTED && y1 < WANTED).then(|| x0 + (x1 - x0) * (y0 - WANTED) / (y0 - y1))
    })
}

fn against_scale(load: &LoadView<'_>, slo: &Slo, shape: &str) -> Picture {
    let mut marks = vec![
        Mark::Level {
            y: WANTED,
            label: format!("{WANTED:.0} %"),
        },
        Mark::Limit {
            x: 1.0,
            label: "the limits".to_owned(),
        },
    ];
    for arm in &load.arms {
        let points: Vec<(f64, f64)> = SCALES
            .iter()
            .map(|scale| (*scale, attained(arm, slo, *scale) * 100.0))
            .collect();
        marks.push(Mark::Line {
            arm: arm.arm,
            dash: Dash::Solid,
            points,
            title: short(arm.name),
            has_markers: true,
        });
    }
    let name = short(shape);
    let plot = Plot {
        title: format!(
            "SLO attainment against the scale of both limits at {}, shape {name}",
            load.words()
        ),
        x: Axis::log("both limits multiplied by (no unit)", SCALES),
        y: Axis::between("requests within both limits, %", 0.0, 100.0),
        marks,
    };
    Picture {
        caption: format!("How tight could the limits be? {}, shape: {name}", load.words()),
        svg: plot.svg(),
        is_wide: false,
    }
}

fn attained(arm: &ArmView<'_>, slo: &Slo, scale: f64) -> f64 {
    let scaled = Slo {
        name: slo.name.clone(),
        ttft_ms_max: slo.ttft_ms_max * scale,
        itl_ms_max: slo.itl_ms_max * scale,
    };
    let (met, all) = arm.measured().fold((0_usize, 0_usize), |(met, all), record| {
        (met + usize::from(record.met(&scaled).both()), all + 1)
    });
    if all == 0 { 0.0 } else { met as f64 / all as f64 }
}

fn figures(view: &View<'_>, shape: &ShapeView<'_>) -> Table {
    let mut table = Table::new(
        "Attainment at each load",
        &[
            "arm",
            "#offered, requests/s",
            "#per core or GPU, requests/s",
            "#both limits",
            "#TTFT only",
            "#ITL only",
            "#falls below 90 % at, requests/s per core or GPU",
        ],
    );
    for arm in 0..view.arms.len() {
        let curve = shape.curve(arm);
        let points: Vec<(f64, f64)> = curve
            .iter()
            .map(|(rate, arm)| (rate / arm.per().count(), arm.mean(LIMITS[0].2) * 100.0))
            .collect();
        for (at, (rate, view)) in curve.iter().enumerate() {
            let mut cells = vec![short(view.name), number(*rate), number(rate / view.per().count())];
            cells.extend(LIMITS.map(|(_, _, of)| percent(view.mean(of))));
            cells.push(if at == 0 {
                maybe(crossing(&points))
            } else {
                String::new()
            });
            table.row(cells);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crossing_lies_where_the_line_between_two_loads_meets_the_wanted_share() {
        assert_eq!(
            crossing(&[(1.0, 100.0), (2.0, 95.0), (4.0, 85.0), (5.0, 99.0)]),
            Some(3.0)
        );
        assert_eq!(crossing(&[(1.0, 100.0), (2.0, 95.0)]), None);
        assert_eq!(crossing(&[(1.0, 50.0), (2.0, 40.0)]), None);
    }
}
