//! Server-sent events of an answer: the events of each token as soon as it is there, then the events of the end or of an error.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use futures::stream;
use tracing::Span;

use super::answering::{Answering, note_end, note_finish_reasons};
use super::error::ApiError;
use super::late;
use super::run::OutToken;

/// Tells nginx-like proxies not to collect the stream.
const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Dropped with the connection. Then the run in it cancels, and the record says so.
struct Events {
    parts: Answering,
    /// Frames after the last token.
    tail: VecDeque<Bytes>,
    is_ended: bool,
    finished: Vec<OutToken>,
}

pub fn response(parts: Answering) -> Response {
    let events = Events {
        parts,
        tail: VecDeque::new(),
        is_ended: false,
        finished: Vec::new(),
    };
    let frames = stream::unfold(events, |mut events| async move {
        let frame = events.next().await?;
        Some((Ok::<Bytes, Infallible>(frame), events))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(NO_BUFFERING, HeaderValue::from_static("no"));
    response
}

impl Events {
    async fn next(&mut self) -> Option<Bytes> {
        self.parts.pace.asked();
        if self.is_ended {
            return self.next_of_tail();
        }
        let next = match self.parts.first.take() {
            Some(first) => Ok(Some(first)),
            None => self.parts.run.next().await,
        };
        match next {
            Ok(Some(out)) => {
                let Answering { reply, run, .. } = &mut self.parts;
                let frame = reply.token(run, &out);
                self.parts.pace.token(&out);
                if out.finish.is_some() {
                    self.finished.push(out);
                }
                Some(frame)
            }
            Ok(None) => {
                self.end_well();
                self.next_of_tail()
            }
            Err(error) => {
                self.end_badly(&error);
                self.tail.pop_front()
            }
        }
    }

    /// The last frame is the end of the answer.
    fn next_of_tail(&mut self) -> Option<Bytes> {
        let frame = self.tail.pop_front()?;
        if self.tail.is_empty() && self.parts.record.facts().outcome == Some("ok") {
            self.parts.pace.ended();
        }
        Some(frame)
    }

    fn end_well(&mut self) {
        self.is_ended = true;
        let parts = &mut self.parts;
        let times = note_end(&parts.record, &parts.run, &mut parts.pace, true);
        parts
            .record
            .update(|generation| note_finish_reasons(generation, self.finished.iter()));
        self.tail.extend(parts.reply.end(&parts.run, &times));
        // The outcome is set last: if something above panics, the answer has not ended well.
        parts.record.facts().outcome = Some("ok");
    }

    fn end_badly(&mut self, error: &ApiError) {
        self.is_ended = true;
        self.parts.record.failed(error);
        let parts = &mut self.parts;
        let told = parts.record.told(error.clone());
        self.tail.extend(parts.reply.failed(&parts.run, &told));
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let parts = &mut self.parts;
        parts.egress = Span::none();
        let is_whole = parts.record.facts().outcome == Some("ok");
        if is_whole {
            late::answered(&parts.record, &mut parts.run);
        } else {
            // Broken off, by the client or here, or failed in mid-stream. What was delivered until then still counts.
            note_end(&parts.record, &parts.run, &mut parts.pace, true);
        }
    }
}
