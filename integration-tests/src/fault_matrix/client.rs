//! One streamed request as its client sees it, event by event, down to how its connection ends.

use std::time::{Duration, Instant};

use futures::StreamExt as _;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::token_exact::{Case, kv_hashes};

const RECONNECT_EVERY: Duration = Duration::from_millis(50);

/// Everything that was seen of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub tokens: Vec<u32>,
    /// Of the prompt's blocks, as far as the end of the answer told them.
    pub kv_hashes: Vec<String>,
    /// When each token came, from the start on.
    pub arrivals: Vec<Duration>,
    /// The coordinator's name for the request.
    pub request_id: Option<String>,
    /// How often it had to be sent again before an answer began.
    pub reconnects: usize,
    /// Final events, in order: a finish reason, or an error's code.
    pub terminals: Vec<Terminal>,
    /// Tokens or terminals after the first terminal.
    pub late_events: usize,
    pub is_done_seen: bool,
    pub ending: Option<Ending>,
    pub took: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Terminal {
    Finished(String),
    Error(String),
}

/// How the connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The body came to its end.
    Whole,
    /// An answer that is no stream: the status.
    Status(u16),
    /// The connection broke.
    Broken(String),
    /// This client left, as it was told to.
    Left,
    /// Nothing more came within the limit.
    Stuck,
}

/// What a client does and how long it waits.
#[derive(Debug)]
pub struct Manner {
    /// Leaves when this fires.
    pub leave: oneshot::Receiver<()>,
    pub within: Duration,
    /// Sent with the request as its own limit.
    pub deadline: Option<Duration>,
    /// A connection that is refused or ends before its answer begins, and a 503, are tried again for so long: what every
    /// client library does.
    pub reconnects_within: Duration,
}

impl Manner {
    /// Stays to the end: a sender that is gone asks for nothing.
    pub fn staying(within: Duration) -> Self {
        Self {
            leave: oneshot::channel().1,
            within,
            deadline: None,
            reconnects_within: Duration::ZERO,
        }
    }
}

/// Streams one completion.
pub async fn stream(client: &reqwest::Client, base_url: &str, case: &Case, mut manner: Manner) -> Seen {
    let mut seen = Seen::default();
    let started = Instant::now();
    let (within, mut leave) = (
        manner.within,
        std::mem::replace(&mut manner.leave, oneshot::channel().1),
    );
    let ending = tokio::select! {
        ending = read(client, base_url, (case, &manner), &mut seen) => ending,
        Ok(()) = &mut leave => Ending::Left,
        () = tokio::time::sleep(within) => Ending::Stuck,
    };
    seen.ending = Some(ending);
    seen.took = started.elapsed();
    seen
}

async fn read(client: &reqwest::Client, base_url: &str, (case, manner): (&Case, &Manner), seen: &mut Seen) -> Ending {
    let begun = Instant::now();
    let mut body = case.body();
    body["stream"] = json!(true);
    let response = loop {
        let mut request = client.post(format!("{base_url}/v1/completions")).json(&body);
        if let Some(deadline) = manner.deadline {
            request = request.header("x-request-timeout-ms", deadline.as_millis().to_string());
        }
        let sent = request.send().await;
        let is_refused = sent
            .as_ref()
            .map_or(true, |response| response.status() == StatusCode::SERVICE_UNAVAILABLE);
        if !is_refused || begun.elapsed() >= manner.reconnects_within {
            break sent;
        }
        seen.reconnects += 1;
        tokio::time::sleep(RECONNECT_EVERY).await;
    };
    let response = match response {
        Ok(response) => response,
        Err(error) => return Ending::Broken(error.to_string()),
    };
    let request_id = response.headers().get("x-request-id");
    seen.request_id = request_id.and_then(|id| id.to_str().ok()).map(str::to_owned);
    if !response.status().is_success() {
        let status = response.status().as_u16();
        let body: Value = response.json().await.unwrap_or_default();
        seen.terminals.push(Terminal::Error(code(&body["error"])));
        return Ending::Status(status);
    }
    let mut events = Events::since(begun);
    let mut body = response.bytes_stream();
    while let Some(piece) = body.next().await {
        match piece {
            Ok(piece) => events.take(&piece, seen),
            Err(error) => return Ending::Broken(error.to_string()),
        }
    }
    Ending::Whole
}

/// Server-sent events out of pieces of a body.
#[derive(Debug)]
struct Events {
    rest: Vec<u8>,
    begun: Instant,
}

impl Events {
    fn since(begun: Instant) -> Self {
        Self {
            rest: Vec::new(),
            begun,
        }
    }

    fn take(&mut self, piece: &[u8], seen: &mut Seen) {
        self.rest.extend_from_slice(piece);
        while let Some(end) = self.rest.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.rest.drain(..end + 2).collect();
            let event = String::from_utf8_lossy(&event);
            if let Some(data) = event.trim_end().strip_prefix("data: ") {
                seen.event(data, self.begun.elapsed());
            }
        }
    }
}

impl Seen {
    fn event(&mut self, data: &str, at: Duration) {
        if self.is_done_seen {
            self.late_events += 1;
        }
        if data == "[DONE]" {
            self.is_done_seen = true;
            return;
        }
        let event: Value = serde_json::from_str(data).unwrap_or_default();
        if let Some(error) = event.get("error") {
            self.terminals.push(Terminal::Error(code(error)));
            return;
        }
        self.kv_hashes.extend(kv_hashes(&event));
        let choice = &event["choices"][0];
        let tokens = choice["token_ids"].as_array().into_iter().flatten();
        let tokens: Vec<u32> = tokens
            .filter_map(Value::as_u64)
            .filter_map(|token| u32::try_from(token).ok())
            .collect();
        if !tokens.is_empty() && !self.terminals.is_empty() {
            self.late_events += 1;
        }
        self.arrivals.extend(tokens.iter().map(|_| at));
        self.tokens.extend(tokens);
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.terminals.push(Terminal::Finished(reason.to_owned()));
        }
    }
}

fn code(error: &Value) -> String {
    let code = error["code"].as_str().or_else(|| error["type"].as_str());
    code.unwrap_or("an error without a code").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pieces: &[&str]) -> Seen {
        let (mut seen, mut events) = (Seen::default(), Events::since(Instant::now()));
        for piece in pieces {
            events.take(piece.as_bytes(), &mut seen);
        }
        seen
    }

    #[test]
    fn events_are_read_however_they_are_cut() {
        let whole = seen(&[
            "data: {\"choices\":[{\"token_ids\":[7]}]}\n\ndata: {\"choices\":[{\"token_ids\":[8],\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n",
        ]);
        assert_eq!(whole.tokens, [7, 8]);
        assert_eq!(whole.terminals, [Terminal::Finished("length".to_owned())]);
        assert!(whole.is_done_seen);
        let cut = seen(&["data: {\"choices\":[{\"tok", "en_ids\":[7]}]}\n", "\n"]);
        assert_eq!((cut.tokens.as_slice(), cut.arrivals.len()), ([7].as_slice(), 1));
    }

    #[test]
    fn a_token_after_the_end_and_a_second_end_are_seen() {
        let late = seen(&[
            "data: {\"choices\":[{\"token_ids\":[8],\"finish_reason\":\"length\"}]}\n\n",
            "data: {\"choices\":[{\"token_ids\":[9]}]}\n\n",
            "data: {\"error\":{\"code\":\"node_lost\"}}\n\n",
        ]);
        assert_eq!(late.late_events, 1);
        assert_eq!(late.terminals.len(), 2);
    }
}
