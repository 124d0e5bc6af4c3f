//! `baton trace --slowest N`: a ranked table, with the cause of each.

use coordinator::records::Page;
use coordinator::records::shape::Summary;

use crate::observe::format::{ms, ms_or_dash};
use crate::observe::look::Look;
use crate::observe::records::way;
use crate::observe::table::{Cell, Table};
use crate::terminal::Paint;

pub fn render(page: &Page, look: Look) -> String {
    let mut table = Table::new(&[
        ">#",
        ">seq",
        "outcome",
        "nodes",
        ">prompt",
        ">output",
        ">TTFT ms",
        ">ITL max",
        ">e2e ms",
        "slow because",
    ]);
    // The server sorts. The order of its answer is the rank.
    for (at, record) in page.records.iter().enumerate() {
        table.row(vec![
            (at + 1).to_string().into(),
            record.seq.to_string().into(),
            outcome(record),
            way(&record.serving).into(),
            record.serving.prompt_tokens.to_string().into(),
            record.serving.output_tokens.to_string().into(),
            ms_or_dash(record.ttft_ms).into(),
            ms_or_dash(record.itl_max_ms).into(),
            ms(record.e2e_ms).into(),
            cause(record).into(),
        ]);
    }
    let mut text = table.render(look.terminal);
    let (shown, kept) = (page.records.len(), page.kept);
    text.push_str(&format!("{shown} of the {kept} requests that are kept"));
    if page.forgotten > 0 {
        text.push_str(&format!("; {} older ones are forgotten", page.forgotten));
    }
    text.push('\n');
    text
}

fn outcome(record: &Summary) -> Cell {
    let (words, paint) = match (record.outcome.as_deref(), record.breached.is_empty()) {
        (None, _) => (record.state.name().to_owned(), Paint::Dim),
        (Some("ok"), true) => ("ok".to_owned(), Paint::None),
        (Some("ok"), false) => (format!("ok, SLO {}", record.breached.join("+")), Paint::Warn),
        (Some(other), _) => (other.to_owned(), Paint::Bad),
    };
    Cell::new(words).paint(paint)
}

fn cause(record: &Summary) -> String {
    let known = record.slow_because.as_ref().or(record.error.as_ref());
    known.map_or_else(|| "not known".to_owned(), String::clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_record_has_its_rank_and_its_cause() {
        let record = |seq: u64, because: Option<&str>| Summary {
            seq,
            outcome: Some("ok".into()),
            e2e_ms: 1e3 / seq as f64,
            slow_because: because.map(str::to_owned),
            ..Summary::default()
        };
        let page = Page {
            records: vec![record(7, Some("the queue took 900 ms")), record(12_345, None)],
            kept: 2,
            forgotten: 9,
            ..Page::default()
        };
        let text = render(&page, Look::plain(100));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        let at = lines[0].find("slow because").expect("a heading");
        assert!(lines[1][at..].starts_with("the queue") && lines[2].len() > at, "{text}");
        assert!(
            lines[1].trim_start().starts_with("1 ") && lines[2].trim_start().starts_with("2 "),
            "{text}"
        );
        assert!(lines[3].contains('9'), "{text}");
    }
}
