//! One bar of the waterfall: a stretch of time as characters, to an eighth of a character where the font has them.

/// The time of the first cell, and the time after the last of `cells` cells.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub start_ms: f64,
    pub end_ms: f64,
    pub cells: usize,
}

impl Scale {
    /// The position in characters from the left. A time outside, or no number, is at the nearest end.
    fn position(self, at_ms: f64) -> f64 {
        let whole = self.end_ms - self.start_ms;
        let part = (at_ms - self.start_ms) / whole;
        let position = part * self.cells as f64;
        if position.is_finite() {
            position.clamp(0.0, self.cells as f64)
        } else {
            0.0
        }
    }

    fn cell(self, at_ms: f64) -> usize {
        (self.position(at_ms) as usize).min(self.cells.saturating_sub(1))
    }
}

/// The marks on a bar, the more important ones last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mark {
    Other,
    Chunk,
    Preempt,
    Stall,
}

impl Mark {
    pub fn of(event: &str) -> Self {
        match event {
            "chunk" => Self::Chunk,
            "preempt" | "preempted" | "preemption" => Self::Preempt,
            name if name.starts_with("stall") => Self::Stall,
            _ => Self::Other,
        }
    }

    pub fn glyph(self, is_ascii: bool) -> char {
        match self {
            Self::Other => '.',
            Self::Chunk if is_ascii => ':',
            Self::Chunk => '┆',
            Self::Preempt => 'x',
            Self::Stall => '!',
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Self::Other => "another event",
            Self::Chunk => "chunk",
            Self::Preempt => "preemption",
            Self::Stall => "stall",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarCell {
    pub glyph: char,
    pub mark: Option<Mark>,
}

#[derive(Clone, Debug)]
pub struct Bar<'a> {
    pub start_ms: f64,
    pub end_ms: f64,
    /// A part that is drawn lighter: where this span overlaps the span that it is compared with.
    pub shaded_ms: Option<(f64, f64)>,
    pub marks: &'a [(f64, Mark)],
    pub is_ascii: bool,
}

pub const fn shade(is_ascii: bool) -> char {
    if is_ascii { '%' } else { '▓' }
}

const LEFT_EIGHTHS: [char; 9] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];

impl Bar<'_> {
    /// One entry for each cell. Every span draws at least one cell, however short it is.
    pub fn cells(&self, scale: Scale) -> Vec<BarCell> {
        let (from, to) = (scale.position(self.start_ms), scale.position(self.end_ms));
        let shaded = self
            .shaded_ms
            .map(|(from, to)| (scale.position(from), scale.position(to)));
        let mut cells: Vec<BarCell> = (0..scale.cells)
            .map(|at| BarCell {
                glyph: self.glyph((at as f64, from, to), shaded),
                mark: None,
            })
            .collect();
        if cells.iter().all(|cell| cell.glyph == ' ')
            && let Some(cell) = cells.get_mut(scale.cell(self.start_ms))
        {
            cell.glyph = match (self.is_ascii, from.fract() < 0.5) {
                (true, _) => '|',
                (false, true) => '▏',
                (false, false) => '▕',
            };
        }
        for (at_ms, mark) in self.marks {
            if let Some(cell) = cells.get_mut(scale.cell(*at_ms))
                && cell.mark.is_none_or(|there| there < *mark)
            {
                cell.glyph = mark.glyph(self.is_ascii);
                cell.mark = Some(*mark);
            }
        }
        cells
    }

    fn glyph(&self, (left, from, to): (f64, f64, f64), shaded: Option<(f64, f64)>) -> char {
        let right = left + 1.0;
        let covered = (to.min(right) - from.max(left)).max(0.0);
        if covered >= 15.0 / 16.0 {
            let middle = left + 0.5;
            let is_shaded = shaded.is_some_and(|(from, to)| from <= middle && middle < to);
            return match (is_shaded, self.is_ascii) {
                (true, is_ascii) => shade(is_ascii),
                (false, true) => '=',
                (false, false) => '█',
            };
        }
        if self.is_ascii {
            return if covered >= 0.5 {
                '='
            } else if covered >= 0.125 {
                '-'
            } else {
                ' '
            };
        }
        let reaches_right = to >= right;
        if from > left && (reaches_right || from - left > right - to) {
            // Unicode has only these characters that fill from the right.
            return match covered {
                c if c >= 0.75 => '█',
                c if c >= 0.3125 => '▐',
                c if c >= 0.0625 => '▕',
                _ => ' ',
            };
        }
        // 0 to 8, because `covered` is below one.
        LEFT_EIGHTHS[((covered * 8.0).round() as usize).min(8)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALE: Scale = Scale {
        start_ms: 0.0,
        end_ms: 100.0,
        cells: 10,
    };

    fn drawn(start_ms: f64, end_ms: f64, is_ascii: bool) -> String {
        let bar = Bar {
            start_ms,
            end_ms,
            shaded_ms: None,
            marks: &[],
            is_ascii,
        };
        bar.cells(SCALE).iter().map(|cell| cell.glyph).collect()
    }

    #[test]
    fn ends_are_drawn_to_an_eighth() {
        assert_eq!(drawn(0.0, 100.0, false), "██████████");
        assert_eq!(drawn(20.0, 43.75, false), "  ██▍     ");
        assert_eq!(drawn(15.0, 40.0, false), " ▐██      ");
        assert_eq!(drawn(20.0, 45.0, true), "  ===     ");
    }

    #[test]
    fn the_shortest_span_is_seen_and_odd_ones_stay_inside() {
        for (start, end) in [
            (55.0, 55.0),
            (55.0, 55.001),
            (99.999, 100.0),
            (60.0, 20.0),
            (100.0, 100.0),
        ] {
            for is_ascii in [false, true] {
                let drawn = drawn(start, end, is_ascii);
                assert_eq!(drawn.chars().count(), 10, "{drawn:?}");
                assert_eq!(drawn.trim().chars().count(), 1, "{start} to {end}: {drawn:?}");
            }
        }
        for odd in [f64::NAN, f64::INFINITY, -1e308, 1e308] {
            assert_eq!(drawn(odd, 1e308, false).chars().count(), 10);
        }
        let point = Scale {
            start_ms: 5.0,
            end_ms: 5.0,
            cells: 0,
        };
        let bar = Bar {
            start_ms: 5.0,
            end_ms: 5.0,
            shaded_ms: Some((0.0, 9.0)),
            marks: &[(5.0, Mark::Stall)],
            is_ascii: false,
        };
        assert!(bar.cells(point).is_empty());
    }

    #[test]
    fn the_overlap_is_shaded_and_a_stall_wins_over_a_chunk() {
        let bar = Bar {
            start_ms: 10.0,
            end_ms: 60.0,
            shaded_ms: Some((0.0, 40.0)),
            marks: &[(55.0, Mark::Stall), (55.0, Mark::Chunk), (25.0, Mark::Chunk)],
            is_ascii: true,
        };
        let drawn: String = bar.cells(SCALE).iter().map(|cell| cell.glyph).collect();
        assert_eq!(drawn, " %:%=!    ");
    }
}
