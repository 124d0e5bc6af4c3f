//! Nodes that register over real gRPC with certificates: each in its own name, and with the roles that are named there.

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "what other tests need, too")]
mod common;

use std::path::Path;
use std::time::Duration;

use common::{coordinator, record, status};
use coordinator::Coordinator;
use identity::{Authority, CertificateFiles, Identity, PeerRole, TlsConfig, in_days};
use service_runtime::membership::{self, CoordinatorsAt, JoinConfig, LostReason, Membership, MembershipEvent};
use service_runtime::metrics::membership::MembershipGauges;
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{NodeRecord, NodeRole};
use tokio::sync::watch;

const WITHIN: Duration = Duration::from_secs(20);

/// A coordinator with a certificate, and the authority that made it.
async fn start(folder: &Path) -> (Coordinator, Authority) {
    let authority = Authority::create(folder, "demo").expect("an authority");
    let files = issue(&authority, "coordinator/coordinator-0");
    let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let flags = [
        flag("tls-cert", &files.certificate),
        flag("tls-key", &files.key),
        flag("tls-ca", &authority.certificate()),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    (coordinator(&flags).await, authority)
}

fn issue(authority: &Authority, process: &str) -> CertificateFiles {
    let process = process.parse().expect("a process");
    authority.issue(&process, in_days(1)).expect("a certificate")
}

/// Joins with the certificate of a process, and with a record of its own.
fn join(cluster: &Coordinator, authority: &Authority, process: &str, record: NodeRecord) -> Joined {
    let files = issue(authority, process);
    let tls = TlsConfig {
        tls_cert: Some(files.certificate),
        tls_key: Some(files.key),
        tls_ca: Some(authority.certificate()),
        insecure: false,
    };
    let (roles, name) = process.split_once('/').expect("a process");
    let first = PeerRole::ALL.into_iter().find(|role| roles.starts_with(role.name()));
    let (status, seen) = watch::channel(status(100));
    let join = JoinConfig {
        coordinators: CoordinatorsAt::Fixed(vec![cluster.control_address.to_string()]),
        prefixes: watch::channel(PrefixLog::default()).1,
        gauges: MembershipGauges::default(),
        identity: Identity::open(&tls, first.expect("a role"), name).expect("its certificate"),
        record,
    };
    Joined {
        membership: membership::join(join, seen).expect("a good record"),
        _status: status,
    }
}

struct Joined {
    membership: Membership,
    /// Without its sender a node leaves.
    _status: watch::Sender<serving_core::node::NodeStatus>,
}

impl Joined {
    /// Whether it is welcome; else why not.
    async fn outcome(&mut self) -> Result<(), LostReason> {
        let looked = async {
            loop {
                match self.membership.next_event().await.expect("it goes on") {
                    MembershipEvent::Welcomed { .. } => return Ok(()),
                    MembershipEvent::ConnectionLost { reason, .. } => return Err(reason),
                    _ => {}
                }
            }
        };
        tokio::time::timeout(WITHIN, looked).await.expect("an answer")
    }
}

#[tokio::test]
async fn a_node_registers_in_its_own_name_and_role_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let (cluster, authority) = start(folder.path()).await;
    for (process, name, role, is_taken) in [
        ("decode/decode-0", "decode-0", NodeRole::Decode, true),
        ("decode/decode-0", "decode-1", NodeRole::Decode, false),
        ("decode/decode-0", "decode-0", NodeRole::Prefill, false),
        ("prefill/decode-7", "decode-7", NodeRole::Decode, false),
        ("prefill,decode/node-0", "node-0", NodeRole::Decode, true),
    ] {
        let mut node = join(&cluster, &authority, process, record(name, rand::random(), role));
        let outcome = node.outcome().await;
        match is_taken {
            true => assert_eq!(outcome, Ok(()), "{process} as {role:?} {name}"),
            false => assert!(
                matches!(&outcome, Err(LostReason::AnotherName(why)) if why.contains("spiffe://demo/")),
                "{process} as {role:?} {name}: {outcome:?}"
            ),
        }
        node.membership.leave().await;
    }
    cluster.stop().await;
}
