//! One line of `baton tap`: columns of fixed width, so that lines that come minutes apart stay aligned.

use coordinator::records::shape::{RecordState, Summary};

use crate::observe::format::{clean, fit, ms, ms_or_dash, time_of_day};
use crate::observe::look::Look;
use crate::observe::records::way;
use crate::observe::table::Align;
use crate::terminal::Paint;

/// Name, columns, and the side that the text keeps to.
const COLUMNS: [(&str, usize, Align); 10] = [
    ("time (UTC)", 12, Align::Left),
    ("seq", 7, Align::Right),
    ("step", 11, Align::Left),
    ("outcome", 16, Align::Left),
    ("lane", 11, Align::Left),
    ("nodes", 20, Align::Left),
    ("tokens", 11, Align::Right),
    ("TTFT ms", 8, Align::Right),
    ("ITL p50/max", 12, Align::Right),
    ("e2e ms", 9, Align::Right),
];
const STEP: usize = 2;

pub fn heading(is_all: bool, look: Look) -> String {
    let names = COLUMNS.map(|(name, _, _)| name.to_owned());
    let line = joined(names, is_all, "why");
    format!("{}\n", look.terminal.paint(&line, Paint::Dim))
}

pub fn line(record: &Summary, is_all: bool, look: Look) -> String {
    let (outcome, paint) = outcome(record);
    let itl = match (record.itl_p50_ms, record.itl_max_ms) {
        (None, None) => "-".to_owned(),
        (p50, max) => format!("{}/{}", ms_or_dash(p50), ms_or_dash(max)),
    };
    let cells = [
        time_of_day(record.received_unix_ms),
        record.seq.to_string(),
        step(record).to_owned(),
        outcome.to_owned(),
        record.lane.to_string(),
        way(&record.serving),
        format!("{}>{}", record.serving.prompt_tokens, record.serving.output_tokens),
        ms_or_dash(record.ttft_ms),
        itl,
        ms(record.e2e_ms),
    ];
    let line = joined(cells, is_all, &why(record));
    format!("{}\n", look.terminal.paint(line.trim_end(), paint))
}

fn joined(cells: [String; COLUMNS.len()], is_all: bool, last: &str) -> String {
    let mut line = String::new();
    for (at, (cell, (_, columns, side))) in cells.iter().zip(COLUMNS).enumerate() {
        if at == STEP && !is_all {
            continue;
        }
        let cell = fit(&clean(cell), columns);
        line.push_str(&match side {
            Align::Left => format!("{cell:<columns$} "),
            Align::Right => format!("{cell:>columns$} "),
        });
    }
    line.push_str(&clean(last));
    line
}

/// The event that the line is about.
fn step(record: &Summary) -> &'static str {
    match record.state {
        RecordState::Received | RecordState::Queued | RecordState::Placed => "received",
        RecordState::Streaming => "first token",
        RecordState::Ended => "ended",
    }
}

fn outcome(record: &Summary) -> (&str, Paint) {
    match record.outcome.as_deref() {
        None => ("-", Paint::Dim),
        Some("ok") if record.breached.is_empty() && record.stall_count == 0 => ("ok", Paint::None),
        Some("ok") => ("ok", Paint::Warn),
        Some("cancelled") => ("cancelled", Paint::Dim),
        Some(other) => (other, Paint::Bad),
    }
}

/// Text for a request that broke a limit, failed or stalled. The others have none.
fn why(record: &Summary) -> String {
    let mut parts = Vec::new();
    parts.extend(record.error.clone());
    if !record.breached.is_empty() {
        parts.push(format!("breached {}", record.breached.join(", ")));
    }
    if record.stall_count > 0 {
        let s = if record.stall_count == 1 { "" } else { "s" };
        parts.push(format!("{} stall{s}", record.stall_count));
    }
    if let (Some(because), false) = (&record.slow_because, parts.is_empty()) {
        parts.push(because.clone());
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use coordinator::records::shape::Serving;

    fn record(seq: u64, nodes: (&str, &str)) -> Summary {
        Summary {
            seq,
            state: RecordState::Ended,
            outcome: Some("ok".into()),
            lane: "interactive".into(),
            serving: Serving {
                prefill_node: Some(nodes.0.to_owned()),
                decode_node: Some(nodes.1.to_owned()),
                ..Serving::default()
            },
            ttft_ms: Some(281.0),
            e2e_ms: 640.2,
            breached: vec!["ttft".into()],
            slow_because: Some("prefill_forward took\x1b[2J long".to_owned()),
            ..Summary::default()
        }
    }

    #[test]
    fn lines_are_aligned_with_their_heading() {
        let look = Look::plain(100);
        let short = record(1, ("p", "d"));
        let long = record(1_234_567, ("a-prefill-node-with-a-name", "a-decode-node"));
        for is_all in [false, true] {
            let heading = heading(is_all, look);
            let at = heading.find("why").expect("the last column");
            for line in [line(&short, is_all, look), line(&long, is_all, look)] {
                assert_eq!(line.find("breached ttft"), Some(at), "{heading}{line}");
                assert!(!line.contains('\x1b') && line.ends_with('\n'), "{line:?}");
            }
        }
    }

    #[test]
    fn a_cause_is_given_only_where_something_was_wrong() {
        let mut fine = record(1, ("p", "d"));
        fine.breached.clear();
        assert_eq!(why(&fine), "");
        fine.stall_count = 2;
        assert!(why(&fine).contains("2 stalls") && why(&fine).contains("prefill_forward"));
    }
}
