//! Who may use the API from a browser: host names and origins are checked before anything else of a request is read.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use service_runtime::http_guard::{GuardRefusal, WebOrigin};
use tower_http::cors::{AllowHeaders, CorsLayer};

use super::error::{ApiError, RETRY_AFTER_MS, SHOULD_RETRY};
use super::{PROCESSING_MS, TRACEPARENT};
use crate::api::record::REQUEST_ID;

/// How long a browser remembers the answer to a preflight. Chromium takes two hours at most.
const PREFLIGHT_KEPT: Duration = Duration::from_secs(7200);

/// CORS for the pages of chosen origins. `None` when no origin was chosen: then no answer has a CORS header.
pub fn cors(origins: &[WebOrigin]) -> Option<CorsLayer> {
    let origins: Vec<HeaderValue> = origins
        .iter()
        .filter_map(|origin| HeaderValue::from_str(&origin.to_string()).ok())
        .collect();
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::HEAD, Method::POST])
        // SDKs send headers of their own, and new ones with each version.
        .allow_headers(AllowHeaders::mirror_request())
        .allow_private_network(true)
        .expose_headers([
            REQUEST_ID,
            TRACEPARENT,
            PROCESSING_MS,
            header::RETRY_AFTER,
            RETRY_AFTER_MS,
            SHOULD_RETRY,
        ])
        .max_age(PREFLIGHT_KEPT);
    (!origins.is_empty()).then(|| layer.allow_origin(origins))
}

pub async fn guarded(State(state): State<Arc<super::AppState>>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    match state.guard.check(&head) {
        Ok(()) => next.run(Request::from_parts(head, body)).await,
        Err(refusal) => ApiError::from(refusal).into_response(),
    }
}

impl From<GuardRefusal> for ApiError {
    fn from(refusal: GuardRefusal) -> Self {
        Self::new(refusal.status, refusal.message).with_code(refusal.code)
    }
}
