//! A caller that keeps to no rule: it believes every server and shows whatever it has.

use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use http::header::{CONTENT_TYPE, HeaderValue, TE};
use hyper_util::rt::TokioIo;
use identity::CertificateFiles;
use rustls::ClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tower::{Service as _, ServiceExt as _};

const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// What the caller shows.
#[derive(Debug)]
pub enum Shown {
    PlainText,
    Nothing,
    Certificate(CertificateFiles),
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The method looked at the call.
    Taken,
    /// It was answered that the caller may not.
    Refused,
    NoConnection,
}

#[derive(Debug)]
struct BelievesAll;

impl ServerCertVerifier for BelievesAll {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }
    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// A connection from another address of this host, such as 127.0.0.2.
pub async fn connect_from(source: &str, address: &str) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(format!("{source}:0").parse().expect("an address"))?;
    socket.connect(address.parse().expect("an address")).await
}

async fn dial(address: &str, files: Option<&CertificateFiles>) -> std::io::Result<TlsStream<TcpStream>> {
    greet(TcpStream::connect(address).await?, files).await
}

/// The greeting of a caller with this certificate, or with none.
pub async fn greet(stream: TcpStream, files: Option<&CertificateFiles>) -> std::io::Result<TlsStream<TcpStream>> {
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(BelievesAll));
    let config = match files {
        None => config.with_no_client_auth(),
        Some(files) => {
            let chain = CertificateDer::from_pem_file(&files.certificate).expect("a certificate");
            let key = PrivateKeyDer::from_pem_file(&files.key).expect("a key");
            config.with_client_auth_cert(vec![chain], key).expect("a pair")
        }
    };
    let name = ServerName::try_from("anybody").expect("a name");
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// The certificate that a port shows now.
pub async fn certificate_of(address: &str) -> Vec<u8> {
    let stream = dial(address, None).await.expect("a connection");
    let shown = stream.get_ref().1.peer_certificates().expect("a certificate");
    shown[0].to_vec()
}

/// Calls a path with an empty message.
pub async fn call(address: &str, path: &str, shown: &Shown) -> Answer {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let endpoint = endpoint.connect_timeout(ANSWER_WITHIN).timeout(ANSWER_WITHIN);
    let files = match shown {
        Shown::Certificate(files) => Some(files.clone()),
        _ => None,
    };
    let connected = match shown {
        Shown::PlainText => endpoint.connect().await,
        _ => {
            let dialler = tower::service_fn(move |to: Uri| {
                let files = files.clone();
                async move {
                    let address = to.authority().expect("an address").to_string();
                    Ok::<_, std::io::Error>(TokioIo::new(dial(&address, files.as_ref()).await?))
                }
            });
            endpoint.connect_with_connector(dialler).await
        }
    };
    let Ok(mut channel) = connected else {
        return Answer::NoConnection;
    };
    // One message of no bytes.
    let message = tonic::codegen::Bytes::from_static(&[0; 5]);
    let mut request = http::Request::post(path)
        .body(Body::new(http_body_util::Full::new(message)))
        .expect("a request");
    request.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
    request
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    let answered = async {
        let channel = channel.ready().await?;
        channel.call(request).await
    };
    match answered.await {
        Err(_) => Answer::NoConnection,
        Ok(answer) => match answer
            .headers()
            .get("grpc-status")
            .and_then(|status| status.to_str().ok())
        {
            Some("7") => Answer::Refused,
            _ => Answer::Taken,
        },
    }
}
