//! `baton trace ID` as text: the header, one line a span with its bar, then what the spans mean in words.

use std::collections::{BTreeMap, BTreeSet};

use coordinator::records::shape::{SpanShape, Waterfall};

use super::bar::{Bar, BarCell, Mark, Scale, shade};
use super::overlap::{Early, early_spans, with_prefill};
use super::words;
use crate::observe::format::{clean, fit, ms, width};
use crate::observe::look::Look;
use crate::terminal::Paint;

/// More spans are cut unless the user asks for all. A long answer has a span for each retry and none for each token.
pub const SPANS_MAX: usize = 200;
const INDENT_DEPTH_MAX: usize = 12;
const PROCESS_WIDTH_MAX: usize = 16;
const NAME_WIDTH_MAX: usize = 34;
const BAR_WIDTH_MIN: usize = 10;
/// Two figures of nine characters, the flag, and the blanks between the columns.
const FIGURES_WIDTH: usize = 24;

pub fn render(fall: &Waterfall, spans_max: usize, look: Look) -> String {
    let request = &fall.request.clone().unwrap_or_default();
    let mut lines = words::header(&request.summary, &fall.trace_id, look);
    let drawing = Drawing::new(fall, spans_max, look);
    let blocks = [
        drawing.lines(),
        words::stage_sum(request, look.width),
        words::prompts(request),
        words::stalls(request),
        words::failed_legs(request),
        drawing.notes(),
        words::clocks(if fall.clocks.is_empty() {
            &request.clocks
        } else {
            &fall.clocks
        }),
        words::slow_because(&request.summary, look),
    ];
    for block in blocks.into_iter().filter(|block| !block.is_empty()) {
        lines.push(String::new());
        lines.extend(block);
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

struct Drawing<'a> {
    fall: &'a Waterfall,
    shown: &'a [SpanShape],
    early: BTreeMap<usize, Early>,
    processes: Vec<&'a str>,
    scale: Scale,
    process_width: usize,
    name_width: usize,
    look: Look,
}

impl<'a> Drawing<'a> {
    fn new(fall: &'a Waterfall, spans_max: usize, look: Look) -> Self {
        let spans = &fall.spans;
        let shown = &spans[..spans.len().min(spans_max)];
        let mut processes: Vec<&str> = Vec::new();
        for span in shown {
            if !processes.contains(&span.process.as_str()) {
                processes.push(&span.process);
            }
        }
        let longest = |widths: &mut dyn Iterator<Item = usize>, max: usize| widths.max().unwrap_or(0).clamp(7, max);
        let process_width = longest(&mut processes.iter().map(|name| width(name)), PROCESS_WIDTH_MAX);
        let room = look.width.saturating_sub(process_width + FIGURES_WIDTH + BAR_WIDTH_MIN);
        let name_width = longest(
            &mut shown.iter().map(|span| width(&indented(span))),
            NAME_WIDTH_MAX.min(room).max(8),
        );
        let cells = look.width.saturating_sub(process_width + name_width + FIGURES_WIDTH);
        // The request begins at 0. A span before it belongs to a wrong clock and is drawn all the same.
        let start_ms = spans.iter().map(|span| span.start_ms).fold(0.0, f64::min);
        let ends = spans.iter().map(|span| span.end_ms.max(span.start_ms));
        let end_ms = ends
            .chain(fall.request.iter().map(|request| request.summary.e2e_ms))
            .fold(start_ms, f64::max);
        Self {
            fall,
            shown,
            early: early_spans(spans, &fall.clocks),
            processes,
            scale: Scale {
                start_ms,
                end_ms,
                cells: cells.max(BAR_WIDTH_MIN),
            },
            process_width,
            name_width,
            look,
        }
    }

    fn lines(&self) -> Vec<String> {
        if self.shown.is_empty() {
            return vec!["No span of it is kept: nodes that are gone take theirs with them.".to_owned()];
        }
        let mut lines = vec![self.heading()];
        lines.extend(self.shown.iter().enumerate().map(|(at, span)| self.line(at, span)));
        let more = self.fall.spans.len() - self.shown.len();
        if more > 0 {
            lines.push(format!(
                "and {more} more spans: baton trace {} --all (or -o json)",
                self.fall.request.as_ref().map_or(0, |request| request.summary.seq)
            ));
        }
        lines.extend(self.legend());
        lines
    }

    fn heading(&self) -> String {
        let (from, to) = (ms(self.scale.start_ms), format!("{} ms", ms(self.scale.end_ms)));
        let blanks = self.scale.cells.saturating_sub(width(&from) + width(&to));
        let line = format!(
            "{:<p$} {:<n$}  {:>9} {:>9}  {from}{}{to}",
            "process",
            "span",
            "start ms",
            "took ms",
            " ".repeat(blanks),
            p = self.process_width,
            n = self.name_width,
        );
        self.look.terminal.paint(&line, Paint::Dim)
    }

    fn line(&self, at: usize, span: &SpanShape) -> String {
        let terminal = self.look.terminal;
        let nth = self.processes.iter().position(|name| *name == span.process);
        let paint = nth.map_or(Paint::None, Paint::Nth);
        let name = format!("{:<n$}", fit(&indented(span), self.name_width), n = self.name_width);
        let process = fit(&clean(&span.process), self.process_width);
        let process = format!("{process:<p$}", p = self.process_width);
        let (flag, flag_paint) = match (self.early.contains_key(&at), &span.error) {
            (true, _) => ("<", Paint::Warn),
            (false, Some(_)) => ("E", Paint::Bad),
            (false, None) => (" ", Paint::None),
        };
        let took = span.end_ms - span.start_ms;
        format!(
            "{} {} {}{:>9} {:>9}  {}",
            terminal.paint(&process, paint),
            terminal.paint(&name, if span.error.is_some() { Paint::Bad } else { Paint::None }),
            terminal.paint(flag, flag_paint),
            fit(&ms(span.start_ms), 9),
            fit(&ms(took), 9),
            self.bar(span, paint),
        )
    }

    fn bar(&self, span: &SpanShape, paint: Paint) -> String {
        let marks: Vec<(f64, Mark)> = span
            .events
            .iter()
            .map(|event| (event.at_ms, Mark::of(&event.name)))
            .collect();
        let overlap = with_prefill(span, &self.fall.spans);
        let cells = Bar {
            start_ms: span.start_ms,
            end_ms: span.end_ms,
            shaded_ms: overlap.map(|overlap| (overlap.from_ms, overlap.to_ms)),
            marks: &marks,
            is_ascii: self.look.is_ascii,
        }
        .cells(self.scale);
        let paint_of = |cell: &BarCell| match cell.mark {
            Some(Mark::Stall | Mark::Preempt) => Paint::Bad,
            _ => paint,
        };
        let end = cells.iter().rposition(|cell| cell.glyph != ' ').map_or(0, |at| at + 1);
        let drawn = &cells[..end];
        let runs = drawn.chunk_by(|a, b| paint_of(a) == paint_of(b) && (a.glyph == ' ') == (b.glyph == ' '));
        runs.map(|run| {
            let text: String = run.iter().map(|cell| cell.glyph).collect();
            let paint = if text.starts_with(' ') {
                Paint::None
            } else {
                paint_of(&run[0])
            };
            self.look.terminal.paint(&text, paint)
        })
        .collect()
    }

    /// Notes on the spans that were drawn.
    fn legend(&self) -> Vec<String> {
        let is_ascii = self.look.is_ascii;
        let events = self.shown.iter().flat_map(|span| &span.events);
        let marks: BTreeSet<Mark> = events.map(|event| Mark::of(&event.name)).collect();
        let mut parts: Vec<String> = marks
            .iter()
            .map(|mark| format!("{} {}", mark.glyph(is_ascii), mark.words()))
            .collect();
        if self
            .shown
            .iter()
            .any(|span| with_prefill(span, &self.fall.spans).is_some())
        {
            parts.push(format!("{} kv.send while prefill.forward ran", shade(is_ascii)));
        }
        if self.early.keys().any(|at| *at < self.shown.len()) {
            parts.push("< begins before its parent, see below".to_owned());
        }
        if self.shown.iter().any(|span| span.error.is_some()) {
            parts.push("E error, see below".to_owned());
        }
        if parts.is_empty() {
            return Vec::new();
        }
        vec![self.look.terminal.paint(&parts.join("   "), Paint::Dim)]
    }

    /// Facts that the bars alone do not show.
    fn notes(&self) -> Vec<String> {
        let spans = &self.fall.spans;
        let mut notes = Vec::new();
        for span in self.shown {
            if let Some(overlap) = with_prefill(span, spans) {
                let (together, whole) = (overlap.to_ms - overlap.from_ms, span.end_ms - span.start_ms);
                notes.push(clean(&format!(
                    "kv.send of {} ran {} of its {} ms ({:.0}%) while prefill.forward did",
                    span.process,
                    ms(together),
                    ms(whole),
                    together / whole * 100.0,
                )));
            }
            if let Some(error) = &span.error {
                notes.push(clean(&format!("{} of {} failed: {error}", span.name, span.process)));
            }
        }
        // Notes on the spans that were cut are printed too.
        for (at, early) in self.early.iter().take(SPANS_MAX) {
            let clock = match early.error_ms {
                Some(error) => format!("more than the clocks' error of {error:.2} ms"),
                None => "a clock of the two was not measured".to_owned(),
            };
            let (span, parent) = (&spans[*at], &spans[early.parent]);
            let what = format!(
                "{} ({}) begins {:.2} ms before its parent",
                span.name, span.process, early.by_ms
            );
            notes.push(clean(&format!(
                "< {what} {} ({}): {clock}",
                parent.name, parent.process
            )));
        }
        let gone = self.fall.not_asked.iter();
        notes.extend(gone.map(|gone| clean(&format!("The spans of {} are missing: {}", gone.node, gone.why))));
        if self.fall.orphan_count > 0 {
            notes.push(format!(
                "{} spans have a parent that is missing; they stand at the left",
                self.fall.orphan_count
            ));
        }
        notes
    }
}

fn indented(span: &SpanShape) -> String {
    format!("{}{}", "  ".repeat(span.depth.min(INDENT_DEPTH_MAX)), clean(&span.name))
}

#[cfg(test)]
#[path = "waterfall_tests.rs"]
mod tests;
