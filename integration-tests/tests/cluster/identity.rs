//! Processes that know each other by certificates: who else is answered, and what a new certificate does to what runs.

pub mod hostile;

use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use cli::local_cluster::LocalClusterOptions;
use futures::future::join_all;
use hostile::{Answer, Shown, call};
use identity::{Authority, CertifiedProcess, in_days};
use integration_tests::cluster::{TestCluster, baton_executable, options};
use integration_tests::wait::wait_until;
use serde_json::json;
use tokio::process::Command;

const PROCESSES: [&str; 3] = ["coordinator/coordinator", "prefill/prefill-0", "decode/decode-0"];
pub const SEEN_WITHIN: Duration = Duration::from_secs(30);

const BY_NCCL: &str = "HandoffService/PushByNccl";

/// The files of the interfaces, and for each method the port that has it and the role that may call it.
const INTERFACES: [&str; 3] = ["membership", "inference", "handoff"];
const MAY_CALL: [(&str, &str, &[&str]); 7] = [
    ("MembershipService/Join", "coordinator", &["prefill", "decode"]),
    ("MembershipService/ReadClock", "coordinator", &["prefill", "decode"]),
    ("DecodeService/Open", "decode-0", &["coordinator"]),
    ("PrefillService/Prefill", "prefill-0", &["coordinator"]),
    ("CacheService/ResetPrefixCache", "decode-0", &["coordinator"]),
    ("HandoffService/Push", "decode-0", &["prefill"]),
    // In no interface: its messages are those of the transport.
    (BY_NCCL, "decode-0", &["prefill"]),
];

pub fn process(text: &str) -> CertifiedProcess {
    text.parse().expect("a process")
}

pub fn authority(folder: &Path) -> Authority {
    let authority = Authority::create(folder, "demo").expect("an authority");
    for name in PROCESSES {
        authority.issue(&process(name), in_days(1)).expect("a certificate");
    }
    authority
}

/// KV travels over gRPC, so that it is encrypted.
pub fn with_certificates(folder: &Path) -> LocalClusterOptions {
    let mut options = options("1p1d").expect("options");
    options.settings.certs = Some(folder.to_owned());
    options.settings.transports = Some("grpc".to_owned());
    options.settings.engine = Some("stand-in".to_owned());
    options
}

/// The methods that the interfaces have. One that is new is in no table here, and fails the test.
fn methods() -> Vec<String> {
    let mut found = vec![BY_NCCL.to_owned()];
    for file in INTERFACES {
        let path = format!("{}/../proto/baton/v1/{file}.proto", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).expect("the interface");
        let mut service = String::new();
        for line in text.lines().map(str::trim) {
            let word = |line: &str| line.split([' ', '(']).next().unwrap_or_default().to_owned();
            if let Some(rest) = line.strip_prefix("service ") {
                service = word(rest);
            } else if let Some(rest) = line.strip_prefix("rpc ") {
                found.push(format!("{service}/{}", word(rest)));
            }
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_certificate_of_the_right_role_is_answered_at_any_port() {
    let folders = [
        tempfile::tempdir().expect("a folder"),
        tempfile::tempdir().expect("a folder"),
    ];
    let (ours, theirs) = (authority(folders[0].path()), authority(folders[1].path()));
    let cluster = TestCluster::start_with(with_certificates(folders[0].path()))
        .await
        .expect("a cluster");
    let listed: Vec<&str> = MAY_CALL.iter().map(|(method, ..)| *method).collect();
    let (mut listed_here, mut there) = (listed.clone(), methods());
    listed_here.sort_unstable();
    there.sort();
    assert_eq!(listed_here, there, "each method says who may call it");

    let mut addresses = cluster.cluster.node_addresses();
    addresses.insert("coordinator".to_owned(), cluster.cluster.control_address().to_owned());
    let past = std::time::SystemTime::now() - Duration::from_secs(60);
    let shown = |authority: &Authority, role: &str, until| {
        let files = authority
            .issue(&process(&format!("{role}/x-{role}")), until)
            .expect("a certificate");
        Shown::Certificate(files)
    };
    let mut refused = 0;
    for (method, port, roles) in MAY_CALL {
        let (address, path) = (&addresses[port], format!("/baton.v1.{method}"));
        for role in ["coordinator", "prefill", "decode", "operator"] {
            let answer = call(address, &path, &shown(&ours, role, in_days(1))).await;
            let expected = if roles.contains(&role) {
                Answer::Taken
            } else {
                Answer::Refused
            };
            assert_eq!(answer, expected, "{path} for {role}");
            let strangers = [shown(&theirs, role, in_days(1)), shown(&ours, role, past)];
            for stranger in strangers {
                let answer = call(address, &path, &stranger).await;
                assert_eq!(answer, Answer::NoConnection, "{path} {stranger:?}");
                refused += 1;
            }
        }
        assert_eq!(call(address, &path, &Shown::Nothing).await, Answer::Refused, "{path}");
        assert_eq!(
            call(address, &path, &Shown::PlainText).await,
            Answer::NoConnection,
            "{path}"
        );
    }
    assert_eq!(refused, 56);
    for address in addresses.values() {
        for path in [
            "/metrics",
            "/admin/blocks",
            "/grpc.health.v1.Health/Check",
            "/",
            "/grpc.reflection.v1.ServerReflection/X",
        ] {
            assert_eq!(
                call(address, path, &Shown::Nothing).await,
                Answer::Refused,
                "{path} at {address}"
            );
        }
    }
    // Those who belong to it are served as ever.
    let body = json!({"model": "smollm2-135m", "prompt": vec![7; 70], "max_tokens": 4, "include_metrics": true});
    let answer = cluster.post("/v1/completions", &body).await.expect("an answer");
    assert_eq!(answer["metrics"]["prefill_node"], "prefill-0", "{answer}");
    cluster.cluster.stop(SEEN_WITHIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_certificates_are_used_while_streams_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = authority(folder.path());
    let cluster = TestCluster::start_with(with_certificates(folder.path()))
        .await
        .expect("a cluster");
    let address = cluster.cluster.node_addresses()["decode-0"].clone();
    let before = hostile::certificate_of(&address).await;
    // Answers that go on while the certificates change: their streams must not break.
    let body =
        json!({"model": "smollm2-135m", "prompt": vec![9; 70], "max_tokens": 300, "ignore_eos": true, "stream": true});
    let (open, is_renewed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let client = || async {
        let mut ended = 0;
        while !is_renewed.load(Ordering::Relaxed) {
            open.fetch_add(1, Ordering::Relaxed);
            let answer = cluster
                .http
                .post(cluster.url("/v1/completions"))
                .json(&body)
                .send()
                .await;
            let text = answer.expect("an answer").text().await.expect("it is not cut off");
            open.fetch_sub(1, Ordering::Relaxed);
            let events = text.matches("data: {").count();
            assert!(text.contains("data: [DONE]") && events >= 300, "{events} events");
            ended += 1;
        }
        ended
    };
    let renew = async {
        wait_until("streams", SEEN_WITHIN, || async {
            (open.load(Ordering::Relaxed) == 4)
                .then_some(())
                .ok_or("not all have begun")
        })
        .await
        .expect("streams");
        for name in PROCESSES {
            authority.issue(&process(name), in_days(2)).expect("a certificate");
        }
        let renewed = wait_until("the new certificate", SEEN_WITHIN, || async {
            match hostile::certificate_of(&address).await == before {
                true => Err("still the old one"),
                false => Ok(()),
            }
        });
        renewed.await.expect("it is used");
        let open_then = open.load(Ordering::Relaxed);
        is_renewed.store(true, Ordering::Relaxed);
        open_then
    };
    let (open_then, ended) = tokio::join!(renew, join_all((0..4).map(|_| client())));
    assert!(
        open_then > 0 && ended.iter().all(|ended| *ended > 0),
        "{open_then} {ended:?}"
    );
    // What connects now has the new ones at both ends.
    cluster.cluster.kill_node("prefill-0").await.expect("it is there");
    let mut cluster = cluster;
    cluster.cluster.restart_node("prefill-0").await.expect("it comes back");
    let body = json!({"model": "smollm2-135m", "prompt": vec![8; 70], "max_tokens": 4, "include_metrics": true});
    let handed = wait_until("a handoff", SEEN_WITHIN, || async {
        let answer = cluster
            .post("/v1/completions", &body)
            .await
            .map_err(|error| format!("{error:#}"))?;
        match answer["metrics"]["prefill_node"] == "prefill-0" {
            true => Ok(()),
            false => Err(answer.to_string()),
        }
    });
    handed.await.expect("prefill-0 prefills again");
    cluster.cluster.stop(SEEN_WITHIN).await;
}

/// A process by hand that is expected to end at once.
async fn ends(arguments: &[&str]) -> Output {
    let mut command = Command::new(baton_executable().expect("baton"));
    command.args(arguments).arg("--model=smollm2-135m").kill_on_drop(true);
    let ended = tokio::time::timeout(SEEN_WITHIN, command.output()).await;
    ended.expect("it ends by itself").expect("it ran")
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_text_is_not_served_to_other_hosts_and_a_wrong_certificate_is_named_at_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    authority(folder.path());
    let file = |name: &str| folder.path().join(name).display().to_string();
    let with = |name: &str| {
        [
            format!("--tls-cert={}", file(&format!("{name}.crt"))),
            format!("--tls-key={}", file(&format!("{name}.key"))),
            format!("--tls-ca={}", file("ca.crt")),
        ]
    };
    let api = |cert: &str, key: &str| {
        let (cert, key) = (file(cert), file(key));
        vec![format!("--api-tls-cert={cert}"), format!("--api-tls-key={key}")]
    };
    let as_strs = |owned: &[String]| owned.iter().map(|text| text.to_owned()).collect::<Vec<_>>();
    let open = ["--listen=0.0.0.0:0".to_owned(), "--advertise=127.0.0.1:9".to_owned()];
    let open_control = [
        "--control-listen=0.0.0.0:0".to_owned(),
        "--listen=127.0.0.1:0".to_owned(),
    ];
    for (verb, flags, says) in [
        ("serve-decode", as_strs(&open), "this process has no certificate"),
        ("serve-prefill", as_strs(&open), "this process has no certificate"),
        (
            "serve-coordinator",
            as_strs(&open_control),
            "this process has no certificate",
        ),
        (
            "serve-decode",
            [&with("decode-0")[..], &["--name=decode-7".to_owned()]].concat(),
            "decode decode-7",
        ),
        (
            "serve-decode",
            [&with("prefill-0")[..], &["--name=prefill-0".to_owned()]].concat(),
            "decode prefill-0",
        ),
        ("serve-prefill", with("prefill-0")[..2].to_vec(), "tls_ca is not set"),
        (
            "serve-coordinator",
            api("decode-0.crt", "prefill-0.key"),
            "prefill-0.key",
        ),
        ("serve-coordinator", api("nowhere.crt", "decode-0.key"), "nowhere.crt"),
        (
            "serve-coordinator",
            api("decode-0.crt", "decode-0.key")[..1].to_vec(),
            "api_tls_key is not set",
        ),
    ] {
        let flags: Vec<&str> = std::iter::once(verb).chain(flags.iter().map(String::as_str)).collect();
        let ended = ends(&flags).await;
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && said.contains(says), "{flags:?}: {said}");
    }
}

mod etcd {
    use std::sync::Arc;

    use ::identity::{Identity, PeerRole, TlsConfig};
    use cli::local_cluster::LocalMembership;
    use etcd_membership::{CoordinatorEntry, EtcdAddress, Registration, RegistrationConfig};
    use serving_core::ids::{NodeEpoch, NodeId, NodeName};
    use serving_core::node::NodeState;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;

    /// Takes whoever comes with the certificate of a node. Counts who came, and the bytes that were said.
    async fn listen(listener: TcpListener, stranger: Identity, (came, heard): (Arc<AtomicUsize>, Arc<AtomicUsize>)) {
        while let Ok((stream, _)) = listener.accept().await {
            came.fetch_add(1, Ordering::Relaxed);
            if let Ok((mut connection, _)) = stranger.accept(stream).await {
                let mut said = Vec::new();
                let _ = connection.read_to_end(&mut said).await;
                heard.fetch_add(said.len(), Ordering::Relaxed);
            }
        }
    }

    /// Whoever may write into etcd can make nodes dial an address. There they look at the certificate first.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_strangers_record_makes_no_node_say_anything() {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = authority(folder.path());
        let mut options = with_certificates(folder.path());
        options.membership = LocalMembership::StartEtcd;
        let cluster = TestCluster::start_with(options).await.expect("a cluster");
        let files = authority
            .issue(&process("decode/decode-9"), in_days(1))
            .expect("a certificate");
        let tls = TlsConfig {
            tls_cert: Some(files.certificate),
            tls_key: Some(files.key),
            tls_ca: Some(authority.certificate()),
            insecure: false,
        };
        let stranger = Identity::open(&tls, PeerRole::Decode, "decode-9").expect("a certificate");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let here = listener.local_addr().expect("an address").to_string();
        let (came, heard) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        tokio::spawn(listen(listener, stranger, (came.clone(), heard.clone())));
        let etcd = format!("etcd://{}/local", cluster.cluster.etcd().expect("an etcd").address);
        let etcd: EtcdAddress = etcd.parse().expect("an address");
        let lease_ttl = etcd.lease_ttl();
        let entry = CoordinatorEntry {
            id: NodeId {
                name: NodeName::new("coordinator-9"),
                epoch: NodeEpoch(9),
            },
            control_address: here.clone(),
            http_address: here,
            version: "0.1.0".to_owned(),
            state: NodeState::Ready,
        };
        let _registered = Registration::start(etcd, RegistrationConfig { lease_ttl }, entry).expect("a record");
        let tried = wait_until("both nodes to try twice", SEEN_WITHIN, || async {
            let count = came.load(Ordering::Relaxed);
            if count >= 4 {
                Ok(())
            } else {
                Err(format!("{count} came"))
            }
        });
        tried.await.expect("they found the record");
        assert_eq!(heard.load(Ordering::Relaxed), 0);
        let body = json!({"model": "smollm2-135m", "prompt": vec![7; 70], "max_tokens": 4, "include_metrics": true});
        let answer = cluster.post("/v1/completions", &body).await.expect("an answer");
        assert_eq!(answer["metrics"]["prefill_node"], "prefill-0", "{answer}");
        cluster.cluster.stop(SEEN_WITHIN).await;
    }
}
