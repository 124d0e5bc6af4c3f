//! Stacked bars beside each other, one row for each: where the time of a request went.

use super::axis::Axis;
use super::svg::{Anchor, Rect, Svg};
use crate::report::text::number;

const WIDTH: f64 = 440.0;
const RIGHT: f64 = 424.0;
const LEFT: f64 = 10.0;
const ROW: f64 = 40.0;
const BAR: f64 = 18.0;
const TOP: f64 = 6.0;

pub struct Bars {
    pub title: String,
    pub axis: Axis,
    pub rows: Vec<Bar>,
}

pub struct Bar {
    pub name: String,
    pub parts: Vec<Part>,
}

pub struct Part {
    /// A class of `../report.css`.
    pub class: &'static str,
    pub name: &'static str,
    pub value: f64,
}

impl Bars {
    /// The unit is that of the values.
    pub fn svg(&self, unit: &str) -> String {
        let bottom = TOP + ROW * self.rows.len() as f64 + 4.0;
        let mut svg = Svg::new(WIDTH, bottom + 44.0, &self.title);
        let place = |value: f64| LEFT + self.axis.share(value) * (RIGHT - LEFT);
        for (value, word) in self.axis.ticks() {
            svg.line("grid", (place(value), TOP), (place(value), bottom));
            svg.text("tick", (place(value), bottom + 16.0), Anchor::Middle, &word);
        }
        for (at, row) in self.rows.iter().enumerate() {
            let y = TOP + ROW * at as f64;
            svg.text("bar-name", (LEFT, y + 13.0), Anchor::Start, &row.name);
            let mut from = 0.0;
            for part in &row.parts {
                let to = from + part.value.max(0.0);
                let rect = Rect {
                    x: place(from),
                    y: y + 18.0,
                    width: place(to) - place(from),
                    height: BAR,
                };
                let title = format!("{}: {} {unit}", part.name, number(part.value));
                if rect.width >= 0.1 {
                    svg.rect(&format!("part {}", part.class), &rect, &title);
                }
                from = to;
            }
        }
        svg.line("axis", (LEFT, bottom), (RIGHT, bottom));
        svg.text(
            "label",
            ((LEFT + RIGHT) / 2.0, bottom + 36.0),
            Anchor::Middle,
            &self.axis.label,
        );
        svg.finish()
    }
}
