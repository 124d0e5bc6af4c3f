//! A port with a certificate: who is served there, what plain HTTP is told, and what connections that say nothing cost.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coordinator::keys::Keys;
use coordinator::keys::file::{ClientKey, KeyFile, Limits, Scope};
use coordinator::keys::secret::{KeyHash, SecretKey};
use identity::{Authority, CertifiedProcess, ServerCertificate, in_days};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional, duplex};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;

use super::client::{Answer, PATIENCE, get, parse, request};
use super::harness::{CONNECTIONS_MAX, Server};
use super::script::{Script, say};

/// A server with a certificate of a new authority in `folder`.
async fn start(folder: &Path, keys: Option<Keys>) -> (Server, Authority) {
    let authority = Authority::create(folder, "demo").unwrap();
    let api: CertifiedProcess = "api/api".parse().unwrap();
    let files = authority.issue(&api.with_hosts([]).unwrap(), in_days(1)).unwrap();
    let certificate = ServerCertificate::open(("cert", &files.certificate), ("key", &files.key)).unwrap();
    let play = |request: &_| Script::Play(say(request, |_| "x".to_owned()));
    let server = Server::start_behind(Some(certificate), play, |parts| parts.keys = keys).await;
    (server, authority)
}

/// Sends a request over TLS, from an address of this machine.
async fn ask(from: &str, to: SocketAddr, what: (&Authority, &[u8])) -> io::Result<Answer> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(from.parse().unwrap())?;
    ask_on(socket.connect(to).await?, what).await
}

async fn ask_on(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    (authority, bytes): (&Authority, &[u8]),
) -> io::Result<Answer> {
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(authority.certificate()).unwrap();
    roots.add(ca).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    stream.write_all(bytes).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(parse(&answer))
}

const HERE: &str = "127.0.0.1:0";

#[tokio::test]
async fn who_trusts_the_authority_is_served_and_plain_http_is_told_what_the_port_speaks() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (server, authority) = start(folders[0].path(), None).await;
    let models = request("GET", "/v1/models", &[], b"");
    let answer = ask(HERE, server.address, (&authority, &models)).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    let stranger = Authority::create(folders[1].path(), "demo").unwrap();
    assert!(ask(HERE, server.address, (&stranger, &models)).await.is_err());
    let told = get(server.address, "/v1/models").await;
    assert_eq!(
        (told.status, &told.json()["error"]["code"]),
        (400, &json!("https_only"))
    );
    assert_eq!(server.submitted(), 0);
}

#[tokio::test]
async fn the_consoles_cookie_stays_behind_tls() {
    let folder = tempfile::tempdir().unwrap();
    let secret = SecretKey::random();
    let entry = ClientKey {
        name: "ops".parse().unwrap(),
        sha256: KeyHash::of(secret.text()),
        scopes: [Scope::Admin].into(),
        tenant: None,
        lane: None,
        weight: None,
        limits: Limits::default(),
    };
    let file = folder.path().join("keys.toml");
    let keys = KeyFile {
        keys: vec![entry],
        ..KeyFile::default()
    };
    keys.save(&file).unwrap();
    let (server, authority) = start(folder.path(), Some(Keys::open(&file, 8000).unwrap())).await;
    let body = json!({"key": secret.text()}).to_string();
    let sign_in = request("POST", "/session", &[], body.as_bytes());
    let answer = ask(HERE, server.address, (&authority, &sign_in)).await.unwrap();
    assert!(answer.header("set-cookie").contains("; Secure"), "{:?}", answer.headers);
    let cookie = answer.header("set-cookie").split(';').next().unwrap();
    let page = request("GET", "/admin/cluster", &[("cookie", cookie)], b"");
    let page = ask(HERE, server.address, (&authority, &page)).await.unwrap();
    assert_eq!(page.status, 200);
}

#[tokio::test]
async fn connections_that_do_not_greet_keep_no_other_address_out_and_end() {
    let folder = tempfile::tempdir().unwrap();
    let (server, authority) = start(folder.path(), None).await;
    let mut silent = Vec::new();
    for begins in 0..CONNECTIONS_MAX * 2 {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        // Half of them begin a greeting.
        if begins % 2 == 0 {
            stream.write_all(&[22, 3, 1]).await.unwrap();
        }
        silent.push(stream);
    }
    let models = request("GET", "/v1/models", &[], b"");
    let other = ask("127.0.0.2:0", server.address, (&authority, &models)).await.unwrap();
    assert_eq!(other.status, 200, "another address has its places");
    let ended = async {
        for stream in &mut silent {
            // The end, or a reset.
            let _ = stream.read(&mut [0; 64]).await;
        }
    };
    tokio::time::timeout(PATIENCE, ended).await.expect("each is closed");
    let own = ask(HERE, server.address, (&authority, &models)).await.unwrap();
    assert_eq!(own.status, 200, "their places are free again");
}

#[tokio::test]
async fn who_greets_while_a_drain_begins_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, authority) = start(folder.path(), None).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let (client, mut relay) = duplex(64 << 10);
    let between = async {
        let mut greeting = vec![0; 4096];
        let size = relay.read(&mut greeting).await.unwrap();
        let (first, second) = greeting[..size].split_at(size / 2);
        stream.write_all(first).await.unwrap();
        // The server has taken the connection and the half before it drains.
        tokio::time::sleep(Duration::from_millis(100)).await;
        server.stop();
        tokio::time::sleep(Duration::from_millis(100)).await;
        stream.write_all(second).await.unwrap();
        let _ = copy_bidirectional(&mut relay, &mut stream).await;
    };
    let health = request("GET", "/health", &[], b"");
    let (answer, ()) = tokio::join!(ask_on(client, (&authority, &health)), between);
    assert_eq!(answer.unwrap().status, 200);
}
