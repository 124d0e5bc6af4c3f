//! Request bodies: each is limited in size and time, all together share one budget, and each must be UTF-8.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use serving_core::stage::Stage;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::AppState;
use super::error::ApiError;
use super::limits::{
    BODY_READ_MAX, BODY_UNCOUNTED_BYTES, REFUSED_BODY_READ_BYTES_MAX, REFUSED_BODY_READ_MAX,
    REFUSED_BYTES_READ_PER_SECOND,
};
use crate::keys::InUse;

/// Bytes that all large bodies of the process may hold together, from the first byte read until the text has become tokens.
/// A body that finds the budget full is refused at once and gives back what it holds, so that other bodies can finish.
#[derive(Clone, Debug)]
pub struct BodyBudget {
    bytes: Arc<Semaphore>,
    /// The one place in which a refused body is read to its end. Without it the connection is closed at once, and its client
    /// rarely gets to read the answer. Under a flood that is better for all other clients.
    refused: Arc<Semaphore>,
}

/// What a request holds until the work on its text has ended, also when a blocking thread outlives the client.
#[derive(Debug, Default)]
pub struct Held {
    /// The body's part of the budget.
    _bytes: Option<OwnedSemaphorePermit>,
    /// One of the requests that its key may have at a time.
    place: Option<Arc<InUse>>,
}

impl Held {
    /// No text, and a place of a key.
    #[cfg(test)]
    pub fn of_key(place: InUse) -> Self {
        let place = Some(Arc::new(place));
        Self { _bytes: None, place }
    }

    /// For work of the same request that needs no text.
    pub fn without_bytes(&self) -> Self {
        let place = self.place.clone();
        Self { _bytes: None, place }
    }
}

impl BodyBudget {
    pub fn new(bytes: usize) -> Self {
        Self {
            bytes: Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS))),
            refused: Arc::new(Semaphore::new(1)),
        }
    }

    /// Refuses a body that has no room, before any of it is read. This takes nothing from the budget: a client that
    /// announces much and sends little must not keep other clients out.
    fn check(&self, announced: usize) -> Result<(), ApiError> {
        let has_room = announced.saturating_sub(BODY_UNCOUNTED_BYTES) <= self.bytes.available_permits();
        has_room.then_some(()).ok_or_else(ApiError::busy_with_bodies)
    }

    /// Reads what is left of a refused body, if the one place for that is free.
    pub async fn read_refused(&self, body: Body) {
        let Ok(place) = self.refused.clone().try_acquire_owned() else {
            return;
        };
        let read = tokio::time::timeout(REFUSED_BODY_READ_MAX, discard(body)).await;
        let rest = Duration::from_secs_f64(read.unwrap_or(0) as f64 / REFUSED_BYTES_READ_PER_SECOND);
        tokio::spawn(async move {
            tokio::time::sleep(rest).await;
            drop(place);
        });
    }

    fn take(&self, held: &mut Option<OwnedSemaphorePermit>, bytes: usize) -> Result<(), ApiError> {
        let wanted = u32::try_from(bytes).unwrap_or(u32::MAX);
        let taken = self.bytes.clone().try_acquire_many_owned(wanted);
        let taken = taken.map_err(|_| ApiError::busy_with_bodies())?;
        match held {
            Some(before) => before.merge(taken),
            None => *held = Some(taken),
        }
        Ok(())
    }
}

/// Refuses a body that comes in an encoding other than gzip. A layer unpacks gzip as the body is read, so all limits count
/// unpacked bytes.
pub async fn known_encoding(mut request: Request, next: Next) -> Response {
    let known = |said: &HeaderValue| {
        let is_said = |name: &&str| said.as_bytes().eq_ignore_ascii_case(name.as_bytes());
        ["gzip", "identity"].into_iter().find(is_said)
    };
    match request.headers().get(header::CONTENT_ENCODING).map(known) {
        None => return next.run(request).await,
        Some(Some(name)) => {
            // Names of codings have no case (RFC 9110, section 8.4.1), and the layer that unpacks knows them in lower case alone.
            let name = HeaderValue::from_static(name);
            request.headers_mut().insert(header::CONTENT_ENCODING, name);
            return next.run(request).await;
        }
        Some(None) => {}
    }
    let message = "The `Content-Encoding` of the request is not supported: send the body as it is, or with gzip.";
    ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
        .with_code("unsupported_encoding")
        .into_response()
}

/// A request's own time limit, and what is left of it for the body.
#[derive(Clone, Copy, Debug)]
pub struct OwnLimit {
    pub limit: Duration,
    pub left: Duration,
}

/// The body as text, or the client's mistake. `place` is the request's among those of its key.
pub async fn text(
    state: &AppState,
    body: Body,
    place: Option<Arc<InUse>>,
    time: Option<OwnLimit>,
) -> Result<(String, Held), ApiError> {
    let (bytes, room) = read(state, body, time).await?;
    if bytes.is_empty() {
        return Err(ApiError::bad_request(
            "The request body is empty; it must be a JSON object.",
        ));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        ApiError::bad_request(format!("The request body is not valid UTF-8 (at byte {at})."))
    })?;
    Ok((text, Held { _bytes: room, place }))
}

/// The bytes, with their part of the budget.
type Taken = (Vec<u8>, Option<OwnedSemaphorePermit>);

/// The time to read a refused body does not count: its client shall hear why it was refused.
async fn read(state: &AppState, mut body: Body, time: Option<OwnLimit>) -> Result<Taken, ApiError> {
    let (limit, budget) = (state.limits.body_bytes_max, &state.bodies);
    let time_max = time.map_or(BODY_READ_MAX, |time| time.left.min(BODY_READ_MAX));
    match tokio::time::timeout(time_max, take(&mut body, limit, budget)).await {
        Ok(Ok(taken)) => Ok(taken),
        Ok(Err(refusal)) => {
            budget.read_refused(body).await;
            Err(refusal)
        }
        Err(_) => Err(late(time)),
    }
}

/// The error of a body that has not arrived, by which of the two limits was over first.
fn late(time: Option<OwnLimit>) -> ApiError {
    if let Some(own) = time.filter(|own| own.left <= BODY_READ_MAX) {
        return ApiError::out_of_time(Stage::Parse, own.limit);
    }
    let message = format!("The request body did not arrive within {} s.", BODY_READ_MAX.as_secs());
    ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
}

async fn take(body: &mut Body, limit: usize, budget: &BodyBudget) -> Result<Taken, ApiError> {
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        return Err(ApiError::body_too_large(limit));
    }
    budget.check(announced)?;
    // The whole capacity is reserved at once, because a growing buffer would double. Pages that are never written never
    // become memory.
    let (mut bytes, mut held) = (Vec::with_capacity(announced), None);
    let mut counted = BODY_UNCOUNTED_BYTES;
    while let Some(frame) = body.frame().await {
        let chunk = frame
            .map_err(|_| broken())?
            .into_data()
            .unwrap_or_else(|_| Bytes::new());
        if bytes.len() + chunk.len() > limit {
            return Err(ApiError::body_too_large(limit));
        }
        let all = bytes.len() + chunk.len();
        if all > counted {
            budget.take(&mut held, all - counted)?;
            counted = all;
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok((bytes, held))
}

/// Reads the rest and drops it, so that the client is still there to read the answer. Returns the bytes that it read.
async fn discard(mut body: Body) -> usize {
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        read += frame.data_ref().map_or(0, Bytes::len);
        if read > REFUSED_BODY_READ_BYTES_MAX {
            break;
        }
    }
    read
}

fn broken() -> ApiError {
    ApiError::bad_request(
        "The request body ended before the length its headers announced, was badly framed, or is no valid gzip.",
    )
}
