//! Checks a client's key, where the operator has given out keys. It does so before the body is read and before a handler runs.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serving_core::request::Lane;

use super::AppState;
use super::error::{ApiError, Retry};
use super::metrics::EdgeMetrics;
use super::record::RequestRecord;
use crate::keys::file::Scope;
use crate::keys::{Caller, HeldKey, Keys, OverLimit, Room};

/// What a route asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing: a load balancer asks.
    Probe,
    /// Nothing: the files of the console hold no secret, and the sign-in of the console checks the key itself.
    Console,
    /// A key, whatever its scopes are.
    AnyKey,
    Scope(Scope),
}

impl Access {
    pub fn is_open(self) -> bool {
        matches!(self, Self::Probe | Self::Console)
    }

    /// Whether clients have a use for the route, so that it is not for operators alone.
    pub(super) fn is_for_clients(self) -> bool {
        matches!(self, Self::Probe | Self::AnyKey | Self::Scope(Scope::Inference))
    }
}

/// The names are OpenAI's, whose SDKs show these headers to people.
const ROOM: [[HeaderName; 2]; 2] = [
    [
        HeaderName::from_static("x-ratelimit-limit-requests"),
        HeaderName::from_static("x-ratelimit-remaining-requests"),
    ],
    [
        HeaderName::from_static("x-ratelimit-limit-tokens"),
        HeaderName::from_static("x-ratelimit-remaining-tokens"),
    ],
];

pub async fn check(
    State((state, access)): State<(Arc<AppState>, Access)>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(keys) = &state.keys else {
        return next.run(request).await;
    };
    match admitted(keys, access, &mut request) {
        Ok(room) => {
            let mut response = next.run(request).await;
            tell_room(response.headers_mut(), room);
            response
        }
        Err(refused) => {
            if let Some(record) = request.extensions().get::<Arc<RequestRecord>>() {
                record.failed(&refused);
            }
            count(&*state.metrics, &refused);
            // A client with a known key is told why it was refused, so its body is read first.
            if refused.status != StatusCode::UNAUTHORIZED {
                state.bodies.read_refused(request.into_body()).await;
            }
            refusal(refused)
        }
    }
}

/// Finds the key of the request, writes it into the record, and checks what it allows. A request that computes takes one of the places
/// that its key has.
fn admitted(keys: &Keys, access: Access, request: &mut Request) -> Result<Room, ApiError> {
    let now = Instant::now();
    let (key, cookie) = key_of(keys, request.headers(), now)?;
    let cookie = cookie.map(str::to_owned);
    let record = request.extensions().get::<Arc<RequestRecord>>().cloned();
    if let Some(record) = &record {
        record.facts().key = Some(key.clone());
    }
    if let Access::Scope(scope) = access
        && !key.entry.may(scope)
    {
        return Err(ApiError::scope_missing(scope));
    }
    if access == Access::Scope(Scope::Admin) {
        let caller = Caller {
            keys: keys.clone(),
            key: key.entry.sha256,
            cookie,
        };
        request.extensions_mut().insert(caller);
    }
    if access != Access::Scope(Scope::Inference) || request.method() != Method::POST {
        return Ok(Room::default());
    }
    let begun = key.begin(now).map_err(|over| {
        if let Some(record) = &record {
            record.metrics().key_refused(over.name());
        }
        ApiError::over_limit(over)
    });
    let (in_use, room) = begun?;
    if let Some(record) = record {
        record.facts().in_use = Some(Arc::new(in_use));
    }
    Ok(room)
}

/// The key of the request, and the cookie of the session if the key is known by a session. A key in the `Authorization` header
/// counts before a session.
pub fn key_of<'a>(
    keys: &Keys,
    headers: &'a HeaderMap,
    now: Instant,
) -> Result<(Arc<HeldKey>, Option<&'a str>), ApiError> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let text = value.to_str().ok().and_then(bearer);
        let key = text.and_then(|text| keys.find(text)).ok_or_else(ApiError::wrong_key)?;
        return Ok((key, None));
    }
    let cookie = cookie(keys, headers).ok_or_else(ApiError::no_key)?;
    let key = keys.find_session(cookie, now).ok_or_else(ApiError::session_ended)?;
    Ok((key, Some(cookie)))
}

/// The text of the session's cookie, if the browser sent one.
pub fn cookie<'a>(keys: &Keys, headers: &'a HeaderMap) -> Option<&'a str> {
    let sent = headers.get_all(header::COOKIE).into_iter();
    let pairs = sent
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(';'));
    let mut named = pairs.filter_map(|pair| pair.trim().split_once('='));
    named
        .find(|(name, _)| *name == keys.cookie_name())
        .map(|(_, value)| value)
}

/// The key of `Bearer KEY`. The scheme's case does not count (RFC 9110, 11.1).
fn bearer(value: &str) -> Option<&str> {
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

fn tell_room(headers: &mut HeaderMap, room: Room) {
    for (names, limit) in ROOM.iter().zip([room.requests, room.tokens]) {
        let Some((most, left)) = limit else { continue };
        for (name, value) in names.iter().zip([most, left]) {
            headers.insert(name.clone(), HeaderValue::from(value));
        }
    }
}

/// Counts a refusal by its code. A refusal by a limit has been counted already, by the name of the limit.
pub fn count(metrics: &dyn EdgeMetrics, refused: &ApiError) {
    if refused.status != StatusCode::TOO_MANY_REQUESTS
        && let Some(code) = refused.code
    {
        metrics.key_refused(code);
    }
}

pub fn refusal(refused: ApiError) -> Response {
    let is_unknown = refused.status == StatusCode::UNAUTHORIZED;
    let mut response = refused.into_response();
    if is_unknown {
        let scheme = HeaderValue::from_static("Bearer");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    }
    response
}

/// The codes of the refusals that [`count`] counts.
#[cfg(test)]
pub const COUNTED_REFUSALS: [&str; 4] = ["missing_api_key", "invalid_api_key", "session_ended", "scope_missing"];

impl ApiError {
    fn unknown_caller(code: &'static str, message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message).with_code(code)
    }

    fn no_key() -> Self {
        Self::unknown_caller(
            "missing_api_key",
            "This server asks for an API key, and none came. Send `Authorization: Bearer KEY`; OpenAI's clients take it as \
             api_key, baton's commands from BATON_API_KEY, its load tests (`baton bench run`) from OPENAI_API_KEY. The operator \
             makes keys with `baton keys create`.",
        )
    }

    pub fn wrong_key() -> Self {
        Self::unknown_caller(
            "invalid_api_key",
            "This server does not know the API key that came. It may have been revoked; ask the operator for another.",
        )
    }

    fn session_ended() -> Self {
        Self::unknown_caller(
            "session_ended",
            "This session of the console has ended. Sign in again with your key.",
        )
    }

    fn scope_missing(scope: Scope) -> Self {
        let message = format!(
            "This API key may not do that: it lacks the scope `{scope}`. Ask the operator for a key that has it."
        );
        Self::new(StatusCode::FORBIDDEN, message).with_code("scope_missing")
    }

    pub(super) fn lane_missing(said: Lane, only: Lane) -> Self {
        let (said, only) = (said.name(), only.name());
        let message = format!(
            "This API key's requests may wait in the lane `{only}` only, and the header `x-lane` says `{said}`. Leave it out, or ask the operator for a key that may."
        );
        Self::new(StatusCode::FORBIDDEN, message).with_code("lane_missing")
    }

    fn over_limit(over: OverLimit) -> Self {
        let message = match over {
            OverLimit::Requests { per_minute, .. } => {
                format!("This API key may send {per_minute} requests a minute, and has sent them.")
            }
            OverLimit::Tokens { per_minute, .. } => {
                format!("This API key may use {per_minute} tokens a minute, of prompts and answers, and has used them.")
            }
            OverLimit::Concurrent { most } => {
                format!("This API key may have {most} requests open at once, and has them.")
            }
        };
        let message = format!("{message} Try again after the time in Retry-After.");
        Self {
            retry: Retry::After(over.retry_after()),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("rate_limit_exceeded")
        }
    }
}
