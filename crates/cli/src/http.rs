//! Shared by all verbs that talk to a server: the HTTP client, and errors that say what to do.

mod client;
pub(crate) mod connect;
pub(crate) mod tls;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use rustls::{Error as TlsError, InvalidMessage};
use serde::Deserialize;
use serde_json::Value;

use crate::exit::{Exit, ExitError, WithExit as _};
pub use client::{Answer, Asking, Client, HttpError};
use connect::Connector;
pub(crate) use tls::TrustArgs;

/// Says where the server is, for every verb that talks to one. A `--url` on the command line wins.
pub(crate) const URL_VARIABLE: &str = "BATON_ENDPOINT";
/// The API key that verbs send to a coordinator that asks for one.
const KEY_VARIABLE: &str = "BATON_API_KEY";
/// Where `baton up` listens unless it is told otherwise.
pub(crate) const URL_DEFAULT: &str = "http://127.0.0.1:8000";
/// The connection alone. A request may take minutes.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
const ERROR_TEXT_CHARS_MAX: usize = 200;

/// A client for the server at `url`. `ca`: the file of the authority whose certificate it has to have, if it has one; else any that
/// this machine trusts.
///
/// # Errors
/// `ca` cannot be read, or the machine has no authorities.
pub fn client(url: &str, ca: Option<&Path>) -> anyhow::Result<Client> {
    client_with(None, url, ca)
}

/// A client that sends the key of [`KEY_VARIABLE`], if it is set: for the verbs that ask one coordinator.
///
/// # Errors
/// As [`client_with`].
pub(crate) fn client_with_key(url: &str, ca: Option<&Path>) -> anyhow::Result<Client> {
    let key = std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty());
    client_with(key.as_deref(), url, ca)
}

/// A client that sends this key, if there is one.
///
/// # Errors
/// As [`client`], or the key has characters that no key has.
pub(crate) fn client_with(key: Option<&str>, url: &str, ca: Option<&Path>) -> anyhow::Result<Client> {
    let mut headers = HeaderMap::new();
    if let Some(key) = key {
        let bearer = HeaderValue::from_str(&format!("Bearer {key}"));
        let mut bearer = bearer
            .context("the API key has characters that no key has; look at BATON_API_KEY or --api-key")
            .exit(Exit::Usage)?;
        // It is shown in no log.
        bearer.set_sensitive(true);
        headers.insert(AUTHORIZATION, bearer);
    }
    let scheme = url.split_once("://").map(|(scheme, _)| scheme);
    let tls = tls::config(scheme, ca)?;
    Ok(Client::new(Connector::from_env(CONNECT_WITHIN), tls, headers))
}

/// The address without the endings that people leave on it: a slash, or the `/v1` of an OpenAI client.
pub fn base_url(url: &str) -> String {
    url.trim_end_matches('/')
        .trim_end_matches("/v1")
        .trim_end_matches('/')
        .to_owned()
}

/// The error of a request that got no answer, with its exit status.
pub fn unreachable(url: &str, error: HttpError) -> anyhow::Error {
    let (exit, what) = match (&error, error.of_tls()) {
        (HttpError::Url(_), _) => (Exit::Usage, format!("`{url}` is no URL; write http://HOST:PORT")),
        (HttpError::Silent, _) => (
            Exit::Unreachable,
            format!("the server at {url} took the connection but did not answer in time; is it overloaded or stopped?"),
        ),
        (_, Some(TlsError::InvalidMessage(InvalidMessage::InvalidContentType))) => (
            Exit::Unreachable,
            format!("the server at {url} does not speak HTTPS; write http:// in place of https://"),
        ),
        (_, Some(why)) => (
            Exit::Unreachable,
            format!("the server at {url} is not trusted ({why}); name the file of its authority with --ca or BATON_CA"),
        ),
        _ => (
            Exit::Unreachable,
            format!("no server answers at {url}; start one: baton up"),
        ),
    };
    anyhow::Error::new(ExitError::new(exit, anyhow::Error::new(error).context(what)))
}

/// Turns an error answer into an error with the server's own words.
///
/// # Errors
/// The status is not a success.
pub async fn checked(response: Answer) -> anyhow::Result<Answer> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let text = response.text().await.unwrap_or_default();
    let body: Value = serde_json::from_str(&text).unwrap_or_default();
    match body["error"]["message"].as_str() {
        Some(message) => bail!("{status}: {message}"),
        None => bail!(
            "{status}: {}",
            text.chars().take(ERROR_TEXT_CHARS_MAX).collect::<String>()
        ),
    }
}

/// A model of `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct ListedModel {
    pub id: String,
    /// Absent from servers other than a coordinator of this version.
    pub parameter_count: Option<u64>,
}

/// The models of an answer of `/v1/models`, at least one.
///
/// # Errors
/// The status is not a success, or there is no model.
pub(crate) async fn models(listed: Answer, url: &str) -> anyhow::Result<Vec<ListedModel>> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<ListedModel>,
    }
    let listed = checked(listed).await?.json::<List>().await;
    let models = listed.context("/v1/models is not a list of models")?.data;
    anyhow::ensure!(!models.is_empty(), "{url} lists no model");
    Ok(models)
}

/// The first model of an answer of `/v1/models`.
///
/// # Errors
/// As [`models`].
pub(crate) async fn first_model(listed: Answer, url: &str) -> anyhow::Result<ListedModel> {
    let first = models(listed, url).await?.into_iter().next();
    first.with_context(|| format!("{url} lists no model"))
}
