//! A picture with two axes: lines, points and rules.

use super::axis::Axis;
use super::svg::{ARM_STYLES, Anchor, Svg};
use crate::report::text::number;

/// Units of the picture. It is about as many pixels wide on a phone, and up to half as large again on a wide screen.
const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 290.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 424.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 244.0;
/// About the width of one character of a label.
const CHARACTER: f64 = 6.2;

pub struct Plot {
    /// What it shows, in a sentence: for those who cannot see it.
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub marks: Vec<Mark>,
}

pub enum Mark {
    Line {
        arm: usize,
        dash: Dash,
        points: Vec<(f64, f64)>,
        title: String,
        has_markers: bool,
    },
    Point {
        arm: usize,
        at: (f64, f64),
        title: String,
        /// Words beside it.
        label: String,
    },
    /// A ring around a point, with words.
    Ring { arm: usize, at: (f64, f64), label: String },
    /// A grey line across, at a limit.
    Level { y: f64, label: String },
    /// A grey line upwards, at a limit.
    Limit { x: f64, label: String },
    /// From a point down to the x axis.
    Drop { arm: usize, at: (f64, f64), label: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dash {
    Solid,
    Dotted,
    Dashed,
}

impl Dash {
    /// A class of `../report.css`.
    pub fn class(self) -> &'static str {
        match self {
            Dash::Solid => "solid",
            Dash::Dotted => "dotted",
            Dash::Dashed => "dashed",
        }
    }
}

impl Plot {
    pub fn svg(&self) -> String {
        let mut svg = Svg::new(WIDTH, HEIGHT, &self.title);
        self.draw_axes(&mut svg);
        // Grey lines first, so that data lie over them.
        let is_rule = |mark: &&Mark| matches!(mark, Mark::Level { .. } | Mark::Limit { .. });
        for mark in self.marks.iter().filter(is_rule) {
            self.draw(&mut svg, mark);
        }
        for mark in self.marks.iter().filter(|mark| !is_rule(mark)) {
            self.draw(&mut svg, mark);
        }
        svg.finish()
    }

    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        (
            LEFT + self.x.share(x) * (RIGHT - LEFT),
            BOTTOM - self.y.share(y) * (BOTTOM - TOP),
        )
    }

    fn draw_axes(&self, svg: &mut Svg) {
        for (value, word) in self.y.ticks() {
            let y = BOTTOM - self.y.share(value) * (BOTTOM - TOP);
            svg.line("grid", (LEFT, y), (RIGHT, y));
            svg.text("tick", (LEFT - 6.0, y + 4.0), Anchor::End, &word);
        }
        let mut free_from = 0.0;
        for (value, word) in self.x.ticks() {
            let x = LEFT + self.x.share(value) * (RIGHT - LEFT);
            svg.line("grid", (x, TOP), (x, BOTTOM));
            let half = CHARACTER * word.chars().count() as f64 / 2.0;
            if x - half >= free_from {
                svg.text("tick", (x.min(WIDTH - half), BOTTOM + 16.0), Anchor::Middle, &word);
                free_from = x + half + CHARACTER;
            }
        }
        svg.line("axis", (LEFT, BOTTOM), (RIGHT, BOTTOM));
        svg.line("axis", (LEFT, TOP), (LEFT, BOTTOM));
        svg.text("label", (4.0, 14.0), Anchor::Start, &self.y.label);
        svg.text(
            "label",
            ((LEFT + RIGHT) / 2.0, HEIGHT - 8.0),
            Anchor::Middle,
            &self.x.label,
        );
    }

    fn draw(&self, svg: &mut Svg, mark: &Mark) {
        match mark {
            Mark::Line { .. } => self.draw_line(svg, mark),
            Mark::Point { arm, at, title, label } => {
                let place = self.place(*at);
                svg.marker(*arm, place, title);
                beside(svg, place, label);
            }
            Mark::Ring { arm, at, label } => {
                let place = self.place(*at);
                svg.circle(&format!("ring a{}", arm % ARM_STYLES), place, 9.0);
                beside(svg, (place.0, place.1 - 8.0), label);
            }
            Mark::Level { y, label } => {
                let (_, y) = self.place((0.0, *y));
                svg.line("rule", (LEFT, y), (RIGHT, y));
                // Above the line, or below it where it lies at the top.
                let below = if y < TOP + 14.0 { 12.0 } else { -4.0 };
                svg.text("rule-label", (LEFT + 4.0, y + below), Anchor::Start, label);
            }
            Mark::Limit { x, label } if self.x.contains(*x) => {
                let (x, _) = self.place((*x, 0.0));
                svg.line("rule", (x, TOP), (x, BOTTOM));
                let is_right = x > (LEFT + RIGHT) / 2.0;
                let (at, anchor) = if is_right {
                    (x - 4.0, Anchor::End)
                } else {
                    (x + 4.0, Anchor::Start)
                };
                svg.text("rule-label", (at, BOTTOM - 6.0), anchor, label);
            }
            // The limit lies outside: every value is on one side of it, and the table beside the picture says so.
            Mark::Limit { .. } => {}
            Mark::Drop { arm, at, label } => {
                let (x, y) = self.place(*at);
                svg.line(&format!("drop a{}", arm % ARM_STYLES), (x, y), (x, BOTTOM));
                let is_right = x > RIGHT - 60.0;
                let (at, anchor) = if is_right {
                    (x - 4.0, Anchor::End)
                } else {
                    (x + 4.0, Anchor::Start)
                };
                let row = 14.0 * (arm % ARM_STYLES) as f64;
                svg.text(
                    &format!("drop-label t{}", arm % ARM_STYLES),
                    (at, BOTTOM - 8.0 - row),
                    anchor,
                    label,
                );
            }
        }
    }

    fn draw_line(&self, svg: &mut Svg, mark: &Mark) {
        let Mark::Line {
            arm,
            dash,
            points,
            title,
            has_markers,
        } = mark
        else {
            return;
        };
        let places: Vec<(f64, f64)> = points.iter().map(|point| self.place(*point)).collect();
        svg.polyline(&format!("line {} a{}", dash.class(), arm % ARM_STYLES), &places, title);
        if *has_markers {
            for (place, (x, y)) in places.iter().zip(points) {
                let value = format!(
                    "{title}: {} {}, {} {}",
                    number(*x),
                    self.x.label,
                    number(*y),
                    self.y.label
                );
                svg.marker(*arm, *place, &value);
            }
        }
    }
}

/// Words to the right of a point, or to the left where there is no room.
fn beside(svg: &mut Svg, (x, y): (f64, f64), label: &str) {
    if label.is_empty() {
        return;
    }
    let width = CHARACTER * label.chars().count() as f64;
    let (at, anchor) = if x + 10.0 + width > WIDTH {
        (x - 10.0, Anchor::End)
    } else {
        (x + 10.0, Anchor::Start)
    };
    svg.text("point-label", (at, y + 4.0), anchor, label);
}
