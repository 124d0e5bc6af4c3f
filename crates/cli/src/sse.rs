//! Server-sent events from a byte stream: `event:` and `data:` lines, which the network may cut anywhere.

use anyhow::ensure;

/// One event of a chat stream is a few hundred bytes, and the last one with its metrics a few thousand. The page of a
/// cluster of a hundred nodes is smaller than this, too.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// One event. `name` is empty when the server gave none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SseEvent {
    pub name: String,
    pub data: String,
}

/// Collects bytes, and returns each event that is complete and has data.
#[derive(Debug, Default)]
pub struct SseReader {
    buffer: Vec<u8>,
}

impl SseReader {
    /// # Errors
    /// An event of more than 1 MiB, or one that is not UTF-8: it is not from our server.
    pub fn push(&mut self, bytes: &[u8]) -> anyhow::Result<Vec<SseEvent>> {
        self.buffer.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some((length, gap)) = event_end(&self.buffer) {
            let event: Vec<u8> = self.buffer.drain(..length + gap).take(length).collect();
            let event = String::from_utf8(event)?;
            // Comment lines (`: keep-alive`) and other fields are not data.
            let data: Vec<&str> = event
                .lines()
                .filter_map(|line| line.strip_prefix("data:"))
                .map(|data| data.strip_prefix(' ').unwrap_or(data))
                .collect();
            let name = event.lines().rev().find_map(|line| line.strip_prefix("event:"));
            if !data.is_empty() {
                events.push(SseEvent {
                    name: name.unwrap_or_default().trim().to_owned(),
                    data: data.join("\n"),
                });
            }
        }
        ensure!(
            self.buffer.len() <= EVENT_BYTES_MAX,
            "an event of more than {EVENT_BYTES_MAX} bytes: is this a baton server?"
        );
        Ok(events)
    }
}

/// Length of the first event and of the empty line after it.
fn event_end(buffer: &[u8]) -> Option<(usize, usize)> {
    let unix = buffer.windows(2).position(|window| window == b"\n\n").map(|at| (at, 2));
    let dos = buffer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .map(|at| (at, 4));
    unix.into_iter().chain(dos).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str =
        ": hello\n\ndata: {\"a\":1}\n\ndata:{\"b\":\"ö\"}\r\n\r\nevent: x\ndata: two\ndata: lines\n\ndata: [DONE]\n\n";

    #[test]
    fn events_are_the_same_however_the_stream_is_cut() {
        let expected = [
            ("", "{\"a\":1}"),
            ("", "{\"b\":\"ö\"}"),
            ("x", "two\nlines"),
            ("", "[DONE]"),
        ];
        for size in 1..STREAM.len() {
            let mut reader = SseReader::default();
            let pieces = STREAM.as_bytes().chunks(size);
            let events: Vec<SseEvent> = pieces.flat_map(|piece| reader.push(piece).expect("valid")).collect();
            let events: Vec<(&str, &str)> = events.iter().map(|e| (e.name.as_str(), e.data.as_str())).collect();
            assert_eq!(events, expected, "cut every {size} bytes");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut reader = SseReader::default();
        assert!(reader.push(&vec![b'x'; EVENT_BYTES_MAX + 1]).is_err());
    }
}
