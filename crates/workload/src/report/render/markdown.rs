//! The report as Markdown: the same tables and sentences; the pictures are in the HTML.

use std::fmt::Write as _;

use crate::report::document::{Block, Card, Section, Table, Tone, verdict_parts};

pub fn page(title: &str, subtitle: &str, alerts: &[String], sections: &[Section]) -> String {
    let mut out = format!("# {}\n\n{}\n", inline(title), inline(subtitle));
    for alert in alerts {
        let _ = writeln!(out, "\n> **{}**", inline(alert));
    }
    for section in sections {
        let _ = writeln!(out, "\n## {}", inline(section.title));
        for block in &section.blocks {
            write_block(&mut out, block);
        }
    }
    out
}

fn write_block(out: &mut String, block: &Block) {
    let _ = match block {
        Block::Heading(text) => writeln!(out, "\n### {}", inline(text)),
        Block::Text(text) => writeln!(out, "\n{}", inline(text)),
        Block::Verdict(text) => {
            let (head, figures) = verdict_parts(text);
            writeln!(out, "\n**{}**{}", inline(head), inline(figures))
        }
        Block::Empty(text) => writeln!(out, "\n*{}*", inline(text)),
        Block::Code(text) => writeln!(out, "\n{}", code(text)),
        Block::Summary(cards) => writeln!(out, "\n{}", summary(cards)),
        Block::Legend(_) => Ok(()),
        Block::Pictures(pictures) => {
            let captions: Vec<&str> = pictures.iter().map(|picture| picture.caption.as_str()).collect();
            writeln!(out, "\nPictures in the HTML: {}.", inline(&captions.join(" — ")))
        }
        Block::Table(table) | Block::Figures(table) => writeln!(out, "\n{}", grid(table)),
        Block::Definitions(definitions) => {
            out.push('\n');
            definitions
                .iter()
                .try_for_each(|(word, meaning)| writeln!(out, "- **{}**: {}", inline(word), inline(meaning)))
        }
    };
}

/// Text in which nothing is markup, on one line.
fn inline(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '|' | '#' | '!' | '&' | '~' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A fence that is longer than any run of backticks inside it.
fn code(text: &str) -> String {
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat((longest + 1).max(3));
    format!("{fence}\n{text}\n{fence}")
}

fn summary(cards: &[Card]) -> String {
    let mut table = Table::new("", &["arm", "reader", "figure", "#value", "interval"]);
    for card in cards {
        for number in &card.numbers {
            table.row(vec![
                format!("{} ({})", card.name, card.note),
                number.reader.to_owned(),
                number.what.to_owned(),
                format!("{} {}", number.value, number.unit),
                number.interval.clone(),
            ]);
        }
    }
    grid(&table)
}

fn grid(table: &Table) -> String {
    let mut out = String::new();
    if !table.caption.is_empty() {
        let _ = writeln!(out, "{}:\n", inline(&table.caption));
    }
    let names: Vec<String> = table.columns.iter().map(|column| inline(&column.name)).collect();
    let rules: Vec<&str> = table
        .columns
        .iter()
        .map(|column| if column.is_number { "--:" } else { "---" })
        .collect();
    let _ = writeln!(out, "| {} |\n|{}|", names.join(" | "), rules.join("|"));
    for row in &table.rows {
        let cells: Vec<String> = row.cells.iter().map(|cell| inline(cell)).collect();
        let bold = |cell: &String| {
            if cell.is_empty() {
                String::new()
            } else {
                format!("**{cell}**")
            }
        };
        let cells = match row.tone {
            Tone::Chosen => cells.iter().map(bold).collect(),
            _ => cells,
        };
        let _ = writeln!(out, "| {} |", cells.join(" | "));
    }
    out.truncate(out.trim_end().len());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_text_cannot_leave_its_cell_or_its_fence() {
        let mut table = Table::new("a|b", &["x", "#y"]);
        table.row(vec!["c|d\n| e".to_owned(), "<b>`1`".to_owned()]);
        assert_eq!(
            grid(&table),
            "a\\|b:\n\n| x | y |\n|---|--:|\n| c\\|d \\| e | \\<b\\>\\`1\\` |"
        );
        assert_eq!(code("a```b"), "````\na```b\n````");
    }
}
