//! What every plan prints: inputs, the formula in words, results, tables, warnings; as text for people or as one JSON object.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::observe::table::{Cell, Table};
use crate::terminal::{Paint, Terminal};

/// How a number is written for people. JSON has the bare number, whose name ends in the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// A number with a word behind it.
    Of(&'static str),
    Whole(&'static str),
    Ms,
    /// A share, written as per cent.
    Percent,
    Dollars,
    DollarsAndCents,
    Bytes,
    /// Bytes a second.
    ByteRate,
}

impl Unit {
    pub fn show(self, value: f64) -> String {
        match self {
            Unit::Of(word) => format!("{} {word}", significant(value)).trim_end().to_owned(),
            Unit::Whole(word) => format!("{} {word}", grouped(value, 0)).trim_end().to_owned(),
            Unit::Ms => format!("{} ms", significant(value)),
            Unit::Percent => format!("{:.1} %", value * 100.0),
            Unit::Dollars => dollars(value, 0),
            Unit::DollarsAndCents => dollars(value, 2),
            Unit::Bytes => bytes(value, ""),
            Unit::ByteRate => bytes(value, "/s"),
        }
    }
}

fn dollars(value: f64, decimals: usize) -> String {
    let sign = if value < 0.0 { "-" } else { "" };
    format!("{sign}${}", grouped(value.abs(), decimals))
}

fn bytes(value: f64, per: &str) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    // Below 10,000 every byte is shown.
    let power = match value >= 1e4 {
        true => ((value.log10() / 3.0) as usize).min(units.len() - 1),
        false => 0,
    };
    format!(
        "{} {}{per}",
        significant(value / 1e3_f64.powi(power as i32)),
        units[power]
    )
}

/// At least three digits that count, and no more than three behind the point.
fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 1000.0 => 0,
        v if v >= 100.0 => 1,
        v if v >= 10.0 => 2,
        v if v >= 1.0 || v == 0.0 => 3,
        _ => 4,
    };
    let text = grouped(value, decimals);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// `73,008`.
fn grouped(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let (sign, digits) = whole.split_at(usize::from(whole.starts_with('-')));
    let mut out = sign.to_owned();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

/// A number in JSON, without the noise of its last bits.
fn number(value: f64) -> Value {
    let rounded = (value * 1e9).round() / 1e9;
    match rounded.fract() == 0.0 && rounded.abs() < 1e15 {
        true => json!(rounded as i64),
        false => json!(rounded),
    }
}

#[derive(Clone, Debug)]
struct Figure {
    key: &'static str,
    label: &'static str,
    value: Value,
    shown: String,
}

/// A cell of a table: a number with its unit, words, or nothing.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Number(f64, Unit),
    Words(String),
    Nothing,
}

impl Item {
    fn value(&self) -> Value {
        match self {
            Item::Number(value, _) => number(*value),
            Item::Words(words) => json!(words),
            Item::Nothing => Value::Null,
        }
    }

    fn shown(&self) -> String {
        match self {
            Item::Number(value, unit) => unit.show(*value),
            Item::Words(words) => words.clone(),
            Item::Nothing => "-".to_owned(),
        }
    }
}

#[derive(Clone, Debug)]
struct Grid {
    key: &'static str,
    /// The key in JSON and the heading for people; a heading that begins with `>` heads numbers.
    columns: Vec<(&'static str, &'static str)>,
    rows: Vec<Vec<Item>>,
}

#[derive(Clone, Debug)]
pub(super) struct Sheet {
    plan: &'static str,
    inputs: Vec<Figure>,
    formula: Vec<String>,
    results: Vec<Figure>,
    grids: Vec<Grid>,
    notes: Vec<String>,
    warnings: Vec<String>,
}

impl Sheet {
    pub fn new(plan: &'static str) -> Self {
        Self {
            plan,
            inputs: Vec::new(),
            formula: Vec::new(),
            results: Vec::new(),
            grids: Vec::new(),
            notes: Vec::new(),
            warnings: Vec::new(),
        }
    }

    pub fn input(mut self, (key, label): (&'static str, &'static str), value: f64, unit: Unit) -> Self {
        self.inputs.push(figure((key, label), value, unit));
        self
    }

    pub fn input_words(mut self, (key, label): (&'static str, &'static str), words: impl Into<String>) -> Self {
        let shown = words.into();
        self.inputs.push(Figure {
            key,
            label,
            value: json!(shown),
            shown,
        });
        self
    }

    pub fn formula(mut self, words: impl Into<String>) -> Self {
        self.formula.push(words.into());
        self
    }

    pub fn result(mut self, (key, label): (&'static str, &'static str), value: f64, unit: Unit) -> Self {
        self.results.push(figure((key, label), value, unit));
        self
    }

    pub fn table(mut self, key: &'static str, columns: &[(&'static str, &'static str)], rows: Vec<Vec<Item>>) -> Self {
        self.grids.push(Grid {
            key,
            columns: columns.to_vec(),
            rows,
        });
        self
    }

    /// What the figures assume, or how to read them.
    pub fn note(mut self, words: impl Into<String>) -> Self {
        self.notes.push(words.into());
        self
    }

    pub fn warning(mut self, words: impl Into<String>) -> Self {
        self.warnings.push(words.into());
        self
    }

    pub fn json(&self) -> String {
        let figures = |figures: &[Figure]| -> Map<String, Value> {
            let member = |figure: &Figure| (figure.key.to_owned(), figure.value.clone());
            figures.iter().map(member).collect()
        };
        let row = |grid: &Grid, row: &Vec<Item>| -> Value {
            let cells = grid.columns.iter().zip(row);
            cells
                .map(|((key, _), item)| ((*key).to_owned(), item.value()))
                .collect()
        };
        let grid = |grid: &Grid| -> (String, Value) {
            (
                grid.key.to_owned(),
                grid.rows.iter().map(|cells| row(grid, cells)).collect(),
            )
        };
        let tables: Map<String, Value> = self.grids.iter().map(grid).collect();
        let page = json!({
            "plan": self.plan,
            "inputs": figures(&self.inputs),
            "formula": self.formula,
            "results": figures(&self.results),
            "tables": tables,
            "notes": self.notes,
            "warnings": self.warnings,
        });
        format!("{page:#}\n")
    }

    pub fn text(&self, terminal: Terminal) -> String {
        let mut text = String::new();
        let figures = self.inputs.iter().chain(&self.results);
        let width = figures.map(|figure| figure.label.chars().count()).max().unwrap_or(0);
        let mut block = |heading: &str, lines: Vec<String>| {
            if lines.is_empty() {
                return;
            }
            if !text.is_empty() {
                text.push('\n');
            }
            let _ = writeln!(text, "{}", terminal.paint(heading, Paint::Dim));
            for line in lines {
                let _ = writeln!(text, "{}", format!("  {line}").trim_end());
            }
        };
        let lines = |figures: &[Figure]| -> Vec<String> {
            let line = |figure: &Figure| format!("{:width$}  {}", figure.label, figure.shown);
            figures.iter().map(line).collect()
        };
        block("inputs", lines(&self.inputs));
        block("formula", self.formula.clone());
        block("results", lines(&self.results));
        for grid in &self.grids {
            block(&grid.key.replace('_', " "), grid.lines(terminal));
        }
        block("notes", self.notes.clone());
        let warned = |words: &String| terminal.paint(words, Paint::Warn);
        block("warning", self.warnings.iter().map(warned).collect());
        text
    }
}

fn figure((key, label): (&'static str, &'static str), value: f64, unit: Unit) -> Figure {
    Figure {
        key,
        label,
        value: number(value),
        shown: unit.show(value),
    }
}

impl Grid {
    fn lines(&self, terminal: Terminal) -> Vec<String> {
        let headings: Vec<&'static str> = self.columns.iter().map(|(_, heading)| *heading).collect();
        let mut table = Table::new(&headings);
        for row in &self.rows {
            table.row(row.iter().map(|item| Cell::new(item.shown())).collect());
        }
        table.render(terminal).lines().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_with_their_units() {
        let shown = [
            Unit::Dollars.show(73_007.999_999_999_99),
            Unit::DollarsAndCents.show(23.66),
            Unit::Dollars.show(-18_576.0),
            Unit::Percent.show(0.666_666),
            Unit::Ms.show(36.217_3),
            Unit::Ms.show(0.003_72),
            Unit::Whole("tokens").show(1_234_567.0),
            Unit::Of("").show(40.0),
            Unit::Bytes.show(131_072.0),
            Unit::Bytes.show(999.0),
            Unit::Bytes.show(268_435_456.0),
            Unit::ByteRate.show(450e9),
        ];
        let expected = [
            "$73,008",
            "$23.66",
            "-$18,576",
            "66.7 %",
            "36.22 ms",
            "0.0037 ms",
            "1,234,567 tokens",
            "40",
            "131.1 kB",
            "999 B",
            "268.4 MB",
            "450 GB/s",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn text_and_json_have_the_same_figures() {
        let sheet = Sheet::new("test")
            .input(("rate_per_s", "rate"), 1000.0, Unit::Of("requests/s"))
            .formula("words")
            .result(("count", "count"), 40.0, Unit::Whole(""))
            .table(
                "rows",
                &[("name", "name"), ("wait_ms", ">wait")],
                vec![
                    vec![Item::Words("a".to_owned()), Item::Number(0.1, Unit::Ms)],
                    vec![Item::Words("b".to_owned()), Item::Nothing],
                ],
            )
            .warning("careful");
        let text = sheet.text(Terminal::plain());
        assert!(text.contains("rate   1,000 requests/s\n"), "{text}");
        assert!(text.contains("count  40\n") && text.contains("careful"), "{text}");
        let page: Value = serde_json::from_str(&sheet.json()).expect("JSON");
        assert_eq!(page["results"]["count"], 40);
        assert_eq!(page["tables"]["rows"][0]["wait_ms"], 0.1);
        assert_eq!(page["tables"]["rows"][1]["wait_ms"], Value::Null);
    }
}
