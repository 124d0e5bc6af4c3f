//! Request bodies: bounded, in time, UTF-8, a JSON object.

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use http_body_util::BodyExt;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::json::describe;
use super::limits::{BODY_READ_MAX, OVERSIZED_BODY_DRAIN_BYTES_MAX, OVERSIZED_BODY_DRAIN_MAX};

/// The body as a JSON object, or the client's mistake.
pub async fn json_object(body: Body, limit: usize) -> Result<Map<String, Value>, ApiError> {
    let bytes = match tokio::time::timeout(BODY_READ_MAX, read(body, limit)).await {
        Ok(bytes) => bytes?,
        Err(_) => {
            let message = format!("The request body did not arrive within {} s.", BODY_READ_MAX.as_secs());
            return Err(ApiError::new(
                StatusCode::REQUEST_TIMEOUT,
                "invalid_request_error",
                message,
            ));
        }
    };
    parse(&bytes)
}

async fn read(mut body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let chunk = frame
            .map_err(|_| broken())?
            .into_data()
            .unwrap_or_else(|_| Bytes::new());
        if bytes.len() + chunk.len() > limit {
            drop(bytes);
            // Reads no further than a bound, keeps nothing: only so that the client is still there for the answer.
            let _ = tokio::time::timeout(OVERSIZED_BODY_DRAIN_MAX, discard(body)).await;
            return Err(ApiError::body_too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

async fn discard(mut body: Body) {
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        read += frame.data_ref().map_or(0, Bytes::len);
        if read > OVERSIZED_BODY_DRAIN_BYTES_MAX {
            return;
        }
    }
}

fn broken() -> ApiError {
    ApiError::bad_request("The request body ended before the length its headers announced, or was badly framed.")
}

fn parse(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if bytes.is_empty() {
        return Err(ApiError::bad_request(
            "The request body is empty; it must be a JSON object.",
        ));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let message = format!("The request body is not valid UTF-8 (at byte {}).", error.valid_up_to());
        ApiError::bad_request(message)
    })?;
    // serde_json stops at 128 levels of nesting: no body can overflow the stack.
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => {
            let message = format!("The request body must be a JSON object, not {}.", describe(&other));
            Err(ApiError::bad_request(message))
        }
        Err(error) => Err(ApiError::bad_request(format!(
            "The request body is not valid JSON: {error}."
        ))),
    }
}
