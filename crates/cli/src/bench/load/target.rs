//! What is asked of the server before the run: whether it is there, its models, where it is.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;

use super::plan::Server;
use crate::exit::{Exit, WithExit as _};
use crate::http;

const ANSWER_WITHIN: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub(super) struct Target {
    pub model: String,
    /// The other end of the connection.
    pub address: Option<SocketAddr>,
    /// What the server calls itself in its answers, if it does.
    pub software: Option<String>,
    /// `/v1/models` as it is, for the report.
    pub models: Value,
}

/// # Errors
/// Nobody answers, or no model is named and the server lists none.
pub(super) async fn find(server: &Server) -> anyhow::Result<Target> {
    let base = http::base_url(&server.url);
    let mut request = http::client(&base, server.ca.as_deref())?
        .get(format!("{base}/v1/models"))
        .timeout(ANSWER_WITHIN);
    if let Some(key) = &server.api_key {
        request = request.bearer_auth(key);
    }
    for (name, value) in &server.headers {
        request = request.header(name, value);
    }
    let listed = request.send().await.map_err(|error| http::unreachable(&base, error))?;
    let address = listed.remote_addr();
    let software = listed.headers().get("server").and_then(|name| name.to_str().ok());
    let software = software.map(str::to_owned);
    let status = listed.status();
    let models: Value = listed.json().await.unwrap_or_default();
    let first = models["data"][0]["id"].as_str();
    let model = server.model.clone().or(first.map(str::to_owned));
    let model = model
        .with_context(|| format!("{base}/v1/models answers {status} and lists no model; name one with --model"))
        .exit(Exit::Usage)?;
    Ok(Target {
        model,
        address,
        software,
        models,
    })
}
