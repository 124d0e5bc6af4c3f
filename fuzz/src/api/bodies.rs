//! Bodies of generation requests: each is answered, or refused with an error that a client of OpenAI's understands.

use axum::http::header;
use serde_json::Value;

use super::{Answer, with_edge};

/// The statuses that a request can get while nothing is full and every node lives.
const STATUSES: [u16; 5] = [200, 400, 404, 413, 415];

pub(crate) fn completions(body: &[u8]) {
    check("/v1/completions", body);
}

pub(crate) fn chat(body: &[u8]) {
    check("/v1/chat/completions", body);
}

pub(crate) fn responses(body: &[u8]) {
    check("/v1/responses", body);
}

fn check(path: &str, body: &[u8]) {
    let answer = with_edge(|edge| {
        edge.says("A wörd\u{1f980}".as_bytes());
        edge.post(path, body)
    });
    assert!(STATUSES.contains(&answer.status.as_u16()), "{}", answer.status);
    match answer.status.as_u16() {
        200 if is_stream(&answer) => check_stream(path, &answer),
        200 => assert!(json(&answer.body).is_object()),
        _ => check_error(&json(&answer.body)),
    }
}

fn is_stream(answer: &Answer) -> bool {
    let kind = answer.headers.get(header::CONTENT_TYPE).map(|kind| kind.as_bytes());
    kind.is_some_and(|kind| kind.starts_with(b"text/event-stream"))
}

fn check_error(body: &Value) {
    let error = &body["error"];
    let has_text = |name: &str| error[name].as_str().is_some_and(|text| !text.is_empty());
    assert!(has_text("message") && has_text("type"), "{body}");
}

fn check_stream(path: &str, answer: &Answer) {
    let events = events(&answer.body);
    let last = events.last().map_or("", |(_, data)| data.as_str());
    match path {
        "/v1/responses" => assert!(last.contains("\"response.completed\"") || last.contains("\"response.incomplete\"")),
        _ => assert_eq!(last, "[DONE]"),
    }
}

pub(super) fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).expect("an answer is JSON")
}

/// Kinds and data of the events, each of which has one line of data, as the specification of server-sent events cuts them.
pub(super) fn events(body: &[u8]) -> Vec<(String, String)> {
    let text = std::str::from_utf8(body).expect("a stream is UTF-8");
    let whole = text.strip_suffix("\n\n").expect("the last event is whole");
    let event = |frame: &str| {
        let (mut kind, mut data) = (None, None);
        // Each of the three ends a line.
        for line in frame.split(['\n', '\r']) {
            match line.split_once(": ") {
                Some(("event", name)) => assert!(kind.replace(name).is_none(), "two kinds: {frame:?}"),
                Some(("data", value)) => assert!(data.replace(value).is_none(), "two lines of data: {frame:?}"),
                _ => panic!("a line of an event is neither its kind nor its data: {frame:?}"),
            }
        }
        let data = data.expect("an event has data");
        assert!(
            data == "[DONE]" || serde_json::from_str::<Value>(data).is_ok(),
            "{data}"
        );
        (kind.unwrap_or_default().to_owned(), data.to_owned())
    };
    whole.split("\n\n").map(event).collect()
}
