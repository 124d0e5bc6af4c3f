//! A small certificate authority: one folder with the authority's certificate and key, and a pair of files for each process.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};
use rustls::pki_types::ServerName;
use thiserror::Error;

use crate::files::{FileError, certificates, private_key};
use crate::name::{PeerName, PeerRole, is_word};
use crate::verify::uris_of;

const AUTHORITY: &str = "ca";
/// Hosts whose clocks are behind take a new certificate all the same.
const VALID_BEFORE: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// The authority's own certificate ends with the cluster's hardware, not with its processes' certificates.
const AUTHORITY_DAYS: u32 = 3650;

#[derive(Debug, Error)]
pub enum AuthorityError {
    #[error("`{0}` is no name of a cluster: letters, digits, `-`, `_` and `.`")]
    Cluster(String),
    #[error(
        "`{0}` is no process: write ROLE/NAME, such as decode/decode-0, prefill,decode/node-0 for a node that may change its role, api/api for what clients see, or etcd/etcd-0 for etcd"
    )]
    Process(String),
    #[error("`{0}` is no host: write a name such as baton.example.com, or an address such as 10.0.0.5")]
    Host(String),
    #[error("{path} is there already: an authority is made once. `baton certs issue` makes further certificates with it", path = .0.display())]
    Exists(PathBuf),
    #[error("{path} is there already, for {there}: choose another name, or move the two files of that one away first", path = .path.display())]
    OtherKind { path: PathBuf, there: &'static str },
    #[error("{path}: {why}", path = .path.display())]
    File { path: PathBuf, why: String },
    #[error(transparent)]
    Unreadable(#[from] FileError),
    #[error("a certificate could not be made: {0}")]
    Make(#[from] rcgen::Error),
}

/// A server that is no process of the cluster: in place of a role its certificate names hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    /// What a coordinator shows to clients.
    Api,
    /// A member of etcd. It calls itself, too, and shows the same certificate then.
    Etcd,
}

/// How clients of the same machine call it.
const HOSTS_HERE: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Who gets a certificate: a process by its name and the roles that it may have, or a server that names hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertifiedProcess {
    pub roles: Vec<PeerRole>,
    pub name: String,
    server: Option<Server>,
    hosts: Vec<SanType>,
}

impl CertifiedProcess {
    /// It is no process of the cluster.
    pub fn names_hosts(&self) -> bool {
        self.server.is_some()
    }

    /// It is called by these names and addresses, and by those of its own machine.
    ///
    /// # Errors
    /// One of them is neither a name nor an address.
    pub fn with_hosts<'a>(self, hosts: impl IntoIterator<Item = &'a str>) -> Result<Self, AuthorityError> {
        let hosts = HOSTS_HERE.into_iter().chain(hosts).map(host);
        Ok(Self {
            hosts: hosts.collect::<Result<_, _>>()?,
            ..self
        })
    }
}

/// A name may be a wildcard, `*.DOMAIN`.
fn host(text: &str) -> Result<SanType, AuthorityError> {
    let wrong = || AuthorityError::Host(text.to_owned());
    match ServerName::try_from(text.trim_start_matches("*.")).map_err(|_| wrong())? {
        ServerName::IpAddress(_) => text.parse().map(SanType::IpAddress).map_err(|_| wrong()),
        _ => Ia5String::try_from(text).map(SanType::DnsName).map_err(|_| wrong()),
    }
}

impl FromStr for CertifiedProcess {
    type Err = AuthorityError;

    fn from_str(text: &str) -> Result<Self, AuthorityError> {
        let wrong = || AuthorityError::Process(text.to_owned());
        let (roles, name) = text.split_once('/').ok_or_else(wrong)?;
        let role = |word: &str| {
            PeerRole::ALL
                .into_iter()
                .find(|role| role.name() == word)
                .ok_or_else(wrong)
        };
        let server = match roles {
            "api" => Some(Server::Api),
            "etcd" => Some(Server::Etcd),
            _ => None,
        };
        let roles: Vec<PeerRole> = match server {
            Some(_) => Vec::new(),
            None => roles.split(',').map(role).collect::<Result<_, _>>()?,
        };
        // Files have this name, so nothing that leads out of the folder is a name.
        match is_word(name) && !name.starts_with('.') && name != AUTHORITY {
            true => Ok(Self {
                roles,
                name: name.to_owned(),
                server,
                hosts: Vec::new(),
            }),
            false => Err(wrong()),
        }
    }
}

/// The files of one certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl CertificateFiles {
    fn of(folder: &Path, name: &str) -> Self {
        Self {
            certificate: folder.join(format!("{name}.crt")),
            key: folder.join(format!("{name}.key")),
        }
    }

    /// Both kinds of certificates lie in one folder under their names. Whoever runs with the files that are there has no use for a certificate
    /// of the other kind. What is no certificate is replaced.
    fn check_kind(&self, process: &CertifiedProcess) -> Result<(), AuthorityError> {
        let Ok(found) = certificates("the certificate that is there", &self.certificate) else {
            return Ok(());
        };
        let uris = found.first().map(uris_of).unwrap_or_default();
        let there = match uris.iter().any(|uri| uri.starts_with("spiffe://")) {
            true if process.names_hosts() => "a process of the cluster",
            false if !process.names_hosts() => "the API or etcd",
            _ => return Ok(()),
        };
        Err(AuthorityError::OtherKind {
            path: self.certificate.clone(),
            there,
        })
    }

    /// The key first: a process that looks in between finds two that do not belong together, and looks again.
    fn write(&self, certificate: &str, key: &KeyPair) -> Result<(), AuthorityError> {
        write(&self.key, &key.serialize_pem(), 0o600)?;
        write(&self.certificate, certificate, 0o644)
    }
}

/// The authority of one cluster. Its key signs whatever process it is asked for, so it stays on one host.
pub struct Authority {
    cluster: String,
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authority({} in {})", self.cluster, self.folder.display())
    }
}

impl Authority {
    /// Makes an authority in a folder that has none.
    ///
    /// # Errors
    /// The folder has one, or cannot be written.
    pub fn create(folder: &Path, cluster: &str) -> Result<Self, AuthorityError> {
        if !is_word(cluster) {
            return Err(AuthorityError::Cluster(cluster.to_owned()));
        }
        fs::create_dir_all(folder).map_err(|error| file(folder, &error))?;
        let files = CertificateFiles::of(folder, AUTHORITY);
        if let Some(there) = [&files.certificate, &files.key].into_iter().find(|path| path.exists()) {
            return Err(AuthorityError::Exists(there.clone()));
        }
        let (key, params) = (KeyPair::generate()?, params_of_authority(cluster)?);
        files.write(&params.self_signed(&key)?.pem(), &key)?;
        Ok(Self {
            cluster: cluster.to_owned(),
            folder: folder.to_owned(),
            issuer: Issuer::new(params, key),
        })
    }

    /// The authority that was made in this folder.
    ///
    /// # Errors
    /// A file is missing or is not what [`Authority::create`] wrote.
    pub fn open(folder: &Path) -> Result<Self, AuthorityError> {
        let files = CertificateFiles::of(folder, AUTHORITY);
        let key = KeyPair::try_from(&private_key("the authority's key", &files.key)?)?;
        let certificates = certificates("the authority's certificate", &files.certificate)?;
        let uris = certificates.first().map(uris_of).unwrap_or_default();
        let cluster = uris
            .iter()
            .find_map(|uri| uri.strip_prefix("spiffe://"))
            .filter(|cluster| is_word(cluster));
        let Some(cluster) = cluster else {
            let why = "it is not the authority of a cluster: it names no spiffe://CLUSTER";
            return Err(file(&files.certificate, &why));
        };
        Ok(Self {
            issuer: Issuer::new(params_of_authority(cluster)?, key),
            cluster: cluster.to_owned(),
            folder: folder.to_owned(),
        })
    }

    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// The file that each host needs as `tls_ca`.
    pub fn certificate(&self) -> PathBuf {
        CertificateFiles::of(&self.folder, AUTHORITY).certificate
    }

    /// Makes a certificate with a new key, which is valid from an hour ago `until` then. One of this name that is there is replaced, but
    /// not that of a process of the cluster by one that names hosts, nor the other way round.
    ///
    /// # Errors
    /// The files cannot be written, or are of the other kind.
    pub fn issue(&self, process: &CertifiedProcess, until: SystemTime) -> Result<CertificateFiles, AuthorityError> {
        let files = CertificateFiles::of(&self.folder, &process.name);
        files.check_kind(process)?;
        let mut params = params(&process.name, until)?;
        for role in &process.roles {
            let name = PeerName {
                cluster: self.cluster.clone(),
                role: *role,
                name: process.name.clone(),
            };
            params
                .subject_alt_names
                .push(SanType::URI(Ia5String::try_from(name.to_string())?));
        }
        params.subject_alt_names.extend(process.hosts.iter().cloned());
        // For Prometheus and curl, which look at names of hosts.
        if let Ok(name) = Ia5String::try_from(process.name.as_str()) {
            params.subject_alt_names.push(SanType::DnsName(name));
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        if process.server != Some(Server::Api) {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        }
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        files.write(&certificate.pem(), &key)?;
        Ok(files)
    }
}

/// The time so many days from now.
pub fn in_days(days: u32) -> SystemTime {
    SystemTime::now() + DAY * days
}

fn params(common_name: &str, until: SystemTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = (SystemTime::now() - VALID_BEFORE).into();
    params.not_after = until.into();
    Ok(params)
}

/// It depends on nothing but the cluster's name and the time, so that it is found again from the certificate.
fn params_of_authority(cluster: &str) -> Result<CertificateParams, AuthorityError> {
    let mut params = params(
        &format!("authority of baton cluster {cluster}"),
        in_days(AUTHORITY_DAYS),
    )?;
    params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(format!("spiffe://{cluster}"))?)];
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    Ok(params)
}

/// Whole or not at all: it is written beside the place and moved there.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), AuthorityError> {
    let beside = path.with_extension("new");
    let written = || -> io::Result<()> {
        let _ = fs::remove_file(&beside);
        let mut to = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&beside)?;
        to.write_all(text.as_bytes())?;
        to.sync_all()?;
        fs::rename(&beside, path)
    };
    written().map_err(|error| file(path, &error))
}

fn file(path: &Path, why: &dyn std::fmt::Display) -> AuthorityError {
    AuthorityError::File {
        path: path.to_owned(),
        why: why.to_string(),
    }
}
