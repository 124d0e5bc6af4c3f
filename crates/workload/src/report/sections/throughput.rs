//! Throughput against latency with the knee, and the Pareto picture of speed for a user against yield for the operator.

use super::{arms_legend, each_shape, legend};
use crate::report::chart::{Axis, Dash, Mark, Plot};
use crate::report::document::{Block, Picture, Section, Table, Tone};
use crate::report::text::{maybe, number, percent, short, tick};
use crate::report::view::{ArmView, ShapeView, View};

/// The knee is the last load at which so many requests met both limits. It is DistServe's line.
const KNEE_ATTAINMENT: f64 = 0.9;

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("throughput", "Throughput against p99 latency");
    section.text(format!(
        "A ring marks the knee: the last load at which at least {:.0} % of the requests met both limits.",
        KNEE_ATTAINMENT * 100.0
    ));
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        if shape.loads.len() < 2 {
            section.empty(format!(
                "There is no curve: this shape was measured at one load only ({}). `baton bench sweep` measures several.",
                load.words()
            ));
            return;
        }
        section.blocks.push(legend(arms_legend(&load.arms)));
        section.blocks.push(Block::Pictures(vec![
            picture(view, shape, ("TTFT", |arm| arm.ttft_p99())),
            picture(view, shape, ("ITL", |arm| arm.itl_p99())),
        ]));
        section.blocks.push(Block::Figures(figures(view, shape)));
    });
    section
}

type Metric = (&'static str, fn(&ArmView<'_>) -> Option<f64>);

fn knee(curve: &[(f64, &ArmView<'_>)]) -> Option<usize> {
    let holds = |arm: &ArmView<'_>| arm.mean(|summary| summary.attainment.both) >= KNEE_ATTAINMENT;
    curve.iter().take_while(|(_, arm)| holds(arm)).count().checked_sub(1)
}

fn picture(view: &View<'_>, shape: &ShapeView<'_>, (name, p99): Metric) -> Picture {
    let mut marks = Vec::new();
    let (mut xs, mut ys) = (Vec::new(), Vec::new());
    let mut unit = "arm";
    for arm in 0..view.arms.len() {
        let curve = shape.curve(arm);
        let Some((_, first)) = curve.first() else { continue };
        unit = first.per().word();
        let points: Vec<(f64, f64)> = curve
            .iter()
            .filter_map(|(_, arm)| Some((arm.output_per(), p99(arm)?)))
            .collect();
        xs.extend(points.iter().map(|(x, _)| *x));
        ys.extend(points.iter().map(|(_, y)| *y));
        // Not of `points`: a load without a p99 is not among them.
        let knee = knee(&curve).and_then(|at| curve.get(at));
        let knee = knee.and_then(|(_, arm)| Some((arm.output_per(), p99(arm)?)));
        marks.push(Mark::Line {
            arm,
            dash: Dash::Solid,
            points,
            title: short(first.name),
            has_markers: true,
        });
        marks.extend(knee.map(|at| Mark::Ring {
            arm,
            at,
            label: String::new(),
        }));
    }
    let shape = short(&shape.shape.name);
    let plot = Plot {
        title: format!("p99 {name} against output tokens per second for each {unit}, shape {shape}; rings mark knees"),
        x: Axis::linear(format!("output tokens/s per {unit}"), xs),
        y: Axis::log(format!("{name} p99, ms (logarithmic)"), ys),
        marks,
    };
    Picture {
        caption: format!("p99 {name} against throughput at each load; shape: {shape}"),
        svg: plot.svg(),
        is_wide: false,
    }
}

fn figures(view: &View<'_>, shape: &ShapeView<'_>) -> Table {
    let mut table = Table::new(
        "Each load",
        &[
            "arm",
            "#offered, requests/s",
            "#output tokens/s per core or GPU",
            "#TTFT p99, ms",
            "#ITL p99, ms",
            "#both limits met",
            "knee",
        ],
    );
    for arm in 0..view.arms.len() {
        let curve = shape.curve(arm);
        let knee = knee(&curve);
        for (at, (rate, view)) in curve.iter().enumerate() {
            let is_knee = knee == Some(at);
            table.toned(
                if is_knee { Tone::Chosen } else { Tone::Plain },
                vec![
                    short(view.name),
                    number(*rate),
                    number(view.output_per()),
                    maybe(view.ttft_p99()),
                    maybe(view.itl_p99()),
                    percent(view.mean(|summary| summary.attainment.both)),
                    if is_knee { "knee".to_owned() } else { String::new() },
                ],
            );
        }
    }
    table
}

/// One point: an arm at a load.
struct Point<'a> {
    arm: usize,
    name: &'a str,
    load: String,
    offered: f64,
    /// Tokens a second for one user: 1000 by the median TPOT.
    user: f64,
    operator: f64,
    unit: &'static str,
}

pub fn pareto(view: &View<'_>) -> Section {
    let mut section = Section::new("pareto", "Pareto: speed for a user against yield");
    section.text(
        "To the right is faster for one user, upwards is more for the operator. A point is on the front when no other point is \
         at least as good in both.",
    );
    each_shape(view, &mut section, |shape, section| {
        let points = points(shape);
        if points.is_empty() {
            section.empty("No request had two tokens, so there is no speed for a user.");
            return;
        }
        let name = short(&shape.shape.name);
        let unit = points[0].unit;
        let marks = points.iter().map(|point| Mark::Point {
            arm: point.arm,
            at: (point.user, point.operator),
            title: format!(
                "{} at {}: {} tokens/s for a user, {} tokens/s per {unit}",
                short(point.name),
                point.load,
                number(point.user),
                number(point.operator)
            ),
            label: if is_on_front(point, &points) {
                tick(point.offered)
            } else {
                String::new()
            },
        });
        let plot = Plot {
            title: format!(
                "Output tokens per second for each {unit} against tokens per second for a user, shape {name}"
            ),
            x: Axis::near(
                "output tokens/s for one user (1000 / median TPOT)",
                points.iter().map(|point| point.user),
            ),
            y: Axis::linear(
                format!("output tokens/s per {unit}"),
                points.iter().map(|point| point.operator),
            ),
            marks: marks.collect(),
        };
        let Some(load) = shape.headline() else { return };
        section.blocks.push(legend(arms_legend(&load.arms)));
        section.blocks.push(Block::Pictures(vec![Picture {
            caption: format!("Each arm at each load; labels on the front: offered load; shape: {name}"),
            svg: plot.svg(),
            is_wide: false,
        }]));
        section.blocks.push(Block::Figures(pareto_figures(&points)));
    });
    section
}

fn points<'a>(shape: &ShapeView<'a>) -> Vec<Point<'a>> {
    let mut points = Vec::new();
    for load in &shape.loads {
        for arm in &load.arms {
            let Some(tpot) = arm.tpot_ms().percentile(50.0).filter(|tpot| *tpot > 0.0) else {
                continue;
            };
            points.push(Point {
                arm: arm.arm,
                name: arm.name,
                load: load.words(),
                offered: load.offered,
                user: 1000.0 / tpot,
                operator: arm.output_per(),
                unit: arm.per().word(),
            });
        }
    }
    points
}

fn is_on_front(point: &Point<'_>, points: &[Point<'_>]) -> bool {
    !points.iter().any(|other| {
        other.user >= point.user
            && other.operator >= point.operator
            && (other.user > point.user || other.operator > point.operator)
    })
}

fn pareto_figures(points: &[Point<'_>]) -> Table {
    let mut table = Table::new(
        "Points of the Pareto picture",
        &[
            "arm",
            "load",
            "#tokens/s for a user",
            "#tokens/s per core or GPU",
            "on the front",
        ],
    );
    for point in points {
        let is_on_front = is_on_front(point, points);
        table.toned(
            if is_on_front { Tone::Chosen } else { Tone::Plain },
            vec![
                short(point.name),
                point.load.clone(),
                number(point.user),
                number(point.operator),
                if is_on_front { "yes" } else { "no" }.to_owned(),
            ],
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_that_another_one_beats_in_both_is_not_on_the_front() {
        let at = |user: f64, operator: f64| Point {
            arm: 0,
            name: "a",
            load: String::new(),
            offered: 0.0,
            user,
            operator,
            unit: "core",
        };
        let points = [at(1.0, 5.0), at(2.0, 4.0), at(1.5, 3.0), at(2.0, 4.0), at(2.0, 1.0)];
        let front: Vec<bool> = points.iter().map(|point| is_on_front(point, &points)).collect();
        assert_eq!(front, [true, true, false, true, false]);
    }
}
