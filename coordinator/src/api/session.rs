//! `/session`: the console's sign-in. A browser sends its key once and gets a cookie, which no script can read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Value, json};

use super::AppState;
use super::access::{cookie, count, key_of, refusal};
use super::connection::Encrypted;
use super::error::ApiError;
use crate::keys::{HeldKey, SESSION_TIME};

/// A key has 70 characters.
const BODY_BYTES_MAX: usize = 4 << 10;
/// Nobody has shown a key yet, so nobody keeps a connection for longer.
const BODY_READ_MAX: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
struct SignIn {
    key: String,
}

/// Who the caller is. `asks_for_keys` is false where nobody needs a key.
pub async fn whose(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Response {
    let Some(keys) = &state.keys else {
        return Json(json!({"asks_for_keys": false})).into_response();
    };
    match key_of(keys, &headers, Instant::now()) {
        Ok((key, _)) => Json(about(&key)).into_response(),
        Err(refused) => refusal(refused),
    }
}

/// `{"key": ".."}` in, a cookie out.
pub async fn begin(
    State(state): State<Arc<AppState>>,
    encrypted: Option<Extension<Encrypted>>,
    body: Body,
) -> Response {
    let Some(keys) = &state.keys else {
        return Json(json!({"asks_for_keys": false})).into_response();
    };
    let sign_in = match tokio::time::timeout(BODY_READ_MAX, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(bytes)) => serde_json::from_slice::<SignIn>(&bytes),
        _ => {
            let message = format!(
                "The body did not arrive within {} s, or has more than {BODY_BYTES_MAX} bytes; a key is shorter.",
                BODY_READ_MAX.as_secs()
            );
            return ApiError::bad_request(message).into_response();
        }
    };
    let Ok(sign_in) = sign_in else {
        return ApiError::invalid("key", "Send {\"key\": \"..\"} as JSON.").into_response();
    };
    let Some(key) = keys.find(sign_in.key.trim()) else {
        let refused = ApiError::wrong_key();
        count(&*state.metrics, &refused);
        return refusal(refused);
    };
    let text = keys.begin_session(&key, Instant::now());
    let response = Json(about(&key)).into_response();
    let cookie = Cookie {
        name: keys.cookie_name(),
        text: &text,
        seconds: SESSION_TIME.as_secs(),
    };
    with_cookie(response, &cookie, encrypted.is_some())
}

pub async fn end(
    State(state): State<Arc<AppState>>,
    encrypted: Option<Extension<Encrypted>>,
    headers: HeaderMap,
) -> Response {
    let response = StatusCode::NO_CONTENT.into_response();
    let Some(keys) = &state.keys else {
        return response;
    };
    if let Some(cookie) = cookie(keys, &headers) {
        keys.end_session(cookie);
    }
    let none = Cookie {
        name: keys.cookie_name(),
        text: "",
        seconds: 0,
    };
    with_cookie(response, &none, encrypted.is_some())
}

fn about(key: &HeldKey) -> Value {
    let scopes: Vec<&str> = key.entry.scopes.iter().map(|scope| scope.name()).collect();
    json!({"asks_for_keys": true, "key": key.entry.name.as_str(), "scopes": scopes})
}

struct Cookie<'a> {
    name: &'a str,
    text: &'a str,
    seconds: u64,
}

/// No script reads the cookie, and no page of another site makes a browser send it. One that came over TLS is sent over TLS alone.
fn with_cookie(mut response: Response, cookie: &Cookie<'_>, is_encrypted: bool) -> Response {
    let Cookie { name, text, seconds } = cookie;
    let secure = if is_encrypted { "; Secure" } else { "" };
    let cookie = format!("{name}={text}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}");
    if let Ok(value) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(header::SET_COOKIE, value);
    }
    response
}
