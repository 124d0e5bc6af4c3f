//! Requests on one time line: the wait for the first token, then each gap in the colour of its length.

use std::time::Duration;

use super::{each_shape, legend};
use crate::record::RequestRecord;
use crate::report::chart::axis::Axis;
use crate::report::chart::svg::{Anchor, Svg};
use crate::report::document::{Block, LegendItem, Picture, Section, Swatch};
use crate::report::text::short;
use crate::report::view::{ArmView, View};
use crate::times::ms;

/// Bands of the gaps between tokens: what is smooth for a reader, what is seen, what disturbs.
const SMOOTH_MS: f64 = 25.0;
const SEEN_MS: f64 = 50.0;
/// Requests that one picture shows.
const REQUESTS_MAX: usize = 32;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 840.0;
const ROW: f64 = 9.0;
const TOP: f64 = 22.0;

const LEGEND: [(&str, &str); 5] = [
    ("late", "due, not yet sent"),
    ("wait", "waits for its first token"),
    ("smooth", "gaps below 25 ms"),
    ("seen", "gaps of 25 to 50 ms"),
    ("slow", "gaps of 50 ms and more"),
];

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("timeline", "Requests on a time line");
    section.text(format!(
        "The first repeat of each arm: up to {REQUESTS_MAX} requests around the longest gap between two tokens, one row each."
    ));
    let items = LEGEND.map(|(class, text)| LegendItem {
        text: text.to_owned(),
        swatch: Swatch::Box(class),
    });
    section.blocks.push(legend(items.into()));
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        let pictures: Vec<Picture> = load
            .arms
            .iter()
            .filter_map(|arm| {
                let name = short(arm.name);
                let caption = format!("{name}, {}; shape: {}", load.words(), short(&shape.shape.name));
                Some(Picture {
                    svg: picture(arm, &caption)?,
                    caption,
                    is_wide: true,
                })
            })
            .collect();
        match pictures.is_empty() {
            true => section.empty("No measured request had a token."),
            false => section.blocks.push(Block::Pictures(pictures)),
        }
    });
    section
}

/// Measured requests with tokens, by due time: those around the longest gap.
fn chosen<'a>(arm: &ArmView<'a>) -> Vec<&'a RequestRecord> {
    let Some((run, _)) = arm.runs.first() else {
        return Vec::new();
    };
    let mut records: Vec<&RequestRecord> = run
        .records
        .iter()
        .filter(|record| record.is_measured() && !record.tokens.is_empty())
        .collect();
    records.sort_by(|a, b| a.scheduled.cmp(&b.scheduled).then_with(|| a.id.cmp(&b.id)));
    let longest = |record: &&RequestRecord| record.gaps_ms().fold(0.0, f64::max);
    let worst = (0..records.len()).max_by(|a, b| longest(&records[*a]).total_cmp(&longest(&records[*b])));
    let from = worst.unwrap_or(0).saturating_sub(REQUESTS_MAX / 2);
    let from = from.min(records.len().saturating_sub(REQUESTS_MAX));
    records.into_iter().skip(from).take(REQUESTS_MAX).collect()
}

fn picture(arm: &ArmView<'_>, title: &str) -> Option<String> {
    let records = chosen(arm);
    let begin = records.iter().map(|record| record.scheduled).min()?;
    let end = records.iter().map(|record| record.ended).max()?;
    let since = |at: Duration| at.saturating_sub(begin).as_secs_f64();
    let axis = Axis::linear("time, s", [since(end)]);
    let place = |at: Duration| LEFT + axis.share(since(at)) * (RIGHT - LEFT);
    let bottom = TOP + ROW * records.len() as f64 + 4.0;
    let mut svg = Svg::new(
        WIDTH,
        bottom + 42.0,
        &format!("Time line of {} requests: {title}", records.len()),
    );
    svg.text("label", (4.0, 12.0), Anchor::Start, "prompt tokens");
    for (value, word) in axis.ticks() {
        let x = LEFT + axis.share(value) * (RIGHT - LEFT);
        svg.line("grid", (x, TOP), (x, bottom));
        svg.text("tick", (x, bottom + 16.0), Anchor::Middle, &word);
    }
    let mut strokes: [Vec<(f64, f64, f64)>; 5] = Default::default();
    for (row, record) in records.iter().enumerate() {
        let y = TOP + ROW * (row as f64 + 0.5);
        if row % 2 == 0 {
            svg.text(
                "row-name",
                (LEFT - 6.0, y + 3.0),
                Anchor::End,
                &record.prompt_tokens.to_string(),
            );
        }
        for (band, from, to) in pieces(record) {
            let x = place(from);
            strokes[band].push((x, y, place(to) - x));
        }
    }
    for (strokes, (class, _)) in strokes.iter().zip(LEGEND) {
        svg.strokes(&format!("stroke {class}"), strokes);
    }
    svg.line("axis", (LEFT, bottom), (RIGHT, bottom));
    let label = "time since the first of these requests was due, s";
    svg.text("label", ((LEFT + RIGHT) / 2.0, bottom + 34.0), Anchor::Middle, label);
    Some(svg.finish())
}

/// The pieces of a request's row: the place in `LEGEND`, and from when to when. Neighbours of one band are one piece.
fn pieces(record: &RequestRecord) -> Vec<(usize, Duration, Duration)> {
    let first = record.tokens.first().copied().unwrap_or(record.ended);
    let mut pieces = vec![(0, record.scheduled, record.sent), (1, record.sent, first)];
    for pair in record.tokens.windows(2) {
        let band = match ms(pair[1].saturating_sub(pair[0])) {
            gap if gap < SMOOTH_MS => 2,
            gap if gap < SEEN_MS => 3,
            _ => 4,
        };
        match pieces.last_mut() {
            Some((last, _, to)) if *last == band => *to = pair[1],
            _ => pieces.push((band, pair[0], pair[1])),
        }
    }
    pieces.retain(|(_, from, to)| to > from);
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::request;

    #[test]
    fn neighbours_of_one_band_are_one_piece() {
        let record = request(1, &[100, 110, 120, 150, 250, 260]);
        let at = Duration::from_millis;
        assert_eq!(
            pieces(&record),
            [
                (1, at(0), at(100)),
                (2, at(100), at(120)),
                (3, at(120), at(150)),
                (4, at(150), at(250)),
                (2, at(250), at(260))
            ]
        );
    }
}
