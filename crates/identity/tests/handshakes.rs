//! Real handshakes over loopback: who reaches whom, and with which certificate nobody is reached.

#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use identity::{
    Authority, Caller, CertificateFiles, CertifiedProcess, Expected, Identity, PeerRole, Renewed as _,
    ServerCertificate, TlsConfig, in_days,
};
use rand::{Rng as _, SeedableRng as _};
use rcgen::{CertificateParams, DnType, Issuer, KeyPair, SanType};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

/// An authority in a folder of its own.
struct Cluster {
    folder: TempDir,
    authority: Authority,
}

impl Cluster {
    fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().expect("it works");
        Self {
            authority: Authority::create(folder.path(), name).expect("it works"),
            folder,
        }
    }

    /// The files of a process, whose certificate is of `roles/name`.
    fn issue(&self, process: &str) -> TlsConfig {
        self.issue_until(process, in_days(1))
    }

    fn issue_until(&self, process: &str, until: SystemTime) -> TlsConfig {
        let process: CertifiedProcess = process.parse().expect("it works");
        let files = self.authority.issue(&process, until).expect("it works");
        config(&files.certificate, &files.key, &self.authority.certificate())
    }

    fn identity(&self, process: &str) -> Identity {
        let config = self.issue(process);
        let process: CertifiedProcess = process.parse().expect("it works");
        Identity::open(&config, process.roles[0], &process.name).expect("it works")
    }
}

fn config(cert: &Path, key: &Path, ca: &Path) -> TlsConfig {
    TlsConfig {
        tls_cert: Some(cert.into()),
        tls_key: Some(key.into()),
        tls_ca: Some(ca.into()),
        insecure: false,
    }
}

/// Both ends of one connection: what the caller learned, and whom the server saw. The caller says one byte and hears one.
async fn meet(server: &Identity, caller: &Identity, expected: Expected) -> (io::Result<u8>, Option<Caller>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("it works");
    let address = listener.local_addr().expect("it works").to_string();
    let serving = async {
        let (stream, _) = listener.accept().await.expect("it works");
        let (mut connection, caller) = server.accept(stream).await.ok()?;
        let said = connection.read_u8().await.ok()?;
        connection.write_u8(said).await.ok()?;
        let _ = connection.shutdown().await;
        Some(caller)
    };
    let calling = async {
        let mut connection = caller.dial(&address, expected).await?;
        connection.write_u8(7).await?;
        connection.read_u8().await
    };
    let (seen, heard) = tokio::join!(serving, calling);
    (heard, seen)
}

#[tokio::test]
async fn two_processes_of_a_cluster_know_each_other() {
    let cluster = Cluster::new("demo");
    let (prefill, decode) = (
        cluster.identity("prefill/prefill-0"),
        cluster.identity("decode/decode-0"),
    );
    let (heard, seen) = meet(&decode, &prefill, Expected::decode_node("decode-0")).await;
    assert_eq!(heard.unwrap(), 7);
    let Some(Caller::Named(names)) = seen else {
        panic!("{seen:?}")
    };
    assert_eq!(
        names.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["spiffe://demo/prefill/prefill-0"]
    );
}

#[tokio::test]
async fn a_server_that_is_another_process_hears_nothing() {
    let (cluster, other) = (Cluster::new("demo"), Cluster::new("demo"));
    let caller = cluster.identity("prefill/prefill-0");
    let decode_0 = || Expected::decode_node("decode-0");
    for (server, expected) in [
        // Another name, another role, another authority of the same cluster's name, a coordinator that is a node.
        (cluster.identity("decode/decode-1"), decode_0()),
        (cluster.identity("prefill/decode-0"), decode_0()),
        (other.identity("decode/decode-0"), decode_0()),
        (cluster.identity("decode/decode-0"), Expected::Coordinator),
    ] {
        let (heard, seen) = meet(&server, &caller, expected).await;
        assert!(heard.is_err() && seen.is_none(), "{server:?} {heard:?} {seen:?}");
    }
    // One that speaks plain text hears the greeting, and no word of the call.
    assert!(meet(&Identity::none(), &caller, decode_0()).await.0.is_err());
    let (heard, _) = meet(&cluster.identity("decode/decode-1"), &caller, decode_0()).await;
    let error = heard.unwrap_err().to_string();
    assert!(
        error.contains("spiffe://demo/decode/decode-1") && error.contains("decode decode-0"),
        "{error}"
    );
}

#[tokio::test]
async fn a_caller_that_cannot_be_known_says_nothing() {
    let (cluster, other) = (Cluster::new("demo"), Cluster::new("demo"));
    let server = cluster.identity("decode/decode-0");
    // Of another authority; the caller trusts this cluster's all the same.
    let foreign = other.issue("prefill/prefill-0");
    let foreign = TlsConfig {
        tls_ca: Some(cluster.authority.certificate()),
        ..foreign
    };
    let error = Identity::open(&foreign, PeerRole::Prefill, "prefill-0").unwrap_err();
    assert!(error.to_string().contains("invalid peer certificate"), "{error}");
    // It would have to trust its own authority to start at all. Then it does not believe this server.
    let (heard, seen) = meet(
        &server,
        &other.identity("prefill/prefill-0"),
        Expected::decode_node("decode-0"),
    )
    .await;
    assert!(heard.is_err() && seen.is_none(), "{heard:?} {seen:?}");
    // In plain text a caller hears an alert of TLS, and is not heard.
    let (heard, seen) = meet(&server, &Identity::none(), Expected::decode_node("decode-0")).await;
    assert!(!matches!(heard, Ok(7)) && seen.is_none(), "{heard:?} {seen:?}");
}

/// The authority's key signed it, for a process of another cluster.
#[tokio::test]
async fn a_process_of_another_cluster_is_turned_away() {
    let cluster = Cluster::new("demo");
    let folder = cluster.folder.path();
    let authority_key = KeyPair::from_pem(&std::fs::read_to_string(folder.join("ca.key")).unwrap()).unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority
        .distinguished_name
        .push(DnType::CommonName, "authority of baton cluster demo");
    let issuer = Issuer::new(authority, authority_key);
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    let uri = "spiffe://other/prefill/prefill-0".try_into().unwrap();
    params.subject_alt_names.push(SanType::URI(uri));
    let key = KeyPair::generate().unwrap();
    let files = [folder.join("other.crt"), folder.join("other.key")];
    std::fs::write(&files[0], params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
    std::fs::write(&files[1], key.serialize_pem()).unwrap();
    let config = config(&files[0], &files[1], &folder.join("ca.crt"));
    let foreigner = Identity::open(&config, PeerRole::Prefill, "prefill-0").unwrap();
    // As a caller, and as a server.
    let server = cluster.identity("decode/decode-0");
    let (heard, seen) = meet(&server, &foreigner, Expected::decode_node("decode-0")).await;
    assert!(heard.is_err() && seen.is_none(), "{heard:?} {seen:?}");
    let (heard, seen) = meet(&foreigner, &server, Expected::Node("prefill-0".to_owned())).await;
    assert!(heard.is_err() && seen.is_none(), "{heard:?} {seen:?}");
}

#[tokio::test]
async fn a_certificate_that_has_ended_opens_nothing() {
    let cluster = Cluster::new("demo");
    let config = cluster.issue_until("prefill/prefill-0", SystemTime::now() - Duration::from_secs(60));
    let error = Identity::open(&config, PeerRole::Prefill, "prefill-0").unwrap_err();
    assert!(error.to_string().contains("expired"), "{error}");
}

#[test]
fn a_process_starts_with_its_own_certificate_only() {
    let cluster = Cluster::new("demo");
    let config = cluster.issue("prefill,decode/node-0");
    for role in [PeerRole::Prefill, PeerRole::Decode] {
        assert!(Identity::open(&config, role, "node-0").is_ok());
    }
    for (role, name) in [(PeerRole::Coordinator, "node-0"), (PeerRole::Decode, "node-1")] {
        let error = Identity::open(&config, role, name).unwrap_err().to_string();
        assert!(
            error.contains("spiffe://demo/prefill/node-0 and spiffe://demo/decode/node-0"),
            "{error}"
        );
    }
    let key_of_another = TlsConfig {
        tls_key: cluster.issue("decode/node-1").tls_key,
        ..config.clone()
    };
    assert!(Identity::open(&key_of_another, PeerRole::Decode, "node-0").is_err());
    let not_there = TlsConfig {
        tls_ca: Some(PathBuf::from("/nowhere/ca.crt")),
        ..config
    };
    let error = Identity::open(&not_there, PeerRole::Decode, "node-0")
        .unwrap_err()
        .to_string();
    assert!(error.contains("tls_ca /nowhere/ca.crt"), "{error}");
}

#[tokio::test]
async fn a_new_certificate_is_used_for_new_connections_and_a_broken_one_is_not() {
    let cluster = Cluster::new("demo");
    let server = cluster.identity("decode/decode-0");
    let caller = cluster.identity("prefill/prefill-0");
    let names = || Expected::decode_node("decode-0");
    // A certificate with a second role, under the same files.
    cluster.issue("decode,prefill/decode-0");
    assert_eq!(server.names().len(), 1);
    server.read_again().unwrap();
    assert_eq!(server.names().len(), 2);
    assert!(meet(&server, &caller, names()).await.0.is_ok());
    std::fs::write(cluster.folder.path().join("decode-0.crt"), "nothing").unwrap();
    assert!(server.read_again().is_err());
    assert!(meet(&server, &caller, names()).await.0.is_ok());
}

#[test]
fn an_authority_is_made_once_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = Authority::create(folder.path(), "demo").unwrap();
    assert!(Authority::create(folder.path(), "demo").is_err());
    let again = Authority::open(folder.path()).unwrap();
    assert_eq!((first.cluster(), again.cluster()), ("demo", "demo"));
    for (authority, name) in [(first, "decode-0"), (again, "decode-1")] {
        let process: CertifiedProcess = format!("decode/{name}").parse().unwrap();
        let files = authority.issue(&process, in_days(1)).unwrap();
        let config = config(&files.certificate, &files.key, &authority.certificate());
        Identity::open(&config, PeerRole::Decode, name).unwrap();
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(
            std::fs::metadata(&files.key).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }
    for wrong in [
        "decode",
        "decode/",
        "decode/..",
        "decode/ca",
        "decode/a/b",
        "root/a",
        "/a",
        "decode,/a",
    ] {
        assert!(wrong.parse::<CertifiedProcess>().is_err(), "{wrong}");
    }
}

/// Whoever can write the files can do worse. A damaged disk cannot end a process all the same.
#[test]
fn no_damage_to_a_file_is_a_panic_or_another_name() {
    let cluster = Cluster::new("demo");
    let good = cluster.issue("decode/decode-0");
    let mut draw = rand::rngs::StdRng::seed_from_u64(1);
    let mut refused = 0;
    for path in [&good.tls_cert, &good.tls_key, &good.tls_ca] {
        let path = path.as_ref().unwrap();
        let whole = std::fs::read(path).unwrap();
        for _ in 0..300 {
            let mut text = whole.clone();
            match draw.random_range(0..3) {
                0 => text.truncate(draw.random_range(0..text.len())),
                1 => {
                    let at = draw.random_range(0..text.len());
                    text[at] = draw.random();
                }
                _ => {
                    let at = draw.random_range(0..text.len());
                    let rest = text.split_off(at);
                    text.extend((0..draw.random_range(1..40)).map(|_| draw.random::<u8>()));
                    text.extend(rest);
                }
            }
            std::fs::write(path, &text).unwrap();
            match Identity::open(&good, PeerRole::Decode, "decode-0") {
                // Text around the block of PEM, or a bit that says nothing.
                Ok(identity) => assert_eq!(identity.names()[0].to_string(), "spiffe://demo/decode/decode-0"),
                Err(_) => refused += 1,
            }
        }
        std::fs::write(path, whole).unwrap();
    }
    assert!(refused > 600, "{refused} of 900");
    assert!(Identity::open(&good, PeerRole::Decode, "decode-0").is_ok());
}

/// What a client hears of a server with this certificate, that it calls by `host`: one byte.
async fn greet(server: &ServerCertificate, ca: &Path, host: &'static str) -> io::Result<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("it works");
    let address = listener.local_addr().expect("it works");
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(ca).expect("it works"))
        .expect("it works");
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().expect("it works");
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let serving = async {
        let (stream, _) = listener.accept().await?;
        server.accept(stream).await?.write_u8(7).await
    };
    let calling = async {
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from(host).expect("a name");
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        stream.read_u8().await
    };
    tokio::join!(serving, calling).1
}

fn api(authority: &Authority, hosts: &[&str], until: SystemTime) -> CertificateFiles {
    let api: CertifiedProcess = "api/api".parse().expect("it works");
    let api = api.with_hosts(hosts.iter().copied()).expect("hosts");
    authority.issue(&api, until).expect("it works")
}

fn served(files: &CertificateFiles) -> Result<ServerCertificate, String> {
    let opened = ServerCertificate::open(("cert", &files.certificate), ("key", &files.key));
    opened.map_err(|error| error.to_string())
}

#[tokio::test]
async fn clients_find_the_hosts_in_the_certificate_of_the_api_and_it_belongs_to_no_process() {
    let (cluster, other) = (Cluster::new("demo"), Cluster::new("demo"));
    let files = api(
        &cluster.authority,
        &["baton.example.com", "10.0.0.5", "*.b.example"],
        in_days(1),
    );
    let (server, ca) = (served(&files).unwrap(), cluster.authority.certificate());
    for host in [
        "baton.example.com",
        "10.0.0.5",
        "x.b.example",
        "localhost",
        "127.0.0.1",
        "::1",
        "api",
    ] {
        assert_eq!(greet(&server, &ca, host).await.unwrap(), 7, "{host}");
    }
    for host in ["example.com", "10.0.0.6", "x.y.b.example"] {
        assert!(greet(&server, &ca, host).await.is_err(), "{host}");
    }
    assert!(
        greet(&server, &other.authority.certificate(), "localhost")
            .await
            .is_err()
    );
    let as_process = config(&files.certificate, &files.key, &ca);
    for role in PeerRole::ALL {
        assert!(Identity::open(&as_process, role, "api").is_err());
    }
    for wrong in ["a b", "", "10.0.0.5:8000", "https://a"] {
        let api: CertifiedProcess = "api/api".parse().unwrap();
        assert!(api.with_hosts([wrong]).is_err(), "{wrong}");
    }
}

/// They lie in one folder, and files have the name alone.
#[test]
fn a_certificate_that_names_hosts_and_that_of_a_process_do_not_replace_each_other() {
    let cluster = Cluster::new("demo");
    let issue = |process: &str| {
        let process: CertifiedProcess = process.parse().unwrap();
        cluster
            .authority
            .issue(&process, in_days(1))
            .map_err(|error| error.to_string())
    };
    let both = [
        ("decode/a", ["api/a", "etcd/a"]),
        ("api/b", ["decode/b", "prefill,decode/b"]),
    ];
    for (first, others) in both {
        let files = issue(first).unwrap();
        let read = || {
            (
                std::fs::read(&files.certificate).unwrap(),
                std::fs::read(&files.key).unwrap(),
            )
        };
        let before = read();
        for other in others {
            assert!(issue(other).is_err(), "{other} after {first}");
            assert_eq!(read(), before, "{other} after {first}");
        }
        issue(first).unwrap();
        assert_ne!(read(), before, "a new one for {first}");
    }
}

#[tokio::test]
async fn the_certificate_of_etcd_names_hosts_and_takes_no_part() {
    let cluster = Cluster::new("demo");
    let etcd: CertifiedProcess = "etcd/etcd-0".parse().unwrap();
    let etcd = etcd.with_hosts(["10.0.0.1"]).unwrap();
    let files = cluster.authority.issue(&etcd, in_days(1)).unwrap();
    let (server, ca) = (served(&files).unwrap(), cluster.authority.certificate());
    assert_eq!(greet(&server, &ca, "10.0.0.1").await.unwrap(), 7);
    let as_process = config(&files.certificate, &files.key, &ca);
    for role in PeerRole::ALL {
        assert!(Identity::open(&as_process, role, "etcd-0").is_err());
    }
}

#[tokio::test]
async fn a_certificate_for_clients_that_is_of_no_use_is_named_and_leaves_the_one_before() {
    let cluster = Cluster::new("demo");
    let files = api(&cluster.authority, &[], in_days(1));
    let (server, ca) = (served(&files).unwrap(), cluster.authority.certificate());
    let first = server.certificate();
    // It ends in a day.
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let day = Duration::from_secs(24 * 3600);
    assert!(server.is_valid_at(now) && !server.is_valid_at(now + day * 2));
    let key = std::fs::read(&files.key).unwrap();
    let (cert_named, key_named) = (
        format!("cert {}", files.certificate.display()),
        format!("key {}", files.key.display()),
    );
    let past = SystemTime::now() - Duration::from_secs(60);
    api(&cluster.authority, &[], past);
    let error = served(&files).unwrap_err();
    assert!(error.starts_with(&cert_named), "{error}");
    assert!(server.read_again().is_err());
    api(&cluster.authority, &[], in_days(2));
    std::fs::write(&files.key, key).unwrap();
    let error = served(&files).unwrap_err();
    assert!(error.starts_with(&key_named), "{error}");
    assert!(server.read_again().is_err());
    std::fs::write(&files.certificate, "nothing").unwrap();
    assert!(served(&files).unwrap_err().starts_with(&cert_named));
    assert!(server.read_again().is_err() && server.certificate() == first);
    assert_eq!(greet(&server, &ca, "localhost").await.unwrap(), 7);
    api(&cluster.authority, &[], in_days(2));
    server.read_again().unwrap();
    assert!(server.certificate() != first);
    assert_eq!(greet(&server, &ca, "localhost").await.unwrap(), 7);
}
