//! Shared by all verbs that talk to a server: the HTTP client, and errors that say what to do.

mod client;
pub(crate) mod connect;
pub(crate) mod tls;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use http::Uri;
use http::header::{AUTHORIZATION, HeaderMap};
use rustls::{CertificateError, Error as TlsError, InvalidMessage};
use serde::Deserialize;
use serde_json::Value;

use crate::exit::{Exit, ExitError, WithExit as _};
pub use client::{Answer, Asking, Client, HttpError};
pub(crate) use tls::TrustArgs;

/// Says where the server is, for every verb that talks to one. A `--url` on the command line wins.
pub(crate) const URL_VARIABLE: &str = "BATON_ENDPOINT";
/// The API key that verbs send to a coordinator that asks for one.
const KEY_VARIABLE: &str = "BATON_API_KEY";
/// Where `baton up` listens unless it is told otherwise.
pub(crate) const URL_DEFAULT: &str = "http://127.0.0.1:8000";
const NO_HEADER: &str = "a header, such as that of the API key, has characters that no header has; look at BATON_API_KEY, --api-key and --header";
/// The connection alone, proxy and TLS included. A request may take minutes.
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
    // A key that was read from a file may have the end of its line.
    let key = std::env::var(KEY_VARIABLE).unwrap_or_default();
    let key = Some(key.trim()).filter(|key| !key.is_empty());
    client_with(key, url, ca)
}

/// A client that sends this key, if there is one.
///
/// # Errors
/// As [`client`], or the key has characters that no key has.
pub(crate) fn client_with(key: Option<&str>, url: &str, ca: Option<&Path>) -> anyhow::Result<Client> {
    let mut headers = HeaderMap::new();
    if let Some(key) = key {
        let bearer = client::bearer(key).context(NO_HEADER).exit(Exit::Usage)?;
        headers.insert(AUTHORIZATION, bearer);
    }
    // What is no URL is told with the request.
    let uri: Option<Uri> = url.parse().ok();
    let tls = tls::config(uri.as_ref().and_then(Uri::scheme_str), ca)?;
    Ok(Client::new(CONNECT_WITHIN, tls, headers))
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
        (HttpError::Header(_), _) => (Exit::Usage, NO_HEADER.to_owned()),
        (HttpError::Json(_), _) => (
            Exit::Failure,
            format!("the server at {url} and this program do not speak the same JSON; compare their versions"),
        ),
        (_, Some(why)) => (Exit::Unreachable, without_tls(url, why)),
        _ => (
            Exit::Unreachable,
            format!("no server answers at {url}; start one: baton up"),
        ),
    };
    anyhow::Error::new(ExitError::new(exit, anyhow::Error::new(error).context(what)))
}

/// Why the two ends did not agree on TLS, and what to do.
fn without_tls(url: &str, why: &TlsError) -> String {
    let certificate = format!("the certificate of the server at {url}");
    match why {
        TlsError::InvalidMessage(InvalidMessage::InvalidContentType) => {
            format!("the server at {url} does not speak HTTPS; write http:// in place of https://")
        }
        TlsError::InvalidCertificate(error) => match error {
            CertificateError::UnknownIssuer => {
                format!(
                    "{certificate} is of an unknown authority; name the file of its authority with --ca or BATON_CA"
                )
            }
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                format!("{certificate} has ended ({why}); give the server a new one")
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                format!("{certificate} is not valid yet ({why}); look at the clocks of both machines")
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                format!(
                    "{certificate} does not name this host ({why}); use a name of the certificate, or make one for this name"
                )
            }
            _ => format!("{certificate} is refused ({why}); give the server another one"),
        },
        _ => format!("no TLS connection to {url} came about ({why}); look at the server's log"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_of_a_certificate_has_its_own_advice() {
        for (fault, advice) in [
            (CertificateError::UnknownIssuer, "--ca"),
            (CertificateError::Expired, "a new one"),
            (CertificateError::NotValidYet, "clocks"),
            (CertificateError::NotValidForName, "a name of the certificate"),
            (CertificateError::BadSignature, "another one"),
        ] {
            let said = without_tls("https://10.0.0.1", &TlsError::InvalidCertificate(fault));
            assert!(said.contains(advice), "{said}");
            assert_eq!(said.contains("--ca"), advice == "--ca", "{said}");
        }
    }

    #[tokio::test]
    async fn a_key_that_no_header_can_hold_is_a_mistake_of_usage() {
        let url = "http://127.0.0.1:1";
        let sent = client(url, None).unwrap().get(url).bearer_auth("a\nb").send().await;
        let error = unreachable(url, sent.unwrap_err());
        assert_eq!(error.to_string(), NO_HEADER);
        assert_eq!(error.downcast::<ExitError>().unwrap().exit, Exit::Usage);
    }

    #[test]
    fn a_scheme_in_capitals_is_https_as_well() {
        let missing = client("HTTPS://10.0.0.1", Some(Path::new("/no/ca.crt")));
        assert!(missing.is_err(), "the authority is read for HTTPS");
        assert!(client("HTTP://10.0.0.1", Some(Path::new("/no/ca.crt"))).is_ok());
    }
}
