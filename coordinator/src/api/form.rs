//! The form of an answer: choices, as completions and chats have them, or the items of a response.

use axum::body::Bytes;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::event_frame::write_event;
use super::reply::Reply;
use super::responses::ResponseReply;
use super::run::{OutToken, Run};
use super::shapes::EdgeTimes;

const DONE: &[u8] = b"data: [DONE]\n\n";

#[derive(Debug)]
pub enum Form {
    Choices(Box<Reply>),
    Response(Box<ResponseReply>),
}

impl Form {
    /// The events of one token of a stream.
    pub fn token(&mut self, run: &Run, out: &OutToken) -> Bytes {
        let mut bytes = Vec::new();
        match self {
            Self::Choices(reply) => write_event(&mut bytes, None, &reply.chunk(run, out)),
            Self::Response(reply) => bytes = reply.token(out),
        }
        Bytes::from(bytes)
    }

    /// The events after the last token. There is at least one.
    pub fn end(&mut self, run: &Run, times: &EdgeTimes) -> Vec<Bytes> {
        match self {
            Self::Choices(reply) => {
                let mut frames = Vec::new();
                if let Some(last) = reply.last_chunk(run, times) {
                    let mut bytes = Vec::new();
                    write_event(&mut bytes, None, &last);
                    frames.push(Bytes::from(bytes));
                }
                frames.push(Bytes::from_static(DONE));
                frames
            }
            Self::Response(reply) => vec![Bytes::from(reply.end(run, times))],
        }
    }

    /// The events of a stream that breaks off.
    pub fn failed(&mut self, run: &Run, error: &ApiError) -> Vec<Bytes> {
        match self {
            Self::Choices(_) => {
                let mut bytes = Vec::new();
                write_event(&mut bytes, None, &error.body());
                vec![Bytes::from(bytes), Bytes::from_static(DONE)]
            }
            Self::Response(reply) => vec![Bytes::from(reply.failed(run, error))],
        }
    }

    /// The whole answer. `tokens` holds the steps of each choice.
    pub fn whole(&mut self, run: &Run, tokens: &[Vec<OutToken>], times: &EdgeTimes) -> Response {
        match self {
            Self::Choices(reply) => axum::Json(reply.whole(run, tokens, times)).into_response(),
            Self::Response(reply) => {
                let steps = tokens.first().map_or(&[][..], Vec::as_slice);
                axum::Json(reply.whole(run, steps, times)).into_response()
            }
        }
    }
}
