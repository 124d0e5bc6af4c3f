//! Tests of one frame: it fits the screen, its figures carry their n, what is old says so.

use super::*;
use crate::observe::format::width;
use crate::observe::records;
use crate::observe::top::watch::{Pages, Update};
use crate::terminal::Terminal;
use coordinator::records::shape::RecordState;

fn state(running_count: u64, now: Instant) -> State {
    let page = serde_json::from_str(include_str!("../../../testdata/cluster.json")).expect("JSON");
    let record = |seq: u64, state: RecordState| Summary {
        seq,
        state,
        outcome: (state == RecordState::Ended).then(|| "ok".into()),
        received_unix_ms: 1e15,
        ttft_ms: Some(seq as f64),
        e2e_ms: seq as f64 * 10.0,
        ..Summary::default()
    };
    let pages = Pages {
        cluster: records::parse(&page).expect("fits"),
        running: (1..=running_count)
            .map(|seq| record(seq, RecordState::Streaming))
            .collect(),
        ended: (1000..1010).map(|seq| record(seq, RecordState::Ended)).collect(),
    };
    let mut state = State::new(now);
    state.apply(Update::Pages(Box::new(pages)), now);
    state
}

#[test]
fn a_frame_fits_any_screen() {
    let now = Instant::now();
    let state = state(100, now);
    for (columns, rows) in [(200, 60), (80, 24), (40, 10), (1, 1), (0, 0)] {
        let look = Look {
            width: columns,
            ..Look::plain(columns)
        };
        let lines = lines(&state, "http://x", (now, rows), look);
        assert!(lines.len() <= rows, "{columns}x{rows}: {lines:#?}");
        assert!(
            lines.iter().all(|line| width(line) <= columns),
            "{columns}x{rows}: {lines:#?}"
        );
    }
}

#[test]
fn the_oldest_requests_are_shown_and_the_rest_counted() {
    let now = Instant::now();
    let text = lines(&state(100, now), "http://x", (now, 30), Look::plain(100)).join("\n");
    assert!(text.contains("1000.0") && text.contains("more"), "{text}");
    let ttft = text.lines().find(|line| line.starts_with("TTFT")).expect("a row");
    let figures: Vec<&str> = ttft.split_whitespace().skip(1).collect();
    assert_eq!(figures, ["1004.0", "1009.0", "10"], "p50, p99, n");
}

#[test]
fn what_is_old_or_missing_says_so() {
    let now = Instant::now();
    let mut state = state(0, now);
    let later = now + STALE_AFTER + Duration::from_secs(2);
    let fresh = lines(&state, "http://x", (now, 40), Look::plain(100)).join("\n");
    let old = lines(&state, "http://x", (later, 40), Look::plain(100)).join("\n");
    assert!(old.contains("no news for 7 s") && !fresh.contains("no news"), "{old}");
    state.missed = 12;
    let missed = lines(&state, "http://x", (now, 40), Look::plain(100)).join("\n");
    assert!(missed.contains("12 events"), "{missed}");
    let nothing = lines(&State::new(now), "http://x", (now, 40), Look::plain(100)).join("\n");
    assert!(nothing.contains("waiting for the first page"), "{nothing}");
}

#[test]
fn the_kv_bar_has_its_width_and_shows_a_single_block() {
    let bar = |used: u64, cached: u64, total: u64| kv_bar(Some(KvUse { used, cached, total }), true);
    assert_eq!(bar(0, 0, 1000), ".".repeat(KV_BAR_CELLS));
    assert!(bar(1, 0, 1000).starts_with("#."));
    assert_eq!(bar(500, 500, 1000), "#".repeat(12) + &"+".repeat(12));
    for odd in [bar(u64::MAX, u64::MAX, 1), bar(1, 1, 0)] {
        assert_eq!(odd.len(), KV_BAR_CELLS);
    }
}

#[test]
fn colours_take_no_columns_and_are_closed() {
    let painted = Terminal::coloured().paint("abcdef", Paint::Bad);
    assert_eq!(truncate_str(&painted, 6, ""), painted);
    assert_eq!(truncate_str(&painted, 3, ""), "\x1b[31mabc\x1b[0m");
    assert_eq!(truncate_str("abc", 2, ""), "ab");
}
