//! A certificate that is shown to clients, who show none themselves.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, Error, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;

use crate::connection::Connection;
use crate::files::{FileError, certificates, file, private_key};
use crate::renewed::Renewed;

/// Bytes that wait within TLS for a client that does not read: one record.
const BUFFER_BYTES_MAX: usize = 16 << 10;

/// A certificate of any authority, public ones too, and its key. Clones share it.
#[derive(Clone)]
pub struct ServerCertificate(Arc<Own>);

struct Own {
    certificate: Setting,
    key: Setting,
    now: RwLock<Arc<Material>>,
}

/// A file, and the setting that names it.
struct Setting {
    name: &'static str,
    path: PathBuf,
}

/// What one reading of the files gave.
struct Material {
    chain: Vec<CertificateDer<'static>>,
    config: Arc<ServerConfig>,
}

impl fmt::Debug for ServerCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.0.certificate.name, self.0.certificate.path.display())
    }
}

impl ServerCertificate {
    /// Reads the files. Each is given with the name of its setting, which errors repeat.
    ///
    /// # Errors
    /// A file is missing or damaged, the key is another certificate's, or the certificate has ended.
    pub fn open(
        (certificate, certificate_path): (&'static str, &Path),
        (key, key_path): (&'static str, &Path),
    ) -> Result<Self, FileError> {
        let setting = |name, path: &Path| Setting {
            name,
            path: path.to_owned(),
        };
        let (certificate, key) = (setting(certificate, certificate_path), setting(key, key_path));
        let material = Material::read(&certificate, &key)?;
        Ok(Self(Arc::new(Own {
            certificate,
            key,
            now: RwLock::new(Arc::new(material)),
        })))
    }

    /// Greets a client. The caller of this limits how long it may take.
    ///
    /// # Errors
    /// The client does not speak TLS, or does not trust the certificate.
    pub async fn accept<S>(&self, stream: S) -> io::Result<Connection<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut accepted = TlsAcceptor::from(self.material().config.clone()).accept(stream).await?;
        accepted.get_mut().1.set_buffer_limit(Some(BUFFER_BYTES_MAX));
        Ok(Connection::Encrypted(Box::new(accepted.into())))
    }

    fn material(&self) -> Arc<Material> {
        self.0.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Renewed for ServerCertificate {
    type Error = FileError;

    fn paths(&self) -> Vec<&Path> {
        vec![&self.0.certificate.path, &self.0.key.path]
    }

    fn certificate(&self) -> Option<Vec<u8>> {
        Some(self.material().chain.first()?.to_vec())
    }

    fn is_valid_at(&self, time: Duration) -> bool {
        check_time(&self.material().chain, UnixTime::since_unix_epoch(time)).is_ok()
    }

    fn read_again(&self) -> Result<(), FileError> {
        let material = Material::read(&self.0.certificate, &self.0.key)?;
        *self.0.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(material);
        Ok(())
    }
}

impl Material {
    fn read(certificate: &Setting, key: &Setting) -> Result<Self, FileError> {
        let of_certificate = |why: Error| file(certificate.name, &certificate.path, why);
        let chain = certificates(certificate.name, &certificate.path)?;
        let secret = private_key(key.name, &key.path)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        check_time(&chain, UnixTime::now()).map_err(of_certificate)?;
        let certified = CertifiedKey::from_der(chain.clone(), secret, &provider);
        let certified = certified.map_err(|why| match why {
            Error::InconsistentKeys(_) => {
                let why = format!(
                    "it is not the key of {} {}",
                    certificate.name,
                    certificate.path.display()
                );
                file(key.name, &key.path, why)
            }
            other => file(key.name, &key.path, other),
        })?;
        // Clients of other people may be older than TLS 1.3.
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(of_certificate)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            chain,
            config: Arc::new(config),
        })
    }
}

/// Whether the chain would be taken at a time by who trusts its authority. That may be any, so it is looked for nowhere; webpki looks at
/// the rest before it looks for the authority.
fn check_time(chain: &[CertificateDer<'_>], at: UnixTime) -> Result<(), Error> {
    let (first, others) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
    let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms;
    let parsed = ParsedCertificate::try_from(first)?;
    let nobody = RootCertStore::empty();
    match verify_server_cert_signed_by_trust_anchor(&parsed, &nobody, others, at, algorithms.all) {
        Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)) | Ok(()) => Ok(()),
        Err(error) => Err(error),
    }
}
