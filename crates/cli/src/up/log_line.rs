//! A process's JSON log line in the form in which a person reads it. Any other line is shown as it is.

use serde_json::{Map, Value};

use crate::observe::format::clean;
use crate::terminal::Terminal;

/// The source of the event is only in the log file. The terminal shows what happened.
const LEFT_OUT: [&str; 6] = ["timestamp", "level", "message", "target", "span", "spans"];

/// `14:03:22 INFO listening address=127.0.0.1:7420`; the time is UTC, as in the log files.
pub fn for_people(line: &str, terminal: Terminal) -> String {
    match serde_json::from_str::<Map<String, Value>>(line) {
        Ok(event) if event.contains_key("level") => render(&event, terminal),
        _ => clean(line),
    }
}

fn render(event: &Map<String, Value>, terminal: Terminal) -> String {
    let text = |key: &str| event.get(key).and_then(Value::as_str).unwrap_or_default();
    // 2026-11-21T14:03:22.123456Z
    let time = text("timestamp").get(11..19).unwrap_or_default();
    let level = match text("level") {
        level @ ("WARN" | "ERROR") => terminal.bold(level),
        level => clean(level),
    };
    // A client may have chosen a part of a text: no control character of it reaches the terminal.
    let mut parts = vec![terminal.dim(&clean(time)), level, clean(text("message"))];
    let fields = event.iter().filter(|(key, _)| !LEFT_OUT.contains(&key.as_str()));
    parts.extend(fields.map(|(key, value)| terminal.dim(&clean(&format!("{key}={}", value_text(value))))));
    parts.retain(|part| !part.is_empty());
    parts.join(" ")
}

fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) if !text.is_empty() && !text.contains([' ', '"', '\n']) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_becomes_a_line_and_other_text_stays() {
        let line = r#"{"timestamp":"2026-11-21T14:03:22.1Z","level":"INFO","message":"request done","tokens":3,"why":"a b","target":"x"}"#;
        assert_eq!(
            for_people(line, Terminal::plain()),
            "14:03:22 INFO request done tokens=3 why=\"a b\""
        );
        let hostile = r#"{"level":"INFO","message":"a\u001b[2Jb","field":"\u001b]0;x\u0007"}"#;
        assert_eq!(for_people(hostile, Terminal::plain()), "INFO a?[2Jb field=?]0;x?");
        for other in ["thread 'main' panicked", "{\"a\":1}", "[1]", ""] {
            assert_eq!(for_people(other, Terminal::plain()), other);
        }
    }
}
