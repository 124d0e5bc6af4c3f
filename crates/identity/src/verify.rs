//! Whom a certificate names, and whether a server is the process that was meant.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme};
use thiserror::Error;
use webpki::EndEntityCert;

use crate::expected::Expected;
use crate::name::PeerName;

/// A certificate that names more processes than roles exist was not made for this.
const NAMES_MAX: usize = 8;

/// The processes that a certificate names. It says nothing about who signed it.
pub(crate) fn names_of(certificate: &CertificateDer<'_>) -> Vec<PeerName> {
    let names = uris_of(certificate);
    names.iter().filter_map(|name| name.parse().ok()).collect()
}

/// The first URIs of a certificate.
pub(crate) fn uris_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    match EndEntityCert::try_from(certificate) {
        Ok(parsed) => parsed.valid_uri_names().take(NAMES_MAX).map(str::to_owned).collect(),
        Err(_) => Vec::new(),
    }
}

/// The server has a certificate of the cluster's authority, and it is the process that was to be called.
#[derive(Debug)]
pub(crate) struct ServerIs {
    pub expected: Expected,
    pub cluster: String,
    pub authorities: Arc<RootCertStore>,
    pub provider: Arc<CryptoProvider>,
}

#[derive(Debug, Error)]
#[error("the process that answers is {}, and {expected} of cluster {cluster} was called", words(.found))]
struct AnotherProcess {
    found: Vec<PeerName>,
    expected: Expected,
    cluster: String,
}

fn words(names: &[PeerName]) -> String {
    match names {
        [] => "named by no spiffe://CLUSTER/ROLE/NAME".to_owned(),
        names => names.iter().map(PeerName::to_string).collect::<Vec<_>>().join(" and "),
    }
}

impl ServerIs {
    /// # Errors
    /// Nobody whom this process trusts signed the chain for this time, or it is another process's.
    pub(crate) fn check(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<(), Error> {
        let (end_entity, intermediates) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.authorities, intermediates, now, algorithms)?;
        let found = names_of(end_entity);
        let is_meant = |name: &PeerName| name.cluster == self.cluster && self.expected.is_met_by(name);
        if found.iter().any(is_meant) {
            return Ok(());
        }
        let another = AnotherProcess {
            found,
            expected: self.expected.clone(),
            cluster: self.cluster.clone(),
        };
        Err(CertificateError::Other(OtherError(Arc::new(another))).into())
    }
}

impl ServerCertVerifier for ServerIs {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let chain: Vec<_> = std::iter::once(end_entity).chain(intermediates).cloned().collect();
        self.check(&chain, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
