//! The address of etcd, as users write it:
//! `etcd://[user:password@]host:port[,host:port...]/CLUSTER[?lease_s=10]`, with TLS `etcds://..?ca=FILE&cert=FILE&key=FILE`. Without
//! these files a process takes those of its own certificate.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// The limit of a DNS label, so that a cluster's name can become a host name or a Kubernetes label unchanged.
const CLUSTER_NAME_BYTES_MAX: usize = 63;
/// etcd recommends seven members at most. Twice that leaves room for an exchange of all of them.
const ENDPOINTS_MAX: usize = 16;
const ADDRESS_BYTES_MAX: usize = 4096;

/// The name that keeps several clusters of one etcd apart: 1 to 63 of `a-z`, `0-9` and `-`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterName(String);

impl ClusterName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub user: String,
    pub password: String,
}

/// Files are read again for each connection, so that renewed certificates are used without a restart.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// `None`: the process's own files, if it has any.
    pub ca: Option<PathBuf>,
    pub identity: Option<ClientIdentity>,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ClientIdentity {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// A parsed address. Neither `Debug` nor `Display` shows the password.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdAddress {
    /// host:port, at least one.
    pub(crate) endpoints: Vec<String>,
    pub(crate) cluster: ClusterName,
    pub(crate) credentials: Option<Credentials>,
    /// `Some` exactly for `etcds://`.
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) lease_ttl: Duration,
}

/// What a process has and allows beside the address.
#[derive(Clone, Copy, Debug, Default)]
pub struct OfProcess<'a> {
    /// The authority of its cluster.
    pub ca: Option<&'a Path>,
    /// Its certificate and its key.
    pub identity: Option<(&'a Path, &'a Path)>,
    /// It may talk to other hosts in plain text.
    pub insecure: bool,
}

/// 10 s: etcd's elections (1 s) and restarts (a few seconds) do not cost a lease. A dead process is gone soon enough,
/// because its status streams have reported it long before.
const LEASE_TTL: Duration = Duration::from_secs(10);
/// etcd grants no lease below 2 s by default. Beyond an hour an entry needs a person.
const LEASE_S: std::ops::RangeInclusive<u64> = 2..=3_600;

/// What is wrong with an address, and what to write instead. It never holds the address, which may hold a password.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AddressError {
    #[error("an etcd address starts with etcd:// or, for TLS, etcds://")]
    Scheme,
    #[error("an etcd address has at most {ADDRESS_BYTES_MAX} bytes")]
    TooLong,
    #[error("no cluster name: end the address with /NAME, for example etcd://127.0.0.1:2379/production")]
    NoCluster,
    #[error("the cluster name `{0}` is not 1 to {CLUSTER_NAME_BYTES_MAX} of a-z, 0-9 and -")]
    Cluster(String),
    #[error("`{0}` is not host:port; write for example etcd-0:2379, an IPv6 address as [::1]:2379")]
    Endpoint(String),
    #[error("at most {ENDPOINTS_MAX} endpoints can be given")]
    TooManyEndpoints,
    #[error("credentials are user:password@, neither of them empty; write @ as %40, : as %3A, / as %2F, % as %25")]
    Credentials,
    #[error("`{0}` is not a setting of an etcd address; there are lease_s, ca, cert and key, each once")]
    Query(String),
    #[error("lease_s={0}: write whole seconds, {min} to {max}", min = LEASE_S.start(), max = LEASE_S.end())]
    Lease(String),
    #[error("ca, cert and key are for TLS: write etcds:// in place of etcd://")]
    TlsWithoutScheme,
    #[error(
        "etcds:// needs the certificate authority that signed etcd's certificate: add ?ca=FILE, or set tls_ca if it is the cluster's own"
    )]
    NoCa,
    #[error(
        "etcd at {0} is on another host, and etcd:// is plain text, passwords too: write etcds:// (`baton certs issue DIR etcd/NAME --host HOST` makes a certificate for etcd), or set insecure = true where everybody in the network is trusted"
    )]
    PlainText(String),
    #[error("a client certificate needs both cert=FILE and key=FILE")]
    HalfIdentity,
}

impl EtcdAddress {
    pub fn cluster(&self) -> &ClusterName {
        &self.cluster
    }

    /// How long an entry outlives a process that died: `lease_s`, or 10 s.
    pub fn lease_ttl(&self) -> Duration {
        self.lease_ttl
    }

    /// The address as a process uses it: with its own files where `etcds://` names none.
    ///
    /// # Errors
    /// [`AddressError::PlainText`], or [`AddressError::NoCa`].
    pub fn used_by(mut self, process: OfProcess<'_>) -> Result<Self, AddressError> {
        let Some(files) = &mut self.tls else {
            let elsewhere = self.endpoints.iter().find(|endpoint| !is_loopback(endpoint));
            return match elsewhere.filter(|_| !process.insecure) {
                Some(endpoint) => Err(AddressError::PlainText(endpoint.clone())),
                None => Ok(self),
            };
        };
        if files.ca.is_none() {
            files.ca = Some(process.ca.ok_or(AddressError::NoCa)?.to_owned());
            let own = process.identity.map(|(certificate, key)| ClientIdentity {
                certificate: certificate.to_owned(),
                key: key.to_owned(),
            });
            files.identity = files.identity.take().or(own);
        }
        Ok(self)
    }

    /// The endpoint at `index`, counted in a circle.
    pub(crate) fn endpoint_url(&self, index: usize) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let host = self.endpoints.get(index % self.endpoints.len().max(1));
        format!("{scheme}://{}", host.map_or("", String::as_str))
    }

    /// The folder of one kind of entry, with its closing slash.
    pub(crate) fn prefix(&self, folder: &str) -> String {
        format!("/baton/{}/{folder}/", self.cluster.0)
    }
}

impl fmt::Display for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls.is_some() { "etcds://" } else { "etcd://" })?;
        if let Some(credentials) = &self.credentials {
            write!(f, "{}:***@", credentials.user.escape_default())?;
        }
        write!(f, "{}/{}", self.endpoints.join(","), self.cluster.0)
    }
}

impl fmt::Debug for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EtcdAddress({self})")
    }
}

impl FromStr for EtcdAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text.len() > ADDRESS_BYTES_MAX {
            return Err(AddressError::TooLong);
        }
        let (is_tls, rest) = match (text.strip_prefix("etcd://"), text.strip_prefix("etcds://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(AddressError::Scheme),
        };
        // The query first, because a file name has slashes.
        let (rest, query) = rest
            .split_once('?')
            .map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (authority, cluster) = rest.split_once('/').ok_or(AddressError::NoCluster)?;
        // A password with a raw `/` or `?` would be cut apart here, and its first half would be shown as a bad endpoint.
        if cluster.contains('@') || query.is_some_and(|query| query.contains('@')) {
            return Err(AddressError::Credentials);
        }
        let (credentials, hosts) = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => (Some(parse_credentials(credentials)?), hosts),
            None => (None, authority),
        };
        let (endpoints, cluster) = (parse_endpoints(hosts)?, parse_cluster(cluster)?);
        let settings = parse_query(query)?;
        Ok(Self {
            endpoints,
            cluster,
            credentials,
            lease_ttl: settings.lease_ttl,
            tls: settings.tls(is_tls)?,
        })
    }
}

fn parse_cluster(text: &str) -> Result<ClusterName, AddressError> {
    let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    match text.len() {
        0 => Err(AddressError::NoCluster),
        1..=CLUSTER_NAME_BYTES_MAX if text.bytes().all(is_name) => Ok(ClusterName(text.to_owned())),
        _ => Err(AddressError::Cluster(shown(text))),
    }
}

fn parse_endpoints(hosts: &str) -> Result<Vec<String>, AddressError> {
    let endpoints: Vec<String> = hosts.split(',').map(str::to_owned).collect();
    if endpoints.len() > ENDPOINTS_MAX {
        return Err(AddressError::TooManyEndpoints);
    }
    match endpoints.iter().find(|endpoint| !is_host_and_port(endpoint)) {
        Some(bad) => Err(AddressError::Endpoint(shown(bad))),
        None => Ok(endpoints),
    }
}

fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0) && !port.starts_with('+');
    let is_host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)),
    };
    is_port && is_host
}

fn is_loopback(endpoint: &str) -> bool {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    address.map_or(host == "localhost", |address| address.to_canonical().is_loopback())
}

fn parse_credentials(text: &str) -> Result<Credentials, AddressError> {
    let (user, password) = text.split_once(':').ok_or(AddressError::Credentials)?;
    // A raw `/` would have ended the authority. A second raw `:` or `@` may be a mistake in a password as well.
    if password.contains([':', '@']) || user.contains('@') {
        return Err(AddressError::Credentials);
    }
    let decode = |text: &str| {
        percent_decode(text)
            .filter(|text| !text.is_empty())
            .ok_or(AddressError::Credentials)
    };
    Ok(Credentials {
        user: decode(user)?,
        password: decode(password)?,
    })
}

/// The settings after the `?`.
struct Settings {
    lease_ttl: Duration,
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
}

fn parse_query(query: Option<&str>) -> Result<Settings, AddressError> {
    let (mut lease, mut ca, mut certificate, mut key) = (None, None, None, None);
    for setting in query.into_iter().flat_map(|query| query.split('&')) {
        let bad = || AddressError::Query(shown(setting.split('=').next().unwrap_or_default()));
        let (name, value) = setting.split_once('=').ok_or_else(bad)?;
        let slot = match name {
            "lease_s" => &mut lease,
            "ca" => &mut ca,
            "cert" => &mut certificate,
            "key" => &mut key,
            _ => return Err(bad()),
        };
        let value = percent_decode(value)
            .filter(|value| !value.is_empty())
            .ok_or_else(bad)?;
        if slot.replace(value).is_some() {
            return Err(bad());
        }
    }
    let lease_ttl = match lease {
        None => LEASE_TTL,
        Some(text) => match text.parse() {
            Ok(seconds) if LEASE_S.contains(&seconds) => Duration::from_secs(seconds),
            _ => return Err(AddressError::Lease(shown(&text))),
        },
    };
    Ok(Settings {
        lease_ttl,
        ca: ca.map(PathBuf::from),
        certificate: certificate.map(PathBuf::from),
        key: key.map(PathBuf::from),
    })
}

impl Settings {
    fn tls(self, is_tls: bool) -> Result<Option<TlsFiles>, AddressError> {
        if !is_tls {
            let has_files = self.ca.is_some() || self.certificate.is_some() || self.key.is_some();
            return if has_files {
                Err(AddressError::TlsWithoutScheme)
            } else {
                Ok(None)
            };
        }
        let identity = match (self.certificate, self.key) {
            (Some(certificate), Some(key)) => Some(ClientIdentity { certificate, key }),
            (None, None) => None,
            _ => return Err(AddressError::HalfIdentity),
        };
        let ca = self.ca;
        Ok(Some(TlsFiles { ca, identity }))
    }
}

/// `None` for a `%` without two hex digits, and for bytes that are not UTF-8.
fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let (high, low) = (digit()?, digit()?);
        out.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(out).ok()
}

/// A part of the user's text, fit for a log line.
fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_default).collect()
}

#[cfg(test)]
#[path = "address_tests.rs"]
mod tests;
