//! A process's own certificate, and the connections that it accepts.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;

use crate::access::Caller;
use crate::connection::Connection;
use crate::expected::Expected;
use crate::files::{FileError, Paths, Pem, TlsConfig, file};
use crate::name::{PeerName, PeerRole};
use crate::renewed::Renewed;
use crate::verify::{ServerIs, names_of};

/// Why a process cannot take part with its certificate. The operator has to mend the files or the settings.
#[derive(Debug, Error)]
pub enum IdentityError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "tls_cert {path} is of {found}, and this process is {role} {name}: give it the certificate of its name and role, or start it with the name of the certificate"
    )]
    AnotherProcess {
        path: String,
        found: String,
        role: PeerRole,
        name: String,
    },
    #[error("the certificate of tls_cert is of no use with tls_ca and tls_key: {0}")]
    Unusable(#[from] rustls::Error),
    #[error("tls_ca: {0}")]
    Authority(#[from] rustls::server::VerifierBuilderError),
}

/// Why a connection is not accepted. Mostly it is the caller's fault.
#[derive(Debug, Error)]
pub enum AcceptError {
    #[error("the caller has no valid certificate, or does not speak TLS: {0}")]
    Handshake(#[from] io::Error),
    #[error("the caller's certificate is of the cluster's authority, but names no process of cluster {cluster}")]
    OfNoProcess { cluster: String },
}

/// A process's certificate and the authority of its cluster, or neither. Clones share it.
#[derive(Clone, Default)]
pub struct Identity(Option<Arc<Own>>);

struct Own {
    paths: Paths,
    role: PeerRole,
    name: String,
    now: RwLock<Arc<Material>>,
}

/// What one reading of the files gave.
struct Material {
    names: Vec<PeerName>,
    cluster: String,
    authorities: Arc<RootCertStore>,
    certificate: Arc<SingleCertAndKey>,
    chain: Vec<CertificateDer<'static>>,
    server: Arc<ServerConfig>,
    provider: Arc<CryptoProvider>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names().first() {
            Some(name) => write!(f, "Identity({name})"),
            None => f.write_str("Identity(none)"),
        }
    }
}

impl Identity {
    /// Plain text, and every caller is taken.
    pub fn none() -> Self {
        Self(None)
    }

    /// Reads the files. Without files it is [`Identity::none`].
    ///
    /// # Errors
    /// A file is missing or damaged, is not signed by the cluster's authority, or names another process.
    pub fn open(config: &TlsConfig, role: PeerRole, name: &str) -> Result<Self, IdentityError> {
        let Some(paths) = config.paths()? else {
            return Ok(Self::none());
        };
        let material = Material::read(&paths, role, name)?;
        Ok(Self(Some(Arc::new(Own {
            paths,
            role,
            name: name.to_owned(),
            now: RwLock::new(Arc::new(material)),
        }))))
    }

    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The processes that the own certificate names. A node may change to the roles that are among them.
    pub fn names(&self) -> Vec<PeerName> {
        self.material()
            .map(|material| material.names.clone())
            .unwrap_or_default()
    }

    /// Greets a caller. The caller of this limits how long it may take.
    ///
    /// # Errors
    /// The caller shows a certificate that is not of this cluster, or does not speak TLS. One without a certificate is
    /// [`Caller::Nobody`].
    pub async fn accept<S>(&self, stream: S) -> Result<(Connection<S>, Caller), AcceptError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let Some(material) = self.material() else {
            return Ok((Connection::Plain(stream), Caller::PlainText));
        };
        let encrypted = TlsAcceptor::from(material.server.clone()).accept(stream).await?;
        let shown = encrypted.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let caller = match shown.map(names_of) {
            None => Caller::Nobody,
            Some(names) => {
                let ours: Vec<_> = names
                    .into_iter()
                    .filter(|name| name.cluster == material.cluster)
                    .collect();
                if ours.is_empty() {
                    return Err(AcceptError::OfNoProcess {
                        cluster: material.cluster.clone(),
                    });
                }
                Caller::Named(ours)
            }
        };
        Ok((Connection::Encrypted(Box::new(encrypted.into())), caller))
    }

    /// `None` in plain text.
    pub(crate) fn client_config(&self, expected: Expected) -> Result<Option<ClientConfig>, rustls::Error> {
        let Some(material) = self.material() else {
            return Ok(None);
        };
        let verifier = ServerIs {
            expected,
            cluster: material.cluster.clone(),
            authorities: material.authorities.clone(),
            provider: material.provider.clone(),
        };
        let mut config = ClientConfig::builder_with_provider(material.provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(material.certificate.clone());
        config.enable_sni = false;
        config.resumption = Resumption::disabled();
        Ok(Some(config))
    }

    fn material(&self) -> Option<Arc<Material>> {
        let own = self.0.as_ref()?;
        Some(own.now.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

impl Renewed for Identity {
    type Error = IdentityError;

    fn paths(&self) -> Vec<&Path> {
        self.0.iter().flat_map(|own| own.paths.all()).collect()
    }

    fn certificate(&self) -> Option<Vec<u8>> {
        Some(self.material()?.chain.first()?.to_vec())
    }

    fn is_valid_at(&self, time: Duration) -> bool {
        let at = UnixTime::since_unix_epoch(time);
        self.material().is_none_or(|material| material.is_good(at))
    }

    fn read_again(&self) -> Result<(), IdentityError> {
        let Some(own) = &self.0 else { return Ok(()) };
        let material = Material::read(&own.paths, own.role, &own.name)?;
        *own.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(material);
        Ok(())
    }
}

impl Material {
    /// As others are going to look at it.
    fn is_good(&self, at: UnixTime) -> bool {
        let Some(name) = self.names.first() else { return false };
        let look = ServerIs {
            expected: Expected::Process {
                role: name.role,
                name: name.name.clone(),
            },
            cluster: self.cluster.clone(),
            authorities: self.authorities.clone(),
            provider: self.provider.clone(),
        };
        look.check(&self.chain, at).is_ok()
    }

    fn read(paths: &Paths, role: PeerRole, name: &str) -> Result<Self, IdentityError> {
        let Pem {
            chain,
            key,
            authorities,
        } = paths.read()?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority).map_err(|error| file("tls_ca", &paths.ca, error))?;
        }
        let authorities = Arc::new(roots);
        let own = chain.first().map(names_of).unwrap_or_default();
        let Some(this) = own.iter().find(|known| known.role == role && known.name == name) else {
            let found: Vec<_> = own.iter().map(PeerName::to_string).collect();
            return Err(IdentityError::AnotherProcess {
                path: paths.cert.display().to_string(),
                found: match found.is_empty() {
                    true => "no spiffe://CLUSTER/ROLE/NAME".to_owned(),
                    false => found.join(" and "),
                },
                role,
                name: name.to_owned(),
            });
        };
        let cluster = this.cluster.clone();
        // Others are going to look at it in the same way: better to hear of an old or foreign certificate at the start.
        let as_others_see_it = ServerIs {
            expected: Expected::Process {
                role,
                name: name.to_owned(),
            },
            cluster: cluster.clone(),
            authorities: authorities.clone(),
            provider: provider.clone(),
        };
        as_others_see_it.check(&chain, UnixTime::now())?;
        let certified = CertifiedKey::from_der(chain.clone(), key, &provider)?;
        let certificate = Arc::new(SingleCertAndKey::from(certified));
        let callers = WebPkiClientVerifier::builder_with_provider(authorities.clone(), provider.clone())
            // Probes have no certificate. `check_call` says what they may.
            .allow_unauthenticated()
            .build()?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(callers)
            .with_cert_resolver(certificate.clone());
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self {
            names: own
                .into_iter()
                .filter(|known| known.cluster == cluster && known.name == name)
                .collect(),
            cluster,
            authorities,
            certificate,
            chain,
            server: Arc::new(server),
            provider,
        })
    }
}
