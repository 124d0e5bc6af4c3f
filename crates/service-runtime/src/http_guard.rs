//! Keeps web pages of other sites away from a process's HTTP pages: it checks the host name of a request and the origin of
//! a write.
//!
//! A browser lets any page send requests to any address, also to this machine. Two facts distinguish such a request from an
//! operator's. One is the host name: a page whose own name was bound to this machine's address ("DNS rebinding") can also
//! read the answers. The other is the origin, which the browser states with every write. Programs such as curl and the SDKs
//! state none.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

use http::{HeaderMap, Method, StatusCode, Uri, Version, header, request};
use serde::{Serialize, Serializer};
use thiserror::Error;

/// Only browsers send it, and no page controls it: <https://www.w3.org/TR/fetch-metadata/>.
const SEC_FETCH_SITE: &str = "sec-fetch-site";
/// Probes and scrapes use any name that their machine has for this one. These pages hold nothing secret.
const PATHS_FOR_ANY_HOST: [&str; 4] = ["/health", "/ready", "/ping", "/metrics"];
/// The length of a client's text that a refusal repeats.
const SHOWN_CHARS_MAX: usize = 64;

/// To be flattened into a process's configuration.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
pub struct GuardConfig {
    /// Host names that HTTP clients may call this process by, beside IP addresses, localhost and the names in its own
    /// addresses: NAME, *.DOMAIN, or * for any. /health, /ready, /ping and /metrics are answered under every name
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_hosts: Vec<HostPattern>,
}

/// A name in the form of `--allowed-hosts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPattern {
    Any,
    /// In lower case, without a port.
    Name(String),
    /// Every name below this domain.
    Below(String),
}

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BadGuardValue {
    #[error("write a host name without scheme and port (baton.example.com), *.DOMAIN, or * alone for any name")]
    Host,
    #[error("write an origin as browsers do, SCHEME://HOST or SCHEME://HOST:PORT, without a path; `*` is not allowed")]
    Origin,
}

impl FromStr for HostPattern {
    type Err = BadGuardValue;

    fn from_str(text: &str) -> Result<Self, BadGuardValue> {
        let text = text.trim().to_ascii_lowercase();
        let (is_domain, name) = match text.strip_prefix("*.") {
            Some(domain) => (true, domain),
            None if text == "*" => return Ok(Self::Any),
            None => (false, text.as_str()),
        };
        let name = name.trim_end_matches('.');
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(BadGuardValue::Host);
        }
        Ok(match is_domain {
            true => Self::Below(name.to_owned()),
            false => Self::Name(name.to_owned()),
        })
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Name(name) => f.write_str(name),
            Self::Below(domain) => write!(f, "*.{domain}"),
        }
    }
}

impl Serialize for HostPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl HostPattern {
    fn fits(&self, host: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Name(name) => name == host,
            Self::Below(domain) => host.strip_suffix(domain).is_some_and(|name| name.ends_with('.')),
        }
    }
}

/// An origin in the form in which a browser states it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebOrigin {
    scheme: String,
    host: String,
    /// `None`: the scheme's own port.
    port: Option<u16>,
}

impl FromStr for WebOrigin {
    type Err = BadGuardValue;

    fn from_str(text: &str) -> Result<Self, BadGuardValue> {
        let text = text.trim().to_ascii_lowercase();
        let (scheme, authority) = text.split_once("://").ok_or(BadGuardValue::Origin)?;
        let is_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        if scheme.is_empty() || !scheme.chars().all(is_scheme) {
            return Err(BadGuardValue::Origin);
        }
        let (host, port) = split_port(authority.trim_end_matches('/')).ok_or(BadGuardValue::Origin)?;
        Ok(Self {
            port: port.filter(|port| Some(*port) != default_port(scheme)),
            scheme: scheme.to_owned(),
            host,
        })
    }
}

impl fmt::Display for WebOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.host)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

impl Serialize for WebOrigin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl WebOrigin {
    /// Whether a page of this origin came from the server that is called `(host, port)` here. The scheme does not count,
    /// because a proxy in front may add TLS.
    fn is_of(&self, (host, port): &(String, Option<u16>)) -> bool {
        let own = self.port.or(default_port(&self.scheme));
        self.host == *host && own == port.or(default_port(&self.scheme))
    }
}

fn default_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

/// Host and port of `host`, `host:port`, `[v6]` or `[v6]:port`. The host is in lower case, without the root's dot.
fn split_port(authority: &str) -> Option<(String, Option<u16>)> {
    let end = match authority.strip_prefix('[') {
        Some(rest) => rest.find(']')? + 2,
        None => authority.find(':').unwrap_or(authority.len()),
    };
    let (host, rest) = (authority.get(..end)?, authority.get(end..)?);
    let port = match rest.strip_prefix(':') {
        Some("") => None,
        Some(port) => Some(port.parse().ok()?),
        None if rest.is_empty() => None,
        None => return None,
    };
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | '[' | ']' | '%');
    (!host.is_empty() && host.chars().all(is_plain)).then_some((host, port))
}

/// An address. No page can make it its own name, because a browser asks no name server about it.
fn is_address(host: &str) -> bool {
    let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match v6 {
        Some(v6) => v6.parse::<Ipv6Addr>().is_ok(),
        None => host.parse::<IpAddr>().is_ok(),
    }
}

/// Why a request was refused, for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuardRefusal {
    pub status: StatusCode,
    pub code: &'static str,
    pub message: String,
}

/// Decides by the head of a request alone. Clones share it. The default allows addresses and localhost, and no writes of
/// other origins.
#[derive(Clone, Debug, Default)]
pub struct HttpGuard(Arc<Allowed>);

#[derive(Debug, Default)]
struct Allowed {
    hosts: Vec<HostPattern>,
    origins: Vec<WebOrigin>,
}

impl HttpGuard {
    /// `own_addresses` are this process's own host:port. The operator chose the names in them.
    pub fn new(config: &GuardConfig, own_addresses: &[&str]) -> Self {
        let own = own_addresses.iter().filter_map(|address| split_port(address));
        let own = own.map(|(host, _)| HostPattern::Name(host));
        Self(Arc::new(Allowed {
            hosts: config.allowed_hosts.iter().cloned().chain(own).collect(),
            origins: Vec::new(),
        }))
    }

    /// Pages of these origins may write, too.
    #[must_use]
    pub fn with_origins(self, origins: &[WebOrigin]) -> Self {
        Self(Arc::new(Allowed {
            hosts: self.0.hosts.clone(),
            origins: origins.to_vec(),
        }))
    }

    /// # Errors
    /// The request must not be answered.
    pub fn check(&self, head: &request::Parts) -> Result<(), GuardRefusal> {
        // A page can send such a content type to no other origin without asking before, which is refused.
        if head.version == Version::HTTP_2 && is_grpc(&head.headers) {
            return Ok(());
        }
        if PATHS_FOR_ANY_HOST.contains(&head.uri.path()) {
            return Ok(());
        }
        let host = host_of(&head.headers, &head.uri)?;
        self.check_hosts(host.as_ref(), &head.uri)?;
        if matches!(head.method, Method::GET | Method::HEAD | Method::OPTIONS) {
            return Ok(());
        }
        self.check_origin(&head.headers, host.as_ref())?;
        check_content(&head.headers)
    }

    fn check_hosts(&self, host: Option<&(String, Option<u16>)>, uri: &Uri) -> Result<(), GuardRefusal> {
        let in_uri = uri
            .authority()
            .map(|authority| split_port(authority.as_str()).unwrap_or_default());
        for (host, _) in host.into_iter().chain(in_uri.as_ref()) {
            let is_known = is_address(host) || host == "localhost" || self.0.hosts.iter().any(|own| own.fits(host));
            if !is_known {
                let host = shown(host);
                return Err(GuardRefusal {
                    status: StatusCode::FORBIDDEN,
                    code: "host_not_allowed",
                    message: format!(
                        "This server does not answer to the host name `{host}`, so that no web page can reach it by a name of \
                         its own. Use an IP address or localhost, or let the operator start it with --allowed-hosts {host}."
                    ),
                });
            }
        }
        Ok(())
    }

    fn check_origin(&self, headers: &HeaderMap, host: Option<&(String, Option<u16>)>) -> Result<(), GuardRefusal> {
        let text = |value: &http::HeaderValue| value.to_str().unwrap_or("?").to_owned();
        let origin = headers.get(header::ORIGIN).map(text);
        let stated = origin.as_deref().map(WebOrigin::from_str);
        if let Some(Ok(origin)) = &stated
            && self.0.origins.contains(origin)
        {
            return Ok(());
        }
        let is_own = |origin: &WebOrigin| host.is_some_and(|host| origin.is_of(host));
        let is_foreign_origin = stated.is_some_and(|origin| !origin.as_ref().is_ok_and(is_own));
        let site = headers.get(SEC_FETCH_SITE).map(text);
        let is_foreign_site = site.is_some_and(|site| !matches!(site.as_str(), "same-origin" | "none"));
        if !is_foreign_origin && !is_foreign_site {
            return Ok(());
        }
        let origin = origin.map_or_else(|| "another origin".to_owned(), |origin| format!("`{}`", shown(&origin)));
        Err(GuardRefusal {
            status: StatusCode::FORBIDDEN,
            code: "foreign_origin",
            message: format!(
                "A web page of {origin} may not change anything here or run requests. If that page is the operator's own, start \
                 the coordinator with --cors-origin and its origin; a proxy in front must hand on the Host header."
            ),
        })
    }
}

/// The name that a request was sent to. `None` where there is none: HTTP/1.0, and so no browser.
fn host_of(headers: &HeaderMap, uri: &Uri) -> Result<Option<(String, Option<u16>)>, GuardRefusal> {
    let mut named = headers.get_all(header::HOST).iter();
    let (first, second) = (named.next(), named.next());
    let Some(first) = first else {
        return Ok(uri.authority().and_then(|authority| split_port(authority.as_str())));
    };
    let host = first.to_str().ok().and_then(split_port);
    match host.filter(|_| second.is_none()) {
        Some(host) => Ok(Some(host)),
        None => Err(GuardRefusal {
            status: StatusCode::BAD_REQUEST,
            code: "bad_host",
            message: "The Host header is not one host name with an optional port. Send exactly one.".to_owned(),
        }),
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE);
    content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// A page can send JSON to another origin only after a preflight has allowed it.
fn check_content(headers: &HeaderMap) -> Result<(), GuardRefusal> {
    let length = headers.get(header::CONTENT_LENGTH);
    let has_body = length.is_some_and(|length| length != "0") || headers.contains_key(header::TRANSFER_ENCODING);
    if !has_body {
        return Ok(());
    }
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let essence = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let said = kind.map_or_else(|| "no content type".to_owned(), |kind| format!("`{}`", shown(kind)));
    Err(GuardRefusal {
        status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
        code: "unsupported_media_type",
        message: format!("The body came with {said}. Send JSON with the header `content-type: application/json`."),
    })
}

fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS_MAX).collect()
}

#[cfg(test)]
#[path = "http_guard_tests.rs"]
mod tests;
