//! The settings and files of a process's certificate.

use std::io::Read as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{ArgAction, Args};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Serialize;
use thiserror::Error;

/// A certificate is two kilobytes. A file of authorities may hold several.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The keys that every process has.
#[derive(Clone, Debug, Default, Args, Serialize)]
pub struct TlsConfig {
    /// File of this process's certificate in PEM, which names it as spiffe://CLUSTER/ROLE/NAME, followed by intermediate certificates
    /// if there are any (`baton certs` makes such files). It is read again when it changes; so are the next two
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert: Option<PathBuf>,
    /// File of the private key of tls_cert in PEM
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<PathBuf>,
    /// File of the certificate, in PEM, with which the cluster's authority signs
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_ca: Option<PathBuf>,
    /// Take part without certificates at an address that other hosts can reach: whoever reaches it may join, read prompts and
    /// stop nodes. Also ask an etcd on another host in plain text. For networks where everybody is trusted
    #[arg(long, action = ArgAction::Set, default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_name = "true|false")]
    pub insecure: bool,
}

/// What is wrong with the settings or the files. It is the operator's to mend.
#[derive(Debug, Error)]
pub enum FileError {
    #[error("{missing} is not set: {} belong together", "tls_cert, tls_key and tls_ca")]
    Incomplete { missing: &'static str },
    #[error("{key} {path}: {why}", path = .path.display())]
    File {
        key: &'static str,
        path: PathBuf,
        why: String,
    },
    #[error(
        "{address} can be reached by other hosts, and this process has no certificate: set tls_cert, tls_key and tls_ca (`baton certs init` makes them), or insecure = true where everybody who reaches this address is trusted"
    )]
    PlainText { address: SocketAddr },
}

impl TlsConfig {
    pub fn is_on(&self) -> bool {
        self.tls_cert.is_some() || self.tls_key.is_some() || self.tls_ca.is_some()
    }

    /// Plain text is for loopback, and for those who say that they want it.
    ///
    /// # Errors
    /// [`FileError::PlainText`].
    pub fn check_address(&self, address: SocketAddr) -> Result<(), FileError> {
        match self.is_on() || self.insecure || address.ip().to_canonical().is_loopback() {
            true => Ok(()),
            false => Err(FileError::PlainText { address }),
        }
    }

    /// `None` where none of the three files is set.
    pub(crate) fn paths(&self) -> Result<Option<Paths>, FileError> {
        let given = |path: &Option<PathBuf>, missing| path.clone().ok_or(FileError::Incomplete { missing });
        if !self.is_on() {
            return Ok(None);
        }
        Ok(Some(Paths {
            cert: given(&self.tls_cert, "tls_cert")?,
            key: given(&self.tls_key, "tls_key")?,
            ca: given(&self.tls_ca, "tls_ca")?,
        }))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Paths {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub ca: PathBuf,
}

/// What the files hold. The key has no `Debug`.
pub(crate) struct Pem {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
    pub authorities: Vec<CertificateDer<'static>>,
}

impl Paths {
    pub fn all(&self) -> [&Path; 3] {
        [&self.cert, &self.key, &self.ca]
    }

    pub fn read(&self) -> Result<Pem, FileError> {
        Ok(Pem {
            key: private_key("tls_key", &self.key)?,
            chain: certificates("tls_cert", &self.cert)?,
            authorities: certificates("tls_ca", &self.ca)?,
        })
    }
}

pub(crate) fn private_key(key: &'static str, path: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    PrivateKeyDer::from_pem_slice(&read(key, path)?).map_err(|error| file(key, path, no_pem(&error)))
}

/// The certificates of a file, at least one. `key`: what names the file, for errors.
///
/// # Errors
/// The file cannot be read, or is no PEM with a certificate.
pub fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let text = read(key, path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match read {
        Ok(found) if found.is_empty() => Err(file(key, path, "it holds no certificate in PEM")),
        Ok(found) => Ok(found),
        Err(error) => Err(file(key, path, no_pem(&error))),
    }
}

/// The library's own words have lines of the file, which may be a key.
fn no_pem(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::NoItemsFound => "it holds no private key in PEM",
        pem::Error::MissingSectionEnd { .. } => "it is no PEM: a section has no END line",
        pem::Error::Base64Decode(_) => "it is no PEM: a section is not in Base64",
        _ => "it is no PEM: a section has a wrong BEGIN line",
    }
}

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, FileError> {
    let mut text = Vec::new();
    let opened = std::fs::File::open(path).map_err(|error| file(key, path, error))?;
    let read = opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut text);
    match read {
        Err(error) => Err(file(key, path, error)),
        Ok(_) if text.len() as u64 > FILE_BYTES_MAX => Err(file(key, path, "it is longer than 1 MiB")),
        Ok(_) => Ok(text),
    }
}

pub(crate) fn file(key: &'static str, path: &Path, why: impl std::fmt::Display) -> FileError {
    FileError::File {
        key,
        path: path.to_owned(),
        why: why.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_is_for_loopback_and_for_those_who_want_it() {
        let open = |config: &TlsConfig, address: &str| config.check_address(address.parse().unwrap()).is_ok();
        let plain = TlsConfig::default();
        for (address, is_open) in [
            ("127.0.0.1:7400", true),
            ("127.8.0.1:7400", true),
            ("[::1]:7400", true),
            ("[::ffff:127.0.0.1]:7400", true),
            ("0.0.0.0:7400", false),
            ("[::]:7400", false),
            ("10.0.0.1:7400", false),
        ] {
            assert_eq!(open(&plain, address), is_open, "{address}");
        }
        let insecure = TlsConfig {
            insecure: true,
            ..TlsConfig::default()
        };
        let with_files = TlsConfig {
            tls_ca: Some("ca.pem".into()),
            ..TlsConfig::default()
        };
        assert!(open(&insecure, "0.0.0.0:7400") && open(&with_files, "0.0.0.0:7400"));
    }

    #[test]
    fn a_file_that_is_missing_is_named() {
        let config = TlsConfig {
            tls_cert: Some("cert.pem".into()),
            tls_ca: Some("ca.pem".into()),
            ..TlsConfig::default()
        };
        let error = config.paths().unwrap_err().to_string();
        assert!(error.starts_with("tls_key is not set"), "{error}");
        assert_eq!(TlsConfig::default().paths().unwrap(), None);
    }
}
