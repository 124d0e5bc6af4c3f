//! The report as one HTML file: no script, nothing from elsewhere. All outside text is escaped here or in `../chart/svg.rs`.

use std::fmt::Write as _;

use crate::report::chart::svg::{ARM_STYLES, marker_path};
use crate::report::document::{Block, Card, LegendItem, Picture, Section, Swatch, Table, Tone, verdict_parts};
use crate::report::text::escape;

const STYLE: &str = include_str!("../report.css");
/// What the file may do when a browser opens it: show itself. Where it is served, the server sends the same.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";

/// A cell with more characters gets a wide column: else a narrow window makes its row very tall.
const LONG_CHARS_MIN: usize = 40;

/// What the page needs beside its sections.
pub struct Page<'a> {
    pub title: &'a str,
    pub subtitle: &'a str,
    pub alerts: &'a [String],
    pub sections: &'a [Section],
    /// JSON text.
    pub data: &'a str,
}

pub fn page(page: &Page<'_>) -> String {
    let mut out = String::with_capacity(256 * 1024 + page.data.len());
    let title = escape(page.title);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"generator\" content=\"baton\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <a class=\"skip\" href=\"#summary\">Skip to the summary</a>\n<header>\n<h1>{title}</h1>\n<p>{}</p>\n",
        escape(page.subtitle)
    );
    for alert in page.alerts {
        let _ = writeln!(out, "<p class=\"alert\" role=\"alert\">{}</p>", escape(alert));
    }
    out.push_str("<nav aria-label=\"Sections\"><ol>\n");
    for section in page.sections {
        let _ = writeln!(
            out,
            "<li><a href=\"#{}\">{}</a></li>",
            section.id,
            escape(section.title)
        );
    }
    out.push_str("</ol></nav>\n</header>\n<main>\n");
    for section in page.sections {
        write_section(&mut out, section);
    }
    out.push_str("</main>\n<script type=\"application/json\" id=\"data\">");
    // In JSON a `<` stands in strings only, so its escape says the same, and no text can end this element.
    out.push_str(&page.data.replace('<', "\\u003c"));
    out.push_str("</script>\n</body>\n</html>\n");
    out
}

fn write_section(out: &mut String, section: &Section) {
    let (id, title) = (section.id, escape(section.title));
    let _ = writeln!(out, "<section aria-labelledby=\"{id}\">\n<h2 id=\"{id}\">{title}</h2>");
    for block in &section.blocks {
        write_block(out, block);
    }
    out.push_str("</section>\n");
}

fn write_block(out: &mut String, block: &Block) {
    let _ = match block {
        Block::Heading(text) => writeln!(out, "<h3>{}</h3>", escape(text)),
        Block::Text(text) => writeln!(out, "<p>{}</p>", escape(text)),
        Block::Verdict(text) => {
            let (head, figures) = verdict_parts(text);
            writeln!(
                out,
                "<p class=\"verdict\"><strong>{}</strong>{}</p>",
                escape(head),
                escape(figures)
            )
        }
        Block::Empty(text) => writeln!(out, "<p class=\"empty\">{}</p>", escape(text)),
        Block::Code(text) => writeln!(out, "<pre tabindex=\"0\"><code>{}</code></pre>", escape(text)),
        Block::Summary(cards) => {
            out.push_str("<div class=\"cards\">\n");
            cards.iter().for_each(|card| write_card(out, card));
            writeln!(out, "</div>")
        }
        Block::Legend(items) => {
            out.push_str("<ul class=\"legend\">");
            items.iter().for_each(|item| write_legend_item(out, item));
            writeln!(out, "</ul>")
        }
        Block::Pictures(pictures) => {
            out.push_str("<div class=\"pictures\">\n");
            pictures.iter().for_each(|picture| write_picture(out, picture));
            writeln!(out, "</div>")
        }
        Block::Table(table) => {
            write_table(out, table);
            Ok(())
        }
        Block::Figures(table) => {
            let _ = writeln!(out, "<details><summary>{} (table)</summary>", escape(&table.caption));
            write_table(out, table);
            writeln!(out, "</details>")
        }
        Block::Definitions(definitions) => {
            out.push_str("<dl>\n");
            for (word, meaning) in definitions {
                let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(word), escape(meaning));
            }
            writeln!(out, "</dl>")
        }
    };
}

fn write_card(out: &mut String, card: &Card) {
    let _ = writeln!(
        out,
        "<article class=\"card\">\n<h4>{}{}</h4>\n<p class=\"note\">{}</p>\n<dl>",
        swatch(Swatch::Arm(card.arm)),
        escape(&card.name),
        escape(&card.note)
    );
    for number in &card.numbers {
        let _ = writeln!(
            out,
            "<div><dt>{}<span>{}</span></dt><dd><b>{}</b> {}<small>{}</small></dd></div>",
            number.reader,
            number.what,
            escape(&number.value),
            number.unit,
            escape(&number.interval)
        );
    }
    out.push_str("</dl>\n</article>\n");
}

fn write_legend_item(out: &mut String, item: &LegendItem) {
    let _ = write!(out, "<li>{}{}</li>", swatch(item.swatch), escape(&item.text));
}

fn swatch(swatch: Swatch) -> String {
    let (drawing, width) = match swatch {
        Swatch::Arm(arm) => {
            let path = marker_path(arm, (14.0, 7.0));
            let style = arm % ARM_STYLES;
            let line = format!("<line class=\"line solid a{style}\" x1=\"0\" y1=\"7\" x2=\"28\" y2=\"7\"/>");
            (format!("{line}<path class=\"dot a{style}\" d=\"{path}\"/>"), 28)
        }
        Swatch::Line(dash) => {
            let line = format!("<line class=\"line {dash} any\" x1=\"0\" y1=\"7\" x2=\"28\" y2=\"7\"/>");
            (line, 28)
        }
        Swatch::Box(class) => {
            let rect = format!("<rect class=\"part {class}\" x=\"0\" y=\"1\" width=\"12\" height=\"12\"/>");
            (rect, 14)
        }
    };
    format!(
        "<svg class=\"swatch\" viewBox=\"0 0 {width} 14\" width=\"{width}\" height=\"14\" aria-hidden=\"true\">{drawing}</svg>"
    )
}

fn write_picture(out: &mut String, picture: &Picture) {
    let class = if picture.is_wide { "wide" } else { "small" };
    let caption = escape(&picture.caption);
    // A wide picture scrolls in its box, and what scrolls must be reachable by keyboard.
    let focus = if picture.is_wide {
        format!(" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"")
    } else {
        String::new()
    };
    let _ = writeln!(
        out,
        "<figure class=\"{class}\"><div class=\"scroll\"{focus}>{}</div><figcaption>{caption}</figcaption></figure>",
        picture.svg
    );
}

fn write_table(out: &mut String, table: &Table) {
    let caption = escape(&table.caption);
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table>\n<caption>{caption}</caption>\n<thead><tr>"
    );
    let class = |is_number: bool| if is_number { " class=\"n\"" } else { "" };
    for column in &table.columns {
        let _ = write!(
            out,
            "<th scope=\"col\"{}>{}</th>",
            class(column.is_number),
            escape(&column.name)
        );
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in &table.rows {
        out.push_str(match row.tone {
            Tone::Plain => "<tr>",
            Tone::Good => "<tr class=\"good\">",
            Tone::Bad => "<tr class=\"bad\">",
            Tone::Faint => "<tr class=\"faint\">",
            Tone::Chosen => "<tr class=\"chosen\">",
        });
        for (at, (cell, column)) in row.cells.iter().zip(&table.columns).enumerate() {
            let is_long = cell.chars().count() > LONG_CHARS_MIN;
            let class = if is_long {
                " class=\"long\""
            } else {
                class(column.is_number)
            };
            let cell = escape(cell);
            let _ = match at {
                0 => write!(out, "<th scope=\"row\"{class}>{cell}</th>"),
                _ => write!(out, "<td{class}>{cell}</td>"),
            };
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}
