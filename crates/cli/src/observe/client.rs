//! The HTTP side of the observing verbs: one page, or the stream of events.

use std::time::Duration;

use ::http::{Method, StatusCode};
use anyhow::Context;
use serde::de::DeserializeOwned;
use serde_json::Value;
use url::Url;

use super::{UrlArgs, records};
use crate::exit::{Exit, WithExit};
use crate::http;

/// A trace asks every node that took part, so its page takes longest.
const PAGE_WITHIN: Duration = Duration::from_secs(30);
/// The time until the head of a stream's answer has come.
const STREAM_HEAD_WITHIN: Duration = Duration::from_secs(10);

pub type Query<'a> = &'a [(&'static str, String)];

#[derive(Clone, Debug)]
pub struct AdminClient {
    http: http::Client,
    base: String,
}

impl AdminClient {
    /// Sends the operator's key to the coordinator that the operator named.
    ///
    /// # Errors
    /// Its address is no URL, or the file of its authority cannot be read, which are usage errors.
    pub fn new(named: &UrlArgs) -> anyhow::Result<Self> {
        let ca = named.trust.ca();
        Self::with(http::client_with_key(&named.url, ca)?, &named.url)
    }

    /// Sends this key, or none: for a server that may be anybody's.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_server(named: &UrlArgs, key: Option<&str>) -> anyhow::Result<Self> {
        let ca = named.trust.ca();
        Self::with(http::client_with(key, &named.url, ca)?, &named.url)
    }

    fn with(http: http::Client, url: &str) -> anyhow::Result<Self> {
        let base = http::base_url(url);
        let parsed = Url::parse(&base);
        let is_usable = parsed
            .as_ref()
            .is_ok_and(|url| url.has_host() && !url.cannot_be_a_base());
        if !is_usable {
            let error = anyhow::anyhow!("`{url}` is no URL; write http://HOST:PORT");
            return Err(error).exit(Exit::Usage);
        }
        Ok(Self { http, base })
    }

    pub fn base(&self) -> &str {
        &self.base
    }

    /// One page. `None` when the server answers 404.
    ///
    /// # Errors
    /// Nobody answers, the server refuses, or the answer is no JSON.
    pub async fn find(&self, path: &[&str], query: Query<'_>) -> anyhow::Result<Option<Value>> {
        let response = self.answer(Method::GET, path, query).await?;
        if response.status() == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        self.json_of(response, path).await.map(Some)
    }

    /// One page that every coordinator has.
    ///
    /// # Errors
    /// As [`Self::find`], or there is no such page.
    pub async fn page(&self, path: &[&str], query: Query<'_>) -> anyhow::Result<Value> {
        let page = self.find(path, query).await?;
        page.with_context(|| self.lacks(path))
    }

    /// # Errors
    /// As [`Self::page`], or a member of the page has the wrong type.
    pub async fn read<T: DeserializeOwned>(&self, path: &[&str], query: Query<'_>) -> anyhow::Result<T> {
        let page = self.page(path, query).await?;
        parse(path, &page)
    }

    /// Sends an order. Returns the server's answer.
    ///
    /// # Errors
    /// Nobody answers, or the server refuses, in its own words.
    pub async fn order(&self, path: &[&str], query: Query<'_>) -> anyhow::Result<Value> {
        let response = self.answer(Method::POST, path, query).await?;
        self.json_of(response, path).await
    }

    /// The answer whose body is a stream of events.
    ///
    /// # Errors
    /// As [`Self::page`].
    pub async fn stream(&self, path: &[&str], query: Query<'_>) -> anyhow::Result<http::Answer> {
        let url = self.url(path, query)?;
        let send = self.http.get(url).header("accept", "text/event-stream").send();
        let response = tokio::time::timeout(STREAM_HEAD_WITHIN, send)
            .await
            .with_context(|| format!("the server at {} took the connection but sends nothing", self.base))
            .exit(Exit::Unreachable)?
            .map_err(|error| http::unreachable(&self.base, error))?;
        anyhow::ensure!(response.status() != StatusCode::NOT_FOUND, self.lacks(path));
        http::checked(response).await
    }

    async fn answer(&self, method: Method, path: &[&str], query: Query<'_>) -> anyhow::Result<http::Answer> {
        let request = self.http.request(method, self.url(path, query)?).timeout(PAGE_WITHIN);
        let response = request.send().await;
        response.map_err(|error| http::unreachable(&self.base, error))
    }

    async fn json_of(&self, response: http::Answer, path: &[&str]) -> anyhow::Result<Value> {
        let bytes = http::checked(response).await?.bytes().await;
        let bytes = bytes
            .with_context(|| format!("the answer of {} did not come to its end", self.base))
            .exit(Exit::Unreachable)?;
        serde_json::from_slice(&bytes).with_context(|| {
            format!(
                "/{} at {} is not JSON; is this a baton server?",
                path.join("/"),
                self.base
            )
        })
    }

    fn lacks(&self, path: &[&str]) -> String {
        let path = path.join("/");
        let base = &self.base;
        format!(
            "{base} has no page /{path}: --url must name the coordinator, not a node, and its version ({base}/version) must not be older than that of `baton version`"
        )
    }

    fn url(&self, path: &[&str], query: Query<'_>) -> anyhow::Result<Url> {
        let mut url = Url::parse(&self.base).exit(Exit::Usage)?;
        if let Ok(mut segments) = url.path_segments_mut() {
            // An id with a slash in it stays one segment.
            segments.pop_if_empty().extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        Ok(url)
    }
}

/// # Errors
/// A member of the page has the wrong type.
pub fn parse<T: DeserializeOwned>(path: &[&str], page: &Value) -> anyhow::Result<T> {
    records::parse(page).with_context(|| {
        let path = path.join("/");
        format!(
            "/{path} is not as docs/reference/records.md says; are client and server of one version? `-o json` shows it"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::test_kit::{Answer, TestServer};

    #[tokio::test]
    async fn an_answer_that_breaks_off_is_not_taken_for_that_of_another_program() {
        for is_order in [false, true] {
            let cut = Answer::with_status("/admin/x", "200 OK\r\ncontent-length: 99", "{");
            let server = TestServer::start(vec![cut]).await;
            let client = AdminClient::new(&UrlArgs::of(&server.url)).expect("a URL");
            let answer = match is_order {
                true => client.order(&["admin", "x"], &[]).await,
                false => client.page(&["admin", "x"], &[]).await,
            };
            let error = answer.expect_err("half an answer");
            assert_eq!(crate::exit::of(&error), Exit::Unreachable, "{error:#}");
        }
    }

    #[test]
    fn an_id_stays_one_segment_of_the_path() {
        let client = AdminClient::new(&UrlArgs::of("http://127.0.0.1:8000/v1/")).expect("a URL");
        let url = client.url(&["admin", "traces", "a/b?c"], &[("view", "water fall".to_owned())]);
        let url = url.expect("a URL").to_string();
        assert_eq!(url, "http://127.0.0.1:8000/admin/traces/a%2Fb%3Fc?view=water+fall");
    }

    #[test]
    fn what_is_no_url_is_a_usage_error() {
        for url in ["not a url", "mailto:x", ""] {
            let error = AdminClient::new(&UrlArgs::of(url)).expect_err("no URL");
            assert_eq!(crate::exit::of(&error), Exit::Usage, "{url}");
        }
    }
}
