//! One request and its answer: from the bytes that are sent to the record.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::{Bytes, Incoming};
use serde_json::Value;
use serving_core::request::Lane;
use workload::record::{Outcome, RequestRecord, RunPart};

use super::answer::{Answer, AnswerReader};
use super::connections::Connections;
use super::plan::Endpoint;

const ERROR_BODY_BYTES_MAX: usize = 64 << 10;
const ERROR_CHARS_MAX: usize = 300;
/// Room for the times of one answer at the start. More grows with the answer.
const TIMES_AT_START_MAX: u32 = 4096;

/// What all requests of a run share.
#[derive(Debug)]
pub(super) struct Exchanges {
    pub connections: Connections,
    pub endpoint: Endpoint,
    /// Times count from here.
    pub start: Instant,
    pub timeout: Duration,
}

/// A request that is ready to be sent.
#[derive(Debug)]
pub(super) struct Prepared {
    pub index: usize,
    pub id: String,
    pub body: Bytes,
    pub lane: Lane,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Give the answer up after so many tokens.
    pub cancel_after: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Exchanged {
    pub index: usize,
    pub record: RequestRecord,
    pub text: String,
}

/// What is known of an answer while it comes.
#[derive(Debug, Default)]
struct Progress {
    tokens: Vec<Duration>,
    text: String,
    answer: Option<Answer>,
}

impl Exchanges {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Sends the request and reads its answer to the end. `scheduled` is when it was due.
    pub(super) async fn exchange(self: Arc<Self>, request: Prepared, scheduled: Duration) -> Exchanged {
        let lane = (request.lane == Lane::Batch).then(|| request.lane.name());
        let mut progress = Progress {
            tokens: Vec::with_capacity(request.output_tokens.min(TIMES_AT_START_MAX) as usize),
            ..Progress::default()
        };
        let sent = self.now();
        let whole = async {
            match self.connections.post(&request.id, lane, request.body).await {
                Ok(response) => self.read(response, request.cancel_after, &mut progress).await,
                Err(error) => failed(format!("no answer: {}", chain(&error))),
            }
        };
        let outcome = tokio::time::timeout(self.timeout, whole).await;
        let ended = self.now();
        let outcome = outcome.unwrap_or_else(|_| failed(format!("no end within {} s", self.timeout.as_secs())));
        let Answer { text, usage } = progress.answer.unwrap_or(Answer {
            text: progress.text,
            ..Answer::default()
        });
        let is_whole = outcome == Outcome::Completed;
        let record = RequestRecord {
            id: request.id,
            // The run's end decides what belongs to it.
            part: RunPart::Measured,
            lane: request.lane,
            prompt_tokens: usage.prompt_tokens.unwrap_or(request.prompt_tokens),
            cached_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens.unwrap_or(progress.tokens.len() as u32),
            scheduled,
            sent,
            tokens: progress.tokens,
            ended,
            output_hash: is_whole.then(|| twox_hash::XxHash3_64::oneshot(text.as_bytes())),
            outcome,
            server: None,
        };
        Exchanged {
            index: request.index,
            record,
            text,
        }
    }

    async fn read(
        &self,
        response: http::Response<Incoming>,
        cancel_after: Option<usize>,
        progress: &mut Progress,
    ) -> Outcome {
        let (head, mut body) = response.into_parts();
        if head.status != StatusCode::OK {
            return refusal(head.status, body).await;
        }
        let kind = head.headers.get(header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if !kind.starts_with("text/event-stream") {
            return failed(format!("the server does not stream: content-type is `{kind}`"));
        }
        let mut reader = AnswerReader::new(self.endpoint);
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else {
                progress.text = reader.text().to_owned();
                return failed("the connection broke in the middle of the stream".to_owned());
            };
            let Some(bytes) = frame.data_ref() else {
                continue;
            };
            let now = self.now();
            match reader.push(bytes) {
                Ok(count) => progress.tokens.extend(std::iter::repeat_n(now, count)),
                Err(error) => {
                    progress.text = reader.text().to_owned();
                    return failed(error.to_string());
                }
            }
            if cancel_after.is_some_and(|count| progress.tokens.len() >= count) {
                progress.text = reader.text().to_owned();
                // The connection closes with the body.
                return Outcome::Cancelled;
            }
        }
        match reader.finish() {
            Ok(answer) => {
                progress.answer = Some(answer);
                Outcome::Completed
            }
            Err(error) => failed(error.to_string()),
        }
    }
}

async fn refusal(status: StatusCode, body: Incoming) -> Outcome {
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        // Read, so that the connection can be used again.
        let _ = Limited::new(body, ERROR_BODY_BYTES_MAX).collect().await;
        return Outcome::Refused {
            status: status.as_u16(),
        };
    }
    let body = Limited::new(body, ERROR_BODY_BYTES_MAX).collect().await;
    let text = body.map(|body| body.to_bytes()).unwrap_or_default();
    let parsed: Value = serde_json::from_slice(&text).unwrap_or_default();
    let message = parsed["error"]["message"].as_str().or(parsed["message"].as_str());
    let message = message.map_or_else(|| String::from_utf8_lossy(&text).into_owned(), str::to_owned);
    failed(format!("{status}: {message}"))
}

fn failed(error: String) -> Outcome {
    Outcome::Failed {
        error: error.chars().take(ERROR_CHARS_MAX).collect(),
    }
}

/// An error with its causes. Hyper's own words name the stage only.
fn chain(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        words.push_str(": ");
        words.push_str(&inner.to_string());
        cause = inner.source();
    }
    words
}
