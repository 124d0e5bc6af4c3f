//! Tests of the drawn waterfall: alignment, sums, marks, and pages that are cut or bent.

use super::*;
use crate::observe::records;
use crate::observe::test_kit::bent;
use serde_json::Value;

const PAGE: &str = include_str!("../../../testdata/waterfall.json");

fn page() -> Waterfall {
    records::parse(&serde_json::from_str::<Value>(PAGE).expect("JSON")).expect("as the contract says")
}

fn row<'a>(text: &'a str, name: &str) -> &'a str {
    let drawn = text.lines().skip_while(|line| !line.contains("start ms"));
    let mut rows = drawn.filter(|line| line.contains(name));
    rows.next().unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

/// Column of the first and behind the last character of the bar.
fn bar_of(text: &str, name: &str) -> (usize, usize) {
    let row: Vec<char> = row(text, name).chars().collect();
    let is_bar = |c: &char| "▏▎▍▌▋▊▉█▐▕▓┆!x".contains(*c);
    let from = row.iter().position(is_bar).expect("a bar");
    let to = row.iter().rposition(is_bar).expect("a bar");
    (from, to + 1)
}

#[test]
fn rows_are_aligned_indented_and_no_wider_than_the_terminal() {
    for columns in [60, 80, 100, 200] {
        let text = render(&page(), SPANS_MAX, Look::plain(columns));
        let heading = row(&text, "start ms");
        let figures_end = heading.find("took ms").expect("a heading") + "took ms".len();
        let rows = text.lines().skip_while(|line| !line.contains("start ms")).skip(1);
        for (span, line) in page().spans.iter().zip(rows) {
            assert!(width(line) <= columns, "{columns}: {line}");
            let figures: String = line.chars().take(figures_end).collect();
            assert!(
                figures.ends_with(&ms(span.end_ms - span.start_ms)),
                "{columns}: {figures:?}"
            );
            assert!(line.starts_with(&span.process), "{line}");
        }
    }
    let text = render(&page(), SPANS_MAX, Look::plain(100));
    let column = |name: &str| row(&text, name).find(name).expect("in its row");
    assert_eq!(column("prefill.forward"), column("prefill.queue"), "{text}");
    assert!(column("prefill.forward") > column("tokenize"), "{text}");
}

#[test]
fn bars_follow_the_times_and_the_overlap_is_visible() {
    let text = render(&page(), SPANS_MAX, Look::plain(120));
    let (forward, send, recv) = (
        bar_of(&text, "prefill.forward"),
        bar_of(&text, "kv.send"),
        bar_of(&text, "kv.recv"),
    );
    assert!(
        forward.0 <= send.0 && send.0 < forward.1 && forward.1 <= send.1,
        "{text}"
    );
    assert!(send.0 <= recv.0, "{text}");
    assert!(
        row(&text, "kv.send").contains('▓') && !row(&text, "prefill.forward").contains('▓'),
        "{text}"
    );
    assert!(row(&text, "prefill.forward").contains('┆'), "{text}");
    assert!(row(&text, "decode.loop").contains('!'), "{text}");
    let (from, to) = bar_of(&text, "chat smollm2");
    assert!(to - from > 40, "the root is as long as the request: {text}");
}

#[test]
fn ascii_means_ascii() {
    let look = Look {
        is_ascii: true,
        ..Look::plain(100)
    };
    let text = render(&page(), SPANS_MAX, look);
    let rows = text.lines().skip_while(|line| !line.contains("start ms"));
    let rows: Vec<&str> = rows.take_while(|line| !line.is_empty()).collect();
    assert!(rows.len() > 10 && rows.iter().all(|line| line.is_ascii()), "{text}");
}

#[test]
fn a_span_before_its_parent_is_marked_and_drawn() {
    let mut fall = page();
    let at = fall
        .spans
        .iter()
        .position(|span| span.name == "prefill.queue")
        .expect("there");
    fall.spans[at].start_ms = -3.0;
    let text = render(&fall, SPANS_MAX, Look::plain(100));
    let plain = render(&page(), SPANS_MAX, Look::plain(100));
    assert!(row(&text, "prefill.queue").contains("<     -3.0"), "{text}");
    assert!(text.lines().any(|line| line.starts_with("< prefill.queue")), "{text}");
    assert!(!plain.contains('<'), "{plain}");
    bar_of(&text, "prefill.queue");
}

#[test]
fn a_long_list_is_cut_and_says_so() {
    let mut fall = page();
    let span = fall.spans[3].clone();
    fall.spans.resize(250, span);
    let text = render(&fall, SPANS_MAX, Look::plain(100));
    assert!(text.contains("and 50 more spans"), "{text}");
    let all = render(&fall, usize::MAX, Look::plain(100));
    assert_eq!(all.lines().count(), text.lines().count() + 49);
}

#[test]
fn what_is_missing_is_said() {
    let mut fall = page();
    fall.not_asked = vec![coordinator::records::shape::NotAsked {
        node: "decode-1".to_owned(),
        why: "connection refused".to_owned(),
    }];
    fall.orphan_count = 2;
    let text = render(&fall, SPANS_MAX, Look::plain(100));
    assert!(
        text.contains("decode-1") && text.contains("connection refused") && text.contains("2 spans"),
        "{text}"
    );
    let nothing = render(&Waterfall::default(), SPANS_MAX, Look::plain(100));
    assert!(nothing.contains("No span"), "{nothing}");
}

/// Any byte may be lost or changed on the way: an error or a picture, never a panic.
#[test]
fn bent_pages_do_not_panic() {
    let bytes = PAGE.as_bytes();
    for cut in (0..bytes.len()).step_by(37) {
        assert!(serde_json::from_slice::<Value>(&bytes[..cut]).is_err());
    }
    let bent_pages = bent(PAGE).filter_map(|page| records::parse::<Waterfall>(&page).ok());
    let mut drawn = 0;
    for fall in bent_pages {
        let text = render(&fall, SPANS_MAX, Look::plain(80));
        assert!(!text.contains('\x1b'));
        drawn += 1;
    }
    assert!(drawn > 300, "only {drawn} bent pages were still pages");
}
