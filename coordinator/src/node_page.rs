//! Asks a node for a page of its operators' endpoints.

use std::time::Duration;

use axum::http::{Request, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use identity::{Expected, Identity};
use tokio::task::JoinSet;

/// 512 spans of generous size.
const ANSWER_BYTES_MAX: usize = 8 << 20;
/// A node that has not answered within this time is not waited for.
pub(crate) const NODE_ANSWER_TIME_LIMIT: Duration = Duration::from_secs(2);

/// The body of a page of the node with this name and address.
///
/// # Errors
/// The error is text for people. Nothing is decided by it.
pub(crate) async fn ask(identity: &Identity, (name, address): (&str, &str), path: &str) -> Result<Vec<u8>, String> {
    let asked = get(identity, (name, address), path);
    let answered = tokio::time::timeout(NODE_ANSWER_TIME_LIMIT, asked).await;
    answered.unwrap_or_else(|_| Err(format!("no answer within {} s", NODE_ANSWER_TIME_LIMIT.as_secs())))
}

async fn get(identity: &Identity, (name, address): (&str, &str), path: &str) -> Result<Vec<u8>, String> {
    let stream = identity.dial(address, Expected::Node(name.to_owned())).await;
    let stream = TokioIo::new(stream.map_err(|error| error.to_string())?);
    let words = |error: hyper::Error| error.to_string();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.map_err(words)?;
    let request = Request::get(path)
        .header(header::HOST, address)
        .body(Empty::<Bytes>::new());
    let request = request.map_err(|error| error.to_string())?;
    // The connection ends with this function.
    let mut driven = JoinSet::new();
    driven.spawn(connection);
    let answer = sender.send_request(request).await.map_err(words)?;
    if !answer.status().is_success() {
        return Err(format!("it answers {}", answer.status()));
    }
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
    // Longer than the limit, or it broke.
    Ok(body.map_err(|error| error.to_string())?.to_bytes().to_vec())
}
